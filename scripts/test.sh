#!/bin/sh
# Runs every test but the long and the learning ones. Those of tests/unit run beside the others, with what these leave of two
# cores: most of a test of a run is one process that starts. Called by `make test`; VENV is the environment. With arguments for
# pytest there is one pytest, which gets them.
set -u
PATH="$VENV/bin:$PATH"
export PATH
chosen="not learns and not long"
if [ $# -gt 0 ]; then
    exec pytest -m "$chosen" "$@"
fi

log="$VENV/unit_tests.log"
nice -n 10 pytest -m "$chosen" -o cache_dir="$VENV/pytest_cache" tests/unit >"$log" 2>&1 &
unit=$!
trap 'kill "$unit" 2>/dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
echo "tests/unit runs beside the others; its lines come last, and stand in $log"
pytest -m "$chosen" --ignore=tests/unit
others=$?
wait "$unit"
status=$?
trap - EXIT
echo "tests/unit:"
cat "$log"
[ "$others" -eq 0 ] && [ "$status" -eq 0 ]

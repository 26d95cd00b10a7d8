#!/bin/sh
# Runs every test but the long and the learning ones, in two parts beside each other: most of a test of a run is one process that
# starts, and uses one core. The second part, at a lower priority, has tests that measure no time and count no processes.
# Called by `make test`; VENV is the environment. With arguments for pytest there is one pytest, which gets them.
set -u
PATH="$VENV/bin:$PATH"
export PATH
chosen="not learns and not long"
if [ $# -gt 0 ]; then
    exec pytest -m "$chosen" "$@"
fi

second="tests/unit tests/mistakes tests/golden"
for name in benchmarks grpo_lora gsm8k_pipeline metrics_contract newcomer nothing_silent objectives precision_flow public_puzzles sweeps wandb; do
    second="$second tests/integration/test_$name.py"
done
without=
for path in $second; do
    without="$without --ignore=$path"
done

log="$VENV/second_part.log"
# The paths have no blanks.
# shellcheck disable=SC2086
nice -n 10 pytest -m "$chosen" -o cache_dir="$VENV/pytest_cache" $second >"$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
echo "two parts run beside each other; the lines of the second one come last, and stand in $log"
# shellcheck disable=SC2086
pytest -m "$chosen" $without
first=$?
wait "$beside"
status=$?
trap - EXIT
echo "second part:"
cat "$log"
[ "$first" -eq 0 ] && [ "$status" -eq 0 ]

#!/bin/sh
# Warm up a small model on a task's own solutions, train it with GRPO, write the report. `make quickstart` calls this.
# Arguments (key=value) go to the GRPO run: scripts/quickstart.sh max_steps=5
set -eu
cd "$(dirname "$0")/.."
if [ -n "${VENV:-}" ]; then
    PATH="$(cd "$VENV/bin" && pwd):$PATH"
    export PATH
fi

# Where the run goes: the config's output_dir, or the one among the arguments.
run_dir=$(torchtune-ext cat grpo/tiny 2>/dev/null | sed -n 's/^output_dir: *//p' | sed 's/ *#.*//')
for word in "$@"; do
    case $word in
        output_dir=*) run_dir=${word#output_dir=} ;;
    esac
done

echo "== 1/3 warm-up: tune run warmup_sft --config warmup/tiny"
tune run warmup_sft --config warmup/tiny
echo "== 2/3 GRPO: tune run grpo_full --config grpo/tiny $*"
tune run grpo_full --config grpo/tiny "$@"
echo "== 3/3 report: torchtune-ext report $run_dir"
torchtune-ext report "$run_dir"
echo "Report: $(cd "$run_dir" && pwd)/report.html"

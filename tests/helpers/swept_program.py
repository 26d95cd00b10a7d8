"""A fake recipe for tests of the sweep runner: it logs, saves and stops like a recipe, in a second.

A file `starts` next to the sweep's folder gets a line per start: the run and its first step.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:])
out, lr, steps = Path(words["output_dir"]), float(words["lr"]), int(words.get("steps", 6))
done = [int(path.name.removeprefix("step_")) for path in out.glob("checkpoints/step_*")]
first = max(done, default=0) if words.get("resume_from_checkpoint") == "True" else 0
with open(out.parent.parent / "starts", "a") as file:
    file.write(
        f"{out.name} {first} {os.getpid()} {os.environ.get('WANDB_RUN_ID')} {os.environ.get('WANDB_RUN_GROUP')}\n"
    )
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
if lr < 0:
    print(f"Traceback\nerror: optimizer.lr={lr} must be 0 or more", file=sys.stderr)
    sys.exit(2)
with open(out / "metrics.jsonl", "a") as file:
    for step in range(first + 1, steps + 1):
        time.sleep(float(words.get("seconds", 0.1)))
        value = lr * step
        line = {"step": step, "eval/reward_sampled": value, "eval/low": value - 0.01, "eval/high": value + 0.01}
        print(json.dumps(line), file=file, flush=True)
        (out / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        if signals:
            sys.exit(143)

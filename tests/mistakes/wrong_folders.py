"""Usage errors in paths, and folders and files of other programs: name -> case."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from trying import RUN, Mistake, evaluate, full, warmup

LONG = "x" * 300
IN_TASK = "task._component_=torchtune_ext.tasks.jsonl.Jsonl task.question=question task.answer=answer task.path="
GRADER = IN_TASK + "rows.jsonl task.grader="
ROWS = {"rows.jsonl": '{"question": "1+1=", "answer": "2"}\n' * 8}
OTHERS = "not written by a run"


def holding(*names: str) -> Callable[[Path], None]:
    """Write files that no run has written."""

    def prepare(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text('{"my": "settings"}')

    return prepare


def warmed(*names: str, setting: str = "tokenizer_problems", model: str = "proj/model") -> Callable[[Path], None]:
    """Make proj the folder of a run with a model, and write further files into it."""

    def prepare(folder: Path) -> None:
        (folder / "proj").mkdir()
        (folder / "proj/run.json").write_text(json.dumps({"id": "a", "config": {setting: 8}}))
        shutil.copytree(folder / "model", folder / model)
        (folder / model / "model.safetensors").rename(folder / model / "model-00001-of-00001.safetensors")
        holding(*names)(folder)
        if model != "proj/model":
            (folder / "proj/model").symlink_to(folder / model)

    return prepare


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def link(folder: Path) -> None:
    (folder / "link").symlink_to("nowhere")


# fmt: off
FOLDERS = {
    "a folder of another program": full("output_dir=proj", rf"output_dir=proj holds run.json, checkpoints, engine.log, teacher, {OTHERS} .*Fix: choose another output_dir, or move them away", prepare=holding("proj/run.json", "proj/checkpoints/w.bin", "proj/engine.log", "proj/teacher/__init__.py"), real=True),
    "run.json of another program": full("output_dir=proj dry_run=True", rf"output_dir=proj holds run.json, {OTHERS}", prepare=holding("proj/run.json")),
    "a package in the working directory": full("output_dir=.", rf"output_dir=\. holds teacher, {OTHERS}", prepare=holding("teacher/__init__.py")),
    "evaluate: a folder of another program": evaluate("output_dir=proj", rf"output_dir=proj holds rollouts, {OTHERS}", prepare=holding("proj/rollouts/mine")),
    "warmup: a folder of another program": warmup("output_dir=proj", rf"output_dir=proj holds start, {OTHERS}", prepare=holding("proj/start/now.sh")),
    "warmup: a model of another program": warmup("output_dir=proj", r"output_dir=proj: the new model would replace proj/model, but it was not written by a run of this recipe. Fix: choose another output_dir, or move proj/model away", prepare=holding("proj/model/config.json"), real=True),
    "warmup: a model in a folder of GRPO": warmup("output_dir=proj", r"replace proj/model, but it was not written by a run of this recipe", prepare=warmed(setting="prompts_per_step")),
    "warmup: a model with notes": warmup("output_dir=proj", r"replace proj/model, but it holds files that were not written by a run: NOTES.txt, pytorch_model.bin", prepare=warmed("proj/model/NOTES.txt", "proj/model/pytorch_model.bin")),
    "warmup: the model that it starts from": warmup("output_dir=proj model_dir=proj/model ~shape", r"replace proj/model, but this run reads proj/model\. Fix", prepare=warmed()),
    "warmup: that model by a link": warmup("output_dir=proj model_dir=elsewhere ~shape", r"replace proj/model, but this run reads elsewhere\. Fix", prepare=warmed(model="elsewhere")),
    "a dangling link": full("output_dir=link/x dry_run=True", r"output_dir=link/x: link is a dangling link", prepare=link),
    "$HOME": full("'output_dir=$HOME/runs/x'", r"output_dir=\$HOME/runs/x: `\$` is shell syntax, .*Fix: write \$\{oc.env:NAME\} for an environment variable", real=True),
    "${HOME}": full("'output_dir=${HOME}/x'", r"output_dir: HOME is an environment variable, not a key\. Fix: write \$\{oc.env:HOME\}"),
    "${HOME} in preset": full("'preset=${HOME}/x.yaml'", r"preset: HOME is an environment variable, not a key\. Fix: write \$\{oc.env:HOME\}"),
    "${now}": full("'output_dir=runs/${now:%Y-%m-%d}'", r"output_dir: \$\{now:\.\.\.\} is unknown; expected .*let a shell fill it in, as in output_dir=runs/\$\(date \+%F\)"),
    "a long name": full(f"output_dir={LONG} dry_run=True", r"output_dir=x+\.\.\. is too long; expected at most 255 bytes in a name and 3,900 in a path\. Fix: choose a shorter one", real=True),
    "a long name of a config": Mistake(f"run grpo_full --config {LONG}", r"--config x+: file not found"),
    "a NUL": full("dry_run=True", r"output_dir='a\\x00b' contains a character that is invalid in a path", files={"run.yaml": RUN.replace("output_dir: out", 'output_dir: "a\\0b"')}),
    "a pipe as config": Mistake("run grpo_full --config pipe", r"--config pipe: not a regular file \(a pipe, device or socket\). Fix: write its content to a file", prepare=pipe),
    "a pipe as rows": full(IN_TASK + "pipe", r"task.path=pipe: not a regular file \(a pipe, device or socket\). Fix: write its content to a file", prepare=pipe),
    "a grader that another module hides": full(GRADER + "random.near", r"random has no 'near'; random is .*random.py, which hides random.py in .*Fix: rename yours", files={**ROWS, "random.py": "def near(text, answer): return 1.0\n"}),
    "a grader that exits": full(GRADER + "mine.near", r"importing mine raised SystemExit: need a key \(mine.py:3\)", files={**ROWS, "mine.py": "import sys\n\nsys.exit('need a key')\n"}, real=True),
    "a task that exits": full("task._component_=mine.Mine", r"`task:` mine.Mine raised SystemExit: no data \(mine.py:6\)", files={"mine.py": "import sys\nfrom sums import Base\n\nclass Mine(Base):\n    def __init__(self):\n        sys.exit('no data')\n"}),
    "a page over a file": Mistake("report runs/x --out run.yaml", r"cannot write run.yaml: it holds something other than a report. Fix: name another file by --out", prepare=lambda folder: holding("runs/x/run.json")(folder) or (folder / "runs/x/metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')),
    "puzzles over a file": Mistake("clue --count 1 --out run.yaml", r"--out run.yaml holds something other than puzzles. Fix: name another file"),
    "a sweep over a file": Mistake("sweep tiny_lr --out proj", r"proj is not empty, and holds no sweep\. Fix: choose another folder", prepare=holding("proj/sweep.yaml")),
}
# fmt: on

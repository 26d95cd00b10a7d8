"""Run usage-error cases: each in a fork of one process that has imported everything, in its own folder.

    python trying.py    # reads {"words": [...], "folder": ..., "log": ..., "variables": {...}}, answers with the status; a line each

Tests start a new process (`Forks`), because their own process may have threads of other tests, which a fork loses.
"""

import gc
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helpers.tiny_runs import environment, write_tiny_model

ENGINE_STARTED = 99  # status of a run that reached its engine
LEFT_A_PROCESS = 98  # status of a run that left a process
LATE = 97  # status of a run that did not end within DEADLINE_S
DEADLINE_S = 60.0

# A valid task and valid configs of all recipes. A case changes one of them.
TASK = """
from torchtune_ext.tasks.task import Problem, Score


class Base:
    def __init__(self, count=8, seed=0):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Problem(f"sum-{index}", ({"role": "user", "content": f"{index}+1="},), index + 1)

    def grade(self, problem, text):
        return Score(float(text.strip() == str(problem.answer)), {})

    def solution(self, problem):
        return str(problem.answer)
"""
RUN = """
output_dir: out
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.from_config, model_dir: "${model_dir}"}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: sums.Base}
evaluation:
  every: 2
  task: {_component_: sums.Base, count: 4}
preset: grpo
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
max_steps: 3
prompts_per_step: 4
samples_per_prompt: 4
row_tokens: 256
sampling: {max_tokens: 12}
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
checkpoints: {every: 1}
"""
ADAPTERS = "lora_attn_modules: [q_proj, v_proj], lora_rank: 4"
LORA = RUN.replace('from_config, model_dir: "${model_dir}"', f'from_config, model_dir: "${{model_dir}}", {ADAPTERS}')
EVAL = """
output_dir: out
model_dir: model
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: sums.Base}
sampling: {max_tokens: 12}
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
"""
WARM = """
output_dir: out
device: cpu
dtype: float32
task: {_component_: sums.Base}
num_problems: 8
batch_problems: 2
row_tokens: 256
tokenizer_problems: 8
shape: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 128}
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
schedule: {warmup: 1}
"""
FILES = {"sums.py": TASK, "run.yaml": RUN, "lora.yaml": LORA, "eval.yaml": EVAL, "warm.yaml": WARM}
MATMUL = "torchtune_ext.measured.matmul.Matmul"
# The modules that the forks need.
MODULES = (
    "torchtune._cli.tune",
    "transformers",
    "torchtune_ext.recipes.grpo",
    "torchtune_ext.recipes.evaluate",
    "torchtune_ext.recipes.warmup_sft",
    "torchtune_ext.tasks.arithmetic",
    "torchtune_ext.tasks.jsonl",
    "torchtune_ext.measured.matmul",
    "torchtune_ext.tasks.temporal_clue",
)


@dataclass(frozen=True)
class Mistake:
    """A usage error: the command, its folder, and the expected message."""

    typed: str  # the arguments of `torchtune-ext`, quoted as in a shell
    says: str  # a regular expression, which names the key, the value and the fix
    files: Mapping[str, str] = field(default_factory=dict)  # written into the folder before
    prepare: Callable[[Path], None] | None = None  # changes the folder before
    real: bool = False  # also run as a real command
    cpu_only: bool = False  # an error only on a machine without a GPU
    status: int = 2

    @property
    def words(self) -> list[str]:
        return shlex.split(self.typed)


def full(words: str, says: str, **more) -> Mistake:
    return Mistake(f"run grpo_full --config run.yaml {words}", says, **more)


def lora(words: str, says: str, **more) -> Mistake:
    return Mistake(f"run grpo_lora --config lora.yaml {words}", says, **more)


def evaluate(words: str, says: str, **more) -> Mistake:
    return Mistake(f"run evaluate --config eval.yaml {words}", says, **more)


def warmup(words: str, says: str, **more) -> Mistake:
    return Mistake(f"run warmup_sft --config warm.yaml {words}", says, **more)


@dataclass(frozen=True)
class Said:
    """The output and the changed files of a run."""

    status: int
    text: str
    changed: list[str]  # changed files and folders below its folder


def make_place(folder: Path) -> Path:
    """Make a folder with a model, a task, and a valid config of each recipe."""
    write_tiny_model(folder / "model")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def attempt(mistake: Mistake, place: Path, folder: Path, run: Callable[[list[str], Path, Path], int]) -> Said:
    """Run a case in a copy of `place`.

    Args:
        folder: the copy.
        run: takes words, the folder and a file for the output, and returns the exit status.
    """
    shutil.copytree(place, folder)
    for name, text in mistake.files.items():
        (folder / name).write_text(textwrap.dedent(text))
    if mistake.prepare is not None:
        mistake.prepare(folder)
    before = listing(folder)
    with tempfile.NamedTemporaryFile("r") as log:
        status = run(mistake.words, folder, Path(log.name))
        text = log.read()
    after = listing(folder)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return Said(status, text.strip(), changed)


def listing(folder: Path) -> dict[str, tuple]:
    """Return size and time of each file below a folder, and the names of the folders."""
    entries = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        entries[str(path.relative_to(folder))] = () if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return entries


def import_all() -> None:
    """Import the modules of the forks once."""
    from torchtune_ext.cli import plugin

    plugin.install()
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("transformers").PreTrainedTokenizerFast  # noqa: B018 (a lazy import)
    gc.freeze()  # Else the garbage collector of each fork would copy all pages of these imports.


class Forks:
    """Run `torchtune-ext WORDS` in forks of a process that has imported everything (`run` of `attempt`)."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), "PYTHONPATH": path},
            text=True,
        )

    def __call__(self, words: list[str], folder: Path, log: Path, **variables: str) -> int:
        order = {"words": words, "folder": str(folder), "log": str(log), "variables": variables}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)


def serve() -> None:
    """Fork for each line of stdin until it is closed."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Keep the output of imports out of the answers.
    os.dup2(2, 1)
    import_all()
    for line in orders:
        order = json.loads(line)
        print(
            in_fork(order["words"], Path(order["folder"]), Path(order["log"]), **order["variables"]),
            file=answers,
            flush=True,
        )


def in_fork(words: list[str], folder: Path, log: Path, **variables: str) -> int:
    """Runs `torchtune-ext WORDS` in a fork of this process, with further variables of its environment, and returns its exit
    status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ |= variables
            status = _run(words, folder, log)
        finally:
            os._exit(status)
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return LATE


def _run(words: list[str], folder: Path, log: Path) -> int:
    from torchtune_ext.cli import cli
    from torchtune_ext.sampling.engine import Engine

    Engine.start = _no_engine
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.chdir(folder)
    # No bytecode is written, so the folder does not change.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # As `python -m` does.
    sys.path.insert(0, str(folder))
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return LEFT_A_PROCESS if any(map(_children, os.listdir("/proc/self/task"))) else int(status or 0)


def _children(thread: str) -> list[str]:
    """Return the running child processes of a thread of this process."""
    try:
        return Path(f"/proc/self/task/{thread}/children").read_text().split()
    except OSError:  # the thread has ended
        return []


def _no_engine(self) -> None:
    print("the engine was started", file=sys.stderr, flush=True)
    os._exit(ENGINE_STARTED)


if __name__ == "__main__":
    serve()

"""Our two kinds of errors, and how a program shows an error.

error      meaning                                                                      shown as      exit status
Mistake    the user can fix it: the message names the key, the value and the fix        one message   2
Failure    something broke though the settings are right: the message names the cause   one message   1
others     a bug, ours or a library's, that somebody should report                      traceback     1
"""

import errno
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from torchtune_ext.run.process_env import rank_and_world_size
from torchtune_ext.run.renames import current_name
from torchtune_ext.run.terminal import RED, apply_style

USAGE_ERROR_STATUS = 2  # the exit status of a mistake
TRACEBACK_VARIABLE = (
    "TORCHTUNE_EXT_TRACEBACK"  # set to 1, this environment variable shows tracebacks instead of messages
)
# Seconds that a rank other than 0 waits before it prints its error. If rank 0 has the same one, torchrun ends the other
# ranks meanwhile, and the user reads the message once.
OTHER_RANKS_WAIT_S = 5.0
MAX_DURATION_S = 604_800.0  # the longest time of a setting
FAILURE_STATUS = 1  # the exit status of a failure
STDLIB = sysconfig.get_path("stdlib") + os.sep
PACKAGE_FOLDERS = ("site-packages", "dist-packages")

# The names that users of other trainers write, and the ones here, without their node.
ALIASES = {
    "learning_rate": "lr",
    "num_generations": "samples_per_prompt",
    "group_size": "samples_per_prompt",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "num_steps": "max_steps",
    "steps": "max_steps",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "max_seq_length": "max_model_len",
    "max_length": "max_model_len",
    "model_path": "model_dir",
    "model_name_or_path": "model_dir",
    "beta": "kl_coef",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "cliprange": "clip_low",
    "tp": "tensor_parallel_size",
    "resume": "resume_from_checkpoint",
    "save_steps": "every",
    "gate": "max_mismatch",
    "wandb": "to",
    "report_to": "to",
    "scheduler": "decay",
    "warmup_steps": "warmup",
    "path": "model_dir",
    "file": "path",
    "n": "samples_per_prompt",
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
    "stop": "stop_token_ids",
    "stop_strings": "stop_token_ids",
}


class UsageError(ValueError):
    """An error that the user can fix. The message names the key, the value and the fix."""


class UsageFileError(UsageError, OSError):
    """A file or a disk that the user has to fix. It is an OSError, too, for code that catches those."""


class RunFailure(RuntimeError):
    """Something broke though the user's settings are right. The message names the cause."""


class DeadlineExceeded(RunFailure, TimeoutError):
    """Something did not answer by its deadline. The message says what."""


class UserCodeError(UsageError):
    """A component that the user named raised an error, the `__cause__` of this one."""


def closest_match(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that the user most likely meant by `name`, or None. Names may be dotted ("loss.level")."""
    known = list(known)
    same = [each for each in known if each.lower() == name.lower()]
    if same:
        return same[0]
    # The last parts are compared as well, so that "learning_rate" finds "optimizer.lr". Where two names end alike, the
    # first one counts. The list is reversed for that, because a later item of a dict replaces an earlier one.
    last = name.rpartition(".")[2]
    by_last = {each.rpartition(".")[2]: each for each in reversed(known)}
    alias_target = ALIASES.get(last)
    if alias_target in by_last:
        return by_last[alias_target]
    # A name of which this one is the beginning is nearer than any other, unless it is so short that many begin with it.
    longer = [each for each in known if len(name) > 3 and each.startswith(name)]
    near = longer or get_close_matches(name, known, n=1, cutoff=0.7) or get_close_matches(last, by_last, n=1)
    return by_last.get(near[0], near[0]) if near else None


def is_usage_error(error: BaseException) -> bool:
    """Tells whether the user can fix the cause of an error."""
    return exit_status_of(error) == USAGE_ERROR_STATUS


def exit_status_of(error: BaseException) -> int | None:
    """Returns the exit status of an error that is shown as one message, or None for another one."""
    if isinstance(error, UsageError):
        return USAGE_ERROR_STATUS
    if isinstance(error, RunFailure):
        return FAILURE_STATUS
    # A path that the user gave. No path of ours is that long.
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return USAGE_ERROR_STATUS
    if error.__traceback__ is None:
        return None
    # The innermost frame tells who raised the error.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    # torchtune.config reads the command line, so what it raises is meant for the user.
    of_torchtune = module.startswith("torchtune.config.") and isinstance(error, ValueError | OSError | ImportError)
    # So is a ValueError that the recipe raises itself. It runs as `__main__`, and may be the user's own copy.
    return USAGE_ERROR_STATUS if of_torchtune or (module == "__main__" and type(error) is ValueError) else None


def error_location(error: BaseException) -> str | None:
    """The innermost line of a user's file in a traceback, as "my_task.py:12", or None if our own code lies deeper."""
    # The frames of a syntax error are those of its importer.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative_path(error.filename)}:{error.lineno}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__")).split(".")[0] == "torchtune_ext":
            return None
        # Libraries are passed over, and so is generated code, whose file is a name such as "<string>".
        library = file.startswith(STDLIB) or any(name in file for name in PACKAGE_FOLDERS)
        if os.path.isfile(file) and not library:
            return f"{_relative_path(file)}:{line}"
    return None


def _relative_path(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def describe_error(error: BaseException) -> str:
    """Returns an error in one line: its kind, its text and, if it has one, its place in the user's files."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and (new := current_name(str(error.name))):
        text = f"{error.name} moved to {new}"
    line = text if isinstance(error, ValueError) and text else f"{kind}: {text}" if text else kind
    place = error_location(error)
    return f"{line[:600]} ({place})" if place else line[:600]


@contextmanager
def wrap_user_errors(action: str, fix: str = "") -> Iterator[None]:
    """Turns an error of a component that the user named into `Blamed`. A mistake passes unchanged.

    Args:
        doing: what is called, as the message begins: "task: my_task.Sums()[0]".
        fix: the end of the message.
    """
    try:
        yield
    # Some programs call sys.exit where a key or a package is missing.
    except (Exception, SystemExit) as error:
        if is_usage_error(error):
            raise
        raise UserCodeError(f"{action} raised {describe_error(error)}{f'; {fix}' if fix else ''}") from error


@contextmanager
def report_errors() -> Iterator[None]:
    """Surrounds a whole program: a mistake or a failure ends it with one message on stderr, other errors pass.

    Raises SystemExit with the status of the table at the top. Under torchrun the process ends without it.
    """
    try:
        yield
    except Exception as error:
        rank, ranks = rank_and_world_size()
        is_distributed = ranks > 1
        if is_distributed and rank:
            time.sleep(OTHER_RANKS_WAIT_S)
        status = exit_status_of(error)
        if status is None:
            raise
        _print_error(error, status, f"rank {rank}: " if is_distributed and rank else "")
        exit_process(status, at_once=is_distributed)


def _print_error(error: Exception, status: int, prefix: str) -> None:
    if os.environ.get(TRACEBACK_VARIABLE) not in (None, "", "0"):
        traceback.print_exception(error)
    else:
        # A failure keeps all its lines: it may quote the last words of an engine.
        kind = "" if type(error) in (RunFailure, DeadlineExceeded) else f"{type(error).__name__}: "
        text = usage_message(error) if status == USAGE_ERROR_STATUS else f"{kind}{error}"
        # training/recipe_runner.py adds notes, which say how the run stands now.
        label = apply_style("error:", RED, sys.stderr)
        print("\n".join([f"{label} {prefix}{text}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    sys.stderr.flush()


def usage_message(error: BaseException) -> str:
    """Returns the message of a mistake. If a user's component failed, its last line says how to see the traceback."""
    text = "\n".join([line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__])
    return f"{text}\n({TRACEBACK_VARIABLE}=1 shows the traceback)" if isinstance(error, UserCodeError) else text


def exit_process(status: int, at_once: bool = False) -> NoReturn:
    """Ends the process with exit status `status`; `at_once` does not wait for threads."""
    if at_once:
        # The threads of a process group that is still open sometimes abort the interpreter while it ends, and torchrun
        # would see another status. os._exit skips that, and also the exit functions and the flushing of streams.
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
    sys.exit(status)


def leading_argument(text: str) -> str | None:
    """Returns the name at the beginning of a message "name=value ..." or "name.key=value ...", or None."""
    match = re.match(r"([A-Za-z_]\w*)(\.\w+)*=", text)
    return match[1] if match else None


def require_seconds(key: str, value: float, least: str = "greater than 0") -> None:
    """Raises ValueError unless a setting is finite, `least` ("greater than 0" or "from 0") and at most a week."""
    # A wait of the system counts milliseconds in 32 bits, which end after 24.8 days.
    if not 0 <= value <= MAX_DURATION_S or (value == 0 and least != "from 0"):
        raise UsageError(f"{key}={value} must be a number of seconds {least}, at most {MAX_DURATION_S:.0f} (a week)")

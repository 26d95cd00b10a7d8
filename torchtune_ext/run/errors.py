"""The error classes of the package, and how a program reports an error.

error        meaning                                                       output       exit status
UsageError   the user can fix it; the message names key, value and fix     one message  2
RunFailure   a failure with valid settings; the message names the cause    one message  1
others       a bug of ours or of a library, which should be reported       traceback    1
"""

import errno
import os
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

USAGE_ERROR_STATUS = 2  # the exit status of a UsageError
FAILURE_STATUS = 1  # the exit status of a RunFailure
TRACEBACK_VARIABLE = "TORCHTUNE_EXT_TRACEBACK"  # the environment variable that shows tracebacks instead of messages (1)
# Seconds that a rank other than 0 waits before it prints its error. If rank 0 has the same error,
# torchrun ends the other ranks in this time, and the message appears once.
OTHER_RANKS_WAIT_S = 5.0
MAX_DURATION_S = 604_800.0  # upper bound of settings in seconds: a week
STDLIB = sysconfig.get_path("stdlib") + os.sep
PACKAGE_FOLDERS = ("site-packages", "dist-packages")

# Names in other trainers -> our config keys, both without their section.
ALIASES = {
    "learning_rate": "lr",
    "num_generations": "samples_per_prompt",
    "group_size": "samples_per_prompt",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "num_steps": "max_steps",
    "steps": "max_steps",
    "num_iterations": "iterations_per_step",
    "ppo_epochs": "iterations_per_step",
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
    """A file or disk error that the user can fix; also an OSError for code that catches OSError."""


class RunFailure(RuntimeError):
    """A failure with valid settings. The message names the cause."""


class DeadlineExceeded(RunFailure, TimeoutError):
    """A deadline has passed. The message names the operation."""


class UserCodeError(UsageError):
    """A user's component raised an error, which is the `__cause__`."""


def closest_match(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None. Names may be dotted ("loss.level")."""
    known = list(known)
    same = [known_name for known_name in known if known_name.lower() == name.lower()]
    if same:
        return same[0]
    # The last parts are compared as well, so that "learning_rate" finds "optimizer.lr". Of two
    # names with the same last part, the first counts (the last item in a dict, hence `reversed`).
    last = name.rpartition(".")[2]
    by_last = {known_name.rpartition(".")[2]: known_name for known_name in reversed(known)}
    alias_target = ALIASES.get(last)
    if alias_target in by_last:
        return by_last[alias_target]
    # A known name that starts with `name` is the closest, unless `name` is too short to be unique.
    longer = [known_name for known_name in known if len(name) > 3 and known_name.startswith(name)]
    near = longer or get_close_matches(name, known, n=1, cutoff=0.7) or get_close_matches(last, by_last, n=1)
    return by_last.get(near[0], near[0]) if near else None


def is_usage_error(error: BaseException) -> bool:
    """Return whether the user can fix the cause of an error."""
    return exit_status_of(error) == USAGE_ERROR_STATUS


def exit_status_of(error: BaseException) -> int | None:
    """Return the exit status of an error that is shown as one message, or None for a bug."""
    if isinstance(error, UsageError):
        return USAGE_ERROR_STATUS
    if isinstance(error, RunFailure):
        return FAILURE_STATUS
    # Only a path from the user can be too long.
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return USAGE_ERROR_STATUS
    if error.__traceback__ is None:
        return None
    # The innermost frame shows which module raised the error.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    # torchtune.config parses the command line, so its errors are usage errors.
    is_torchtune_error = module.startswith("torchtune.config.") and isinstance(
        error, ValueError | OSError | ImportError
    )
    # So is a ValueError of the recipe itself, which runs as `__main__` and may be the user's copy.
    return USAGE_ERROR_STATUS if is_torchtune_error or (module == "__main__" and type(error) is ValueError) else None


def error_location(error: BaseException) -> str | None:
    """Return the innermost line of a user's file ("my_task.py:12"); None if our code is deeper."""
    # The frames of a syntax error belong to the importing module.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative_path(error.filename)}:{error.lineno}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__")).split(".")[0] == "torchtune_ext":
            return None
        # Libraries are skipped, as is generated code with a file name such as "<string>".
        library = file.startswith(STDLIB) or any(name in file for name in PACKAGE_FOLDERS)
        if os.path.isfile(file) and not library:
            return f"{_relative_path(file)}:{line}"
    return None


def _relative_path(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def describe_error(error: BaseException) -> str:
    """Format an error in one line: type, text and, if known, the line in the user's files."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and (new := current_name(str(error.name))):
        text = f"{error.name} moved to {new}"
    line = text if isinstance(error, ValueError) and text else f"{kind}: {text}" if text else kind
    place = error_location(error)
    return f"{line[:600]} ({place})" if place else line[:600]


@contextmanager
def wrap_user_errors(action: str, fix: str = "") -> Iterator[None]:
    """Turn an error of a user's component into UserCodeError. A UsageError passes unchanged.

    Args:
        action: the call, with which the message begins: "task: my_task.Sums()[0]".
        fix: the end of the message.

    Raises:
        UserCodeError: the block raised an error.
    """
    try:
        yield
    # Some programs call sys.exit if a key or a package is missing.
    except (Exception, SystemExit) as error:
        if is_usage_error(error):
            raise
        raise UserCodeError(f"{action} raised {describe_error(error)}{f'. Fix: {fix}' if fix else ''}") from error


@contextmanager
def report_errors() -> Iterator[None]:
    """Report a UsageError or RunFailure of a program as one message on stderr and exit.

    Other errors propagate. Under torchrun the process exits at once.

    Raises:
        SystemExit: with the exit status of the table at the top of the module.
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
        # A RunFailure keeps all its lines, because it may quote the end of an engine's log.
        kind = "" if type(error) in (RunFailure, DeadlineExceeded) else f"{type(error).__name__}: "
        text = usage_message(error) if status == USAGE_ERROR_STATUS else f"{kind}{error}"
        # training/recipe_runner.py adds notes about the state of the run.
        label = apply_style("error:", RED, sys.stderr)
        print("\n".join([f"{label} {prefix}{text}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    sys.stderr.flush()


def usage_message(error: BaseException) -> str:
    """Return the message of a UsageError; a UserCodeError adds how to see the traceback."""
    text = "\n".join([line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__])
    return f"{text}\n({TRACEBACK_VARIABLE}=1 shows the traceback)" if isinstance(error, UserCodeError) else text


def exit_process(status: int, at_once: bool = False) -> NoReturn:
    """Exit with `status`; with `at_once`, without waiting for threads."""
    if at_once:
        # The threads of an open process group sometimes abort the interpreter at exit, and torchrun
        # would see another status. os._exit avoids that, but skips exit functions and flushing.
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
    sys.exit(status)


def require_seconds(key: str, value: float) -> None:
    """Raise UsageError unless a duration is above 0 and at most a week.

    Args:
        key: the config key, for messages.
        value: seconds.
    """
    # System calls count a timeout in milliseconds in 32 bits, which overflow after 24.8 days.
    if not 0 < value <= MAX_DURATION_S:
        raise UsageError(f"{key}={value} must be a number of seconds above 0 and at most {MAX_DURATION_S:.0f} (a week)")

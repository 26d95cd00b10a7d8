"""Commands, parsed as by a shell, and code blocks of the pages of docs/."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("tune", "torchtune-ext", "hf", "python", "vllm", "make", "pytest")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page."""

    line: str  # as written
    words: tuple[str, ...]  # from the program on
    environ: dict[str, str]  # assignments before the program

    def option(self, name: str) -> str | None:
        """Return the value of an option, or None."""
        return self.words[self.words.index(name) + 1] if name in self.words else None


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return every fenced block of a page as (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[Command]:
    """Return every command of a page, in plain blocks and in `code` of tables, in order."""
    lines = []
    inside = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = "" if inside else (line[3:] or "plain")
        elif inside == "plain":
            lines.append(line)
        elif line.startswith("|"):
            lines += re.findall(r"`([^`]+)`", line)
    return [command for line in lines if (command := _command(line)) is not None]


def _command(line: str) -> Command | None:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    count = next((i for i, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    if len(words) < count + 2 or words[count] not in PROGRAMS:
        return None
    return Command(line, tuple(words[count:]), dict(word.split("=", 1) for word in words[:count]))


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Arguments of a `tune run`."""

    recipe: str
    config: str
    overrides: list[str]  # key=value
    processes: int  # of torchrun on each node; 1 without it


def run_command(command: Command) -> RunCommand | None:
    """Parse a `tune run` with a config. Return None for another command."""
    if command.words[:2] != ("tune", "run") or "--config" not in command.words:
        return None
    rest = list(command.words[2:])
    torchrun = {}
    while rest[0].startswith("--"):
        torchrun[rest[0]], rest = rest[1], rest[2:]
    processes = int(torchrun.get("--nproc_per_node", 1))
    recipe, option, config, *overrides = rest
    assert option == "--config" and not any(word.startswith("-") for word in overrides), command.line
    return RunCommand(recipe, config, overrides, processes)

"""What the pages of docs/ show: their commands, as a shell would take them apart, their blocks, and what the commands make."""

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from torchtune_ext.run.catalog import config_files, folder

PROGRAMS = ("tune", "torchtune-ext", "hf", "python", "vllm", "make", "pytest")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page."""

    line: str  # as it stands there
    words: tuple[str, ...]  # from the program on
    environ: dict[str, str]  # assignments before the program

    def option(self, name: str) -> str | None:
        """The word behind an option, or None."""
        return self.words[self.words.index(name) + 1] if name in self.words else None


def blocks(page: Path) -> list[tuple[str, str]]:
    """Every fenced block of a page, as (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[Command]:
    """Every command of a page, in plain blocks and in `code` of tables, in their order."""
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
    """What `tune run` is asked for."""

    recipe: str
    config: str
    overrides: list[str]  # key=value
    processes: int  # of torchrun on each node; 1 without it


def run_command(command: Command) -> RunCommand | None:
    """Takes a `tune run` apart; None: it is another command."""
    if command.words[:2] != ("tune", "run"):
        return None
    rest = list(command.words[2:])
    torchrun = {}
    while rest[0].startswith("--"):
        torchrun[rest[0]], rest = rest[1], rest[2:]
    processes = int(torchrun.get("--nproc_per_node", 1))
    recipe, option, config, *overrides = rest
    assert option == "--config" and not any(word.startswith("-") for word in overrides), command.line
    return RunCommand(recipe, config, overrides, processes)


def read_by(node):
    """What a config reads: paths, and data sets of the hub as the call that loads them, Math('aime2024')."""
    if isinstance(node, dict):
        kind = str(node.get("_component_")).rpartition(".")[2]
        if kind in ("Math", "GSM8K") and "path" not in node:
            yield f"{kind}({node['dataset' if kind == 'Math' else 'split']!r})"
        for key, value in node.items():
            if isinstance(value, str) and key not in ("_component_", "output_dir", "address"):
                yield from [value] if "/" in value and "${" not in value else []
            else:
                yield from read_by(value)
    elif isinstance(node, list):
        for value in node:
            yield from read_by(value)


def made_by(command):
    """What a command of the page makes, in the words of `read_by`."""
    program, word = command.words[:2]
    if (program, word) == ("hf", "download") and command.words[3] == "--local-dir":
        owner, name = command.words[2].split("/")
        assert command.words[4] == f"models/{name}" and owner in ("Qwen", "meta-llama"), command.line
        return {command.words[4]}
    if (program, word) == ("make", "pretrained"):
        return {"models/SmolLM2-135M-Instruct"}
    if (program, word) == ("torchtune-ext", "clue"):
        return {command.option("--out")}
    if (run := run_command(command)) and run.recipe == "warmup_sft":
        return {f"{OmegaConf.load(config_files(folder('configs'))[run.config]).output_dir}/model"}
    if (program, word) == ("python", "-c"):
        return {ast.unparse(node) for node in ast.walk(ast.parse(command.words[2])) if isinstance(node, ast.Call)}
    return set()

#!/usr/bin/env python3
"""Writes the pages of docs/reference/ from the source: python scripts/reference.py

A test fails if the pages differ from what this script writes.
"""

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

import yaml

from torchtune_ext.cli.cli import OWN_COMMANDS, TUNE_COMMANDS
from torchtune_ext.cli.options import (
    USUAL_COMPONENTS,
    Option,
    argument_descriptions,
    arguments_of,
    config_class,
    format_yaml,
    list_options,
)
from torchtune_ext.grading.environments import FINISH_REASONS
from torchtune_ext.measured.results import BenchConfig
from torchtune_ext.run.catalog import import_object, recipe_files
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.presets import preset_files
from torchtune_ext.telemetry.panels import PANELS
from torchtune_ext.training.buckets import POSITION_EDGES, STALENESS_EDGES, bucket_names

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by scripts/reference.py from the source. Do not edit. -->"
UNITS = {"percent": "fraction", "seconds": "s", "gib": "GiB", "int": "count", "tok/s": "tokens/s"}
# The classes, protocols and functions that a user's code imports, by section of the page.
API = {
    "Tasks and rewards": [
        "torchtune_ext.tasks.task.Task",
        "torchtune_ext.tasks.task.Problem",
        "torchtune_ext.tasks.task.Score",
        "torchtune_ext.tasks.task.AdaptiveTask",
        "torchtune_ext.tasks.task.SelfGradingTask",
        "torchtune_ext.tasks.task.strip_thinking",
        "torchtune_ext.tasks.answers.MathGrader",
    ],
    "Environments": [
        "torchtune_ext.tasks.task.EpisodeTask",
        "torchtune_ext.tasks.task.Environment",
        "torchtune_ext.tasks.task.EnvironmentReply",
        "torchtune_ext.tasks.games.GameTask",
        "torchtune_ext.tasks.tool_calls.parse_tool_calls",
    ],
    "Groups and completions": [
        "torchtune_ext.pipeline.groups.Group",
        "torchtune_ext.pipeline.groups.Sample",
        "torchtune_ext.sampling.types.Completion",
        "torchtune_ext.grading.outcomes.Ungraded",
        "torchtune_ext.pipeline.advantages.assign_advantages",
        "torchtune_ext.pipeline.rollout_store.read_rollouts",
        "torchtune_ext.telemetry.metrics.read_metrics",
    ],
    "Losses": [
        "torchtune_ext.objective.tokens.Tokens",
        "torchtune_ext.objective.loss.PolicyLoss",
        "torchtune_ext.objective.constraints.Constraint",
        "torchtune_ext.objective.importance.ImportanceMethod",
    ],
    "Metric sinks": [
        "torchtune_ext.telemetry.sinks.settings.Sink",
        "torchtune_ext.telemetry.sinks.settings.SinkContext",
    ],
    "Engines, models and tokenizers": [
        "torchtune_ext.sampling.backend.Backend",
        "torchtune_ext.policy.builder.from_config",
        "torchtune_ext.chat.tokenizer.ChatTokenizer",
    ],
    "Measured programs": ["torchtune_ext.measured.kernel.Kernel", "torchtune_ext.measured.kernel.Parameter"],
    "Errors": ["torchtune_ext.run.errors.UsageError", "torchtune_ext.run.errors.RunFailure"],
}


def cell(text: str) -> str:
    """Returns a text as the cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with an empty line before and after it."""
    lines = [heads, ["---"] * len(heads), *([cell(each) for each in row] for row in rows)]
    return ["", *(f"| {' | '.join(line)} |" for line in lines), ""]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def codes(names: Iterable[str]) -> str:
    return ", ".join(code(name.lstrip("_")) for name in names)


def sentence(text: str) -> str:
    """Returns a description with a capital letter, unless it begins with a value or a name, and a period."""
    # A tag in quotes would be HTML.
    text = re.sub(r"(`[^`]*`)|<(?=[\w/])", lambda each: each[1] or "&lt;", text)
    is_name = text[1:2].isupper() or re.match(r"(null|true|false)\b", text)
    return (text if is_name else text[:1].upper() + text[1:]).removesuffix(".") + "."


def option_rows(options: Iterable[Option], titles: Mapping[str, str] = MappingProxyType({})) -> list[tuple[str, ...]]:
    """Returns the rows of a table. The row of a section links to its own table, by its title."""
    return [
        (f"[`{each.name}`](#{titles[each.name].replace(' ', '-')})", each.values, "", each.description)
        if each.name in titles
        else (code(each.name), each.values, code(each.default), each.description)
        for each in options
    ]


def option_items(options: Iterable[Option]) -> Iterator[str]:
    """Yields a list item for each argument, whose description may have several sentences."""
    for each in options:
        yield f"- `{each.name}` ({each.values or 'any value'}, {code(each.default)}): {sentence(each.description)}"


def summary_of(item: object) -> str:
    """Returns the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())


def field_items(item: object) -> Iterator[str]:
    """Yields a list item for each annotated field of a class, with its comment above it or after it."""
    if not inspect.isclass(item):
        return
    lines, described = inspect.getsource(item).splitlines(), argument_descriptions(item)
    for node in ast.parse("\n".join(lines)).body[0].body:
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target).startswith("_"):
            continue
        above = list(takewhile(lambda line: line.startswith("#"), map(str.strip, reversed(lines[: node.lineno - 1]))))
        trailing = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
        comment = " ".join(line.removeprefix("#").strip() for line in (*reversed(above), trailing) if line)
        name, kind = ast.unparse(node.target), ast.unparse(node.annotation)
        comment = " ".join(comment.split()) or described.get(name, "")
        yield f"- `{name}: {kind}`" + (f": {sentence(comment)}" if comment else "")


def source_link(item: object) -> str:
    """Returns a link from docs/reference/ to the file that defines a class or function."""
    file = Path(inspect.getsourcefile(inspect.unwrap(item)) or "").resolve().relative_to(ROOT)
    return f"[{file}](../../{file})"


def component_lines(section: str, paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        name = path.rpartition(".")[2]
        component = import_object(path, section)
        ours = component.__module__.startswith("torchtune_ext.")
        yield from (f"### {name}", "", f"`_component_: {path}`", "")
        if ours:
            yield from (summary_of(component), f"Source: {source_link(component)}.", "")
        yield from (*option_items(arguments_of(section, path)), "")


def config_page() -> Iterator[str]:
    """Yields the lines of the page of all config keys."""
    yield from (
        "# Configuration keys", "", NOTE, "",
        "This page lists every config key of the recipes with its type, its default and its meaning.",
        "Use it to look up a key; `torchtune-ext config` prints the same, also for a copied recipe.",
        "", "```", "torchtune-ext config sampling.max_tokens", "```", "",
        "A key is written as `key: value` in the YAML, and as `key=value` on the command line.",
        "A key of a section is `section.key=value` on the command line.",
        "A key whose default is `(required)` must be in the config, in the preset or on the command line.",
        "A key of type *component* is a section: `_component_`, the dotted path of a class or function, and its arguments.",
        "The arguments of the usual classes are in [Components](#components) and [Tasks](#tasks).",
        "The default preset, `grpo`, sets `loss.importance: tis` and `aggregation: sequence`.",
        "The tables show the defaults without a preset.",
        "Terms: [glossary](../concepts/glossary.md).", "",
    )  # fmt: skip
    heads = ("key", "type", "default", "description")
    names: dict[str, list[str]] = {}
    written: dict[str, list[Option]] = {}
    for recipe in recipe_files():
        names.setdefault(recipe.path.stem, []).append(recipe.name)
    for recipes in sorted(names.values(), key=len, reverse=True):
        options = list_options(config_class(recipes[0]))
        sections = [each for each in options if each.values == "section"]
        yield from (f"## {', '.join(recipes)}", "")
        yield from (
            f"Source: [recipes/{stem}.py](../../recipes/{stem}.py)." for stem in names if names[stem] == recipes
        )
        # Recipes share sections. A section with other defaults has a second table.
        keys = {each.name: [key for key in options if key.name.startswith(f"{each.name}.")] for each in sections}
        new = {name for name in keys if keys[name] not in written.values()}
        titles = {name: f"{name} of {recipes[0]}" if name in new and name in written else name for name in keys}
        written = {name: keys[name] for name in new} | written
        yield from table(heads, option_rows((each for each in options if "." not in each.name), titles))
        for section in sections:
            if section.name in new:
                yield from (f"### {titles[section.name]}", "", sentence(section.description))
                yield from table(heads, option_rows(keys[section.name]))
    yield from ("## Components", "", "The arguments of the classes that the shipped configs name in `_component_`.", "")
    for section, paths in USUAL_COMPONENTS.items():
        if section != "task":
            yield from component_lines(section, paths)
    yield from ("## Tasks", "", "The arguments of the tasks for `task` and `evaluation.task`.", "")
    yield from component_lines("task", USUAL_COMPONENTS["task"])
    yield from ("### BenchConfig", "", "The keys of `task.bench` of `Matmul`.")
    yield from table(heads, option_rows(list_options(BenchConfig, prefix="task.bench.")))


def presets_page() -> Iterator[str]:
    """Yields the lines of the page of presets."""
    yield from (
        "# Presets", "", NOTE, "",
        "A preset is a published method: defaults for `loss`, `advantage`, `aggregation`, `refill_rounds` and `teacher`.",
        "Set `preset` in a config or on the command line, and override single keys next to it.",
        "", "```", "tune run grpo_full --config grpo/tiny preset=dapo", "torchtune-ext presets dapo", "```", "",
        "`preset: null` sets nothing, and `preset: my_preset.yaml` reads your own file.",
        "[Algorithms](../how_to/algorithms.md) says how to choose one.",
        "[Objectives](../concepts/objectives.md) explains the loss.",
    )  # fmt: skip
    rows, notes = [], []
    for name, path in preset_files().items():
        text = path.read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
        loss = str(Component(settings.pop("loss"), "loss").instantiate())
        rest = ", ".join(code(f"{key}={format_yaml(value)}") for key, value in flatten(settings))
        papers = re.findall(r"arXiv ([\d.]+\d)", text.partition("\nloss:")[0])
        links = ", ".join(f"[{each}](https://arxiv.org/abs/{each})" for each in dict.fromkeys(papers))
        rows.append((f"[`{name}`](../../configs/presets/{name}.yaml)", links, loss, rest))
        notes.append(f"- `{name}`: {' '.join(line[2:] for line in text.splitlines() if line.startswith('# '))}")
    yield from table(("preset", "arXiv", "loss", "other keys"), rows)
    yield from ("`loss` is the loss as the header of a run prints it.", "", "## Notes", "", *notes)


def flatten(settings: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def metrics_page() -> Iterator[str]:
    """Yields the lines of the page of metrics, in the sections of the report."""
    yield from (
        "# Metrics", "", NOTE, "",
        "This page lists the metrics that recipes write to `metrics.jsonl` and to the sinks of `logging`.",
        "Use it to find out what a chart of the report shows, and which value needs an investigation.",
        "", "```", "torchtune-ext report RUN", "```", "",
        "Not every run has every metric, and a task may add others.",
        "A word in angle brackets stands for several names:", "",
        "- `<part>` and `<term>`: names that your task and your loss return.",
        f"- `<place>`: position of a token in its completion: {codes(bucket_names('', POSITION_EDGES))}.",
        f"- `<bucket>`: staleness of a token, in policy versions: {codes(bucket_names('', STALENESS_EDGES))}.",
        "- `<versions>`: staleness of a group, from 0 to `staleness`.",
        f"- `<ending>`: ending of a conversation: {codes(FINISH_REASONS)}.",
        "- `<outcome>` and `<stage>`: outcomes and curriculum of [measured programs](../how_to/measured_programs.md).",
        "- `<level>`: level of `NearLevel`, or without levels `settled`, the fraction of problems at the lowest weight.",
        "- `<n>`: samples per held-out problem.", "",
        "[Tracking](../how_to/tracking.md) explains the report and the sinks.",
    )  # fmt: skip
    section, rows = "", []
    for panel in (*PANELS, None):
        if panel is None or panel.section != section:
            if rows:
                yield from ("", f"## {section}", *table(("metric", "unit", "meaning", "investigate if"), rows))
            section, rows = panel.section if panel else "", []
        for name, _, meaning, investigate in panel.metrics if panel else ():
            # "time/sample/generate" is a part of "time/sample".
            total = name.rpartition("/")[0]
            meaning = f"breakdown of `{total}`: {meaning}" if "/" in total and meaning else meaning
            unit = UNITS.get(panel.unit, panel.unit) if panel else ""
            rows += [(code(name), unit, meaning, investigate)] if meaning else []
    yield from (
        "## Notes", "",
        "- Rank 0 measures the time; a phase ends when the GPU has finished its work.",
        "- `speed/sampled_tokens_s` divides by `time/sample/generate`, with `prefetch_steps` above 0 by `time/step`.",
        "- `time/wait_for_rollouts` is the sum of `time/sample/generate` and `time/sample/grade`.",
        "- `canary/update_applied` and `canary/adapter_applied` have no value while the change is below four times the noise.",
        "- An SFT warm-up writes those metrics of `loss/`, `optim/`, `pack/`, `time/`, `speed/` and `memory/` that it has.",
    )  # fmt: skip


def cli_page() -> Iterator[str]:
    """Yields the lines of the page of commands."""
    yield from (
        "# Commands", "", NOTE, "",
        "This page lists the subcommands of `torchtune-ext` and their arguments.",
        "`tune run`, `ray` and `sweep` start runs; the others prepare, check or read them.",
        "", "```", "torchtune-ext doctor", "```", "",
        "`torchtune-ext COMMAND --help` prints the arguments of a command.",
        "", "## torchtune-ext",
    )  # fmt: skip
    yield from table(
        ("command", "purpose"),
        ((f"[`{name}`](#{name})", text.partition(": ")[0]) for name, (_, text) in OWN_COMMANDS.items()),
    )
    for name, (module, text) in OWN_COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        import_module(module).add_arguments(parser)
        actions = sorted(parser._actions, key=lambda each: bool(each.option_strings))
        usage = parser.usage or " ".join(["torchtune-ext", name, *map(usage_of, actions)])
        yield from (f"### {name}", "", sentence(text.partition(": ")[0]), "", "```text", usage, "```")
        rows = [(code(argument_name(each)), each.help or "") for each in actions]
        yield from table(("argument", "description"), rows) if rows else ("",)
        if parser.epilog:
            yield from (sentence(parser.epilog), "")
    yield from (
        "## tune", "",
        "torchtune's command `tune` lists, copies and runs the recipes of this package next to its own.",
        "`torchtune-ext` forwards these subcommands to it.",
        *table(("command", "purpose"), ((code(name), text) for name, text in TUNE_COMMANDS.items())),
        "`tune run RECIPE --help` prints the config keys of a recipe, which [Configuration keys](config.md) lists:", "",
        "```text",
        "tune run [TORCHRUN-OPTIONS] RECIPE --config CONFIG [key=value ...]",
        "```", "",
        "`key=value` overrides a key of the config, and `~key` removes it.",
        "torchrun's options, such as `--nproc_per_node 4`, precede the recipe.",
    )  # fmt: skip


def argument_name(action: argparse.Action) -> str:
    return ", ".join(action.option_strings) or str(action.metavar or action.dest)


def usage_of(action: argparse.Action) -> str:
    """Returns an argument as in a usage line. Python's own form differs between its versions."""
    value = str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))
    many = {"+": f"{value} [{value} ...]", "*": f"[{value} ...]", "?": f"[{value}]"}
    value = many.get(str(action.nargs), value)
    if not action.option_strings:
        return value
    text = f"{action.option_strings[0]}{'' if action.nargs == 0 else f' {value}'}"
    return text if action.required else f"[{text}]"


def api_page() -> Iterator[str]:
    """Yields the lines of the page of classes; mkdocstrings replaces its lines `::: ...`."""
    yield from (
        "# Python interface", "", NOTE, "",
        "This page lists the classes and functions that rewards, environments, losses and other extensions import.",
        "Use it to write a task, a loss or a sink of your own; configs name them by dotted paths.",
        "", "```", 'python -c "import torchtune_ext; print(torchtune_ext.__version__)"', "```", "",
        "On the site, each entry shows signature and methods; on GitHub, follow the link to the source.", "",
    )  # fmt: skip
    for section, paths in API.items():
        yield from (f"## {section}", "")
        for path in paths:
            item = import_object(path, "API")
            yield from (f"### {path.rpartition('.')[2]}", "", summary_of(item), f"Source: {source_link(item)}.", "")
            yield from (*field_items(item), "", f"::: {path}", "")


PAGES = {
    "config.md": config_page,
    "presets.md": presets_page,
    "metrics.md": metrics_page,
    "cli.md": cli_page,
    "api.md": api_page,
}


def page_text(name: str) -> str:
    """Returns the text of a page of docs/reference/."""
    text = "\n".join(PAGES[name]())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        (FOLDER / page).write_text(page_text(page), encoding="utf-8")

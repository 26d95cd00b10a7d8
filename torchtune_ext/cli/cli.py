"""The command `torchtune-ext`: our own subcommands, and all subcommands of torchtune's `tune`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from torchtune_ext import __version__
from torchtune_ext.cli import plugin
from torchtune_ext.run.catalog import config_path, recipe_files
from torchtune_ext.run.errors import closest_match, report_errors
from torchtune_ext.run.terminal import replace_unencodable, run_until_closed

# Each subcommand has a module with add_arguments(parser) and main(args), and one line of help. The
# module is imported only when its subcommand runs, so packages of other subcommands may be missing.
OWN_COMMANDS = {
    "doctor": ("torchtune_ext.cli.doctor", "check this environment and print what to change"),
    "bench": ("torchtune_ext.measured.cli", "compile, verify and time programs in C"),
    "clue": ("torchtune_ext.tasks.temporal_clue.cli", "generate Temporal Clue puzzles"),
    "gguf": ("torchtune_ext.cli.gguf", "convert a GGUF file to a model directory: gguf FILE OUT"),
    "install-engine": ("torchtune_ext.cli.engine_install", "install the vLLM build for this machine"),
    "config": ("torchtune_ext.cli.config", "list the config keys of a recipe: config [RECIPE] [KEY] [--schema]"),
    "presets": ("torchtune_ext.settings.presets", "list the published methods, or print one: presets [NAME]"),
    "ray": ("torchtune_ext.cluster.ray_command", "start a run and its vLLM servers on an existing Ray cluster"),
    "report": ("torchtune_ext.telemetry.report", "write the HTML report of one run or several: report RUN [RUN ...]"),
    "serve": (
        "torchtune_ext.cli.serve",
        "start vLLM's server for a run, or the endpoint of agents: serve --config CONFIG",
    ),
    "sweep": (
        "torchtune_ext.cli.sweep",
        "run a sweep in W&B's format: sweep FILE [--jobs N] [--out DIR] [key=value ...]",
    ),
    "sweeps": ("torchtune_ext.sweep.spec", "list the sweeps, or print one: sweeps [NAME]"),
}
# The main function of these subcommands also takes the arguments that their parser does not know.
PASSTHROUGH_COMMANDS = {"serve", "sweep"}
ALIASES = {"knobs": "config"}
# These work here even if Ray's `tune` is first on PATH, or if Python reads no start-up files.
TUNE_COMMANDS = {
    "ls": "list recipes and configs",
    "cp": "copy a recipe or a config to edit it",
    "cat": "print a config",
    "run": "run a recipe: run [TORCHRUN OPTIONS] RECIPE --config CONFIG [key=value ...]",
    "validate": "check a config, given by path (`torchtune-ext`: or name)",
    "download": "download a model",
}


def usage_text() -> str:
    own = "\n".join(f"  {word:<15}{text}" for word, (_, text) in OWN_COMMANDS.items())
    tune = "\n".join(f"  {word:<15}{text}" for word, text in TUNE_COMMANDS.items())
    return (
        f"usage: torchtune-ext COMMAND [ARGUMENTS ...]\n\ncommands of torchtune-ext:\n{own}\n\n"
        f"commands of torchtune's `tune`:\n{tune}\n\n`torchtune-ext COMMAND --help` shows the arguments of a command."
    )


def run_own_command(command: str, rest: Sequence[str]) -> int:
    """Runs one of our subcommands with the arguments `rest`, and returns the exit status."""
    name, text = OWN_COMMANDS[command]
    with report_errors():
        module = import_module(name)
    # A shell expands ~ at the beginning of an argument, but not in `--out=~/x`.
    rest = [
        re.sub(r"(?<==)~.*", lambda home: os.path.expanduser(home[0]), word, count=1) if word.startswith("--") else word
        for word in rest
    ]
    # With abbreviations, argparse could take an option meant for vLLM for one of ours.
    parser = argparse.ArgumentParser(
        prog=f"torchtune-ext {command}", description=text, allow_abbrev=command not in PASSTHROUGH_COMMANDS
    )
    module.add_arguments(parser)

    def work() -> int | None:
        arguments = parser.parse_known_args(rest) if command in PASSTHROUGH_COMMANDS else (parser.parse_args(rest),)
        with report_errors():
            return module.main(*arguments)

    return run_until_closed(work)


def run_tune(arguments: Sequence[str]) -> int:
    """Calls torchtune's command line and returns the exit status."""
    if find_spec("torchtune") is None:
        print('torchtune-ext: torchtune is not installed; run: pip install "torchtune==0.6.1"', file=sys.stderr)
        return 1
    plugin.install()
    arguments = list(arguments)
    # torchtune's `validate` takes only paths, so names of configs are replaced by paths.
    if arguments[0] == "validate":
        with report_errors():
            arguments[1:] = [
                word if word.startswith("-") or "=" in word else config_path(word) for word in arguments[1:]
            ]
    # torchtune reads `sys.argv` itself, for instance to count the options of torchrun.
    sys.argv = ["tune", *arguments]
    from torchtune._cli.tune import main as tune_main

    if arguments[0] != "run":
        return run_until_closed(tune_main)
    # A run handles a closed stdout itself (run/output.py); other broken pipes in it are errors.
    tune_main()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    replace_unencodable()
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        return run_until_closed(lambda: print(usage_text()))
    command, *rest = argv
    command = ALIASES.get(command, command)
    if command == "--version":
        print(f"torchtune-ext {__version__}")
        return 0
    if command in OWN_COMMANDS:
        return run_own_command(command, rest)
    if command in TUNE_COMMANDS:
        return run_tune(argv)
    recipes = [recipe.name for recipe in recipe_files()]
    # A recipe is an argument of `run`.
    near = closest_match(command, [*OWN_COMMANDS, *TUNE_COMMANDS, *recipes])
    hint = f"; did you mean {'run ' * (near in recipes)}{near}?" if near else ""
    print(f"torchtune-ext: unknown command {command!r}{hint}\n\n{usage_text()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

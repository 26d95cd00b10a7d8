"""Finds presets. A preset is a published method as a few keys of a GRPO recipe, in configs/presets/NAME.yaml."""

import argparse
from pathlib import Path

from torchtune_ext.run.catalog import package_folder, print_first_lines
from torchtune_ext.run.errors import UsageError, closest_match


def preset_files() -> dict[str, Path]:
    """Returns the file of every preset of ours by its name, sorted by name."""
    return {path.stem: path for path in sorted((package_folder("configs") / "presets").glob("*.yaml"))}


def find_preset(preset: str) -> Path:
    """Returns the file of a preset, by its name if it is ours, or by its path. Raises ValueError if there is none."""
    if not isinstance(preset, str):
        raise UsageError(
            f"preset={preset} must be one name or one path; what else it should change, the config says itself"
        )
    if preset.endswith((".yaml", ".yml")):
        if not Path(preset).is_file():
            raise UsageError(
                f"preset={preset}: no such file; give the path of a YAML file, or the name of a preset of ours"
            )
        return Path(preset)
    known = preset_files()
    if preset not in known:
        near = closest_match(preset, known)
        hint = f"did you mean {near!r}?" if near else f"use {', '.join(known)}, or a path of your own"
        raise UsageError(f"preset={preset!r} is unknown; {hint}")
    return known[preset]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one, to be redirected to a file and edited")


def main(args: argparse.Namespace) -> int:
    """Lists the presets, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(find_preset(args.name).read_text(encoding="utf-8"), end="")
    else:
        print_first_lines(preset_files())
    return 0

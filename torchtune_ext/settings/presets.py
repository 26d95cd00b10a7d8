"""Find presets.

A preset is a published method as a few keys of a GRPO recipe, in configs/presets/NAME.yaml.
"""

import argparse
from pathlib import Path

from torchtune_ext.run.catalog import list_or_print, package_folder
from torchtune_ext.run.errors import UsageError, closest_match


def preset_files() -> dict[str, Path]:
    """Return the file of each of our presets by name, sorted by name."""
    return {path.stem: path for path in sorted((package_folder("configs") / "presets").glob("*.yaml"))}


def find_preset(preset: str) -> Path:
    """Return the file of a preset.

    Args:
        preset: the name of one of our presets, or the path of a YAML file.

    Raises:
        UsageError: the preset was not found.
    """
    if not isinstance(preset, str):
        raise UsageError(f"preset={preset} must be one name or one path. Fix: put further keys into the config")
    if preset.endswith((".yaml", ".yml")):
        if not Path(preset).is_file():
            raise UsageError(
                f"preset={preset}: file not found. Fix: give the path of a YAML file, or one of our presets by name"
            )
        return Path(preset)
    known = preset_files()
    if preset not in known:
        near = closest_match(preset, known)
        hint = f"did you mean {near!r}?" if near else f"use {', '.join(known)}, or the path of your own"
        raise UsageError(f"preset={preset!r} is unknown; {hint}")
    return known[preset]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this preset (redirect it to a file to edit it)")


def main(args: argparse.Namespace) -> int:
    """List the presets, or print one preset. Raises UsageError for an unknown name."""
    return list_or_print(preset_files(), find_preset(args.name) if args.name else None)

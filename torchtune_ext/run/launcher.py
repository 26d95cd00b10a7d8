"""Reads the variables in which torchrun tells a process its place among the ranks. Job launchers may leave others."""

import os

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def number(name: str, default: int) -> int:
    """Returns the number in a variable. One that is unset, empty or not a number (`misread`) gives `default`."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else default


def place() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks. A single process is rank 0 of 1, whatever RANK says."""
    ranks = max(1, number("WORLD_SIZE", 1))
    return number("RANK", 0) if ranks > 1 else 0, ranks


def misread() -> list[str]:
    """Returns the names of the variables that should be numbers and are not."""
    return [name for name in NUMBERS if (text := os.environ.get(name, "").strip()) and not text.isdecimal()]

"""The policy model. `torchtune_ext.policy.from_config` builds any family of families.py."""

from typing import Any


def __getattr__(name: str) -> Any:
    # The import is lazy, because every engine process also runs this file and needs no torchtune.
    if name == "from_config":
        from torchtune_ext.policy.builder import from_config

        return from_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

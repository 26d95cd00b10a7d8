"""The model that is trained. `torchtune_ext.policy.from_config` builds one of any family that families.py knows."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Imported at its first use, because this file also runs in every engine process, which needs no torchtune.
    if name == "from_config":
        from torchtune_ext.policy.families import from_config

        return from_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

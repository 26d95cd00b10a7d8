"""The bounds of settings in seconds."""

from torchtune_ext.run.errors import Mistake

WEEK_S = 604_800.0


def require_seconds(key: str, value: float, least: str = "greater than 0") -> None:
    """Raises ValueError unless a setting is finite, `least` ("greater than 0" or "from 0") and at most a week."""
    # A wait of the system counts milliseconds in 32 bits, which end after 24.8 days.
    if not 0 <= value <= WEEK_S or (value == 0 and least != "from 0"):
        raise Mistake(f"{key}={value} must be a number of seconds {least}, at most {WEEK_S:.0f} (a week)")

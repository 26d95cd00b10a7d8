"""What a config may compute: `${divide:512,${samples_per_prompt}}` is 512 divided by another setting, a whole number."""

import warnings

from omegaconf import OmegaConf


def divide(whole: int, by: int) -> int:
    """Returns the quotient. Raises ValueError if it is no whole number."""
    if not isinstance(whole, int) or not isinstance(by, int) or by < 1 or whole % by:
        raise ValueError(f"${{divide:{whole},{by}}} is no whole number; choose values that divide {whole}")
    return whole // by


with warnings.catch_warnings():
    # OmegaConf warns about this name of the function, but it is the one that all supported versions have.
    warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)
    OmegaConf.register_new_resolver("divide", divide, replace=True)

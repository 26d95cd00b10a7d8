"""Makes torchtune 0.6.1 importable with torchao 0.16 to 0.18, which removed or moved five names that torchtune imports.

`apply` must run before `torchtune` is executed (`plugin.install` takes care of that). With torchao 0.15 or earlier it
changes nothing. The functions behind the removed names stay unavailable: torchtune's post-training int4 and int8
quantizers.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType


def _removed(name: str) -> Callable:
    def stub(*args, **kwargs):
        raise NotImplementedError(
            f'{name} was removed from the installed torchao: pip install "torchao<0.16" to use it'
        )

    stub.__name__ = name
    return stub


def _of_interest(record: logging.LogRecord) -> bool:
    """Tells whether a log record is of interest.

    torchao logs that it skips its C++ extensions, which fit one version of torch, and torch 2.13 that torchao 0.18 registers an
    Enum. Nothing here uses either.
    """
    message = record.getMessage()
    return "Skipping import of cpp extensions" not in message and "register_constant() on Enum" not in message


def apply(_module: ModuleType | None = None) -> None:
    """Puts back the names that torchtune 0.6.1 imports. It may be called again.

    Raises:
        ImportError: torchao is not installed.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_of_interest)
    from torchao import dtypes, quantization

    # torchao 0.18 moved NF4 to another module.
    try:
        importlib.import_module("torchao.dtypes.nf4tensor")
    except ModuleNotFoundError:
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        sys.modules["torchao.dtypes.nf4tensor"] = nf4
        dtypes.nf4tensor = nf4
        for name in ("NF4Tensor", "to_nf4"):
            if name not in vars(dtypes):
                setattr(dtypes, name, vars(nf4)[name])

    # torchao 0.16 replaced these functions by configuration classes.
    for name, successor in (
        ("int4_weight_only", "Int4WeightOnlyConfig"),
        ("int8_dynamic_activation_int4_weight", "Int8DynamicActivationInt4WeightConfig"),
    ):
        if name not in vars(quantization):
            setattr(quantization, name, vars(quantization).get(successor) or _removed(name))

    # torchao 0.18 removed the tensor-core layout.
    if "TensorCoreTiledLayout" not in vars(dtypes):
        dtypes.TensorCoreTiledLayout = _removed("TensorCoreTiledLayout")

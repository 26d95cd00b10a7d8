"""Training on measured speed: tasks, warm-up programs, curriculum, rewards, archive and prompts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtune_ext.measured.matmul.compile_and_fix import CompileAndFix
    from torchtune_ext.measured.matmul.programs import Programs
    from torchtune_ext.measured.matmul.task import Matmul

__all__ = ["CompileAndFix", "Matmul", "Programs"]


def __getattr__(name: str) -> Any:
    # Imported on demand: the archive of a run can be read without the C parser.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = {"CompileAndFix": "compile_and_fix", "Matmul": "task", "Programs": "programs"}[name]
    return getattr(import_module(f"{__name__}.{file}"), name)

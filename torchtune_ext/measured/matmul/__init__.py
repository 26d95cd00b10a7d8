"""Learning from measured speed: what a program does, programs to begin with, stages, rewards, the fastest ones, the prompts."""

from typing import Any

from torchtune_ext.run.errors import Mistake

__all__ = ["CompileAndFix", "Matmul", "Programs"]


def __getattr__(name: str) -> Any:
    """Imports the tasks when they are asked for: the archive of a run can be read without what reads programs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torchtune_ext.measured.matmul.mending import CompileAndFix
        from torchtune_ext.measured.matmul.programs import Programs
        from torchtune_ext.measured.matmul.task import Matmul
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tree_sitter"):
            raise Mistake("programs are read with tree-sitter: pip install 'torchtune-ext[bench]'") from error
        raise
    return {"CompileAndFix": CompileAndFix, "Matmul": Matmul, "Programs": Programs}[name]

"""The prompts: what to compute, the size, the signature and the permitted techniques.

Optionally, a prompt shows a correct program to improve.
"""

from collections.abc import Iterable

from torchtune_ext.measured.kernel import Kernel, output_parameters, prototype
from torchtune_ext.measured.matmul.archive import ArchiveEntry
from torchtune_ext.measured.matmul.stages import STAGES
from torchtune_ext.measured.techniques import TECHNIQUES

Messages = tuple[dict[str, str], ...]


def messages(kernel: Kernel, stage: str, elite: ArchiveEntry | None = None) -> Messages:
    """Returns the messages for one problem.

    Args:
        kernel: the kernel to compute, at the size `kernel.timed`.
        stage: a name of `stages.STAGES`.
        elite: a program to improve, with its speed. None shows no program.
    """
    parts = [
        f"Write a function in C, as fast as you can make it. It computes {kernel.question}.",
        f"```c\n{prototype(kernel)};\n```",
        _rules_text(kernel),
        _techniques_text(stage),
    ]
    if elite is not None:
        parts.append(
            f"This program is right and {elite.ratio:.2g} times as fast as the plain definition. Write a faster one.\n\n"
            f"```c\n{elite.source.rstrip()}\n```"
        )
    parts.append("Answer with the whole program in one block of C code, ```c ... ```.")
    return ({"role": "user", "content": "\n\n".join(parts)},)


def short_messages(kernel: Kernel, stage: str) -> Messages:
    """Returns the short prompt, for a model after the warm-up: "dgemm 256 256 256 blocking"."""
    size = " ".join(str(kernel.timed[name]) for name in kernel.size_names)
    return ({"role": "user", "content": f"{kernel.name} {size} {stage}"},)


def _rules_text(kernel: Kernel) -> str:
    outputs = " and ".join(each.name for each in output_parameters(kernel))
    size = ", ".join(f"{name} = {kernel.timed[name]}" for name in kernel.size_names)
    return (
        f"Its speed is measured at {size}, and its result must be right in double precision for every size from 1. Arrays are "
        f"stored by rows, begin at an address that 64 divides, and do not overlap. {outputs} holds anything before the call. "
        "No library may do the work, and no assembly."
    )


def _techniques_text(stage: str) -> str:
    allowed = STAGES[stage]
    if not allowed:
        return f"Permitted is the plain definition alone: none of these techniques: {_join_techniques(TECHNIQUES)}."
    others = [name for name in TECHNIQUES if name not in allowed]
    text = f"These techniques are permitted: {_join_techniques(name for name in TECHNIQUES if name in allowed)}."
    return text + (f" These are not: {_join_techniques(others)}." if others else "")


def _join_techniques(names: Iterable[str]) -> str:
    return "; ".join(TECHNIQUES[name] for name in names)

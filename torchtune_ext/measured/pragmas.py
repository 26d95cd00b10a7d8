"""What the pragmas of a program ask the compiler for."""

import re
from collections.abc import Iterator

_PARALLEL = re.compile(r"omp\b.*\b(parallel|teams)\b")
_SIMD = re.compile(r"omp\b.*\bsimd\b")
_UNROLL = re.compile(r"(?:GCC\s+unroll|clang\s+loop\s+.*\bunroll(?:_count)?|unroll|omp\s+unroll|omp\s+tile)\b\W*(\w+)?")
_VECTOR = re.compile(r"GCC\s+ivdep|clang\s+loop\s+.*\bvectorize(?:_width)?\b|ivdep\b|simd\b|vector\b")
_OPTIMIZE = re.compile(r"GCC\s+(?:optimize|push_options|target)\b(.*)")
_OFF = ("0", "1", "disable", "off")


def techniques_of(pragma: str, openmp: bool, is_global: bool = False) -> Iterator[tuple[str, str]]:
    """Yields the techniques that a line such as "#pragma omp parallel for" asks for, each with words about it.

    Args:
        pragma: the line.
        openmp: whether the compiler obeys OpenMP.
        is_global: whether it stands outside of all functions, where only options of the compiler mean something.
    """
    text = re.sub(r"^\s*#\s*pragma\s+", "", pragma).strip()
    if optimize := _OPTIMIZE.match(text):
        if "unroll" in optimize[1] and "no-unroll" not in optimize[1]:
            yield "unrolling", f"#pragma {text}"
        return
    if is_global:
        return
    if text.startswith("omp"):
        if not openmp:
            return
        if _PARALLEL.match(text):
            yield "threads", f"#pragma {text}"
        if _SIMD.match(text):
            yield "vectorization", f"#pragma {text}"
        if re.match(r"omp\s+tile\b", text):
            yield "blocking", f"#pragma {text}"
            return
    if (unroll := _UNROLL.match(text)) and unroll[1] not in _OFF:
        yield "unrolling", f"#pragma {text}"
    if _VECTOR.match(text):
        yield "vectorization", f"#pragma {text}"

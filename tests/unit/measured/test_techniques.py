"""Which techniques are found, against what a person says of each program, and that no text can break the reader."""

import random
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_c")

from helpers.labelled_programs import labelled_programs, preprocessed, techniques
from torchtune_ext.measured import reader
from torchtune_ext.measured.kernels import KERNELS, Dgemm
from torchtune_ext.measured.matmul.stages import STAGES
from torchtune_ext.measured.reader import UnreadableProgram
from torchtune_ext.measured.techniques import (
    TECHNIQUES,
    find_techniques,
    violations,
)

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
ROOT = Path(__file__).resolve().parents[3]
LABELLED = labelled_programs()
HEAD = "void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {"
FILES = {
    "examples/dgemm_avx2.c": "loop_order blocking vectorization",
    "examples/dgemm_blocked.c": "loop_order blocking",
    "examples/dgemm_float.c": "",
    "examples/dgemm_naive.c": "",
    "examples/gemv_unrolled.c": "blocking",
    "examples/reduction_pairwise.c": "blocking",
    "tests/exploits/control_naive.c": "",
    "tests/exploits/control_blocked.c": "loop_order blocking vectorization packing",
}


@needs_gcc
@pytest.mark.parametrize("program", LABELLED, ids=lambda program: f"{program.kernel} {program.name}")
def test_labelled_program(program):
    kernel = KERNELS[program.kernel]()
    text = preprocessed(program.source)
    assert program.name.startswith("wrong") or "void" in text
    used = find_techniques(text, kernel)
    assert {use.technique for use in used} == program.techniques
    for stage in STAGES:
        assert len(violations(used, STAGES[stage])) == len(program.techniques - STAGES[stage])


@needs_gcc
def test_technique_reader_accuracy_on_heldout_programs():
    # Nobody has looked at these while writing the reader, so their rate is what to expect of a model's programs. It stays
    # honest only while that is so: a rule that is made for one of them belongs to a program of the same kind in LABELLED.
    right = labels = 0
    heldout = labelled_programs("heldout_programs.txt")
    for program in heldout:
        used = techniques(preprocessed(program.source), KERNELS[program.kernel]())
        right += used == program.techniques
        labels += len(TECHNIQUES) - len(used ^ program.techniques)
    assert len(heldout) == 28
    assert right >= 27 and labels >= 139


@needs_gcc
@pytest.mark.parametrize("file", FILES)
def test_examples_and_honest_exploits(file):
    kernel = next((KERNELS[name]() for name in KERNELS if name in file), Dgemm())
    assert techniques(preprocessed((ROOT / file).read_text()), kernel) == set(FILES[file].split())


def test_labels_cover_every_technique_and_every_kernel():
    assert {program.kernel for program in LABELLED} == set(KERNELS)
    assert frozenset().union(*(program.techniques for program in LABELLED)) == set(TECHNIQUES)
    for technique in TECHNIQUES:
        # A technique that is only ever seen among others could be taken for one of them.
        assert any(program.techniques == {technique} for program in LABELLED), technique
    assert len(LABELLED) + len(FILES) >= 60


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_naive_program_uses_no_techniques(kernel):
    assert find_techniques(kernel.naive, kernel()) == []


def test_stage_permits_all_techniques_of_earlier_stages():
    for before, after in pairwise(STAGES.values()):
        assert before < after
    assert STAGES["none"] == set() and STAGES["all"] == set(TECHNIQUES)


@needs_gcc
def test_a_violation_names_the_line_of_the_source():
    source = f"""#include <stdlib.h>
#define EACH(x, n) for (int x = 0; x < n; x++)

{HEAD}
    EACH(i, m * n) C[i] = 0;
#pragma omp parallel for
    EACH(i, m)
        EACH(l, k)
            EACH(j, n)
                C[i * n + j] += A[i * k + l] * B[l * n + j];
}}
"""
    text = preprocessed(source)
    lines = violations(find_techniques(text, Dgemm()), STAGES["none"])
    assert lines == [
        "line 6: not permitted here: threads: #pragma omp parallel (#pragma omp parallel for)",
        "line 7: not permitted here: loops in another order than that of the definition (the loops are nested i, l, j)",
    ]
    assert violations(find_techniques(text, Dgemm()), STAGES["loop_order"]) == lines[:1]
    assert violations(find_techniques(text, Dgemm()), STAGES["threads"]) == []
    assert violations(find_techniques(text, Dgemm(), openmp=False), STAGES["none"]) == lines[1:]


def calls_on_calls(depth: int) -> str:
    helpers = ["static double f0(double x) { return x * x; }"]
    helpers += [f"static double f{i}(double x) {{ return f{i - 1}(x) + f{i - 1}(x); }}" for i in range(1, depth)]
    return "\n".join([*helpers, f"{HEAD} C[0] = f{depth - 1}(A[0]) * B[0]; }}"])


BOMBS = {
    "calls": calls_on_calls(60),
    "parentheses": f"{HEAD} C[0] = {'(' * 5000}A[0]{')' * 5000}; }}",
    "parentheses on the left": f"{HEAD} {'(' * 5000}C[0]{')' * 5000} = 1; }}",
    "blocks": f"{HEAD} {'{' * 5000} {'}' * 5000} }}",
    "loops": f"{HEAD} {'for (int i = 0; i < m; i++) ' * 3000} C[0] += A[0] * B[0]; }}",
    "ifs": f"{HEAD} {'if (m) ' * 3000} C[0] = 1; }}",
    "products": f"{HEAD} for (int i = 0; i < m; i++) {{ {('C[i] += ' + ' + '.join(['A[i] * B[i]'] * 900) + ';') * 6} }} }}",
    "vectors": f"typedef double v __attribute__((vector_size(32))); {HEAD} {''.join(f'v x{i}; ' for i in range(9000))} }}",
    "a long sum": f"{HEAD} C[0] = {' + '.join(['A[0] * B[0]'] * 5000)}; }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends(bomb, monkeypatch):
    monkeypatch.setattr(reader, "MAX_STEPS", reader.MAX_STEPS // 5)  # the test takes a fifth of the time
    start = time.monotonic()
    try:
        end = techniques(BOMBS[bomb], Dgemm())
    except UnreadableProgram as error:
        end = str(error)
    # The slowest takes half a second on two idle cores; without the limits the first would run for longer than the universe has.
    assert time.monotonic() - start < 60, end


@pytest.mark.parametrize("seed", range(40))
def test_broken_text_is_read_or_refused(seed):
    """Cut, doubled and exchanged pieces: whatever the tree looks like, nothing but Unreadable may come out."""
    rng = random.Random(seed)
    program = rng.choice(LABELLED)
    text = program.source
    for _ in range(rng.randint(1, 12)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.randint(1, 40))
        text = rng.choice([text[:a] + text[b:], text[:b] + text[a:], text[:a] + text[a:b][::-1] + text[b:]])
    try:
        assert techniques(text, KERNELS[program.kernel]()) <= set(TECHNIQUES)
    except UnreadableProgram:
        pass

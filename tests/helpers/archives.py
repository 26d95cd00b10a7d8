"""A synthetic archive: programs of the family with speeds that are made up, found step by step."""

import random

from torchtune_ext.measured.matmul.archive import Archive, Entry
from torchtune_ext.measured.matmul.programs import Family

MACHINE = "Imaginary CPU @ 3.00GHz, 2 cores, x86_64, Linux 6.1"
GAINS = {"loop_order": 2.2, "blocking": 2.8, "vectorization": 2.4, "threads": 1.8, "packing": 1.2}


def made_up_entries(
    count: int = 40, steps: int = 60, seed: int = 0, machine: str = MACHINE, kernels=("dgemm",)
) -> list[Entry]:
    """Right programs of the family. What a technique gains is made up, and comes late in the run where it gains much."""
    rng = random.Random(seed)
    entries = []
    for i in range(count):
        kernel = kernels[i % len(kernels)]
        program = Family(seed=seed, broken=0.0)[i]
        ratio = rng.lognormvariate(0.0, 0.3)
        for technique in sorted(program.techniques):
            ratio *= GAINS[technique] ** rng.uniform(0.3, 1.0)
        size = {"m": 256, "n": 256, "k": 256} if kernel == "dgemm" else {"n": 4096}
        found = min(steps, 1 + int(steps * rng.random() * (1 + len(program.techniques)) / 6))
        spread = rng.uniform(0.002, 0.03)
        entries.append(
            Entry(machine, kernel, size, program.techniques, program.source, ratio, spread, 1.7 * ratio, found)
        )
    return entries


def made_up_archive(**settings) -> Archive:
    return Archive(made_up_entries(**settings))

"""The tiny run on measured speed learns; about ten minutes on two cores that nobody else uses.

`TORCHTUNE_EXT_MATMUL` names a folder of `benchmarks/matmul.py`: its runs that have ended are not made again.
"""

import os
from pathlib import Path

import matmul
import pytest

TIMES = 3.0  # how many times the GFLOPS of the warmed-up model, in the mean over sampled programs


@pytest.mark.timeout(3600)
def test_matmul_sampled_programs_become_faster(tmp_path):
    folder = Path(os.environ.get("TORCHTUNE_EXT_MATMUL", tmp_path))
    figures = matmul.main(["--out", str(folder), "--seeds", "1"])[0]["none"]
    assert figures["speedup"] >= TIMES, figures
    assert figures["correct after"] >= figures["correct before"], figures

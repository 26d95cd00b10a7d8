"""The tiny run learns, from warm-ups that differ; about half an hour on two cores.

`TORCHTUNE_EXT_LEARNING` names a folder of `benchmarks/learning.py --threads 1`: its runs that have ended are not made again.
"""

import os
import statistics
from pathlib import Path

import learning
import pytest

WARMUPS = (0, 1, 2)
RISE = 0.20  # absolute, of the accuracy on 256 held-out puzzles, in the mean over warm-ups
EACH = 0.10  # and of every run


@pytest.mark.timeout(7200)
def test_accuracy_rises(tmp_path):
    folder = Path(os.environ.get("TORCHTUNE_EXT_LEARNING", tmp_path))
    runs = learning.main(["--out", str(folder), "--warmups", *map(str, WARMUPS)])
    assert len(runs) == len(WARMUPS)
    for way in ("sampled", "greedy"):
        rises = [run[f"{way}/rise"] for run in runs]
        assert min(rises) >= EACH and statistics.fmean(rises) >= RISE, (way, rises)
    assert max(run["mismatch"] for run in runs) < 1e-4

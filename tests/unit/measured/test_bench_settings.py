"""Settings of the benchmark service that cannot be are told before anything is started."""

import pytest

from torchtune_ext.tasks.measured import bench as benches
from torchtune_ext.tasks.measured.bench import Bench, BenchConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "bench.workers=0 must be at least 1, or null"),
        ({"cores": []}, r"bench.cores=\[\]: name each core once"),
        ({"cores": [1, 1]}, r"bench.cores=\[1, 1\]: name each core once"),
        ({"cores": [0], "threads": 2}, r"bench.threads=2 needs as many cores, and bench.cores=\[0\] names 1"),
        ({"threads": 0}, "bench.threads=0 must be at least 1"),
        ({"optimization": "-Ofast"}, "bench.optimization='-Ofast': use -O0, -O1, -O2 or -O3"),
        ({"budget_s": 0}, "bench.budget_s=0 must be more than 0 seconds"),
        ({"budget_s": float("nan")}, "bench.budget_s=nan must be more than 0 seconds"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    for make in (BenchConfig, Bench):
        with pytest.raises(ValueError, match=message):
            make(**settings)


def test_settings_that_this_machine_cannot_have(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="bench.resource is empty"):
        BenchConfig(resource="")
    with pytest.raises(ValueError, match=r"cores=\[4096\]: use some of"):
        Bench(cores=[4096])
    with pytest.raises(ValueError, match="no C compiler: nocc"):
        Bench(compiler="nocc")
    with pytest.raises(ValueError, match="bench.cache=.*nowhere"):
        Bench(cache=tmp_path / "nowhere" / "file")
    monkeypatch.setattr(benches.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'torchtune-ext\[bench\]'"):
        Bench()

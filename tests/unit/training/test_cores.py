"""A core is reserved for an asynchronous engine, and the run prints it; freed memory is kept."""

import os

import pytest

torch = pytest.importorskip("torch")

from helpers.forked_runs import forked_ranks  # noqa: E402
from torchtune_ext.training.distributed import init_ranks  # noqa: E402


@pytest.fixture
def cores(monkeypatch):
    """Simulates a machine with this many cores and PyTorch threads; restores the threads afterwards."""
    before = torch.get_num_threads()

    def of(cores: int, threads: int, variable: str | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        torch.set_num_threads(threads)

    yield of
    torch.set_num_threads(before)


def test_init_ranks_leaves_one_cpu_core_and_reports(cores, capsys):
    cores(4, threads=4)
    init_ranks("cpu", concurrent_engine=True)
    assert torch.get_num_threads() == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cores: PyTorch uses 3 of 4, because ") and "OMP_NUM_THREADS" in line


@pytest.mark.parametrize(
    ("machine", "beside"),
    [
        ({"cores": 4, "threads": 4}, False),
        ({"cores": 4, "threads": 4, "variable": "4"}, True),
        ({"cores": 4, "threads": 2}, True),
        ({"cores": 1, "threads": 1}, True),
    ],
    ids=["no engine beside", "the user says how many", "a core is free already", "one core"],
)
def test_init_ranks_without_core_conflict_keeps_threads_silently(cores, capsys, machine, beside):
    cores(**machine)
    init_ranks("cpu", concurrent_engine=beside)
    assert torch.get_num_threads() == machine["threads"] and not capsys.readouterr().out


def test_init_ranks_only_first_rank_prints_cpu_threads(cores, capsys, monkeypatch):
    cores(4, threads=4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    init_ranks("cpu", concurrent_engine=True)
    assert torch.get_num_threads() == 3 and not capsys.readouterr().out


TENSORS = """
import resource
import sys
import torch

if sys.argv[1] == "kept":
    from torchtune_ext.training.distributed import init_ranks

    init_ranks("cpu")
# A block that an alignment has cut is too small for the same tensor, so some are made of new pages all the same.
pages = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 25)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(pages))
"""


def test_large_tensor_reallocation_reuses_memory_pages(tmp_path):
    (tmp_path / "tensors.py").write_text(TENSORS)
    kept, given_back = (int(forked_ranks(tmp_path, "tensors.py", way, ranks=1)) for way in ("kept", "given back"))
    assert kept < 32 and given_back >= (1 << 27) // 2**21, "128 MiB, of 4 KiB or at least of 2 MiB each"


@pytest.mark.parametrize(
    ("shares", "environ", "settings"),
    [
        (True, {}, "expandable_segments:True"),
        (False, {}, ""),
        (True, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ],
)
def test_init_ranks_sharing_gpu_uses_expandable_segments(shares, environ, settings, tmp_path, monkeypatch):
    """The settings belong to the process, so it is another one. An engine does not inherit them."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "settings.py").write_text(
        "import os, torch; from torchtune_ext.training.distributed import init_ranks; before = dict(os.environ); "
        f"init_ranks('cpu', shares_gpu={shares}); assert dict(os.environ) == before; "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    assert forked_ranks(tmp_path, "settings.py", ranks=1).strip() == settings

"""Settings of the benchmark service that cannot be are told before anything is started."""

import os
import sys
from importlib import import_module

import pytest

from torchtune_ext.cli.cli import main
from torchtune_ext.measured.bench import Bench, BenchConfig
from torchtune_ext.measured.grading import MeasuredTask


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"workers": 0}, "bench.workers=0 must be a whole number of at least 1, or null"),
        ({"threads": 0}, "bench.threads=0 must be a whole number of at least 1"),
        ({"workers": "two"}, "bench.workers='two' must be a whole number of at least 1, or null"),
        ({"workers": True}, "bench.workers=True must be a whole number of at least 1, or null"),
        ({"cores": 1}, r"bench.cores=1 must be a list, each item a whole number, or null: bench.cores=\[1\]"),
        ({"cores": "1"}, r"bench.cores='1' must be a list"),
        ({"cores": [[1]]}, r"bench.cores=\[\[1\]\] must be a list"),
        ({"cores": {1: 1}}, r"bench.cores=\{1: 1\} must be a list"),
        ({"threads": 1.5}, "bench.threads=1.5 must be a whole number"),
        ({"threads": None}, "bench.threads has no value"),
        ({"budget_s": "long"}, "bench.budget_s='long' must be a number of seconds above 0"),
        ({"namespaces": "maybe"}, "bench.namespaces='maybe' must be true or false, or null"),
        ({"budget_s": 0}, "bench.budget_s=0 must be a number of seconds above 0"),
        ({"budget_s": float("nan")}, "bench.budget_s=nan must be a number of seconds above 0"),
        ({"core": [1]}, "unknown key 'bench.core' in `bench:`; did you mean 'bench.cores'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    for make in (BenchConfig, Bench):
        with pytest.raises(ValueError, match=message):
            make(**settings)


def test_settings_of_a_task():
    assert MeasuredTask({"cores": [0], "budget_s": 3}).bench == BenchConfig(cores=[0], budget_s=3)
    assert MeasuredTask().bench == BenchConfig()
    with pytest.raises(ValueError, match="unknown key 'bench.core' in `bench:`; did you mean 'bench.cores'"):
        MeasuredTask({"core": [1]})
    with pytest.raises(ValueError, match="bench=3 must be a mapping"):
        MeasuredTask(3)


def test_settings_that_this_machine_cannot_have():
    core = max(os.sched_getaffinity(0))
    for cores, message in (
        ([4096], r"cores=\[4096\]: use some of"),
        ([], r"cores=\[\]: use some of"),
        ([core, core], rf"cores=\[{core}, {core}\]: threads=1 needs 1 different core; name them, or null"),
    ):
        with pytest.raises(ValueError, match=message):
            Bench(cores=cores)
    with pytest.raises(ValueError, match="no C compiler: nocc"):
        Bench(compiler="nocc")


def test_matmul_without_tree_sitter_reports_install_command(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("torchtune_ext.measured")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    with pytest.raises(SystemExit):
        main(["bench", "a.c"])
    assert "pip install 'torchtune-ext[bench]'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"pip install 'torchtune-ext\[bench\]'"):
        import_module("torchtune_ext.measured.matmul").Matmul()

"""Settings of the benchmark service that cannot be are told before anything is started."""

import os
import sys
from importlib import import_module

import pytest
from tables import every_row

from torchtune_ext.cli.cli import main
from torchtune_ext.measured.bench import Bench, BenchConfig
from torchtune_ext.measured.grading import MeasuredTask


@every_row(
    "settings, message",
    [
        ({"workers": 0}, "bench.workers=0 must be at least 1, or null"),
        ({"threads": 0}, "bench.threads=0 must be at least 1"),
        ({"workers": "2"}, "bench.workers='2' must be a whole number, or null for one on each core"),
        ({"workers": True}, "bench.workers=True must be a whole number, or null"),
        ({"cores": 1}, r"bench.cores=1 must be a list of whole numbers, as \[2, 3\], or null"),
        ({"cores": "1"}, r"bench.cores='1' must be a list of whole numbers"),
        ({"cores": [[1]]}, r"bench.cores=\[\[1\]\] must be a list of whole numbers"),
        ({"cores": {1: 1}}, r"bench.cores=\{1: 1\} must be a list of whole numbers"),
        ({"threads": 1.5}, "bench.threads=1.5 must be a whole number, as 1"),
        ({"threads": None}, "bench.threads=None must be a whole number, as 1"),
        ({"compiler": 12}, "bench.compiler=12 must be a name or a path, as gcc, or null"),
        ({"budget_s": "3"}, "bench.budget_s='3' must be a number of seconds, as 10.0"),
        ({"namespaces": "yes"}, "bench.namespaces='yes' must be true, false, or null"),
        ({"budget_s": 0}, "bench.budget_s=0 must be a number of seconds"),
        ({"budget_s": float("nan")}, "bench.budget_s=nan must be a number of seconds"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    for make in (BenchConfig, Bench):
        with pytest.raises(ValueError, match=message):
            make(**settings)


def test_settings_of_a_task():
    assert MeasuredTask({"cores": [0], "budget_s": 3}).bench == BenchConfig(cores=[0], budget_s=3)
    assert MeasuredTask().bench == BenchConfig()
    with pytest.raises(ValueError, match=r"bench.core=\[1\]: there is no such setting; did you mean 'cores'\?"):
        MeasuredTask({"core": [1]})
    with pytest.raises(ValueError, match="bench=3 must be a mapping with some of the keys workers, cores, "):
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


def test_without_tree_sitter_it_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("torchtune_ext.measured")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    with pytest.raises(SystemExit):
        main(["bench", "a.c"])
    assert "pip install 'torchtune-ext[bench]'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"pip install 'torchtune-ext\[bench\]'"):
        import_module("torchtune_ext.measured.matmul").Matmul()

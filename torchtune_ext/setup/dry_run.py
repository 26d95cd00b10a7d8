"""Check a GRPO run and plan its memory without loading weights (`dry_run=`).

    dry_run=True     this machine
    dry_run=4x80     4 GPUs of 80 GB in total, for trainer and engine
    dry_run=16x80    16 GPUs of 80 GB, also on several machines
    dry_run="CPU 64" a CPU with 64 GB of main memory

The exit status is 0 if the run would pass the checks of a start and fits, otherwise 2.
"""

import json
import os
import re
import sys
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torchtune.modules import TransformerDecoder

from torchtune_ext.objective.loss import loss_requirements
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.fp8.plan import Fp8Plan, linear_layers
from torchtune_ext.policy.hub import hub_model_config
from torchtune_ext.policy.memory import GIB, ModelSizes
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.folder import require_usable_folder
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.process_env import rank_and_world_size, read_int_variable
from torchtune_ext.sampling.engine import find_backend
from torchtune_ext.settings.components import Component
from torchtune_ext.setup.checks import measure_optimizer_state, require_row_capacity
from torchtune_ext.setup.config_sections import RunSettings
from torchtune_ext.setup.header import problems_text
from torchtune_ext.setup.machine_checks import missing_device, require_disjoint_gpus, require_gpus, training_gpus
from torchtune_ext.setup.plan import Machine, RunPlan, plan_table, verdict
from torchtune_ext.setup.run_components import build_components
from torchtune_ext.training.distributed import Ranks, has_usable_gpus, require_capability
from torchtune_ext.training.precision import DTYPES, chosen_dtype

# The memory that CUDA reports, as a share of the nominal size. Users' error messages show 39.5 of
# 40 GiB for an A100, 23.7 of 24 for a 4090 and 15.8 of 16 for a V100. GPUs with error correction
# in GDDR memory report a sixteenth less: L4 and A10 22.0 of 24 GiB, L40S 44.4 of 48.
USABLE_MEMORY_SHARE = 0.985
GPU_PATTERN = re.compile(r"(\d+) ?x ?(\d+(?:\.\d+)?) ?(?:GB)?", re.IGNORECASE)
CPU_PATTERN = re.compile(r"CPU,? (\d+(?:\.\d+)?) ?(?:GB)?", re.IGNORECASE)
MAX_GPUS = 72  # a larger number is a swapped size, as in 80x4


def dry_run(cfg: RunSettings) -> None:
    """Print the plan of a run and exit, with the status described at the top of the module.

    Raises:
        UsageError: a setting is invalid, or `dry_run` does not name a machine.
    """
    # Under torchrun every rank runs this function. One plan is enough.
    rank, ranks = rank_and_world_size()
    if rank:
        sys.exit(0)
    machine, missing = resolve_machine(cfg.dry_run, cfg.device, cfg.engine.devices, ranks), None
    plan, notes = make_plan(cfg, machine)
    plan = plan.with_trainers(ranks if ranks > 1 else None, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if machine.is_local and not machine.gpus and cfg.device != "cpu":
        notes.append("no GPU is visible, so the run would use the CPU; dry_run=4x80 plans for 4 GPUs of 80 GB")
    if cfg.teacher.model_dir and not cfg.replay:
        notes.append(f"the plan excludes the teacher's engine ({cfg.teacher.model_dir})")
    try:
        check_planned_start(plan, torchrun=ranks > 1)
    except UsageFileError as error:
        # The plan needs no files of the model or of a task, so it is printed nevertheless.
        missing = error
    print_text("\n".join([plan_table(plan, Path(cfg.model_dir).name), *notes, "", verdict(plan)]))
    if missing:
        print_text(f"problem: {missing}\nA start would fail with this error")
    elif plan.fits:
        checked = "settings" if cfg.replay else "settings, first problems, grader"
        print_text(f"checked without errors: {checked}")
    sys.exit(0 if plan.fits and not missing else 2)


def check_planned_start(plan: RunPlan, torchrun: bool) -> None:
    """Run the checks of a start.

    Args:
        plan: the plan of the run.
        torchrun: whether torchrun started this process.

    Raises:
        UsageError: a start would fail.
        UsageFileError: a file is missing.
    """
    cfg = plan.cfg
    require_usable_folder(cfg.output_dir)
    # GPUs can be inspected only on this machine. For another machine only their number is known.
    machine, engine = plan.machine, plan.engine
    if engine is not None and machine.is_local:
        require_gpus(engine)
        # Under torchrun the training GPUs are known. Otherwise the plan chooses their number.
        if machine.gpus:
            require_disjoint_gpus(engine, training_gpus(None if torchrun else plan.trainers))
    elif engine is not None and machine.gpus:
        problem = missing_device(engine, machine.gpus, machine.name)
        if problem:
            raise UsageError(problem)
    cfg.ranks.require_divisible(plan.trainers)
    require_row_capacity(cfg.row_tokens, cfg.engine)
    # The components are built on this machine, even if the plan is for another machine.
    on_gpu = cfg.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    components = build_components(cfg, Ranks(0, plan.trainers, device, shard_within=cfg.ranks.shard_within))
    components.check_grading()
    if not components.replay:
        find_backend(components.engine_config.backend)
        text = problems_text(cfg, components.task, components.eval_task, components.train_eval_overlap)
        print_text(format_labels([("problems", text)]))


def resolve_machine(asked: bool | str | None, device: str, engine_devices: str | None, ranks: int) -> Machine:
    """Return the machine that a dry run plans for.

    Args:
        asked: the value of `dry_run`.
        device: the value of `device`.
        engine_devices: the value of `engine.devices`.
        ranks: the number of ranks that torchrun has started on all machines.

    Raises:
        UsageError: `dry_run` does not name a machine, names GPUs for a CPU run, or this machine has
            no GPU although the settings require one.
    """
    if asked is not True:
        machine = parse_machine(asked)
        if machine.gpus and device == "cpu":
            raise UsageError(f"dry_run={asked!r} names GPUs, but device=cpu. Fix: set device=auto, or dry_run=True")
        return machine
    # LOCAL_WORLD_SIZE is the number of ranks on this machine. Other machines cannot be inspected.
    if ranks > read_int_variable("LOCAL_WORLD_SIZE", ranks):
        raise UsageError(
            "dry_run=True under torchrun on several machines. Fix: name the GPUs of all machines, for instance dry_run=16x80"
        )
    local = this_machine(device)
    requirement = "device=cuda" if device == "cuda" else engine_devices and f"engine.devices={engine_devices}"
    if requirement and device != "cpu" and not local.gpus:
        raise UsageError(
            f"dry_run=True with {requirement}: this machine has no GPU. Fix: name a machine, for instance dry_run=4x80"
        )
    return local


def parse_machine(text: Any) -> Machine:
    """Parse a machine: "4x80" or "CPU 8".

    Raises:
        UsageError: the text does not name a machine.
    """
    if match := GPU_PATTERN.fullmatch(str(text)):
        gpus, size = int(match[1]), float(match[2])
        if 0 < gpus <= MAX_GPUS and size > 0:
            return Machine(gpus, int(USABLE_MEMORY_SHARE * size * GIB), None, f"{gpus} x {size:g} GB", is_local=False)
    if match := CPU_PATTERN.fullmatch(str(text)):
        size = float(match[1])
        return Machine(0, 0, int(size * GIB), f"a CPU with {size:g} GB", is_local=False)
    raise UsageError(
        f"dry_run={text!r} is invalid; expected True, 4x80 (4 GPUs of 80 GB in total, for trainer and engine) "
        "or CPU 64 (a CPU with 64 GB)"
    )


def this_machine(device: str) -> Machine:
    """Return this machine: its visible GPUs, or its main memory without GPUs or for "cpu".

    Raises:
        UsageError: torch cannot use the GPUs, or a GPU is too old.
    """
    host = main_memory()
    if has_usable_gpus(device):
        # Each rank checks its own GPU; a run without torchrun has one.
        for i in range(min(torch.cuda.device_count(), read_int_variable("LOCAL_WORLD_SIZE", 1))):
            require_capability(i)
        # The weights are sharded evenly, so the smallest GPU is the limit.
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        name = f"the {len(sizes)} GPUs of this machine" if len(sizes) > 1 else "the GPU of this machine"
        return Machine(len(sizes), min(sizes), host, name, is_local=True)
    return Machine(0, 0, host, "the free main memory of this machine", is_local=True)


def main_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the bytes of main memory that this process may still allocate."""
    # Linux reports available memory without the limit of a container, which has its own cgroup.
    limit_text = limit.read_text().strip() if limit.exists() else "max"
    available = psutil.virtual_memory().available
    return available if limit_text == "max" else min(available, int(limit_text))


def make_plan(cfg: RunSettings, machine: Machine) -> tuple[RunPlan, list[str]]:
    """Plan a run, still without its number of training devices.

    Returns:
        The plan, and lines to print below it.

    Raises:
        UsageError: a setting is invalid, or the sizes of the model are unknown.
    """
    model, lines = build_meta_model(cfg.model, cfg.model_dir)
    trainer_fp8, engine_fp8 = fp8_configs = cfg.precision.fp8_configs
    # The dtype follows the planned machine, not this machine.
    name = chosen_dtype(cfg.dtype, "cuda" if machine.gpus else "cpu", fp8=engine_fp8 is not None)
    dtype, engine = DTYPES[name], cfg.engine.with_trainer_defaults(name)
    sizes = ModelSizes(model, dtype, fp8_configs, getattr(torch, engine.dtype))
    publish_mode = cfg.adapters.resolve_publish_mode(bool(cfg.model.get("use_dora")), engine.dtype)
    loads_adapters = sizes.has_frozen_params and publish_mode == "adapter"
    planned = copy(cfg)
    planned.engine = engine
    plan = RunPlan(
        cfg=planned,
        sizes=sizes,
        machine=machine,
        reference=loss_requirements(cfg.loss.instantiate()).reference_logprobs,
        # The engine receives adapters without the frozen weights, unless the adapters are merged,
        # or FP8 or NF4 has changed the frozen weights, which are then sent once.
        publishes_full_weights=not loads_adapters or engine_fp8 is not None or sizes.largest_nf4 > 0,
        engine_loads_adapters=loads_adapters,
        optimizer_bytes=measure_optimizer_state(cfg.optimizer.instantiate),
    )
    if engine_fp8 is not None:
        layers = linear_layers(model, engine_fp8, trainer_fp8 is not None)[0]
        lines.append(Fp8Plan(engine_fp8, dtype, layers).format_table())
    return plan, lines


def build_meta_model(builder: Component, model_dir: str) -> tuple[TransformerDecoder, list[str]]:
    """Build the model on the meta device.

    Args:
        builder: the `model` section of the config.
        model_dir: the model directory, which may be missing for a public model.

    Returns:
        The model, and a line that says whether its sizes come from the published config.

    Raises:
        UsageError: the model cannot be built.
    """
    # A plan may be made before the download, if the folder has the name of a public model.
    known = hub_model_config(Path(model_dir).name)
    # The published config replaces only the config of this directory.
    named = builder.get("model_dir") == model_dir
    if known is None or not named or (Path(model_dir) / "config.json").exists():
        return build_on_meta(builder.instantiate), []
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(known))
        model = build_on_meta(Component({**builder, "model_dir": folder}, "model").instantiate)
    source = f"the published config of {Path(model_dir).name}, because model_dir has no config.json yet"
    return model, [f"sizes: from {source}"]

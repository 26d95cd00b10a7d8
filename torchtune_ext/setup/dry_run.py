"""`dry_run=` of a GRPO recipe: does the checks of a start and says whether the run fits a machine. It loads no weights.

    dry_run=True   this machine
    dry_run=4x80   4 GPUs of 80 GB in all, for trainer and engine together; 16x80: also those of several machines

The exit status is 0 if a start would get through its checks and the run fits, else 2.
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
from torchtune_ext.policy.families import hub_model_config
from torchtune_ext.policy.fp8.plan import Fp8Plan, linear_layers
from torchtune_ext.policy.memory import GIB, ModelSizes
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.folder import require_usable_folder
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.process_env import rank_and_world_size, read_int_variable
from torchtune_ext.sampling.engine import find_backend
from torchtune_ext.settings.components import Component
from torchtune_ext.setup.config_records import GRPOConfig
from torchtune_ext.setup.header import problems_text
from torchtune_ext.setup.machine_checks import missing_device, require_disjoint_gpus, require_gpus, training_gpus
from torchtune_ext.setup.plan import Machine, RunPlan, plan_table, verdict
from torchtune_ext.setup.run_components import build_components
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.precision import DTYPES, chosen_dtype

# The memory that CUDA reports of a card, as a share of what it is sold as. Users' error messages show 39.5 of 40 GiB
# for an A100, 23.7 of 24 for a 4090 and 15.8 of 16 for a V100. Other cards of these sizes differ by less than 1%.
USABLE_MEMORY_SHARE = 0.985
GPU_PATTERN = re.compile(r"(\d+) ?x ?(\d+(?:\.\d+)?) ?(?:GB)?", re.IGNORECASE)
CPU_PATTERN = re.compile(r"CPU,? (\d+(?:\.\d+)?) ?(?:GB)?", re.IGNORECASE)
MAX_GPUS = 72  # a larger number is a size in the wrong place, as in 80x4


def dry_run(cfg: GRPOConfig) -> None:
    """Prints the plan of a run with these settings, and ends the process.

    Raises:
        SystemExit: always, with the status above.
        ValueError: a setting is wrong, or `dry_run` names no machine.
    """
    # Under torchrun every rank is here. One plan is enough.
    rank, ranks = rank_and_world_size()
    if rank:
        sys.exit(0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    machine, missing = machine_of(cfg.dry_run, cfg.device, cfg.engine.devices, ranks), None
    plan, notes = plan_of(cfg, machine)
    plan = plan.with_trainers(ranks if ranks > 1 else None, visible)
    if machine.is_local and not machine.gpus and cfg.device != "cpu":
        notes.append("no GPU is visible here, so the run would compute on the CPU; dry_run=4x80 judges 4 GPUs of 80 GB")
    if cfg.teacher.model_dir and not cfg.replay:
        notes.append(f"the engine of the teacher, {cfg.teacher.model_dir}, is in none of these figures")
    try:
        check_planned_start(plan, torchrun=ranks > 1)
    except UsageFileError as error:
        # The plan needs no file of the model or of a task, so it is printed all the same.
        missing = error
    print_text("\n".join([plan_table(plan, Path(cfg.model_dir).name), *notes, "", verdict(plan)]))
    if missing:
        print_text(f"problem: {missing}\nThe figures are right, but a start would stop at this problem")
    elif plan.fits:
        tried = "The settings" if cfg.replay else "The settings, the first problems and the grader"
        print_text(f"{tried} were tried: nothing is wrong")
    sys.exit(0 if plan.fits and not missing else 2)


def check_planned_start(plan: RunPlan, torchrun: bool) -> None:
    """Does the checks of a start. `torchrun`: whether it started this process.

    Raises:
        ValueError: a start would stop there; a `FileMistake` if a file is not there.
    """
    cfg = plan.cfg
    require_usable_folder(cfg.output_dir)
    # The GPUs of this machine can be looked at. Of another one only their number is known.
    machine, engine = plan.machine, plan.engine
    if engine is not None and machine.is_local:
        require_gpus(engine)
        # Under torchrun the GPUs that train are known. Without it the plan chooses how many.
        if machine.gpus:
            require_disjoint_gpus(engine, training_gpus(None if torchrun else plan.trainers))
    elif (
        plan.engine_placement == "own"
        and machine.gpus
        and (fault := missing_device(plan.engine, machine.gpus, machine.name))
    ):
        raise UsageError(fault)
    cfg.ranks.require_divisible(plan.trainers)
    # The parts are made on this machine, whatever machine the plan is for.
    on_gpu = cfg.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    components = build_components(cfg, Ranks(0, plan.trainers, device, shard_within=cfg.ranks.shard_within))
    components.check_grading()
    if not components.replay:
        find_backend(components.precision.engine.backend)
        print_text(
            format_labels(
                [("problems", problems_text(cfg, components.task, components.eval_task, components.train_eval_overlap))]
            )
        )


def machine_of(asked: bool | str | None, device: str, engine_devices: str | None, ranks: int) -> Machine:
    """Returns the machine that a dry run is for. `ranks`: how many torchrun has started, on all machines together.

    Raises:
        ValueError: `dry_run` names no machine, or GPUs for a run on a CPU, or there is none to be found.
    """
    if asked is not True:
        machine = parse_machine(asked)
        if machine.gpus and device == "cpu":
            raise UsageError(f"dry_run={asked!r} asks for GPUs, but device=cpu: set device=auto, or dry_run=True")
        return machine
    # LOCAL_WORLD_SIZE is the number of ranks on this machine, the only one whose GPUs can be looked at.
    if ranks > read_int_variable("LOCAL_WORLD_SIZE", ranks):
        raise UsageError(
            "dry_run=True under torchrun on several machines: name the GPUs of all, for instance dry_run=16x80"
        )
    here = this_machine(device)
    wants = "device=cuda" if device == "cuda" else engine_devices and f"engine.devices={engine_devices}"
    if wants and device != "cpu" and not here.gpus:
        raise UsageError(f"dry_run=True with {wants}: there is no GPU here; name a machine, for instance dry_run=4x80")
    return here


def parse_machine(text: Any) -> Machine:
    """Returns the machine that a user asks for: "4x80" or "CPU 8".

    Raises:
        ValueError: the text names no machine.
    """
    if match := GPU_PATTERN.fullmatch(str(text)):
        gpus, size = int(match[1]), float(match[2])
        if 0 < gpus <= MAX_GPUS and size > 0:
            return Machine(gpus, int(USABLE_MEMORY_SHARE * size * GIB), None, f"{gpus} x {size:g} GB", is_local=False)
    if match := CPU_PATTERN.fullmatch(str(text)):
        size = float(match[1])
        return Machine(0, 0, int(size * GIB), f"a CPU with {size:g} GB", is_local=False)
    raise UsageError(
        f"dry_run={text!r} is neither True nor a machine: 4x80 asks for 4 GPUs of 80 GB in all, for trainer and engine "
        "together, CPU 64 for a CPU with 64 GB"
    )


def this_machine(device: str) -> Machine:
    """Returns this machine: its visible GPUs, or its main memory where there are none or `device` is "cpu"."""
    host = main_memory()
    if device != "cpu" and torch.cuda.is_available():
        # The weights are cut into equal parts, so the smallest card decides.
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        name = f"the {len(sizes)} GPUs here" if len(sizes) > 1 else "the GPU here"
        return Machine(len(sizes), min(sizes), host, name, is_local=True)
    return Machine(0, 0, host, "the main memory that is free here", is_local=True)


def main_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns how many bytes of main memory this process may still take."""
    # Linux does not count a container's limit in what it calls available. Inside a container this is its own cgroup's.
    most = limit.read_text().strip() if limit.exists() else "max"
    available = psutil.virtual_memory().available
    return available if most == "max" else min(available, int(most))


def plan_of(cfg: GRPOConfig, machine: Machine) -> tuple[RunPlan, list[str]]:
    """Returns the plan of a run, not yet with its training devices, and lines to print below it.

    Raises:
        ValueError: a setting is wrong, or the sizes of the model are not known.
    """
    model, lines = model_of(cfg.model, cfg.model_dir)
    trainer, sampler = sides = cfg.precision.side_configs
    # The dtype follows the machine of the plan, not the one where the plan is made.
    name = chosen_dtype(cfg.dtype, "cuda" if machine.gpus else "cpu", fp8=sampler is not None)
    dtype, engine = DTYPES[name], cfg.engine.with_trainer_defaults(name)
    merged = cfg.adapters.resolve_publish_mode(bool(cfg.model.get("use_dora")), engine.dtype) == "merged"
    sizes = ModelSizes(model, dtype, sides, getattr(torch, engine.dtype))
    planned = copy(cfg)
    planned.engine = engine
    plan = RunPlan(
        cfg=planned,
        sizes=sizes,
        machine=machine,
        reference=loss_requirements(cfg.loss.instantiate()).reference_logprobs,
        # Adapters go to the engine without the frozen weights, unless they are merged into them, or FP8 or NF4 has
        # changed the frozen weights, which the engine then gets once.
        publishes_full_weights=not sizes.has_frozen_params or merged or sampler is not None or sizes.largest_nf4 > 0,
    )
    if sampler is not None:
        lines.append(Fp8Plan(sampler, dtype, linear_layers(model, sampler, trainer is not None)[0]).format_table())
    return plan, lines


def model_of(builder: Component, model_dir: str) -> tuple[TransformerDecoder, list[str]]:
    """Builds the model on the meta device, and says in a line if its sizes come from no file. Raises ValueError."""
    # A plan may come before the download. Then the name of the folder tells the public model, whose config is known.
    known = hub_model_config(Path(model_dir).name)
    # Only a model that is built from this directory can be built from the published config instead.
    named = builder.get("model_dir") == model_dir
    if known is None or not named or (Path(model_dir) / "config.json").exists():
        return build_on_meta(builder.instantiate), []
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(known))
        model = build_on_meta(Component({**builder, "model_dir": folder}, "model").instantiate)
    return model, [
        f"sizes: those of {Path(model_dir).name} as it was published, since model_dir has no config.json yet"
    ]

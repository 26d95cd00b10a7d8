"""`dry_run=` of a GRPO recipe: does the checks of a start and says whether the run fits a machine. It loads and starts nothing.

    dry_run=True   this machine
    dry_run=4x80   a machine with 4 GPUs of 80 GB in all, for trainer and engine together; 2x8x80: two nodes with 8 each;
                   8x80+4x80: 8 that train, and elsewhere 4 for the servers of engine.address

A start itself only looks for GPUs and for room on the disk (`Parts.check_start`).

Exit status 0: a start would get through its checks, and the run fits. 2: it would not, or does not.
"""

import json
import os
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torchtune.modules import TransformerDecoder

from torchtune_ext.host.opening import problems_text
from torchtune_ext.host.parts import make_parts
from torchtune_ext.objective.loss import needs_of
from torchtune_ext.policy.builder import on_meta
from torchtune_ext.policy.families import published_config
from torchtune_ext.policy.fp8.gain import engine_memory
from torchtune_ext.policy.fp8.plan import Fp8Receipt, linear_layers
from torchtune_ext.policy.memory import sizes_of
from torchtune_ext.run.errors import Mistake, is_mistake, traceback_wanted
from torchtune_ext.run.output import labelled, say
from torchtune_ext.sampling.engine import find_backend
from torchtune_ext.settings.components import Component, instantiate
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.plan.machine import Machine, asked_machine, this_machine
from torchtune_ext.training.plan.plan import Plan, Settings, missing_devices, trainers_of
from torchtune_ext.training.plan.table import plan_table, verdict
from torchtune_ext.training.precision import DTYPES
from torchtune_ext.training.settings import chosen_dtype
from torchtune_ext.training.start import optimizer_bytes, require_apart, require_gpus, training_gpus


def dry_run(cfg: Any) -> None:
    """Prints the plan of a run with these settings, and what is wrong with them. Under torchrun rank 0 does so for all.

    Raises:
        SystemExit: always; with status 0 if a start would get through its checks and the run fits, else with 2.
        ValueError: `dry_run` names no machine.
    """
    if int(os.environ.get("RANK", 0)):
        sys.exit(0)
    machine = machine_of(cfg)
    plan, problems, notes = None, [], []
    try:
        settings, notes = settings_of(cfg, "cuda" if machine.gpus else "cpu")
        if machine.here and not machine.gpus and cfg.device != "cpu":
            notes.append(
                "no GPU is visible here, so the run would compute on the CPU; dry_run=4x80 judges 4 GPUs of 80 GB"
            )
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        plan = Plan(settings, machine, trainers_of(machine, settings, ranks if ranks > 1 else None, visible))
        problems += missing_devices(machine, settings)
        if machine.here and machine.gpus and settings.engine is not None:
            require_apart(settings.engine, training_gpus(plan.on_node(plan.trainers) if ranks == 1 else None))
    except Exception as error:
        problems.append(_foreseen(error))
    longest, found = checked(cfg, plan.trainers if plan else 1, machine.here)
    problems += [text for text in found if text not in problems]
    if plan is not None:
        plan = replace(plan, settings=replace(plan.settings, prompt_tokens=longest))
        say("\n".join([plan_table(plan, Path(cfg.model_dir).name), *notes, "", verdict(plan)]))
    for problem in problems:
        say(f"problem: {problem}")
    if plan is not None and plan.fits and not problems:
        tried = "The settings" if cfg.replay else "The settings, the first problems and the grader"
        say(f"{tried} were tried: nothing is wrong")
    if plan is not None and problems:
        say(
            "The figures are right, but a start would stop at " + ("these problems" if problems[1:] else "this problem")
        )
    sys.exit(0 if plan is not None and plan.fits and not problems else 2)


def machine_of(cfg: Any) -> Machine:
    """Returns the machine that a dry run is for.

    Raises:
        ValueError: `dry_run` names no machine, or GPUs for a run on a CPU, or there is none to be found.
    """
    if cfg.dry_run is not True:
        machine = asked_machine(cfg.dry_run)
        if machine.gpus and cfg.device == "cpu":
            raise Mistake(f"dry_run={cfg.dry_run!r} asks for GPUs, but device=cpu: set device=auto, or dry_run=True")
        return machine
    here = replace(this_machine(cfg.device), nodes=_nodes())
    if cfg.device == "cuda" and not here.gpus:
        raise Mistake("dry_run=True with device=cuda: there is no GPU here; name a machine, for instance dry_run=4x80")
    return here


def settings_of(cfg: Any, device: str) -> tuple[Settings, list[str]]:
    """Builds what decides about the need of a run. Returns it, and lines that say where sizes come from that no file gives, and
    which layers compute in FP8, if any does.

    Raises:
        ValueError: a setting is wrong, or the sizes of the model are not known.
    """
    model, lines = model_of(cfg)
    sides = cfg.precision.sides
    name = chosen_dtype(cfg.dtype, device, fp8=sides[1] is not None)
    dtype, engine = DTYPES[name], cfg.engine.following(name)
    merged = cfg.adapters.way(bool(cfg.model.get("use_dora")), engine.dtype) == "merged"
    sizes = sizes_of(model, dtype, sides, getattr(torch, engine.dtype))
    settings = Settings(
        sizes=sizes,
        engine=None if cfg.replay else engine,
        checkpoints=cfg.checkpoints,
        output_dir=cfg.output_dir,
        resumes=cfg.resume_from_checkpoint,
        max_model_len=engine.max_model_len,
        max_steps=cfg.max_steps,
        row_tokens=cfg.row_tokens,
        max_tokens=cfg.sampling.max_tokens,
        activation_checkpointing=cfg.activation_checkpointing,
        optimizer_bytes=optimizer_bytes(partial(instantiate, cfg.optimizer)),
        evaluated=cfg.evaluation.task is not None and not cfg.replay,
        reference=needs_of(instantiate(cfg.loss)).reference,
        # What FP8 or NF4 has left of frozen weights goes to the engine once.
        publishes_all=not sizes.frozen or merged or sides[1] is not None or sizes.largest_nf4 > 0,
        save_merged=cfg.adapters.save_merged,
        shard_within=cfg.ranks.shard_within,
    )
    trainer, sampler = sides
    if sampler is None:
        return settings, lines
    receipt = Fp8Receipt(sampler, dtype, linear_layers(model, sampler, trainer is not None)[0])
    return settings, [*lines, receipt.table(), f"  engine: {engine_memory(model, receipt)}"]


def model_of(cfg: Any) -> tuple[TransformerDecoder, list[str]]:
    """Builds the model on the meta device. Where its config.json has not been downloaded yet, it has the sizes that are known
    of the public model with the name of the folder, and a line says so.

    Raises:
        ValueError: the sizes are not known.
    """
    known = published_config(Path(cfg.model_dir).name)
    named = cfg.model.get("model_dir") == cfg.model_dir
    if known is None or not named or (Path(cfg.model_dir) / "config.json").exists():
        return on_meta(partial(instantiate, cfg.model)), []
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(known))
        model = on_meta(partial(instantiate, Component({**cfg.model, "model_dir": folder}, "model")))
    return model, [
        f"sizes: those of {Path(cfg.model_dir).name} as it was published, since model_dir has no config.json yet"
    ]


def checked(cfg: Any, trainers: int, here: bool) -> tuple[int | None, list[str]]:
    """Does the checks of a start. Returns the tokens of the longest of a few prompts, and what is wrong.

    Args:
        trainers: how many devices the run will train on.
        here: whether it will do so on this machine, so that the engine's GPUs have to be there.
    """
    on_gpu = cfg.device != "cpu" and torch.cuda.is_available()
    try:
        cfg.ranks.require_divides(trainers)
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        parts = make_parts(cfg, Ranks(0, trainers, device, shard_within=cfg.ranks.shard_within))
        parts.rehearse()
        if not parts.replay:
            say(labelled([("problems", problems_text(cfg, parts.task, parts.eval_task, parts.trained_too))]))
            find_backend(parts.precision.engine.backend)
            if here:
                require_gpus(parts.precision.engine)
        return max(map(len, parts.canary)), []
    except Exception as error:
        return None, [_foreseen(error)]


def _foreseen(error: Exception) -> str:
    """Returns the message of a mistake, and shows its traceback if it was asked for. Raises what is none."""
    if not is_mistake(error):
        raise error
    if traceback_wanted():
        traceback.print_exception(error)
    return str(error)


def _nodes() -> int:
    """Returns on how many nodes torchrun has started this run."""
    return int(os.environ.get("WORLD_SIZE", 1)) // int(
        os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))
    )

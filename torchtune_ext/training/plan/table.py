"""Writes a plan for people: what each part takes, whether it fits, and which changes would make it fit."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchtune_ext.policy.memory import GIB
from torchtune_ext.training.plan.plan import Plan

NAMES, FIGURE = 56, 9  # characters of a row's name and of a figure
MIB = 1 << 20
MOST_GPUS = 128  # more are not tried
UTILIZATIONS = [share / 100 for share in range(90, 5, -5)]  # of gpu_memory_utilization
SHOWN = 3  # changes that a verdict names


def three(value: float) -> str:
    """Returns a number with three digits: 0.123, 1.23, 12.3, 123, 1,234."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


def plan_table(plan: Plan, name: str) -> str:
    """Returns the table without the verdict, at most 120 characters wide.

    Args:
        name: of the model.
    """
    made, sizes, machine = plan.settings, plan.settings.sizes, plan.machine
    trained = f"{sizes.trained / sizes.total:.2%} of them trained" if sizes.frozen else "all trained"
    lines = [f"{name}: {_count(sizes.total)} parameters, {trained}"]
    if machine.gpus:
        lines.append(f"GPUs: {_roles(plan)}")
    unit, unit_name = (GIB, "GiB") if plan.total() >= GIB else (MIB, "MiB")
    first = " of the first node" if machine.nodes > 1 else ""
    where = "on each GPU that trains" if machine.gpus else f"of main memory{first} for the trainer"
    lines += _rows(f"{unit_name} {where}", plan.device(plan.trainers), unit)
    if plan.engine is not None:
        lines += _engine_rows(plan, unit, unit_name)
    elif made.engine_place == "server":
        lines.append(f"the engine is the server at {made.engine.address}; what it needs is not in this table")
    lines += _rows(f"{unit_name} of main memory{first}, besides", plan.host, unit)
    disk = plan.disk
    lines += _rows(f"{unit_name} of disk for one checkpoint in {made.output_dir}", disk.rows, unit)
    there = f"; free there: {three(disk.free / GIB)} GiB" if machine.here else ""
    lines.append(
        f"  {disk.kept} at once at most, with the one that is being written: {three(disk.total / unit)} {unit_name}{there}"
    )
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Returns whether the plan fits, in one line, and below it what else it takes, or what is missing and what helps."""
    where = f"{'on' if plan.machine.gpus or not plan.machine.here else 'into'} {plan.machine}"
    if plan.fits:
        return f"fits {where}{_used(plan)}"
    lines = [f"does NOT fit {where}:", *(f"  {missing}" for missing in shortages(plan).values())]
    if not (helpful := list(changes_that_help(plan))):
        return "\n".join([*lines, "no single change of a setting makes it fit"])
    width = max(len(words) for words, _ in helpful[:SHOWN])
    lines.append("what helps, the cheapest first:")
    for words, left in helpful[:SHOWN]:
        lines.append(f"  {words:<{width}}  {'then ' + '; '.join(left.values()) if left else 'then it fits'}")
    return "\n".join(lines)


def shortages(plan: Plan) -> dict[str, str]:
    """Returns what is missing, a phrase for each kind of it."""
    machine, found = plan.machine, {}
    if not plan.servers_fit:
        found["gpus"] = f"its {_engines(plan)} need {plan.settings.engine_gpus} GPUs, where {machine.serving} serve"
    elif not plan.gpus_fit:
        found["gpus"] = f"it needs {plan.gpus} GPUs{' on nodes alike' if machine.nodes > 1 else ''}: {_roles(plan)}"
    if not plan.training_fits:
        found["training"] = f"training takes {three(plan.total() / GIB)} GiB of each GPU"
    need, which = plan.engine, "the" if plan.settings.engines == 1 else "each"
    if not plan.engine_fits and not need.fits:
        less = f"fewer than engine.max_model_len={need.max_model_len}"
        found["engine"] = f"{which} engine's KV cache would hold {need.tokens:,} tokens, {less}"
    elif not plan.engine_fits:
        found["engine"] = f"{which} engine takes {three(need.total / GIB)} GiB of each GPU"
    if not plan.host_fits:
        free = three(machine.host_bytes / GIB)
        found["host"] = f"it takes {three(plan.main_memory / GIB)} GiB of main memory, where {free} are free"
    if not plan.disk_fits:
        free = three(plan.disk.free / GIB)
        found["disk"] = f"checkpoints take {three(plan.disk.total / GIB)} GiB of disk, where {free} are free"
    return found


def changes_that_help(plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the changes after which less is missing, in words, with what is still missing, the cheapest first."""
    missing = shortages(plan).keys()
    for words, changed in _changes(plan):
        if (left := shortages(changed)).keys() < missing:
            yield words, left


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields what may be changed, in words, and the plan then: first what costs time, then what costs hardware or tokens."""
    made = plan.settings
    words, lean = [], plan
    if not made.activation_checkpointing:
        words, lean = ["activation_checkpointing=True"], _changed(plan, activation_checkpointing=True)
        yield words[0], lean
    if made.row_tokens > made.max_model_len:
        words, lean = [*words, f"row_tokens={made.max_model_len}"], _changed(lean, row_tokens=made.max_model_len)
        yield " ".join(words), lean
    if (made.shard_within or plan.trainers) < plan.trainers:
        yield "ranks.shard_within=null", _changed(plan, shard_within=None)
    kept = made.checkpoints
    for change, fields in (("save_optimizer=false", {"save_optimizer": False}), ("keep_last=1", {"keep_last": 1})):
        yield f"checkpoints.{change}", _changed(plan, checkpoints=replace(kept, **fields))
    both = replace(kept, save_optimizer=False, keep_last=1)
    yield "checkpoints.save_optimizer=false checkpoints.keep_last=1", _changed(plan, checkpoints=both)
    if made.engine is not None:
        yield from _engine_changes(plan)
    also = f", with {' '.join(words)}" if words else ""
    for ending, base in {"": plan, also: lean}.items():
        step, limit = plan.machine.nodes, plan.machine.gpu_bytes
        for number in range(plan.trainers + step, MOST_GPUS + 1 if limit else 0, step):
            if base.total(number) <= limit:
                more = _on_as_many(replace(base, trainers=number))
                yield f"{number} GPUs that train{ending} ({more.gpus} in all)", more
                break
    if not made.sizes.frozen:
        for title, nf4 in (("adapters (docs/training.md)", False), ("adapters over NF4 (QLoRA)", True)):
            yield f"{title}{also}", _changed(lean, sizes=made.sizes.with_adapters(nf4), publishes_all=False)


def _engine_changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields what may be changed of the engine."""
    made, engine, place = plan.settings, plan.settings.engine, plan.settings.engine_place

    def changed(**settings) -> Plan:
        return _changed(plan, engine=replace(engine, **settings))

    if engine.kv_cache_bytes is not None:
        yield f"engine.kv_cache_bytes={engine.kv_cache_bytes // 2}", changed(kv_cache_bytes=engine.kv_cache_bytes // 2)
    elif place in ("shared", "sleeps"):
        less = [share for share in UTILIZATIONS if share < engine.gpu_memory_utilization]
        for share in less:
            if not shortages(now := changed(gpu_memory_utilization=share)):
                yield f"engine.gpu_memory_utilization={share:g}", now
                break
    elif plan.machine.gpus and engine.gpu_memory_utilization < UTILIZATIONS[0]:
        share = UTILIZATIONS[0]
        yield f"engine.gpu_memory_utilization={share:g}", changed(gpu_memory_utilization=share)
    if place == "shared" and plan.machine.gpus:
        yield "engine.sleep=true, with staleness=0", changed(sleep=True, kv_on_publish="recompute")
    need = plan.engine
    if need is not None and made.max_tokens + (made.prompt_tokens or 0) <= need.tokens < engine.max_model_len:
        yield f"engine.max_model_len={need.tokens}", changed(max_model_len=need.tokens)
    if not plan.machine.gpus:
        return
    if place in ("shared", "sleeps"):
        first, size = plan.machine.gpus, engine.tensor_parallel_size
        devices = ",".join(str(number) for number in range(first, first + size))
        more = _on_as_many(changed(sleep=False, devices=devices, count=None))
        yield f"GPUs more: {size}, which engine.devices names", more
    # vLLM deals whole heads out to its GPUs.
    sizes = [
        gpus for gpus in range(engine.tensor_parallel_size + 1, made.sizes.heads + 1) if not made.sizes.heads % gpus
    ]
    for gpus in sizes:
        fewer, rest = divmod(made.engine_gpus, gpus) if place == "own" else (0, 0)
        names = engine.device_names[: fewer * gpus] or [str(plan.trainers + number) for number in range(gpus)]
        devices = ",".join(names) if place == "own" else engine.devices
        now = _on_as_many(changed(tensor_parallel_size=gpus, devices=devices, count=None))
        if now.engine_fits:
            where = f"so {fewer} engines in place of {made.engines}" if fewer and not rest else f"on {gpus} GPUs"
            yield f"engine.tensor_parallel_size={gpus}, {where}", now
            break


def _changed(plan: Plan, **settings) -> Plan:
    return replace(plan, settings=replace(plan.settings, **settings))


def _on_as_many(plan: Plan) -> Plan:
    """Returns the plan on a machine of as many GPUs as it needs."""
    machine = plan.machine
    return replace(plan, machine=replace(machine, gpus=max(machine.gpus, -(-plan.gpus // machine.nodes))))


def _roles(plan: Plan) -> str:
    """Returns which GPUs do what: "4 train, 4 sample (4 engines of 1)"."""
    made, machine = plan.settings, plan.machine
    trains = f"{plan.trainers} train{'s' if plan.trainers == 1 else ''}"
    if made.engine_place == "none":
        return trains
    if not made.engine_gpus:
        return f"{trains} and sample{'s' if plan.trainers == 1 else ''}"
    verb = "serve" if made.engine_place == "server" else "sample"
    samples = f"{made.engine_gpus} {verb}{'s' if made.engine_gpus == 1 else ''} ({_engines(plan)})"
    if plan.serves_elsewhere:
        return f"{trains}; elsewhere {samples}"
    idle = machine.all_gpus - plan.gpus
    return f"{trains}, {samples}{f', {idle} idle' if idle > 0 and not machine.here else ''}"


def _engines(plan: Plan) -> str:
    made = plan.settings
    kind = "server" if made.engine_place == "server" else "engine"
    return f"{made.engines} {kind}{'s' if made.engines > 1 else ''} of {made.engine.tensor_parallel_size}"


def _used(plan: Plan) -> str:
    main, disk = (f"{three(bytes_ / GIB)} GiB" for bytes_ in (plan.main_memory, plan.disk.total))
    if not plan.machine.gpus:
        return f": {main} used at most; checkpoints take {disk} of disk"
    text = f": {three(plan.total() / GIB)} GiB used at most on {_that(plan.trainers, 'train')}"
    place, nodes = plan.settings.engine_place, plan.machine.nodes
    if place in ("own", "server") and plan.engine is not None:
        that = _that(plan.settings.engine_gpus, "serve" if place == "server" else "sample")
        text += f", {three(plan.engine.total / GIB)} on {that}"
    elif place in ("shared", "sleeps"):
        text += f" and {'samples' if plan.trainers == 1 else 'sample'}"
    words = f"--nproc_per_node {-(-plan.trainers // nodes)}"
    ranks = f"; start it with {words}" if plan.trainers > 1 else ""
    if nodes > 1:
        ranks = f"\n  start it on each node with --nnodes {nodes} {words}"
    return f"{text}\n  besides, {main} of main memory and {disk} of disk for checkpoints{ranks}"


def _that(gpus: int, verb: str) -> str:
    return f"1 GPU that {verb}s" if gpus == 1 else f"{gpus} GPUs that {verb}"


def _count(values: int) -> str:
    return f"{values / 1e9:.3f} B" if values >= 1e8 else f"{values / 1e6:.3f} M"


def _rows(title: str, rows: Mapping[str, int], unit: int) -> list[str]:
    """Returns a title with the sum, and a line for each name whose figure is not zero."""
    figures = {name: bytes_ / unit for name, bytes_ in rows.items()}
    lines = [f"{title:<{NAMES + 2}}{three(sum(figures.values())):>{FIGURE}}"]
    return lines + [f"  {name:<{NAMES}}{three(each):>{FIGURE}}" for name, each in figures.items() if each >= 0.0005]


def _engine_rows(plan: Plan, unit: int, unit_name: str) -> list[str]:
    made, need, engine = plan.settings, plan.engine, plan.settings.engine
    whose = f"{'server' if made.engine_place == 'server' else 'engine'} GPU"
    where = f"on each {whose} (engine.tensor_parallel_size={engine.tensor_parallel_size})"
    cache = f"KV cache (what gpu_memory_utilization={engine.gpu_memory_utilization:g} leaves)"
    if engine.kv_cache_bytes is not None or not plan.machine.gpus:
        cache = "KV cache (engine.kv_cache_bytes)"
    rows = need.rows | {cache: max(need.kv_bytes, 0)}
    title = f"{unit_name} {where if plan.machine.gpus else 'of main memory for the engine'}"
    whole = f" of each of {made.engines}" if made.engines > 1 else ""
    lines = [f"  the KV cache{whole} holds {need.tokens:,} tokens, for so many requests at once:"]
    lines.append(f"    {need.in_flight(need.max_model_len):,} of engine.max_model_len={need.max_model_len}")
    if made.prompt_tokens is not None:
        typical = need.in_flight(made.prompt_tokens + made.max_tokens)
        lines.append(f"    {typical:,} of a prompt of {made.prompt_tokens} + sampling.max_tokens={made.max_tokens}")
    return [*_rows(title, rows, unit), *lines]

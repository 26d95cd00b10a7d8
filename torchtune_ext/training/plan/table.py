"""Writes a plan for people: what each part takes, whether it fits, and what to change if not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtune_ext.policy.memory import GIB
from torchtune_ext.training.plan.plan import COLUMNS, Plan

NAMES, FIGURE = 56, 9  # characters of a row's name and of a figure
MIB = 1 << 20
MOST_GPUS = 128  # more are not tried
UTILIZATIONS = [share / 100 for share in range(90, 5, -5)]  # of gpu_memory_utilization


def three(value: float) -> str:
    """Returns a number with three digits: 0.123, 1.23, 12.3, 123, 1,234."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


def plan_table(plan: Plan, name: str) -> str:
    """Returns the table without the verdict, at most 120 characters wide.

    Args:
        name: of the model.
    """
    made, sizes = plan.settings, plan.settings.sizes
    trained = f"{sizes.trained / sizes.total:.2%} of them trained" if sizes.frozen else "all trained"
    lines = [f"{name}: {_count(sizes.total)} parameters, {trained}"]
    if plan.machine.gpus:
        lines.append(f"GPUs: {_roles(plan)}")
    numbers = sorted({*COLUMNS, plan.trainers})
    columns = [plan.device(n) for n in numbers]
    unit, unit_name = (GIB, "GiB") if plan.total() >= GIB else (MIB, "MiB")
    each = " of each node" if plan.machine.nodes > 1 else ""
    where = "on each training GPU by their number" if plan.machine.gpus else f"of main memory{each} by number of ranks"
    lines += _rows(
        f"{unit_name} {where} ([{plan.trainers}] is planned)",
        [f"[{n}]" if n == plan.trainers else str(n) for n in numbers],
        columns,
        unit,
    )
    if plan.engine is not None:
        lines += _engine_lines(plan, unit, unit_name)
    elif made.engine_place == "server":
        lines.append(f"the engine is the server at {made.engine.address}; what it needs is not in this table")
    node = " of the first node" if plan.machine.nodes > 1 else ""
    lines += _rows(f"{unit_name} of main memory{node}, besides", [], [plan.host], unit)
    disk = plan.disk
    lines += _rows(f"{unit_name} of disk for one checkpoint in {made.output_dir}", [], [disk.rows], unit)
    kept = f"{disk.kept} at once at most, with the one that is being written"
    there = f"; free there: {three(disk.free / GIB)} GiB" if plan.machine.here else ""
    lines.append(f"  {kept}: {three(disk.total / unit)} {unit_name}{there}")
    return "\n".join(line.rstrip() for line in lines)


def verdict(plan: Plan) -> str:
    """Returns whether the plan fits, in one line, and below it what else it takes, or what to change, the cheapest first."""
    if plan.fits:
        return f"fits {_where(plan)}{_used(plan)}"
    lines = [f"does NOT fit {_where(plan)}:", *(f"  {missing}" for missing in shortages(plan))]
    changes = advice(plan)
    if changes:
        lines.append("what to change, the cheapest first:")
        width = max(len(change.words) for change in changes)
        lines += [f"  {c.words:<{width}}  {c.result}, {'enough' if c.enough else 'NOT enough'}" for c in changes]
    return "\n".join(lines)


def shortages(plan: Plan) -> list[str]:
    """Returns what is missing, one phrase each."""
    machine, found = plan.machine, []
    if not plan.servers_fit:
        found.append(f"its {_engines(plan)} need {plan.settings.engine_gpus} GPUs, where {machine.serving} serve")
    elif not plan.gpus_fit:
        found.append(f"it needs {plan.gpus} GPUs{' on nodes alike' if machine.nodes > 1 else ''}: {_roles(plan)}")
    if not plan.training_fits:
        found.append(f"training takes {three(plan.total() / GIB)} GiB of each GPU")
    need, which = plan.engine, "the" if plan.settings.engines == 1 else "each"
    if not plan.engine_fits and not need.fits:
        less = f"fewer than engine.max_model_len={need.max_model_len}"
        found.append(f"{which} engine's KV cache would hold {need.tokens:,} tokens, {less}")
    elif not plan.engine_fits:
        found.append(f"{which} engine takes {three(need.total / GIB)} GiB of each GPU")
    if not plan.host_fits:
        found.append(f"it takes {three(plan.main_memory / GIB)} GiB of main memory, {_left(machine.host_bytes)}")
    if not plan.disk_fits:
        found.append(f"checkpoints take {three(plan.disk.total / GIB)} GiB of disk, {_left(plan.disk.free)}")
    return found


def _where(plan: Plan) -> str:
    return f"{'on' if plan.machine.gpus or not plan.machine.here else 'into'} {plan.machine}"


def _left(bytes_: int) -> str:
    return f"where {three(bytes_ / GIB)} are free"


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


def _rows(title: str, heads: Sequence[str], columns: Sequence[Mapping[str, int]], unit: int) -> list[str]:
    """Returns a title, a line for each name that has bytes in some column, and their sums."""
    lines = [f"{title:<{NAMES + 2}}" + "".join(f"{head:>{FIGURE}}" for head in heads)]
    for name in columns[0]:
        # What the table would show as zero is left out; it is in the sum.
        if max(column[name] for column in columns) >= 0.0005 * unit:
            lines.append(
                f"  {name:<{NAMES}}" + "".join(f"{_figure(column[name], unit):>{FIGURE}}" for column in columns)
            )
    sums = [sum(column.values()) for column in columns]
    return [*lines, f"  {'total':<{NAMES}}" + "".join(f"{_figure(bytes_, unit):>{FIGURE}}" for bytes_ in sums)]


def _figure(bytes_: int, unit: int) -> str:
    return three(bytes_ / unit) if bytes_ >= 0.0005 * unit else "-"


def _engine_lines(plan: Plan, unit: int, unit_name: str) -> list[str]:
    made, need = plan.settings, plan.engine
    several = made.engines > 1
    whose = f"{'server' if made.engine_place == 'server' else 'engine'} GPU"
    where = f"on each {whose} (engine.tensor_parallel_size={made.engine.tensor_parallel_size})"
    title = f"{unit_name} {where if plan.machine.gpus else 'of main memory for the engine'}"
    lines = _rows(title, [], [need.rows | {_cache_name(plan): max(need.kv_bytes, 0)}], unit)
    typical = [(f"engine.max_model_len={need.max_model_len}", need.max_model_len)]
    if made.prompt_tokens is not None:
        words = f"a prompt of {made.prompt_tokens} + sampling.max_tokens={made.max_tokens}"
        typical.append((words, made.prompt_tokens + made.max_tokens))
    whole = f" of each of {made.engines}" if several else ""
    lines.append(f"  the KV cache{whole} holds {need.tokens:,} tokens, for so many requests at once:")
    return lines + [f"    {need.in_flight(tokens):>9,} of {words}" for words, tokens in typical]


def _cache_name(plan: Plan) -> str:
    engine = plan.settings.engine
    if engine.kv_cache_bytes is not None or not plan.machine.gpus:
        return "KV cache (engine.kv_cache_bytes)"
    return f"KV cache (what gpu_memory_utilization={engine.gpu_memory_utilization:g} leaves)"


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of settings, and what comes of it."""

    words: str  # what to add to the command line, or to do
    result: str  # what that brings
    enough: bool  # whether what was short then fits


def advice(plan: Plan) -> list[Advice]:
    """Returns the changes for all that does not fit, the cheapest first. Each is tried alone, but for those that say "with"."""
    found: list[Advice] = []
    if plan.machine.gpus:
        if not plan.training_fits:
            found += _training(plan)
        if not plan.engine_fits:
            found += _engine(plan)
    elif not plan.host_fits:
        found += _memory(plan)
    if not plan.disk_fits:
        found += _disk(plan)
    return found


def _changed(plan: Plan, **settings) -> Plan:
    return replace(plan, settings=replace(plan.settings, **settings))


def _gib(bytes_: float) -> str:
    return f"{bytes_ / GIB:,.1f} GiB"


def _cheap(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields the changes that cost time, and nothing else, each with those before it."""
    words: list[str] = []
    if not plan.settings.activation_checkpointing:
        words.append("activation_checkpointing=True")
        plan = _changed(plan, activation_checkpointing=True)
        yield words[-1], plan
    shortest = plan.settings.max_model_len
    if plan.settings.row_tokens > shortest:
        words.append(f"row_tokens={shortest}")
        yield " ".join(words), _changed(plan, row_tokens=shortest)


def _training(plan: Plan) -> list[Advice]:
    limit, nodes, found = plan.machine.gpu_bytes, plan.machine.nodes, []

    def tried(words: str, changed: Plan) -> Advice:
        total = changed.total()
        return Advice(words, f"{_gib(total)} on each GPU", total <= limit)

    found += _sharing(plan)
    if (plan.settings.shard_within or plan.trainers) < plan.trainers:
        found.append(tried("ranks.shard_within=null", _changed(plan, shard_within=None)))
    found += [tried(words, changed) for words, changed in _cheap(plan)]
    cheapest = list(_cheap(plan))
    for words, base in [("", plan), *cheapest[-1:]]:
        number = next((n for n in range(plan.trainers + nodes, MOST_GPUS + 1, nodes) if base.total(n) <= limit), None)
        if number is not None:
            more = replace(base, trainers=number)
            title = f"{number} GPUs that train{f', with {words}' if words else ''} ({more.gpus} in all)"
            found.append(tried(title, more))
    return found + [tried(words, changed) for words, changed in _adapters(plan)]


def _adapters(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields what adapters in place of all weights would take, with the changes that cost time alone."""
    cheapest = list(_cheap(plan))
    words, base = cheapest[-1] if cheapest else ("", plan)
    if plan.settings.sizes.frozen:
        return
    for title, nf4 in (("adapters (docs/lora.md)", False), ("adapters over NF4 (QLoRA)", True)):
        changed = _changed(base, sizes=plan.settings.sizes.with_adapters(nf4), publishes_all=False)
        yield f"{title}{f', with {words}' if words else ''}", changed


def _sharing(plan: Plan) -> Iterator[Advice]:
    """Yields what to do where the engine is on the trainer's GPU."""
    limit, engine = plan.machine.gpu_bytes, plan.settings.engine
    if plan.settings.engine_place not in ("shared", "sleeps"):
        return
    for share in UTILIZATIONS:
        if engine.kv_cache_bytes is None and share < engine.gpu_memory_utilization:
            changed = _changed(plan, engine=replace(engine, gpu_memory_utilization=share))
            if changed.total() <= limit and changed.engine_fits:
                yield Advice(f"engine.gpu_memory_utilization={share:g}", f"{_gib(changed.total())} on each GPU", True)
                break
    if plan.settings.engine_place == "shared":
        changed = _changed(plan, engine=replace(engine, sleep=True, kv_on_publish="recompute"))
        words = "engine.sleep=true, with staleness=0"
        yield Advice(words, f"{_gib(changed.total())} on each GPU", changed.total() <= limit)
    gpus = plan.machine.gpus
    names = ",".join(str(number) for number in range(gpus, gpus + engine.tensor_parallel_size))
    changed = _changed(plan, engine=replace(engine, sleep=False, devices=names))
    words = f"GPUs more: {engine.tensor_parallel_size}, which engine.devices names"
    yield Advice(words, f"{_gib(changed.total())} on each GPU that trains", changed.total() <= limit)


def _engine(plan: Plan) -> Iterator[Advice]:
    need, engine = plan.engine, plan.settings.engine

    def tried(words: str, **settings) -> Advice:
        changed = _changed(plan, engine=replace(engine, **settings))
        return Advice(words, f"a KV cache of {changed.engine.tokens:,} tokens", changed.engine_fits)

    longest = plan.settings.max_tokens + (plan.settings.prompt_tokens or 0)
    if longest <= need.tokens < engine.max_model_len:
        yield tried(f"engine.max_model_len={need.tokens}", max_model_len=need.tokens)
    if engine.kv_cache_bytes is None and engine.gpu_memory_utilization < UTILIZATIONS[0] and not engine.sleep:
        share = UTILIZATIONS[0]
        yield tried(f"engine.gpu_memory_utilization={share:g}", gpu_memory_utilization=share)
    for gpus in range(engine.tensor_parallel_size + 1, plan.settings.sizes.heads + 1):
        # vLLM deals whole heads out to its GPUs.
        if plan.settings.sizes.heads % gpus == 0:
            made = plan.settings
            fewer, rest = divmod(made.engine_gpus, gpus) if made.engine_place == "own" else (0, 0)
            where = f"so {fewer} engines in place of {made.engines}" if fewer and not rest else f"on {gpus} GPUs"
            more = tried(f"engine.tensor_parallel_size={gpus}, {where}", tensor_parallel_size=gpus)
            if more.enough:
                yield more
                break


def _memory(plan: Plan) -> Iterator[Advice]:
    """Yields what to do where a CPU has too little main memory."""
    limit, engine = plan.machine.host_bytes, plan.settings.engine
    if engine is not None and engine.kv_cache_bytes is not None:
        less = replace(engine, kv_cache_bytes=engine.kv_cache_bytes // 2)
        changed = _changed(plan, engine=less)
        if changed.engine_fits:
            words = f"engine.kv_cache_bytes={less.kv_cache_bytes}"
            yield Advice(words, f"{_gib(changed.main_memory)} of main memory", changed.main_memory <= limit)
    for words, changed in (*_cheap(plan), *_adapters(plan)):
        yield Advice(words, f"{_gib(changed.main_memory)} of main memory", changed.main_memory <= limit)


def _disk(plan: Plan) -> Iterator[Advice]:
    kept = plan.settings.checkpoints
    for words, fields in (
        ("checkpoints.save_optimizer=false", {"save_optimizer": False}),
        ("checkpoints.keep_last=1", {"keep_last": 1}),
        ("checkpoints.save_optimizer=false checkpoints.keep_last=1", {"save_optimizer": False, "keep_last": 1}),
    ):
        changed = _changed(plan, checkpoints=replace(kept, **fields))
        if changed.disk.total < plan.disk.total:
            yield Advice(words, f"{_gib(changed.disk.total)} of checkpoints", changed.disk_fits)
    yield Advice("output_dir on another disk", f"needs {_gib(plan.disk.total)} there", True)

"""What to change where a plan does not fit, the cheapest first, each with what it would bring."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtune_ext.policy.memory import GIB
from torchtune_ext.training.plan.plan import Plan

MOST_GPUS = 128  # more are not tried
UTILIZATIONS = [share / 100 for share in range(90, 5, -5)]  # of gpu_memory_utilization


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

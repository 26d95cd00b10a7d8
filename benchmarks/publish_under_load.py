"""Correctness of weight sync under load: no restart, no mixed weights, no preemption that a pause caused.

Also measures the latency of a canary with queued requests.

    python benchmarks/publish_under_load.py [--weight-syncs 200] [--requests 5000] [--kills 0]

A tiny random model generates. All requests are queued at once, and queued again after all have completed, and weights are
published each time a fixed fraction has completed. The engine computes a checksum of every loaded tensor
(`Engine.checksums`), which must match the version of its label. `--kills` kills the engine that many times at the worst
moments: during a copy, so that the restarted engine finds a half-written buffer, and with the next weight sync starting
exactly while that engine loads. The same number of restarts is then expected. At the end a canary of the recipes' size
follows each of five weight syncs of an idle engine, and of five with all requests queued again; "as a sample" is the same
without its priority. The exit status is 1 after a failed check.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchtune_ext.sampling.engine import BACKENDS, Engine, EngineConfig, Priority, PublishReport, SamplingConfig
from torchtune_ext.sampling.types import CANARY_REQUESTS
from torchtune_ext.sampling.vllm_backend import ProcessBackend
from torchtune_ext.sampling.weight_buffer import checksum

VOCABULARY, PROMPT, TOKENS = 512, 24, 48
CANARIES = 5
SAMPLING = SamplingConfig(max_tokens=TOKENS, seed=1)
WAIT_S = 120.0  # seconds; less than a test gives the whole of this


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=1, tie_word_embeddings=True, **shape)
    return Qwen2ForCausalLM(config).float()


@dataclass
class Log:
    """Loads of the engines, and events for the moments of the kills."""

    # (requested version and label, checksums of the tensors)
    loads: list[tuple[int, dict[str, int | None]]] = field(default_factory=list)
    launches: int = 0
    slow_restart: bool = False  # the next engine that is started again loads slowly
    loading: threading.Event = field(default_factory=threading.Event)  # it is about to
    loaded: threading.Event = field(default_factory=threading.Event)


LOG = Log()


class RecordedBackend(ProcessBackend):
    """An engine that records its loads."""

    fresh = True

    async def launch(self) -> None:
        await super().launch()
        LOG.launches += 1

    async def load(self, buffers, version):
        if buffers and LOG.slow_restart and self.fresh:
            LOG.loading.set()
            await asyncio.sleep(1.0)
        self.fresh = False
        times = await super().load(buffers, version)
        if buffers:
            (checksums,) = await self.checksums()
            LOG.loads.append((version, checksums))
        LOG.loaded.set()
        return times


def wait(condition) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError("the engine did not get there")
        time.sleep(0.005)


class Publisher:
    """Publishes consecutive versions; every tensor differs between versions."""

    def __init__(self, engine: Engine, model: Qwen2ForCausalLM):
        self.engine, self.model = engine, model
        self.version = 0
        self.reports: list[PublishReport] = []
        self.sent: dict[int, dict[str, int]] = {}  # version -> checksums
        self.missed: list[str] = []  # strikes that did not come at their moment

    def weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.named_parameters():
            yield name, tensor.detach() + 1e-4 * version

    def publish(self, half_way=None) -> None:
        """Publish the next version. `half_way` is called after half of the tensors are copied."""
        self.version += 1
        version = self.version
        self.sent[version] = {name: checksum(tensor) for name, tensor in self.weights(version)}

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            named = list(self.weights(version))
            for index, pair in enumerate(named):
                if half_way is not None and index == len(named) // 2:
                    half_way()
                yield pair

        self.reports.append(self.engine.publish(tensors(), version))

    def kill_in_the_copy(self) -> None:
        """Kill the engine so that its restart loads while the buffer is half written."""

        def strike() -> None:
            launches = LOG.launches
            self.kill()
            wait(lambda: LOG.launches > launches)
            time.sleep(0.5)  # it would load now, if nothing kept it

        self.publish(strike)

    def kill_and_copy_in_the_load(self) -> None:
        """Kill the engine and start a weight sync while its restart loads the previous one."""
        LOG.slow_restart = True
        LOG.loading.clear()
        LOG.loaded.clear()
        self.kill()
        if not LOG.loading.wait(WAIT_S):
            self.missed.append("no restarted engine began to load")

        def strike() -> None:  # the copy stands still, half written, until the engine has loaded
            if not LOG.loaded.wait(10.0):
                self.missed.append("the engine had not loaded when the copy continued")

        self.publish(strike)
        LOG.slow_restart = False

    def kill(self) -> None:
        # After a completed request, since several failures in a row are final.
        before = self.engine.stats().completed
        wait(lambda: self.engine.stats().completed > before)
        os.killpg(self.engine._pool.replicas[0].backend.process_group, signal.SIGKILL)


def time_canaries(engine: Engine, publisher: Publisher, prompts: list[list[int]]) -> dict[str, str]:
    """Return the table rows with the latency of a canary without and with queued requests.

    The canary has 8 completions of 16 tokens for each of 4 prompts, as in training/publish.py.
    """
    few = np.random.default_rng(1).integers(0, VOCABULARY, (CANARY_REQUESTS // 8, PROMPT)).tolist()

    def milliseconds(priority: Priority) -> float:
        publisher.publish()
        began = time.monotonic()
        engine.sample(few, 8, SamplingConfig(max_tokens=16, seed=0), priority=priority)
        return 1e3 * (time.monotonic() - began)

    idle = [milliseconds(Priority.CANARY) for _ in range(CANARIES)]
    queued = [engine.submit(prompt, 4, SamplingConfig(max_tokens=TOKENS)) for prompt in prompts]
    lags = [milliseconds(Priority.CANARY) for _ in range(CANARIES)]
    left = sum(not group.done() for group in queued) * 4
    as_sample = milliseconds(Priority.SAMPLE)
    return {
        "canary in an idle engine, ms, median and max": f"{np.median(idle):.0f}, {max(idle):.0f}",
        f"canary with {left} to {len(queued) * 4} requests queued": f"{np.median(lags):.0f}, {max(lags):.0f}",
        f"the same as a sample, with {left} queued": f"{as_sample:.0f}",
    }


def run(weight_syncs: int, requests: int, kills: int, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the table and the failed checks."""
    model = make_model()
    model.save_pretrained(folder / "model")
    BACKENDS["vllm"] = RecordedBackend
    # The cache has room for all requests of a step: every counted preemption comes from a pause.
    config = EngineConfig(dtype="float32", max_model_len=256, kv_cache_bytes=256 << 20)
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (requests // 4, PROMPT)).tolist()
    kinds: Counter[int] = Counter()
    queued, answered, failed = [], [], []
    over = threading.Event()

    with Engine(str(folder / "model"), config, str(folder)) as engine:
        engine.start()
        engine.wait_ready()
        publisher = Publisher(engine, model)
        publisher.publish()

        def sample() -> None:
            try:
                with suppress(CancelledError):
                    while not over.is_set():
                        queued[:] = [engine.submit(p, 4, SAMPLING, seed_index=i) for i, p in enumerate(prompts)]
                        for group in queued:
                            answered.extend(group.result())
            except Exception as error:  # noqa: BLE001 (reported at the end)
                failed.append(repr(error))

        began = time.monotonic()
        sampler = threading.Thread(target=sample)
        sampler.start()
        strikes = {round((k + 1) * weight_syncs / (kills + 1)): k for k in range(kills)}
        for number in range(1, weight_syncs):
            wait(lambda number=number: failed or engine.stats().completed >= number * requests // weight_syncs)
            if number not in strikes:
                publisher.publish()
            elif strikes[number] % 2 == 0:
                publisher.kill_in_the_copy()
            else:
                publisher.kill_and_copy_in_the_load()
        over.set()
        if len(answered) >= requests:  # else the first of all requests are still under way
            for group in queued:
                group.cancel()
        sampler.join(WAIT_S)
        seconds, stats = time.monotonic() - began, engine.stats()
        reports = list(publisher.reports)
        canaries = time_canaries(engine, publisher, prompts)

    for completion in answered:
        kinds[len(set(completion.versions.tolist()))] += len(completion.tokens)
    wrong = [version for version, checksums in LOG.loads if publisher.sent[version] != checksums]
    unknown = {v for completion in answered for v in completion.versions.tolist()} - set(publisher.sent)
    pauses = np.array([report.pause_s for report in reports])
    table = {
        "weight syncs": f"{len(reports)}",
        "requests answered": f"{len(answered)} in {seconds:.0f} s",
        "engines killed": f"{kills}",
        "restarts": f"{stats.restarts}",
        "loads whose checksums were compared": f"{len(LOG.loads)}",
        "mixed loads": f"{len(wrong)}",
        "preemptions counted": f"{stats.preemptions}",
        "pause, ms, median": f"{1e3 * np.median(pauses):.0f}",
        "pause, ms, max": f"{1e3 * pauses.max():.0f}",
        "limit of requests at the end": f"{stats.concurrency}",
    }
    table |= canaries
    table |= {f"tokens in completions of {k} version{'s' * (k > 1)}": f"{kinds[k]}" for k in sorted(kinds)}
    checks = {
        f"sample failed: {failed}": failed,
        f"{len(answered)} of {len(prompts) * 4} requests answered": len(answered) < len(prompts) * 4,
        f"{stats.restarts} restarts, {kills} kills": stats.restarts != kills,
        f"loads that are not what their label says: {wrong[:3]}": wrong,
        f"only {len(LOG.loads)} loads recorded": len(LOG.loads) < weight_syncs,
        f"tokens of versions that were never published: {sorted(unknown)}": unknown,
        f"{stats.preemptions} preemptions counted, with room for all": stats.preemptions,
        f"strikes that missed their moment: {publisher.missed}": publisher.missed,
        "no completion spans a weight sync": sum(kinds.values()) == kinds[1],
    }
    return table, [text for text, bad in checks.items() if bad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weight-syncs", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000, help="in groups of 4")
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table, wrong = run(args.weight_syncs, args.requests, args.kills, Path(folder))
    print("| | |\n|---|---|")
    for name, value in table.items():
        print(f"| {name} | {value} |")
    for text in wrong:
        print(f"WRONG: {text}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""An engine whose completions the test releases."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from helpers.letter_tokens import LetterTokenizer, completion
from helpers.loop_engine import LoopEngine, ManualRequest, settle
from helpers.waiting import wait_until
from torchtune_ext.pipeline.source import sampling_seed

SEED, SAMPLES = 3, 2
# Seed -> (step, refill round).
SEED_ORIGINS = {sampling_seed(SEED, step, refill): (step, refill) for step in range(200) for refill in range(16)}


@dataclass
class GroupRequest:
    """A requested group. `step` and `refill` come from its seed."""

    problem: str
    step: int
    refill: int
    seed_index: int
    samples: list[ManualRequest] = field(compare=False, default_factory=list)
    future: Future | None = field(compare=False, default=None)  # of the group's coroutine

    def complete(self, *texts):
        for sample, text in enumerate(texts or ["xx"] * SAMPLES):
            self.complete_sample(sample, text)

    def complete_sample(self, sample, text):
        self.samples[sample].complete(completion(text))


class ManualEngine(LoopEngine):
    """An engine that completes requests when the test says so, or, with `completes_immediately`, immediately."""

    def __init__(self, completes_immediately=False):
        super().__init__()
        self.requests, self.completes_immediately = [], completes_immediately
        self._groups = {}  # by the stream's own object

    def schedule(self, work, priority):
        future = super().schedule(work, priority)
        self.requests[-1].future = future
        return future

    async def generate(self, request, affinity_key=None):
        assert request.n == SAMPLES and request.sampling.max_tokens == 8
        if affinity_key not in self._groups:
            step, refill = SEED_ORIGINS[request.sampling.seed]
            group = GroupRequest(LetterTokenizer().decode(request.prompt), step, refill, request.seed_index)
            self._groups[affinity_key] = group
            self.requests.append(group)
        if self.completes_immediately:
            return completion("xx")
        samples = self._groups[affinity_key].samples
        samples.append(ManualRequest())
        return await samples[-1].wait()


def wait_for_groups(stream, *numbers):
    """Wait until these groups are finished, but not yet returned by `wait_next`."""
    wait_until(lambda: all(stream._pending[number].future.done() for number in numbers))
    settle()  # the stream has been notified

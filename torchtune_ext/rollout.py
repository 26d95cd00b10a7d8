"""Problems -> graded groups: prompt ids, completions from the sampler, texts, outcomes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome, log_failures
from torchtune_ext.groups import Group, Sample
from torchtune_ext.sampling.engine import Completion, Engine, EngineFailed, Priority, SamplingConfig
from torchtune_ext.tasks.task import Problem

# Python acts on a Ctrl-C in the main thread alone, but the kernel may give it to another: so often a wait looks for one.
WAKE_S = 1.0


class Watcher(Protocol):
    """Who wants to see samples as they come: a progress bar. The engine's thread calls `on_completion`, whoever takes the
    groups calls `add_reward`."""

    def on_completion(self, problem: int, sample: int, completion: Completion) -> None: ...

    def add_reward(self, reward: float) -> None: ...


def sample_groups(
    problems: Sequence[Problem],
    samples_per_prompt: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader,
    watcher: Watcher | None = None,
    watch: Callable[[str], AbstractContextManager] = nullcontext,
    priority: Priority = Priority.SAMPLE,
) -> Iterator[tuple[int, Group]]:
    """Samples `samples_per_prompt` completions of every problem and grades each while others are still sampled, or, with a
    grader that compares, each group when it is whole.

    The engine samples as fast as it can, whoever takes the groups; texts reach the graders while somebody waits for the next
    group. A grader reads the assistant's turn: where the prompt ends in an open "<think>", the text begins with it. `watch`
    gives a context for "generate", while the engine samples, and one for "grade", while only grades are waited for.

    Yields:
        (index of the problem, its group without advantages) as soon as the last sample of the group is graded. `in_order`
        makes the batch of them. An iterator that is closed early ends what is still sampled and graded.

    Raises:
        What `Engine.submit` and `Grader.submit` raise, ValueError for instance, before the first group; EngineFailed when the
        engine is lost or closed.
    """
    groups = [_Unfinished(problem, tokenizer, samples_per_prompt) for problem in problems]
    events: SimpleQueue[tuple[int, int, Completion | Future] | Future] = SimpleQueue()
    grading: list[Future] = []

    def on_completion(p: int, s: int, completion: Completion) -> None:
        events.put((p, s, completion))
        if watcher is not None:
            watcher.on_completion(p, s, completion)

    def when_graded(p: int, s: int, future: Future) -> None:
        grading.append(future)
        future.add_done_callback(lambda done: events.put((p, s, done)))

    def take(p: int, s: int, what: Completion | Future) -> int:
        """Hands a completion to the grader, or notes what the grader says. Returns the index of the group."""
        group = groups[p]
        if isinstance(what, Completion):
            text = group.add(s, what)
            if not grader.compares:
                when_graded(p, s, grader.submit(group.problem, text))
            elif group.drawn:
                when_graded(p, 0, grader.submit_group(group.problem, group.texts))
            return p
        found = what.result()
        for place, outcome in enumerate(found if grader.compares else [found], start=s):
            group.outcomes[place] = outcome
            if watcher is not None and outcome.score is not None:
                watcher.add_reward(outcome.score.reward)
        return p

    drawing: list[Future] = []
    try:
        for p, group in enumerate(groups):
            drawn = engine.submit(group.prompt, samples_per_prompt, sampling, partial(on_completion, p), p, priority)
            drawn.add_done_callback(events.put)
            drawing.append(drawn)
        undrawn, unfinished = len(groups), set(range(len(groups)))
        while unfinished or undrawn:  # so that nothing is drawn any more when the iterator ends
            with watch("generate" if undrawn else "grade"):
                event = _next(events)
                if isinstance(event, Future):
                    # All completions of a group are there, or this raises what went wrong.
                    _require(event)
                    undrawn -= 1
                    continue
                p = take(*event)
            if groups[p].graded:
                unfinished.remove(p)
                yield p, groups[p].finish()
    finally:
        # What nobody wants any more (an error, Ctrl-C, an iterator that was closed) does not hold up what comes next.
        for future in (*drawing, *grading):
            future.cancel()
    log_failures([outcome for group in groups for outcome in group.outcomes])


def in_order(stream: Iterable[tuple[int, Group]]) -> list[Group]:
    """The batch: all groups of a stream, in the order of their problems."""
    return [group for _, group in sorted(stream, key=itemgetter(0))]


class _Unfinished:
    """A group on its way: its completions arrive, then their outcomes, each in any order."""

    def __init__(self, problem: Problem, tokenizer: ChatTokenizer, samples: int):
        self.problem, self._decode = problem, tokenizer.decode
        self.prompt = tokenizer.prompt_ids(list(problem.messages))
        self._opened = tokenizer.opened_thought(self.prompt)
        self._completions: list[Completion | None] = [None] * samples
        self.texts = [""] * samples
        self.outcomes: list[Outcome | None] = [None] * samples

    def add(self, sample: int, completion: Completion) -> str:
        """Takes a completion and returns its text."""
        self._completions[sample] = completion
        self.texts[sample] = self._opened + self._decode(completion.tokens.tolist())
        return self.texts[sample]

    @property
    def drawn(self) -> bool:
        return all(completion is not None for completion in self._completions)

    @property
    def graded(self) -> bool:
        return all(outcome is not None for outcome in self.outcomes)

    def finish(self) -> Group:
        found = zip(self._completions, self.texts, self.outcomes, strict=True)
        samples = tuple(Sample(completion, text=text, outcome=outcome) for completion, text, outcome in found)
        return Group(self.problem, np.asarray(self.prompt, dtype=np.int32), samples)


def _next(events: SimpleQueue) -> tuple | Future:
    while True:
        try:
            return events.get(timeout=WAKE_S)
        except Empty:
            pass


def _require(drawn: Future) -> None:
    try:
        drawn.result()
    except CancelledError:  # another thread closed the engine
        raise EngineFailed("the engine was closed") from None

"""Problems -> graded groups: prompt ids, completions from the sampler, texts, outcomes."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome, Ungraded, log_failures
from torchtune_ext.grading.environments import Environments
from torchtune_ext.pipeline.episodes import Episode
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.run.errors import Late, text_of
from torchtune_ext.sampling.calls import mixed_seed
from torchtune_ext.sampling.engine import Engine, EngineFailed, Priority, SamplingConfig
from torchtune_ext.sampling.records import Completion
from torchtune_ext.tasks.task import Problem, Score, Turn

log = logging.getLogger(__name__)

# Seconds after which a wait in the main thread wakes up. Python handles Ctrl-C only there, but the kernel may deliver
# the signal to another thread, and then the wait goes on.
WAKE_S = 1.0
CLOSE_S = 10.0  # seconds that the thread of a stream has to end
DEADLINE_S = 1800.0  # seconds without any completion or grade after which a wait is given up
NAMED = 5  # groups that a message names


class Watcher(Protocol):
    """Shows samples as they come, for instance as a progress bar. The stream's thread calls it."""

    def add(self, count: int, tokens: int) -> None: ...

    def add_reward(self, reward: float) -> None: ...


class Unfinished:
    """A group in progress, whose completions and outcomes arrive in any order."""

    def __init__(
        self,
        number: int,
        problem: Problem,
        tokenizer: ChatTokenizer,
        samples: int,
        sampling: SamplingConfig,
        place: int,
        priority: Priority,
        environments: Environments | None,
    ):
        self.number, self.problem, self._decode = number, problem, tokenizer.decode
        self.sampling, self.place, self.priority = sampling, place, priority  # as `GroupStream.submit` has them
        self.prompt = tokenizer.prompt_ids(problem.messages, problem.tools)
        # If the prompt ends in an open "<think>", the text for graders and people begins with it.
        self._opened = tokenizer.opened_thought(self.prompt)
        self.samples: list[Sample | None] = [None] * samples
        # One for each sample, if the samples are conversations.
        self.episodes = [Episode(self.prompt, self._opened) for _ in range(samples)] if environments else []
        self._environments = environments
        self.futures: list[Future] = []  # the engine's and the grader's
        self.drawing = 0  # the engine's futures that are not done
        self.submitted = time.monotonic()
        self.cancelled = False

    def add(self, place: int, completion: Completion) -> str:
        """Takes a completion and returns its text."""
        sample = Sample(completion, text=self._opened + self._decode(completion.tokens.tolist()))
        self.samples[place] = sample
        return sample.text

    def grade(self, place: int, outcome: Outcome) -> None:
        sample = self.samples[place]
        assert sample is not None  # only what has arrived is graded
        self.samples[place] = replace(sample, outcome=outcome)

    def leave(self, place: int) -> None:
        """Gives the process of a conversation back."""
        if (seat := self.episodes[place].seat) is not None and self._environments is not None:
            self._environments.leave(seat)

    def cancel(self) -> None:
        self.cancelled = True
        # Canceling the future of a seat is not enough: the seat may have a process by now, which it has to give back.
        for place in range(len(self.episodes)):
            self.leave(place)
        for future in list(self.futures):
            future.cancel()

    @property
    def drawn(self) -> bool:
        """Whether the engine has nothing to do for the group now. An environment's answer may change that."""
        return not self.drawing

    @property
    def arrived(self) -> list[Sample]:
        """The samples whose completions have arrived."""
        return [sample for sample in self.samples if sample is not None]

    @property
    def ungraded(self) -> int:
        """How many samples have no outcome yet."""
        return len(self.samples) - sum(sample.outcome is not None for sample in self.arrived)

    @property
    def tokens(self) -> int:
        """The sampled tokens of the completions, or turns of conversations, that have arrived."""
        if self.episodes:
            return sum(episode.tokens for episode in self.episodes)
        return sum(len(sample.completion.tokens) for sample in self.arrived)

    @property
    def missing(self) -> str:
        since = f"submitted {time.monotonic() - self.submitted:.0f} s ago"
        if self.episodes:
            open_ = [episode for episode, sample in zip(self.episodes, self.samples, strict=True) if sample is None]
            # A turn that has no answer yet waits for a process of its environment, or for what that says.
            asked = [each for each in open_ if each.messages and each.message["role"] == "assistant"]
            seated = sum(each.seat is not None and each.seat.process.done() for each in asked)
            return (
                f"{since}, {len(open_)} of {len(self.samples)} conversations are not over: {len(open_) - len(asked)} wait for "
                f"the engine, {len(asked) - seated} for a free environment process, {seated} for the environment's answer"
            )
        if undrawn := self.samples.count(None):
            return f"{since}, the engine has not ended {undrawn} of {len(self.samples)} completions"
        return f"{since}, {self.ungraded} of {len(self.samples)} texts are not graded"

    def finish(self) -> Group:
        return Group(self.problem, np.asarray(self.prompt, dtype=np.int32), tuple(self.arrived))


class GroupStream:
    """Owns groups from `submit` to `take`: the engine samples them, and their completions are graded as they come.

    With `Environments` as the grader, a completion is the first turn of a conversation (`episodes.py`), and a group is
    finished when all its conversations are over.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        grader: Grader,
        watcher: Watcher | None = None,
    ):
        # The watcher, and the number below which it watches groups.
        self._watched = None if watcher is None else (watcher, math.inf)
        self.last_sign = time.monotonic()  # when the last completion or grade came
        self._engine, self._tokenizer, self._grader = engine, tokenizer, grader
        self._differs = False  # whether the log says that a context differs from the template's text
        # Only the caller's thread changes these two. A group goes from the first to the second in `next`.
        self._groups: dict[int, Unfinished] = {}
        self.finished: dict[int, Group] = {}  # without advantages, until they are taken
        # The threads of the engine and of the graders only put events into this queue, so nothing holds them up.
        self._events: SimpleQueue[tuple[Unfinished, int | None, Completion | Future] | None] = SimpleQueue()
        self._finished: SimpleQueue[Unfinished | Exception | None] = SimpleQueue()
        # This thread handles the events, so that groups advance while the trainer computes and does not call `next`.
        self._thread = Thread(target=self._work, name="torchtune-ext-groups", daemon=True)
        self._thread.start()

    @property
    def grader(self) -> Grader:
        """The grader of the texts."""
        return self._grader

    def drawing(self, numbers: Collection[int] | None = None) -> bool:
        """Tells whether the engine still samples for any group, or for any of these."""
        return any(not group.drawn for number, group in self._groups.items() if numbers is None or number in numbers)

    def submit(
        self,
        number: int,
        problem: Problem,
        samples: int,
        sampling: SamplingConfig,
        place: int,
        priority: Priority = Priority.SAMPLE,
    ) -> None:
        """Begins to sample a group.

        Args:
            number: the name of the group for `next`, `take` and `cancel`.
            samples: how many completions of the prompt to sample.
            place: the number of the group among those with the same `sampling.seed` (`Engine.submit`).

        Raises:
            What `Engine.submit` raises, ValueError for instance.
        """
        environments = self._grader if isinstance(self._grader, Environments) else None
        group = Unfinished(number, problem, self._tokenizer, samples, sampling, place, priority, environments)
        self._groups[number] = group
        self.last_sign = time.monotonic()
        try:
            self._draw(group, group.prompt, samples, sampling, place, priority)
        except BaseException:
            del self._groups[number]
            raise

    def next(
        self,
        watch: Callable[[str], AbstractContextManager] = nullcontext,
        within_s: float = math.inf,
        missing: Collection[int] | None = None,
    ) -> int | None:
        """Waits until a group is finished.

        Args:
            watch: returns a context for the wait: "generate" while the engine samples, "grade" while only grades lack.
            within_s: the most seconds to wait.
            missing: the numbers of the groups that decide which of the two it is; None: all.

        Returns:
            Its number for `take`, or None when the time is over.

        Raises:
            What `Grader.submit` and the task raise; EngineFailed if the engine is lost or closed.
        """
        end = time.monotonic() + within_s
        while True:
            with watch("generate" if self.drawing(missing) else "grade"):
                try:
                    group = self._finished.get(timeout=max(0.0, min(end - time.monotonic(), WAKE_S)))
                except Empty:
                    if time.monotonic() >= end:
                        return None
                    continue
            if isinstance(group, Exception):
                raise group
            # None only wakes this loop when a group is sampled. A finished group may have been canceled meanwhile.
            if group is not None and not group.cancelled:
                self.finished[group.number] = self._groups.pop(group.number).finish()
                return group.number

    def take(self, number: int) -> Group:
        """Hands a finished group out."""
        return self.finished.pop(number)

    def cancel(self, number: int) -> int:
        """Ends a group, finished or not. Returns how many of its tokens were sampled."""
        if (finished := self.finished.pop(number, None)) is not None:
            return sum(len(sample.completion.sampled) for sample in finished.samples)
        group = self._groups.pop(number)
        group.cancel()
        return group.tokens

    @contextmanager
    def watched(self, watcher: Watcher | None, below: float = math.inf) -> Iterator[None]:
        """Shows `watcher` the samples of groups numbered under `below`, beginning with those that have come already."""
        # A sample that comes at this moment may count twice or not at all. A progress bar is not worth a lock.
        if watcher is not None:
            for number, finished in self.finished.items():
                if number < below:
                    tell(watcher, finished.samples)
            for number, group in self._groups.items():
                if number < below:
                    tell(watcher, group.arrived)
            self._watched = watcher, below
        try:
            yield
        finally:
            self._watched = None

    def missing(self, number: int) -> str:
        """Says when a group was submitted and what it still lacks, for messages."""
        return self._groups[number].missing

    def require_signs(
        self, begun: float, deadline_s: float, missing: Sequence[int], named: Callable[[int], str]
    ) -> None:
        """Raises TimeoutError if no completion or grade of any group has come for `deadline_s` seconds.

        Args:
            begun: when the wait began (`time.monotonic`).
            missing: numbers of the groups that are waited for.
            named: what the message calls a group.
        """
        # An evaluation may have used the engine before the wait, so the silence does not begin before the wait does.
        silent = time.monotonic() - max(self.last_sign, begun)
        if silent <= deadline_s:
            return
        listed = "; ".join(f"{named(number)}: {self.missing(number)}" for number in missing[:NAMED])
        more = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        count = "1 group is" if len(missing) == 1 else f"{len(missing)} groups are"
        raise Late(
            f"no completion and no grade came for {silent:.0f} s (rollouts.deadline_s={deadline_s:g}), while {count} waited "
            f"for: {listed}{more}. Look at engine.log and grader.log, or raise rollouts.deadline_s"
        )

    def close(self) -> None:
        """Ends all groups and the thread."""
        for number in list(self._groups):
            self.cancel(number)
        self._events.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the thread that hands texts to the graders did not end within %g s", CLOSE_S)

    def _watcher_of(self, group: Unfinished) -> Watcher | None:
        # The main thread may take the watcher away at any moment, so it is read once.
        watched = self._watched
        return watched[0] if watched is not None and group.number < watched[1] else None

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            group = event[0]
            if group.cancelled:
                continue
            self.last_sign = time.monotonic()
            try:
                self._take(*event)
            except Exception as error:  # noqa: BLE001 (it is raised again)
                # `next` raises it in the caller's thread.
                self._finished.put(error)
                continue
            if group.drawn and not group.ungraded:
                self._finished.put(group)

    def _draw(
        self,
        group: Unfinished,
        prompt: Sequence[int],
        samples: int,
        sampling: SamplingConfig,
        number: int,
        priority: Priority,
        first: int = 0,
    ) -> None:
        """Lets the engine sample completions of a group, which go to its places from `first` on."""

        # These are all first completions, or the next turn of one conversation.
        def arrived(index: int, completion: Completion) -> None:
            self._events.put((group, first + index, completion))

        group.drawing += 1
        # The turns of a conversation go to the engine that has its earlier ones in the prefix cache.
        home = group if group.episodes else None
        drawing = self._engine.submit(prompt, samples, sampling, arrived, number, priority, home)
        group.futures.append(drawing)
        # Another thread may have canceled the group before the future was in its list.
        if group.cancelled:
            drawing.cancel()
        drawing.add_done_callback(lambda future: self._events.put((group, None, future)))

    def _take(self, group: Unfinished, place: int | None, what: Completion | Future) -> None:
        # A completion is a whole sample or a turn. A future without a place is the end of a draw. One with a place
        # holds outcomes, or in a conversation the process of a seat or an environment's answer.
        if isinstance(what, Completion):
            assert place is not None
            if group.episodes:
                self._take_turn(group, place, what)
            else:
                self._take_completion(group, place, what)
            return
        if place is None:
            try:
                what.result()
            except CancelledError:
                # Another thread closed the engine.
                raise EngineFailed("the engine was closed") from None
            group.drawing -= 1
            # None wakes `next`, which now may wait only for grades.
            if group.ungraded:
                self._finished.put(None)
        elif group.episodes:
            self._take_answer(group, place, what.result())
        else:
            for each, outcome in enumerate(what.result(), start=place):
                group.grade(each, outcome)
                self._watch_reward(group, outcome)

    def _take_completion(self, group: Unfinished, place: int, completion: Completion) -> None:
        text = group.add(place, completion)
        if (watcher := self._watcher_of(group)) is not None:
            watcher.add(1, len(completion.tokens))
        whole = None not in group.samples
        if not self._grader.compares:
            self._when_done(group, place, self._grader.submit(group.problem, text))
        elif whole:
            # A grader that compares samples needs all texts of a group at once.
            self._when_done(group, 0, self._grader.submit(group.problem, *(each.text for each in group.arrived)))

    @property
    def _environments(self) -> Environments:
        assert isinstance(self._grader, Environments)  # else there are no episodes
        return self._grader

    def _take_turn(self, group: Unfinished, place: int, completion: Completion) -> None:
        episode = group.episodes[place]
        episode.sampled(completion, self._tokenizer.decode(completion.tokens.tolist()))
        if (watcher := self._watcher_of(group)) is not None:
            watcher.add(0, len(completion.tokens))
        if completion.finish_reason != "stop":
            # The engine cut the turn, and the environment would answer half of it.
            self._end_episode(group, place, episode.over(completion.finish_reason))
        elif episode.seat is None:
            # A conversation takes a process only when it has a turn to be answered.
            seat = episode.seat = self._environments.seat()
            self._when_done(group, place, seat.process)
            # Another thread may have canceled the group before the episode had its seat.
            if group.cancelled:
                group.leave(place)
        else:
            self._when_done(group, place, self._environments.step(episode.seat, episode.message))

    def _take_answer(self, group: Unfinished, place: int, answer: int | Turn | Ungraded) -> None:
        """Continues a conversation that has got a process (its number), an answer, or a failure."""
        episode = group.episodes[place]
        if isinstance(answer, int):
            # All samples of a group get the same seed, so that they differ only by what the policy does.
            begin = group.problem, mixed_seed(group.sampling.seed or 0, group.place)
            assert episode.seat is not None  # it has a process
            self._when_done(group, place, self._environments.step(episode.seat, episode.message, begin))
            return
        if isinstance(answer, Ungraded):
            ending = "step_timeout" if answer.kind == "timed_out" else "environment_failed"
            self._end_episode(group, place, episode.over(ending, answer))
            return
        episode.answered(answer)
        if answer.done or episode.turns == self._environments.max_turns:
            self._end_episode(group, place, episode.over("completed" if answer.done else "max_turns"))
            return
        try:
            prompt = self._next_context(group.problem, episode, answer)
        except Exception as error:  # noqa: BLE001 (the template's and the tokenizer's code, on what an environment wrote)
            # This answer cannot be rendered or encoded, but those of other conversations may be.
            failure = Ungraded("infra_failed", f"its answer cannot be read: {text_of(error)}")
            self._end_episode(group, place, episode.over("environment_failed", failure))
            return
        # A row holds at least as much as the engine's context. What fits there with all its branches can be trained.
        if episode.places(prompt) + group.sampling.max_tokens > self._engine.config.max_model_len:
            self._end_episode(group, place, episode.over("context_overflow"))
            return
        episode.go_on(prompt, self._tokenizer.opened_thought(prompt))
        seed = group.sampling.seed
        # The seed of a later turn follows from its sample and its number, so it does not depend on which conversation
        # is faster.
        own = replace(group.sampling, seed=None if seed is None else mixed_seed(seed, group.place, place))
        # A later turn goes before new groups, while its context is still in the prefix cache.
        self._draw(group, prompt, 1, own, episode.turns, min(group.priority, Priority.TURN), place)

    def _next_context(self, problem: Problem, episode: Episode, answer: Turn) -> list[int]:
        """Returns the prompt ids of the next turn. Raises Mistake: the template cannot render the answer."""
        tokenizer, path = self._tokenizer, episode.path
        if tokenizer.history == "sampled":
            return [*path, *tokenizer.between_turns_ids(answer.messages, path[-1], problem.tools, problem.messages)]
        context = tokenizer.context_ids(problem.messages, episode.messages, episode.sampled_ids, problem.tools)
        if not self._differs and context != tokenizer.prompt_ids([*problem.messages, *episode.messages], problem.tools):
            self._differs = True
            log.info(
                "problem %r: the template's own text has other ids than were sampled, which stay as they were",
                problem.id,
            )
        return context

    def _end_episode(self, group: Unfinished, place: int, sample: Sample) -> None:
        # Another conversation can have the process before the rest of this group is over.
        group.leave(place)
        group.samples[place] = sample
        if (watcher := self._watcher_of(group)) is not None:
            watcher.add(1, 0)
        self._watch_reward(group, sample.outcome)

    def _watch_reward(self, group: Unfinished, outcome: Outcome | None) -> None:
        if (watcher := self._watcher_of(group)) is not None and isinstance(outcome, Score):
            watcher.add_reward(outcome.reward)

    def _when_done(self, group: Unfinished, place: int, future: Future) -> None:
        group.futures.append(future)
        future.add_done_callback(lambda future: self._events.put((group, place, future)))


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
    kind: str = "evaluation",
    deadline_s: float = DEADLINE_S,
) -> Iterator[tuple[int, Group]]:
    """Samples and grades `samples_per_prompt` completions of every problem (`GroupStream`).

    Yields:
        (index of the problem, its group without advantages) as groups finish. Closing the iterator ends the rest.

    Raises:
        What `GroupStream.submit` raises, before the first group, and what `GroupStream.next` raises.
        TimeoutError: no completion and no grade came for `deadline_s` seconds. The message names missing problems.
    """
    stream, outcomes = GroupStream(engine, tokenizer, grader, watcher), []
    try:
        for p, problem in enumerate(problems):
            stream.submit(p, problem, samples_per_prompt, sampling, p, priority)
        missing, begun = list(range(len(problems))), time.monotonic()
        while missing:
            stream.require_signs(begun, deadline_s, missing, lambda p: f"problem {problems[p].id!r}")
            if (p := stream.next(watch, WAKE_S)) is None:
                continue
            missing.remove(p)
            group = stream.take(p)
            outcomes += [sample.outcome for sample in group.samples]
            yield p, group
            # The time that the caller took with the group is no silence of the engine.
            begun = time.monotonic()
    finally:
        stream.close()
    log_failures(outcomes, f"grading ({kind})")


def tell(watcher: Watcher, samples: Iterable[Sample]) -> None:
    """Shows a watcher samples that have come already."""
    for sample in samples:
        watcher.add(1, len(sample.completion.sampled))
        if sample.score is not None:
            watcher.add_reward(sample.score.reward)


def sample_held_out(
    problems: Sequence[Problem],
    samples_per_problem: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader,
    bars: Callable[[int, str], AbstractContextManager[Watcher]],
    watch: Callable[[str], AbstractContextManager] = nullcontext,
    deadline_s: float = DEADLINE_S,
    greedy: bool = True,
) -> list[list[Group]]:
    """Samples and grades every held-out problem `samples_per_problem` times and, if `greedy`, once greedily.

    These requests go before all others. The arguments and errors are those of `sample_groups`.

    Args:
        bars: makes a watcher from its number of samples and a title.

    Returns:
        The sampled groups, and the greedy ones, each in the order of the problems.
    """
    batches = []
    for title, kind, n, how in (
        ("evaluate", "evaluation", samples_per_problem, sampling),
        ("evaluate greedy", "greedy", 1, replace(sampling, temperature=0.0)),
    )[: 1 + greedy]:
        with bars(len(problems) * n, title) as bar:
            groups = sample_groups(
                problems, n, how, engine, tokenizer, grader, bar, watch, Priority.EVALUATION, kind, deadline_s
            )
            batches.append(in_order(groups))
    return batches


def in_order(stream: Iterable[tuple[int, Group]]) -> list[Group]:
    """Returns all groups of a stream in the order of their problems."""
    return [group for _, group in sorted(stream, key=itemgetter(0))]

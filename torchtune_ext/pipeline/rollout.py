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
from torchtune_ext.run.errors import DeadlineExceeded, describe_error
from torchtune_ext.sampling.backend import derive_seed
from torchtune_ext.sampling.engine import Engine, EngineFailed, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem, Score, Turn

log = logging.getLogger(__name__)

# Seconds after which a wait in the main thread wakes up. Python handles Ctrl-C only there, but the kernel may deliver
# the signal to another thread, and then the wait goes on.
SIGNAL_POLL_S = 1.0
CLOSE_TIMEOUT_S = 10.0  # seconds that the thread of a stream has to end
DEADLINE_S = 1800.0  # seconds without any completion or grade after which a wait is given up
MAX_GROUPS_IN_MESSAGE = 5  # groups that a message names


class ProgressSink(Protocol):
    """Shows samples as they come, for instance as a progress bar. The stream's thread calls it."""

    def add(self, count: int, tokens: int) -> None: ...

    def add_reward(self, reward: float) -> None: ...


class PendingGroup:
    """A group in progress, whose completions and outcomes arrive in any order."""

    def __init__(
        self,
        number: int,
        problem: Problem,
        tokenizer: ChatTokenizer,
        num_samples: int,
        sampling: SamplingConfig,
        seed_index: int,
        priority: Priority,
        environments: Environments | None,
    ):
        self.number, self.problem, self._decode = number, problem, tokenizer.decode
        self.sampling, self.seed_index, self.priority = (
            sampling,
            seed_index,
            priority,
        )  # as `GroupStream.submit` has them
        self.prompt = tokenizer.prompt_ids(problem.messages, problem.tools)
        # If the prompt ends in an open "<think>", the text for graders and people begins with it.
        self._thought_prefix = tokenizer.thought_prefix(self.prompt)
        self.samples: list[Sample | None] = [None] * num_samples
        # One for each sample, if the samples are conversations.
        self.episodes = [Episode(self.prompt, self._thought_prefix) for _ in range(num_samples)] if environments else []
        self._environments = environments
        self.futures: list[Future] = []  # the engine's and the grader's
        self.open_requests = 0  # the engine's futures that are not done
        self.submitted = time.monotonic()
        self.cancelled = False

    def add_completion(self, sample_index: int, completion: Completion) -> str:
        """Takes a completion and returns its text."""
        sample = Sample(completion, text=self._thought_prefix + self._decode(completion.tokens.tolist()))
        self.samples[sample_index] = sample
        return sample.text

    def set_outcome(self, sample_index: int, outcome: Outcome) -> None:
        sample = self.samples[sample_index]
        assert sample is not None  # only what has arrived is graded
        self.samples[sample_index] = replace(sample, outcome=outcome)

    def release_environment(self, sample_index: int) -> None:
        """Gives the process of a conversation back."""
        if (slot := self.episodes[sample_index].slot) is not None and self._environments is not None:
            self._environments.release(slot)

    def cancel(self) -> None:
        self.cancelled = True
        # Canceling the future of a seat is not enough: the seat may have a process by now, which it has to give back.
        for place in range(len(self.episodes)):
            self.release_environment(place)
        for future in list(self.futures):
            future.cancel()

    @property
    def engine_idle(self) -> bool:
        """Whether the engine has nothing to do for the group now. An environment's answer may change that."""
        return not self.open_requests

    @property
    def arrived(self) -> list[Sample]:
        """The samples whose completions have arrived."""
        return [sample for sample in self.samples if sample is not None]

    @property
    def num_ungraded(self) -> int:
        """How many samples have no outcome yet."""
        return len(self.samples) - sum(sample.outcome is not None for sample in self.arrived)

    @property
    def num_tokens(self) -> int:
        """The sampled tokens of the completions, or turns of conversations, that have arrived."""
        if self.episodes:
            return sum(episode.num_tokens for episode in self.episodes)
        return sum(len(sample.completion.tokens) for sample in self.arrived)

    @property
    def pending_text(self) -> str:
        since = f"submitted {time.monotonic() - self.submitted:.0f} s ago"
        if self.episodes:
            open_ = [episode for episode, sample in zip(self.episodes, self.samples, strict=True) if sample is None]
            # A turn that has no answer yet waits for a process of its environment, or for what that says.
            asked = [each for each in open_ if each.messages and each.last_message["role"] == "assistant"]
            seated = sum(each.slot is not None and each.slot.process.done() for each in asked)
            return (
                f"{since}, {len(open_)} of {len(self.samples)} conversations are not over: {len(open_) - len(asked)} wait for "
                f"the engine, {len(asked) - seated} for a free environment process, {seated} for the environment's answer"
            )
        if undrawn := self.samples.count(None):
            return f"{since}, the engine has not ended {undrawn} of {len(self.samples)} completions"
        return f"{since}, {self.num_ungraded} of {len(self.samples)} texts are not graded"

    def to_group(self) -> Group:
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
        progress: ProgressSink | None = None,
    ):
        # The watcher, and the number below which it watches groups.
        self._progress = None if progress is None else (progress, math.inf)
        self.last_progress_at = time.monotonic()  # when the last completion or grade came
        self._engine, self._tokenizer, self._grader = engine, tokenizer, grader
        self._warned_template_mismatch = False  # whether the log says that a context differs from the template's text
        # Only the caller's thread changes these two. A group goes from the first to the second in `next`.
        self._groups: dict[int, PendingGroup] = {}
        self.finished: dict[int, Group] = {}  # without advantages, until they are taken
        # The threads of the engine and of the graders only put events into this queue, so nothing holds them up.
        self._events: SimpleQueue[tuple[PendingGroup, int | None, Completion | Future] | None] = SimpleQueue()
        self._finished: SimpleQueue[PendingGroup | Exception | None] = SimpleQueue()
        # This thread handles the events, so that groups advance while the trainer computes and does not call `next`.
        self._thread = Thread(target=self._event_loop, name="torchtune-ext-groups", daemon=True)
        self._thread.start()

    @property
    def grader(self) -> Grader:
        """The grader of the texts."""
        return self._grader

    def is_generating(self, numbers: Collection[int] | None = None) -> bool:
        """Tells whether the engine still samples for any group, or for any of these."""
        return any(
            not group.engine_idle for number, group in self._groups.items() if numbers is None or number in numbers
        )

    def submit(
        self,
        number: int,
        problem: Problem,
        num_samples: int,
        sampling: SamplingConfig,
        seed_index: int,
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
        group = PendingGroup(
            number, problem, self._tokenizer, num_samples, sampling, seed_index, priority, environments
        )
        self._groups[number] = group
        self.last_progress_at = time.monotonic()
        try:
            self._generate(group, group.prompt, num_samples, sampling, seed_index, priority)
        except BaseException:
            del self._groups[number]
            raise

    def wait_next(
        self,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        timeout_s: float = math.inf,
        awaited: Collection[int] | None = None,
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
        end = time.monotonic() + timeout_s
        while True:
            with timer("generate" if self.is_generating(awaited) else "grade"):
                try:
                    result = self._finished.get(timeout=max(0.0, min(end - time.monotonic(), SIGNAL_POLL_S)))
                except Empty:
                    if time.monotonic() >= end:
                        return None
                    continue
            if isinstance(result, Exception):
                raise result
            # None only wakes this loop when a group is sampled. A finished group may have been canceled meanwhile.
            if result is not None and not result.cancelled:
                self.finished[result.number] = self._groups.pop(result.number).to_group()
                return result.number

    def pop(self, number: int) -> Group:
        """Hands a finished group out."""
        return self.finished.pop(number)

    def cancel(self, number: int) -> int:
        """Ends a group, finished or not. Returns how many of its tokens were sampled."""
        if (finished := self.finished.pop(number, None)) is not None:
            return sum(len(sample.completion.sampled_indices) for sample in finished.samples)
        group = self._groups.pop(number)
        group.cancel()
        return group.num_tokens

    @contextmanager
    def report_progress(self, progress: ProgressSink | None, max_number: float = math.inf) -> Iterator[None]:
        """Shows `watcher` the samples of groups numbered under `below`, beginning with those that have come already."""
        # A sample that comes at this moment may count twice or not at all. A progress bar is not worth a lock.
        if progress is not None:
            for number, finished in self.finished.items():
                if number < max_number:
                    report_samples(progress, finished.samples)
            for number, group in self._groups.items():
                if number < max_number:
                    report_samples(progress, group.arrived)
            self._progress = progress, max_number
        try:
            yield
        finally:
            self._progress = None

    def describe_pending(self, number: int) -> str:
        """Says when a group was submitted and what it still lacks, for messages."""
        return self._groups[number].pending_text

    def check_deadline(
        self, begun: float, deadline_s: float, awaited: Sequence[int], describe: Callable[[int], str]
    ) -> None:
        """Raises TimeoutError if no completion or grade of any group has come for `deadline_s` seconds.

        Args:
            begun: when the wait began (`time.monotonic`).
            missing: numbers of the groups that are waited for.
            named: what the message calls a group.
        """
        # An evaluation may have used the engine before the wait, so the silence does not begin before the wait does.
        silent = time.monotonic() - max(self.last_progress_at, begun)
        if silent <= deadline_s:
            return
        listed = "; ".join(
            f"{describe(number)}: {self.describe_pending(number)}" for number in awaited[:MAX_GROUPS_IN_MESSAGE]
        )
        more = f"; and {len(awaited) - MAX_GROUPS_IN_MESSAGE} more" if len(awaited) > MAX_GROUPS_IN_MESSAGE else ""
        count = "1 group is" if len(awaited) == 1 else f"{len(awaited)} groups are"
        raise DeadlineExceeded(
            f"no completion and no grade came for {silent:.0f} s (rollouts.deadline_s={deadline_s:g}), while {count} waited "
            f"for: {listed}{more}. Look at engine.log and grader.log, or raise rollouts.deadline_s"
        )

    def close(self) -> None:
        """Ends all groups and the thread."""
        for number in list(self._groups):
            self.cancel(number)
        self._events.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the thread that hands texts to the graders did not end within %g s", CLOSE_TIMEOUT_S)

    def _progress_for(self, group: PendingGroup) -> ProgressSink | None:
        # The main thread may take the watcher away at any moment, so it is read once.
        watched = self._progress
        return watched[0] if watched is not None and group.number < watched[1] else None

    def _event_loop(self) -> None:
        while (event := self._events.get()) is not None:
            group = event[0]
            if group.cancelled:
                continue
            self.last_progress_at = time.monotonic()
            try:
                self._handle_event(*event)
            except Exception as error:  # noqa: BLE001 (it is raised again)
                # `next` raises it in the caller's thread.
                self._finished.put(error)
                continue
            if group.engine_idle and not group.num_ungraded:
                self._finished.put(group)

    def _generate(
        self,
        group: PendingGroup,
        prompt: Sequence[int],
        num_samples: int,
        sampling: SamplingConfig,
        seed_index: int,
        priority: Priority,
        first: int = 0,
    ) -> None:
        """Lets the engine sample completions of a group, which go to its places from `first` on."""

        # These are all first completions, or the next turn of one conversation.
        def on_completion(index: int, completion: Completion) -> None:
            self._events.put((group, first + index, completion))

        group.open_requests += 1
        # The turns of a conversation go to the engine that has its earlier ones in the prefix cache.
        affinity_key = group if group.episodes else None
        request = self._engine.submit(prompt, num_samples, sampling, on_completion, seed_index, priority, affinity_key)
        group.futures.append(request)
        # Another thread may have canceled the group before the future was in its list.
        if group.cancelled:
            request.cancel()
        request.add_done_callback(lambda future: self._events.put((group, None, future)))

    def _handle_event(self, group: PendingGroup, sample_index: int | None, payload: Completion | Future) -> None:
        # A completion is a whole sample or a turn. A future without a place is the end of a draw. One with a place
        # holds outcomes, or in a conversation the process of a seat or an environment's answer.
        if isinstance(payload, Completion):
            assert sample_index is not None
            if group.episodes:
                self._handle_turn(group, sample_index, payload)
            else:
                self._handle_completion(group, sample_index, payload)
            return
        if sample_index is None:
            try:
                payload.result()
            except CancelledError:
                # Another thread closed the engine.
                raise EngineFailed("the engine was closed") from None
            group.open_requests -= 1
            # None wakes `next`, which now may wait only for grades.
            if group.num_ungraded:
                self._finished.put(None)
        elif group.episodes:
            self._handle_answer(group, sample_index, payload.result())
        else:
            for each, outcome in enumerate(payload.result(), start=sample_index):
                group.set_outcome(each, outcome)
                self._report_reward(group, outcome)

    def _handle_completion(self, group: PendingGroup, sample_index: int, completion: Completion) -> None:
        text = group.add_completion(sample_index, completion)
        if (watcher := self._progress_for(group)) is not None:
            watcher.add(1, len(completion.tokens))
        if not self._grader.grades_groups:
            self._enqueue_when_done(group, sample_index, self._grader.submit(group.problem, text))
        elif None not in group.samples:
            # A grader that compares samples needs all texts of a group at once.
            self._enqueue_when_done(
                group, 0, self._grader.submit(group.problem, *(each.text for each in group.arrived))
            )

    @property
    def _environments(self) -> Environments:
        assert isinstance(self._grader, Environments)  # else there are no episodes
        return self._grader

    def _handle_turn(self, group: PendingGroup, sample_index: int, completion: Completion) -> None:
        episode = group.episodes[sample_index]
        episode.add_turn(completion, self._tokenizer.decode(completion.tokens.tolist()))
        if (watcher := self._progress_for(group)) is not None:
            watcher.add(0, len(completion.tokens))
        if completion.finish_reason != "stop":
            # The engine cut the turn, and the environment would answer half of it.
            self._end_episode(group, sample_index, episode.to_sample(completion.finish_reason))
        elif episode.slot is None:
            # A conversation takes a process only when it has a turn to be answered.
            slot = episode.slot = self._environments.acquire_slot()
            self._enqueue_when_done(group, sample_index, slot.process)
            # Another thread may have canceled the group before the episode had its seat.
            if group.cancelled:
                group.release_environment(sample_index)
        else:
            self._enqueue_when_done(group, sample_index, self._environments.step(episode.slot, episode.last_message))

    def _handle_answer(self, group: PendingGroup, sample_index: int, answer: int | Turn | Ungraded) -> None:
        """Continues a conversation that has got a process (its number), an answer, or a failure."""
        episode = group.episodes[sample_index]
        if isinstance(answer, int):
            # All samples of a group get the same seed, so that they differ only by what the policy does.
            reset_args = group.problem, derive_seed(group.sampling.seed or 0, group.seed_index)
            assert episode.slot is not None  # it has a process
            self._enqueue_when_done(
                group, sample_index, self._environments.step(episode.slot, episode.last_message, reset_args)
            )
            return
        if isinstance(answer, Ungraded):
            ending = "step_timeout" if answer.kind == "timed_out" else "environment_failed"
            self._end_episode(group, sample_index, episode.to_sample(ending, answer))
            return
        episode.add_answer(answer)
        if answer.done or episode.num_turns == self._environments.max_turns:
            self._end_episode(group, sample_index, episode.to_sample("completed" if answer.done else "max_turns"))
            return
        try:
            prompt = self._next_context(group.problem, episode, answer)
        except Exception as error:  # noqa: BLE001 (the template's and the tokenizer's code, on what an environment wrote)
            # This answer cannot be rendered or encoded, but those of other conversations may be.
            failure = Ungraded("infra_failed", f"its answer cannot be read: {describe_error(error)}")
            self._end_episode(group, sample_index, episode.to_sample("environment_failed", failure))
            return
        # A row holds at least as much as the engine's context. What fits there with all its branches can be trained.
        if episode.packed_size(prompt) + group.sampling.max_tokens > self._engine.config.max_model_len:
            self._end_episode(group, sample_index, episode.to_sample("context_overflow"))
            return
        episode.set_next_context(prompt, self._tokenizer.thought_prefix(prompt))
        seed = group.sampling.seed
        # The seed of a later turn follows from its sample and its number, so it does not depend on which conversation
        # is faster.
        turn_sampling = replace(
            group.sampling, seed=None if seed is None else derive_seed(seed, group.seed_index, sample_index)
        )
        # A later turn goes before new groups, while its context is still in the prefix cache.
        self._generate(
            group, prompt, 1, turn_sampling, episode.num_turns, min(group.priority, Priority.TURN), sample_index
        )

    def _next_context(self, problem: Problem, episode: Episode, answer: Turn) -> list[int]:
        """Returns the prompt ids of the next turn. Raises Mistake: the template cannot render the answer."""
        tokenizer, path = self._tokenizer, episode.path
        if tokenizer.history == "sampled":
            return [*path, *tokenizer.turn_boundary_ids(answer.messages, path[-1], problem.tools, problem.messages)]
        context = tokenizer.context_ids(problem.messages, episode.messages, episode.sampled_ids, problem.tools)
        if not self._warned_template_mismatch and context != tokenizer.prompt_ids(
            [*problem.messages, *episode.messages], problem.tools
        ):
            self._warned_template_mismatch = True
            log.info(
                "problem %r: the template's own text has other ids than were sampled, which stay as they were",
                problem.id,
            )
        return context

    def _end_episode(self, group: PendingGroup, sample_index: int, sample: Sample) -> None:
        # Another conversation can have the process before the rest of this group is over.
        group.release_environment(sample_index)
        group.samples[sample_index] = sample
        if (watcher := self._progress_for(group)) is not None:
            watcher.add(1, 0)
        self._report_reward(group, sample.outcome)

    def _report_reward(self, group: PendingGroup, outcome: Outcome | None) -> None:
        if (watcher := self._progress_for(group)) is not None and isinstance(outcome, Score):
            watcher.add_reward(outcome.reward)

    def _enqueue_when_done(self, group: PendingGroup, sample_index: int, future: Future) -> None:
        group.futures.append(future)
        future.add_done_callback(lambda future: self._events.put((group, sample_index, future)))


def sample_groups(
    problems: Sequence[Problem],
    samples_per_prompt: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader,
    progress: ProgressSink | None = None,
    timer: Callable[[str], AbstractContextManager] = nullcontext,
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
    stream, outcomes = GroupStream(engine, tokenizer, grader, progress), []
    try:
        for p, problem in enumerate(problems):
            stream.submit(p, problem, samples_per_prompt, sampling, p, priority)
        missing, begun = list(range(len(problems))), time.monotonic()
        while missing:
            stream.check_deadline(begun, deadline_s, missing, lambda p: f"problem {problems[p].id!r}")
            if (p := stream.wait_next(timer, SIGNAL_POLL_S)) is None:
                continue
            missing.remove(p)
            group = stream.pop(p)
            outcomes += [sample.outcome for sample in group.samples]
            yield p, group
            # The time that the caller took with the group is no silence of the engine.
            begun = time.monotonic()
    finally:
        stream.close()
    log_failures(outcomes, f"grading ({kind})")


def report_samples(progress: ProgressSink, samples: Iterable[Sample]) -> None:
    """Shows a watcher samples that have come already."""
    for sample in samples:
        progress.add(1, len(sample.completion.sampled_indices))
        if sample.score is not None:
            progress.add_reward(sample.score.reward)


def sample_held_out(
    problems: Sequence[Problem],
    samples_per_problem: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader,
    make_progress: Callable[[int, str], AbstractContextManager[ProgressSink]],
    timer: Callable[[str], AbstractContextManager] = nullcontext,
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
    for title, kind, n, batch_sampling in (
        ("evaluate", "evaluation", samples_per_problem, sampling),
        ("evaluate greedy", "greedy", 1, replace(sampling, temperature=0.0)),
    )[: 1 + greedy]:
        with make_progress(len(problems) * n, title) as bar:
            groups = sample_groups(
                problems,
                n,
                batch_sampling,
                engine,
                tokenizer,
                grader,
                bar,
                timer,
                Priority.EVALUATION,
                kind,
                deadline_s,
            )
            batches.append(collect_in_order(groups))
    return batches


def collect_in_order(stream: Iterable[tuple[int, Group]]) -> list[Group]:
    """Returns all groups of a stream in the order of their problems."""
    return [group for _, group in sorted(stream, key=itemgetter(0))]

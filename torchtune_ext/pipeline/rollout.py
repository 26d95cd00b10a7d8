"""Samples and grades groups: problems -> prompt ids -> completions -> texts -> outcomes."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome, Ungraded, log_failures
from torchtune_ext.grading.environments import EnvironmentPool
from torchtune_ext.pipeline.episodes import Episode
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.run.errors import DeadlineExceeded, describe_error
from torchtune_ext.sampling.backend import derive_seed
from torchtune_ext.sampling.engine import Engine, EngineFailed, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import EnvironmentReply, Problem, Score

log = logging.getLogger(__name__)

# A wait in the main thread wakes up after this many seconds. Python handles Ctrl-C only in the main
# thread, but the kernel may deliver the signal to another thread, which does not end the wait.
SIGNAL_POLL_S = 1.0
CLOSE_TIMEOUT_S = 10.0  # timeout for the thread of a stream to end
DEADLINE_S = 1800.0  # a wait fails after this many seconds without a completion or grade
MAX_GROUPS_IN_MESSAGE = 5  # an error message names at most this many groups


class ProgressSink(Protocol):
    """Receives samples as they arrive, for example a progress bar. The stream's thread calls it."""

    def add(self, count: int, tokens: int) -> None: ...

    def add_reward(self, reward: float) -> None: ...


class PendingGroup:
    """A group in progress. Its completions and outcomes arrive in any order."""

    def __init__(
        self,
        number: int,
        problem: Problem,
        tokenizer: ChatTokenizer,
        num_samples: int,
        sampling: SamplingConfig,
        seed_index: int,
        priority: Priority,
        environments: EnvironmentPool | None,
    ):
        self.number, self.problem, self._decode = number, problem, tokenizer.decode
        self.sampling, self.seed_index, self.priority = sampling, seed_index, priority
        self.prompt = tokenizer.prompt_ids(problem.messages, problem.tools)
        # If the prompt ends with an open "<think>", every decoded text starts with it.
        self._thought_prefix = tokenizer.thought_prefix(self.prompt)
        self.samples: list[Sample | None] = [None] * num_samples
        # One episode per sample if the task has environments, else empty.
        self.episodes = [Episode(self.prompt, self._thought_prefix) for _ in range(num_samples)] if environments else []
        self._environments = environments
        self.futures: list[Future] = []  # of engine requests, grader and environment
        self.open_requests = 0  # engine requests in flight
        self.submitted = time.monotonic()
        self.cancelled = False

    def add_completion(self, sample_index: int, completion: Completion) -> str:
        """Stores a completion and returns its text."""
        sample = Sample(completion, text=self._thought_prefix + self._decode(completion.tokens.tolist()))
        self.samples[sample_index] = sample
        return sample.text

    def set_outcome(self, sample_index: int, outcome: Outcome) -> None:
        sample = self.samples[sample_index]
        assert sample is not None  # only arrived completions are graded
        self.samples[sample_index] = replace(sample, outcome=outcome)

    def release_environment(self, sample_index: int) -> None:
        """Releases the environment process of an episode."""
        if (slot := self.episodes[sample_index].slot) is not None and self._environments is not None:
            self._environments.release(slot)

    def cancel(self) -> None:
        self.cancelled = True
        # Canceling a slot's future is not enough: the slot may already hold a process.
        for sample_index in range(len(self.episodes)):
            self.release_environment(sample_index)
        for future in list(self.futures):
            future.cancel()

    @property
    def engine_idle(self) -> bool:
        """Whether no engine request is in flight. An environment's reply may start one."""
        return not self.open_requests

    @property
    def arrived(self) -> list[Sample]:
        """The samples whose completions have arrived."""
        return [sample for sample in self.samples if sample is not None]

    @property
    def num_ungraded(self) -> int:
        """The number of samples without an outcome."""
        return len(self.samples) - sum(sample.outcome is not None for sample in self.arrived)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens in the completions or turns that have arrived."""
        if self.episodes:
            return sum(episode.num_tokens for episode in self.episodes)
        return sum(len(sample.completion.tokens) for sample in self.arrived)

    @property
    def pending_text(self) -> str:
        since = f"submitted {time.monotonic() - self.submitted:.0f} s ago"
        if self.episodes:
            unfinished = [e for e, sample in zip(self.episodes, self.samples, strict=True) if sample is None]
            # After a turn, an episode waits for a free environment process, or for the reply.
            after_turn = [e for e in unfinished if e.messages and e.last_message["role"] == "assistant"]
            with_process = sum(e.slot is not None and e.slot.assigned_worker.done() for e in after_turn)
            return (
                f"{since}, {len(unfinished)} of {len(self.samples)} episodes are not finished: "
                f"{len(unfinished) - len(after_turn)} wait for the engine, {len(after_turn) - with_process} for a free "
                f"environment process, {with_process} for the environment's reply"
            )
        if unsampled := self.samples.count(None):
            return f"{since}, the engine has not finished {unsampled} of {len(self.samples)} completions"
        return f"{since}, {self.num_ungraded} of {len(self.samples)} texts are not graded"

    def to_group(self) -> Group:
        return Group(self.problem, np.asarray(self.prompt, dtype=np.int32), tuple(self.arrived))


class GroupStream:
    """Owns groups from `submit` to `pop`. Grades each completion as soon as the engine returns it.

    With an `EnvironmentPool` in place of the grader, a completion is the first turn of an episode
    (`episodes.py`), and a group is finished when all its episodes are finished.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        grader: Grader | EnvironmentPool,
        progress: ProgressSink | None = None,
    ):
        # The progress sink, and the group number below which it receives samples.
        self._progress = None if progress is None else (progress, math.inf)
        self.last_progress_at = time.monotonic()  # arrival of the last completion or grade
        self._engine, self._tokenizer = engine, tokenizer
        self._environments = grader if isinstance(grader, EnvironmentPool) else None
        self._grader = None if isinstance(grader, EnvironmentPool) else grader
        self.grading_metrics = lambda is_refill: grader.metrics(is_refill)
        self._warned_template_mismatch = False
        # Only the caller's thread changes these two. `wait_next` moves a group to the second.
        self._pending: dict[int, PendingGroup] = {}
        self.finished: dict[int, Group] = {}  # without advantages, until `pop`
        # The threads of engine and graders only put events into this queue, so they never block. An
        # event is a group and the call that updates the group.
        self._events: SimpleQueue[tuple[PendingGroup, Callable[[], None]] | None] = SimpleQueue()
        # Complete groups and errors for `wait_next`; None only wakes it.
        self._results: SimpleQueue[PendingGroup | Exception | None] = SimpleQueue()
        # This thread handles the events, so that groups advance even outside of `wait_next`.
        self._thread = Thread(target=self._event_loop, name="torchtune-ext-groups", daemon=True)
        self._thread.start()

    def is_generating(self, numbers: Collection[int] | None = None) -> bool:
        """Whether the engine still samples for any group, or for any of `numbers`."""
        return any(
            not group.engine_idle for number, group in self._pending.items() if numbers is None or number in numbers
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
        """Starts sampling a group.

        Args:
            number: identifies the group for `wait_next`, `pop` and `cancel`.
            num_samples: number of completions.
            seed_index: index among groups with the same `sampling.seed` (`Engine.submit`).

        Raises:
            ValueError: `Engine.submit` or the chat template rejects the problem.
            EngineFailed: the engine has failed or is closed.
        """
        group = PendingGroup(
            number, problem, self._tokenizer, num_samples, sampling, seed_index, priority, self._environments
        )
        self._pending[number] = group
        self.last_progress_at = time.monotonic()
        try:
            self._generate(group, group.prompt, num_samples, sampling, seed_index, priority)
        except BaseException:
            del self._pending[number]
            raise

    def wait_next(
        self,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        timeout_s: float = math.inf,
        awaited: Collection[int] | None = None,
    ) -> int | None:
        """Waits until a group is finished.

        Args:
            timer: returns a context manager that times the wait, as "generate" while the engine
                samples and as "grade" while only grades are missing.
            timeout_s: maximum seconds to wait.
            awaited: numbers of the groups that decide between "generate" and "grade"; None for all.

        Returns:
            The number of a finished group for `pop`, or None after the timeout.

        Raises:
            EngineFailed: the engine failed or was closed.
            Exception: any error of `Grader.submit` or of the task's code.
        """
        end = time.monotonic() + timeout_s
        while True:
            with timer("generate" if self.is_generating(awaited) else "grade"):
                try:
                    result = self._results.get(timeout=max(0.0, min(end - time.monotonic(), SIGNAL_POLL_S)))
                except Empty:
                    if time.monotonic() >= end:
                        return None
                    continue
            if isinstance(result, Exception):
                raise result
            # None only wakes this loop. A finished group may have been canceled.
            if result is not None and not result.cancelled:
                self.finished[result.number] = self._pending.pop(result.number).to_group()
                return result.number

    def pop(self, number: int) -> Group:
        """Removes and returns a finished group."""
        return self.finished.pop(number)

    def cancel(self, number: int) -> int:
        """Cancels and drops a group, finished or not. Returns its number of sampled tokens."""
        if (finished := self.finished.pop(number, None)) is not None:
            return sum(len(sample.completion.sampled_indices) for sample in finished.samples)
        group = self._pending.pop(number)
        group.cancel()
        return group.num_tokens

    @contextmanager
    def report_progress(self, progress: ProgressSink | None, max_number: float = math.inf) -> Iterator[None]:
        """Reports the samples of groups below `max_number` to `progress`, arrived ones first."""
        # A sample that arrives now may count twice or never. A progress bar is not worth a lock.
        if progress is not None:
            for number, finished in self.finished.items():
                if number < max_number:
                    report_samples(progress, finished.samples)
            for number, group in self._pending.items():
                if number < max_number:
                    report_samples(progress, group.arrived)
            self._progress = progress, max_number
        try:
            yield
        finally:
            self._progress = None

    def describe_pending(self, number: int) -> str:
        """Describes, for messages, when a group was submitted and what is still missing."""
        return self._pending[number].pending_text

    def check_deadline(
        self, wait_started: float, deadline_s: float, awaited: Sequence[int], describe: Callable[[int], str]
    ) -> None:
        """Fails if no completion or grade of any group has arrived for `deadline_s` seconds.

        Args:
            wait_started: start of the wait (`time.monotonic`).
            deadline_s: maximum seconds without a completion or grade.
            describe: group number -> name of the group in the message.

        Raises:
            DeadlineExceeded: the deadline has passed. The message describes the awaited groups.
        """
        # The time before the wait does not count: an evaluation may have used the engine then.
        idle_s = time.monotonic() - max(self.last_progress_at, wait_started)
        if idle_s <= deadline_s:
            return
        listed = "; ".join(
            f"{describe(number)}: {self.describe_pending(number)}" for number in awaited[:MAX_GROUPS_IN_MESSAGE]
        )
        more = f"; and {len(awaited) - MAX_GROUPS_IN_MESSAGE} more" if len(awaited) > MAX_GROUPS_IN_MESSAGE else ""
        count = "1 group" if len(awaited) == 1 else f"{len(awaited)} groups"
        raise DeadlineExceeded(
            f"no completion or grade arrived for {idle_s:.0f} s (rollouts.deadline_s={deadline_s:g}), waiting for "
            f"{count}: {listed}{more}. Fix: look at engine.log and grader.log, or raise rollouts.deadline_s"
        )

    def close(self) -> None:
        """Cancels all groups and ends the thread."""
        for number in list(self._pending):
            self.cancel(number)
        self._events.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("rollouts: the event thread did not end within %g s", CLOSE_TIMEOUT_S)

    def _progress_for(self, group: PendingGroup) -> ProgressSink | None:
        # The main thread may remove the progress sink at any moment, so read it once.
        progress = self._progress
        return progress[0] if progress is not None and group.number < progress[1] else None

    def _event_loop(self) -> None:
        while (event := self._events.get()) is not None:
            group, update = event
            if group.cancelled:
                continue
            self.last_progress_at = time.monotonic()
            try:
                update()
            except Exception as error:  # noqa: BLE001 (it is raised again)
                # `wait_next` raises it in the caller's thread.
                self._results.put(error)
                continue
            if group.engine_idle and not group.num_ungraded:
                self._results.put(group)

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
        """Submits an engine request for the samples of a group from index `first` on."""
        # Returns the completion or first turn of every sample, or the next turn of one episode.
        handle = self._handle_turn if group.episodes else self._handle_completion

        def on_completion(index: int, completion: Completion) -> None:
            self._events.put((group, partial(handle, group, first + index, completion)))

        group.open_requests += 1
        # The turns of an episode go to the replica whose prefix cache has its earlier turns.
        affinity_key = group if group.episodes else None
        request = self._engine.submit(prompt, num_samples, sampling, on_completion, seed_index, priority, affinity_key)
        group.futures.append(request)
        # Another thread may have canceled the group before the future was in its list.
        if group.cancelled:
            request.cancel()
        request.add_done_callback(
            lambda future: self._events.put((group, partial(self._handle_request_done, group, future)))
        )

    def _handle_request_done(self, group: PendingGroup, request: Future) -> None:
        try:
            request.result()
        except CancelledError:
            # Another thread closed the engine.
            raise EngineFailed("the engine was closed") from None
        group.open_requests -= 1
        # None wakes `wait_next`, which may now wait for grades only.
        if group.num_ungraded:
            self._results.put(None)

    def _handle_completion(self, group: PendingGroup, sample_index: int, completion: Completion) -> None:
        assert self._grader is not None  # only episodes have no grader
        text = group.add_completion(sample_index, completion)
        if (progress := self._progress_for(group)) is not None:
            progress.add(1, len(completion.tokens))
        if not self._grader.grades_groups:
            graded = self._grader.submit(group.problem, text)
            self._enqueue_when_done(self._handle_outcomes, group, sample_index, graded)
        elif None not in group.samples:
            # A grader that compares samples needs all texts of a group at once.
            graded = self._grader.submit(group.problem, *(sample.text for sample in group.arrived))
            self._enqueue_when_done(self._handle_outcomes, group, 0, graded)

    def _handle_outcomes(self, group: PendingGroup, first: int, outcomes: Sequence[Outcome]) -> None:
        for index, outcome in enumerate(outcomes, start=first):
            group.set_outcome(index, outcome)
            self._report_reward(group, outcome)

    def _handle_turn(self, group: PendingGroup, sample_index: int, completion: Completion) -> None:
        assert self._environments is not None  # only environments create episodes
        episode = group.episodes[sample_index]
        episode.add_turn(completion, self._tokenizer.decode(completion.tokens.tolist()))
        if (progress := self._progress_for(group)) is not None:
            progress.add(0, len(completion.tokens))
        if completion.finish_reason != "stop":
            # The turn is truncated, so the environment does not get it.
            self._end_episode(group, sample_index, episode.to_sample(completion.finish_reason))
        elif episode.slot is None:
            # An episode acquires an environment process only with its first turn.
            slot = episode.slot = self._environments.acquire_slot()
            self._enqueue_when_done(self._handle_slot_ready, group, sample_index, slot.assigned_worker)
            # Another thread may have canceled the group before the episode had its slot.
            if group.cancelled:
                group.release_environment(sample_index)
        else:
            self._step_environment(group, sample_index)

    def _handle_slot_ready(self, group: PendingGroup, sample_index: int, worker_index: int) -> None:
        # All samples of a group get the same environment seed, so only the policy differs.
        reset_args = group.problem, derive_seed(group.sampling.seed or 0, group.seed_index)
        self._step_environment(group, sample_index, reset_args)

    def _step_environment(
        self, group: PendingGroup, sample_index: int, reset_args: tuple[Problem, int] | None = None
    ) -> None:
        episode = group.episodes[sample_index]
        assert self._environments is not None and episode.slot is not None  # the slot has a process
        reply = self._environments.step(episode.slot, episode.last_message, reset_args)
        self._enqueue_when_done(self._handle_reply, group, sample_index, reply)

    def _handle_reply(self, group: PendingGroup, sample_index: int, reply: EnvironmentReply | Ungraded) -> None:
        """Continues or ends an episode after the environment has replied or failed."""
        assert self._environments is not None  # only environments reply
        episode = group.episodes[sample_index]
        if isinstance(reply, Ungraded):
            finish_reason = "step_timeout" if reply.kind == "timed_out" else "environment_failed"
            self._end_episode(group, sample_index, episode.to_sample(finish_reason, reply))
            return
        episode.add_reply(reply)
        if reply.done or episode.num_turns == self._environments.max_turns:
            self._end_episode(group, sample_index, episode.to_sample("completed" if reply.done else "max_turns"))
            return
        try:
            prompt = self._next_context(group.problem, episode, reply)
        except Exception as error:  # noqa: BLE001 (the template and the tokenizer, on the environment's reply)
            # The template cannot render this reply. Other episodes are not affected.
            failure = Ungraded("infra_failed", f"the environment's reply cannot be rendered: {describe_error(error)}")
            self._end_episode(group, sample_index, episode.to_sample("environment_failed", failure))
            return
        # One row must hold all branches of an episode, and `row_tokens` may be as small as
        # `max_model_len`.
        if episode.packed_size(prompt) + group.sampling.max_tokens > self._engine.config.max_model_len:
            self._end_episode(group, sample_index, episode.to_sample("context_overflow"))
            return
        episode.set_next_context(prompt, self._tokenizer.thought_prefix(prompt))
        seed = group.sampling.seed
        # The seed of a later turn depends on its sample and turn number, not on timing.
        turn_sampling = replace(
            group.sampling, seed=None if seed is None else derive_seed(seed, group.seed_index, sample_index)
        )
        # A later turn has priority over new groups, while its context is still in the prefix cache.
        self._generate(
            group, prompt, 1, turn_sampling, episode.num_turns, min(group.priority, Priority.TURN), sample_index
        )

    def _next_context(self, problem: Problem, episode: Episode, reply: EnvironmentReply) -> list[int]:
        """Returns the next turn's prompt ids. Raises UsageError if rendering fails."""
        tokenizer, path = self._tokenizer, episode.path
        if tokenizer.history == "sampled":
            return [*path, *tokenizer.turn_boundary_ids(reply.messages, path[-1], problem.tools, problem.messages)]
        context = tokenizer.context_ids(problem.messages, episode.messages, episode.sampled_ids, problem.tools)
        if not self._warned_template_mismatch and context != tokenizer.prompt_ids(
            [*problem.messages, *episode.messages], problem.tools
        ):
            self._warned_template_mismatch = True
            log.info(
                "rollouts: problem %r: the chat template would tokenize earlier turns differently; keeping the sampled ids",
                problem.id,
            )
        return context

    def _end_episode(self, group: PendingGroup, sample_index: int, sample: Sample) -> None:
        # Release the process now: other episodes can use it before the group is finished.
        group.release_environment(sample_index)
        group.samples[sample_index] = sample
        if (progress := self._progress_for(group)) is not None:
            progress.add(1, 0)
        self._report_reward(group, sample.outcome)

    def _report_reward(self, group: PendingGroup, outcome: Outcome | None) -> None:
        if (progress := self._progress_for(group)) is not None and isinstance(outcome, Score):
            progress.add_reward(outcome.reward)

    def _enqueue_when_done(
        self, handle: Callable[[PendingGroup, int, Any], None], group: PendingGroup, sample_index: int, future: Future
    ) -> None:
        group.futures.append(future)
        # `result` may raise, so it is called in the stream's thread.
        future.add_done_callback(
            lambda future: self._events.put((group, lambda: handle(group, sample_index, future.result())))
        )


def sample_groups(
    problems: Sequence[Problem],
    samples_per_prompt: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader | EnvironmentPool,
    progress: ProgressSink | None = None,
    timer: Callable[[str], AbstractContextManager] = nullcontext,
    priority: Priority = Priority.SAMPLE,
    kind: str = "evaluation",
    deadline_s: float = DEADLINE_S,
) -> Iterator[tuple[int, Group]]:
    """Samples and grades `samples_per_prompt` completions of every problem (`GroupStream`).

    Yields:
        (problem index, group without advantages) as groups finish. Closing cancels the rest.

    Raises:
        DeadlineExceeded: no completion and no grade arrived for `deadline_s` seconds.
        Exception: any error of `GroupStream.submit` or `GroupStream.wait_next`.
    """
    stream, outcomes = GroupStream(engine, tokenizer, grader, progress), []
    try:
        for p, problem in enumerate(problems):
            stream.submit(p, problem, samples_per_prompt, sampling, p, priority)
        missing, wait_started = list(range(len(problems))), time.monotonic()
        while missing:
            stream.check_deadline(wait_started, deadline_s, missing, lambda p: f"problem {problems[p].id!r}")
            if (p := stream.wait_next(timer, SIGNAL_POLL_S)) is None:
                continue
            missing.remove(p)
            group = stream.pop(p)
            outcomes += [sample.outcome for sample in group.samples]
            yield p, group
            # The time that the caller spends on the group does not count towards the deadline.
            wait_started = time.monotonic()
    finally:
        stream.close()
    log_failures(outcomes, f"grading ({kind})")


def report_samples(progress: ProgressSink, samples: Iterable[Sample]) -> None:
    """Reports samples that have already arrived to a progress sink."""
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
    grader: Grader | EnvironmentPool,
    make_progress: Callable[[int, str], AbstractContextManager[ProgressSink]],
    timer: Callable[[str], AbstractContextManager] = nullcontext,
    deadline_s: float = DEADLINE_S,
    greedy: bool = True,
) -> list[list[Group]]:
    """Samples and grades every held-out problem, at the sampling temperature and greedily.

    These requests have the highest priority. Other arguments and errors are as in `sample_groups`.

    Args:
        make_progress: (number of samples, title) -> context manager of a progress sink.
        greedy: also generate one greedy sample per problem.

    Returns:
        The sampled groups and, if `greedy`, the greedy groups, each in the order of the problems.
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
    """Returns all groups of an iterator in the order of their problems."""
    return [group for _, group in sorted(stream, key=itemgetter(0))]

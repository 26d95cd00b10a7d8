"""Samples and grades groups: problems -> prompt ids -> completions -> texts -> outcomes."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome, Ungraded, log_failures
from torchtune_ext.grading.agents import AgentPool
from torchtune_ext.grading.environments import EnvironmentPool
from torchtune_ext.pipeline.episodes import Episode
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.run.errors import DeadlineExceeded, describe_error
from torchtune_ext.sampling.backend import EngineRequest, build_requests, derive_seed, gather_or_cancel
from torchtune_ext.sampling.engine import Engine, EngineFailed, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import EnvironmentReply, Problem, Score

log = logging.getLogger(__name__)

T = TypeVar("T")

# A wait in the main thread wakes up after this many seconds. Python handles Ctrl-C only in the main
# thread, but the kernel may deliver the signal to another thread, which does not end the wait.
SIGNAL_POLL_S = 1.0
DEADLINE_S = 1800.0  # a wait fails after this many seconds without a completion or grade
MAX_GROUPS_IN_MESSAGE = 5  # an error message names at most this many groups


class ProgressSink(Protocol):
    """Receives samples as they arrive, for example a progress bar. The stream's thread calls it."""

    def add(self, count: int, tokens: int) -> None: ...

    def add_reward(self, reward: float) -> None: ...


class PendingGroup:
    """A group in progress. Its completions and outcomes arrive in any order."""

    future: Future[None]  # of the coroutine that generates and grades the samples

    def __init__(
        self,
        number: int,
        problem: Problem,
        tokenizer: ChatTokenizer,
        num_samples: int,
        sampling: SamplingConfig,
        seed_index: int,
        priority: Priority,
        has_environments: bool,
    ):
        self.number, self.problem = number, problem
        self.sampling, self.seed_index, self.priority = sampling, seed_index, priority
        self.prompt = tokenizer.prompt_ids(problem.messages, problem.tools)
        # If the prompt ends with an open "<think>", every decoded text starts with it.
        self.thought_prefix = tokenizer.thought_prefix(self.prompt)
        self.samples: list[Sample | None] = [None] * num_samples
        # One episode per sample if the task has environments, else empty.
        self.episodes = (
            [Episode(self.prompt, self.thought_prefix) for _ in range(num_samples)] if has_environments else []
        )
        self.agent_episodes: dict[int, Any] = {}  # `AgentEpisode` by sample, if the task has an agent
        self.submitted = time.monotonic()

    @property
    def unfinished_episodes(self) -> list[Episode]:
        """The episodes that have not ended."""
        # Not strict: without environments, `episodes` is empty.
        return [episode for episode, sample in zip(self.episodes, self.samples, strict=False) if sample is None]

    @property
    def is_generating(self) -> bool:
        """Whether the engine samples for the group. An environment's reply may start a request."""
        if self.episodes:
            return any(episode.waits_for_engine for episode in self.unfinished_episodes)
        return None in self.samples

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
        if episodes := self.episodes or [episode.session for episode in list(self.agent_episodes.values())]:
            return sum(episode.num_tokens for episode in episodes)
        return sum(len(sample.completion.tokens) for sample in self.arrived)

    @property
    def pending_text(self) -> str:
        since = f"submitted {time.monotonic() - self.submitted:.0f} s ago"
        if self.episodes:
            unfinished = self.unfinished_episodes
            # After a turn, an episode waits for a free environment process, or for the reply.
            after_turn = [episode for episode in unfinished if not episode.waits_for_engine]
            with_process = sum(episode.has_environment for episode in after_turn)
            return (
                f"{since}, {len(unfinished)} of {len(self.samples)} episodes are not finished: "
                f"{len(unfinished) - len(after_turn)} wait for the engine, {len(after_turn) - with_process} for a free "
                f"environment process, {with_process} for the environment's reply"
            )
        if (unsampled := self.samples.count(None)) and self.agent_episodes:
            waiting = sum(episode.is_generating for episode in list(self.agent_episodes.values()))
            return (
                f"{since}, {unsampled} of {len(self.samples)} agents have not finished, {waiting} wait for the engine"
            )
        if unsampled:
            return f"{since}, the engine has not finished {unsampled} of {len(self.samples)} completions"
        return f"{since}, {self.num_ungraded} of {len(self.samples)} texts are not graded"

    def to_group(self) -> Group:
        group = Group(self.problem, np.asarray(self.prompt, dtype=np.int32), tuple(self.arrived))
        if not self.agent_episodes:
            return group
        from torchtune_ext.pipeline.agent_session import share_prefix

        return share_prefix(group, [episode.session for _, episode in sorted(self.agent_episodes.items())])


class GroupStream:
    """Owns groups from `submit` to `pop`. Grades each completion as soon as the engine returns it.

    With an `EnvironmentPool` in place of the grader, a completion is the first turn of an episode
    (`episodes.py`), and a group is finished when all its episodes are finished. With an `AgentPool`,
    a sample is what an agent requests from the endpoint until it returns the reward.

    One coroutine per sample waits in the engine's loop for the engine, the grader and the
    environment. Code of the tokenizer, the task and the progress sink runs in the stream's thread,
    so that the loop never blocks: the tokenizer decodes 16 completions of 2,000 tokens in 0.07 s.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        grader: Grader | EnvironmentPool | AgentPool,
        progress: ProgressSink | None = None,
    ):
        # The progress sink, and the group number below which it receives samples.
        self._progress = None if progress is None else (progress, math.inf)
        self.last_progress_at = time.monotonic()  # arrival of the last completion or grade
        self._engine, self._tokenizer = engine, tokenizer
        self._environments = grader if isinstance(grader, EnvironmentPool) else None
        self._agents = grader if isinstance(grader, AgentPool) else None
        self._grader = None if isinstance(grader, EnvironmentPool | AgentPool) else grader
        self.grading_metrics = lambda is_refill: grader.metrics(is_refill)
        self._warned_template_mismatch = False
        # Only the caller's thread changes these two. `wait_next` moves a group to the second.
        self._pending: dict[int, PendingGroup] = {}
        self.finished: dict[int, Group] = {}  # without advantages, until `pop`
        # Groups whose coroutine has ended, for `wait_next`; None only wakes it.
        self._results: SimpleQueue[PendingGroup | None] = SimpleQueue()
        # A single thread, so that completions are handled in the order of their arrival.
        self._executor = ThreadPoolExecutor(1, "torchtune-ext-groups")

    def is_generating(self, numbers: Collection[int] | None = None) -> bool:
        """Whether the engine still samples for any group, or for any of `numbers`."""
        return any(
            group.is_generating for number, group in self._pending.items() if numbers is None or number in numbers
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
            ValueError: the chat template rejects the problem, or its prompt does not fit.
            EngineFailed: the engine has failed or is closed.
        """
        has_environments = self._environments is not None
        group = PendingGroup(
            number, problem, self._tokenizer, num_samples, sampling, seed_index, priority, has_environments
        )
        requests = self._build_requests(group.prompt, num_samples, sampling, seed_index, priority)
        self.last_progress_at = time.monotonic()
        group.future = self._engine.schedule(self._run_group(group, requests), priority)
        self._pending[number] = group
        group.future.add_done_callback(lambda _: self._results.put(group))

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
                    group = self._results.get(timeout=max(0.0, min(end - time.monotonic(), SIGNAL_POLL_S)))
                except Empty:
                    if time.monotonic() >= end:
                        return None
                    continue
            # A canceled group is not pending, and its number may belong to a new group.
            if group is None or self._pending.get(group.number) is not group:
                continue
            try:
                group.future.result()
            except CancelledError:
                # Another thread closed the engine.
                raise EngineFailed("the engine was closed") from None
            self.finished[group.number] = self._pending.pop(group.number).to_group()
            return group.number

    def pop(self, number: int) -> Group:
        """Removes and returns a finished group."""
        return self.finished.pop(number)

    def cancel(self, number: int) -> int:
        """Cancels and drops a group, finished or not. Returns its number of sampled tokens."""
        if (finished := self.finished.pop(number, None)) is not None:
            return sum(len(sample.completion.sampled_indices) for sample in finished.samples)
        group = self._pending.pop(number)
        group.future.cancel()
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
        self._progress = None
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _build_requests(
        self, prompt: Sequence[int], n: int, sampling: SamplingConfig, seed_index: int, priority: Priority
    ) -> list[EngineRequest]:
        return build_requests(prompt, n, sampling, seed_index, priority, self._engine.config.max_model_len)

    # -- in the engine's loop ----------------------------------------------------------------------

    async def _run_group(self, group: PendingGroup, requests: Sequence[EngineRequest]) -> None:
        """Generates and grades all samples of a group."""
        # The first error cancels the other samples of the group, and `wait_next` raises it.
        run_sample = self._run_agent if self._agents else self._converse if group.episodes else self._sample_one
        await gather_or_cancel(*(run_sample(group, index, request) for index, request in enumerate(requests)))
        # A grader that compares samples needs all texts of a group at once.
        if self._grader is not None and self._grader.grades_groups:
            await self._grade(group, 0, *(sample.text for sample in group.arrived))

    async def _sample_one(self, group: PendingGroup, sample_index: int, request: EngineRequest) -> None:
        """Generates a completion and grades it."""
        assert self._grader is not None  # only episodes have no grader
        completion = await self._engine.generate(request, affinity_key=group)
        text = await self._in_thread(self._add_completion, group, sample_index, completion)
        if not self._grader.grades_groups:
            await self._grade(group, sample_index, text)

    async def _run_agent(self, group: PendingGroup, sample_index: int, request: EngineRequest) -> None:
        """Runs an agent, which requests responses from the endpoint until it returns the reward."""
        # Imported here, since only runs with agents need the server.
        from torchtune_ext.pipeline.endpoint import run_agent

        assert self._agents is not None  # otherwise the stream samples by itself

        def on_response(completion: Completion) -> None:
            self.last_progress_at = time.monotonic()
            self._report_tokens(group, 0, completion)

        sample = await run_agent(
            self._agents, self._engine, self._tokenizer, group.problem, group.prompt, group.sampling, request,
            sample_index, group.priority, on_response, group.agent_episodes,
        )  # fmt: skip
        self.last_progress_at, group.samples[sample_index] = time.monotonic(), sample
        if (progress := self._progress_for(group)) is not None:
            progress.add(1, 0)
        self._report_reward(group, sample.outcome)

    async def _grade(self, group: PendingGroup, first: int, *texts: str) -> None:
        """Grades the samples of a group from index `first` on."""
        assert self._grader is not None  # only episodes have no grader
        outcomes = await asyncio.wrap_future(await self._in_thread(self._grader.submit, group.problem, *texts))
        await self._in_thread(self._set_outcomes, group, first, outcomes)

    async def _converse(self, group: PendingGroup, sample_index: int, request: EngineRequest) -> None:
        """Generates the turns of an episode, and passes each to its environment, until it ends."""
        assert self._environments is not None  # only environments create episodes
        episode = group.episodes[sample_index]
        if not await self._generate_turn(group, sample_index, request):
            return
        # An episode reserves an environment process only after its first turn. Another episode can
        # use the process before the group is finished.
        async with self._environments.slot() as process:
            self.last_progress_at, episode.has_environment = time.monotonic(), True
            # All samples of a group get the same environment seed, so only the policy differs.
            reset_args = group.problem, derive_seed(group.sampling.seed or 0, group.seed_index)
            while True:
                # Called in the loop, not in the stream's thread, where the call could follow a
                # cancellation, when the process belongs to the next episode.
                reply = await asyncio.wrap_future(self._environments.step(process, episode.last_message, reset_args))
                next_request = await self._in_thread(self._add_reply, group, sample_index, reply)
                if next_request is None or not await self._generate_turn(group, sample_index, next_request):
                    return
                reset_args = None

    async def _generate_turn(self, group: PendingGroup, sample_index: int, request: EngineRequest) -> bool:
        """Generates a turn of an episode. Returns whether the environment gets it."""
        # The turns of an episode go to the replica whose prefix cache has its earlier turns.
        completion = await self._engine.generate(request, affinity_key=group)
        return await self._in_thread(self._add_turn, group, sample_index, completion)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function in the stream's thread, after a completion, a grade or a reply arrived."""
        self.last_progress_at = time.monotonic()
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    # -- in the stream's thread --------------------------------------------------------------------

    def _add_completion(self, group: PendingGroup, sample_index: int, completion: Completion) -> str:
        """Adds a completion to its group and returns its text."""
        text = group.thought_prefix + self._tokenizer.decode(completion.tokens.tolist())
        group.samples[sample_index] = Sample(completion, text=text)
        self._report_tokens(group, 1, completion)
        return text

    def _set_outcomes(self, group: PendingGroup, first: int, outcomes: Sequence[Outcome]) -> None:
        for index, outcome in enumerate(outcomes, start=first):
            sample = group.samples[index]
            assert sample is not None  # only arrived completions are graded
            group.samples[index] = replace(sample, outcome=outcome)
            self._report_reward(group, outcome)

    def _add_turn(self, group: PendingGroup, sample_index: int, completion: Completion) -> bool:
        """Adds a turn to its episode. Returns whether the environment gets it."""
        group.episodes[sample_index].add_turn(completion, self._tokenizer.decode(completion.tokens.tolist()))
        self._report_tokens(group, 0, completion)
        # The environment does not get a truncated turn.
        if completion.finish_reason != "stop":
            self._end_episode(group, sample_index, completion.finish_reason)
        return completion.finish_reason == "stop"

    def _add_reply(
        self, group: PendingGroup, sample_index: int, reply: EnvironmentReply | Ungraded
    ) -> EngineRequest | None:
        """Adds the environment's reply or failure to an episode.

        Returns:
            The request of the next turn, or None if the episode has ended.
        """
        assert self._environments is not None  # only environments reply
        episode = group.episodes[sample_index]
        if isinstance(reply, Ungraded):
            finish_reason = "step_timeout" if reply.kind == "timed_out" else "environment_failed"
            return self._end_episode(group, sample_index, finish_reason, reply)
        episode.add_reply(reply)
        if reply.done or episode.num_turns == self._environments.max_turns:
            return self._end_episode(group, sample_index, "completed" if reply.done else "max_turns")
        try:
            prompt, problem = self._next_context(group.problem, episode, reply), group.problem
            content = self._tokenizer.content_spans(prompt, reply.messages, problem.tools, problem.messages)
        except Exception as error:  # noqa: BLE001 (the template and the tokenizer, on the environment's reply)
            # The template cannot render this reply. Other episodes are not affected.
            failure = Ungraded("infra_failed", f"the environment's reply cannot be rendered: {describe_error(error)}")
            return self._end_episode(group, sample_index, "environment_failed", failure)
        # One row must hold all branches, and `row_tokens` may be as small as `max_model_len`.
        if episode.packed_size(prompt) + group.sampling.max_tokens > self._engine.config.max_model_len:
            return self._end_episode(group, sample_index, "context_overflow")
        episode.set_next_context(prompt, self._tokenizer.thought_prefix(prompt), content)
        seed = group.sampling.seed
        # The seed of a later turn depends on its sample and turn number, not on timing.
        turn_sampling = replace(
            group.sampling, seed=None if seed is None else derive_seed(seed, group.seed_index, sample_index)
        )
        # A later turn has priority over new groups, while its context is still in the prefix cache.
        priority = min(group.priority, Priority.TURN)
        return self._build_requests(prompt, 1, turn_sampling, episode.num_turns, priority)[0]

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

    def _end_episode(
        self, group: PendingGroup, sample_index: int, finish_reason: str, failure: Ungraded | None = None
    ) -> None:
        sample = group.samples[sample_index] = group.episodes[sample_index].to_sample(finish_reason, failure)
        if (progress := self._progress_for(group)) is not None:
            progress.add(1, 0)
        self._report_reward(group, sample.outcome)

    def _progress_for(self, group: PendingGroup) -> ProgressSink | None:
        # The main thread may remove the progress sink at any moment, so read it once.
        progress = self._progress
        return progress[0] if progress is not None and group.number < progress[1] else None

    def _report_tokens(self, group: PendingGroup, count: int, completion: Completion) -> None:
        if (progress := self._progress_for(group)) is not None:
            progress.add(count, len(completion.tokens))
        # `wait_next` may now wait for grades only.
        if not group.is_generating:
            self._results.put(None)

    def _report_reward(self, group: PendingGroup, outcome: Outcome | None) -> None:
        if (progress := self._progress_for(group)) is not None and isinstance(outcome, Score):
            progress.add_reward(outcome.reward)


def sample_groups(
    problems: Sequence[Problem],
    samples_per_prompt: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader | EnvironmentPool | AgentPool,
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
    grader: Grader | EnvironmentPool | AgentPool,
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

"""Defines groups and samples, the records between sampling and packing, and their JSON format."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtune_ext.grading import Outcome, Ungraded
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import GradedGroup, Message, Problem, Score


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt, with its outcome and its advantage."""

    completion: Completion  # sampled by the engine, or the target of a supervised sample
    # The decoded completion; of an episode, its messages after their roles. If the prompt ends with
    # an open "<think>", the completion starts with it.
    text: str = ""
    outcome: Outcome | None = None  # the result of grading; None if the sample was not graded
    advantage: float = 0.0  # set by `assign_advantages`
    in_loss: bool = False  # False: the sample is stored, but not packed
    teacher_logprobs: np.ndarray | None = None  # [R] float32, nats; None without a teacher
    messages: tuple[Message, ...] = ()  # the messages after the prompt; empty for a single turn
    turn_rewards: tuple[float, ...] = ()  # for each answered turn, of an agent for each response
    turn_advantages: tuple[float, ...] = ()  # with `credit: turn`; `advantage` is their mean

    @property
    def score(self) -> Score | None:
        """Returns the score, or None if the sample was not graded or grading failed."""
        return self.outcome if isinstance(self.outcome, Score) else None

    @property
    def rated_messages(self) -> list[tuple[Message, float | None]]:
        """Returns (message, reward from the environment) for each message after the prompt.

        The reward is None for an unanswered turn and for a message of the environment.
        """
        rewards = iter(self.turn_rewards)
        sampled = [m["role"] == "assistant" and m.get("sampled") != "no" for m in self.messages]
        return [(m, next(rewards, None) if turn else None) for m, turn in zip(self.messages, sampled, strict=True)]


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and all its completions."""

    problem: Problem
    prompt_tokens: np.ndarray  # [P] int32
    samples: tuple[Sample, ...]  # G samples

    @property
    def has_nonzero_advantage(self) -> bool:
        """Whether any sample or turn has an advantage other than 0."""
        return any(sample.advantage or any(sample.turn_advantages) for sample in self.samples)

    @property
    def num_completions(self) -> int:
        """The number of samples that have a score or are trained on (supervised samples)."""
        return sum(sample.in_loss or sample.score is not None for sample in self.samples)


def outcomes_for_task(groups: Sequence[Group]) -> list[GradedGroup]:
    """Converts groups to the argument of `AdaptiveTask.observe`."""
    return [
        (group.problem, [(s.text, s.score, s.outcome.kind if s.outcome else "") for s in group.samples])
        for group in groups
    ]


def group_to_json(group: Group) -> str:
    """Formats a group as a line of JSON.

    Policy versions are run-length encoded as `[[version, number of tokens], ...]`.
    """
    # `cached_prompt_tokens` is omitted, so that an engine restart, which empties the prefix cache,
    # does not change the stored rollouts.
    problem = {"id": group.problem.id, "messages": group.problem.messages, "answer": group.problem.answer}
    if group.problem.tools:
        problem["tools"] = group.problem.tools
    samples = ",".join(_sample_to_json(sample) for sample in group.samples)
    return (
        f'{{"problem":{json.dumps(problem, default=repr)},"prompt_tokens":{_ints(group.prompt_tokens)},'
        f'"samples":[{samples}]}}'
    )


def _sample_to_json(sample: Sample) -> str:
    completion, outcome, score = sample.completion, sample.outcome, sample.score
    head = {
        "text": sample.text,
        "reward": None if score is None else _number(score.reward),
        "parts": None if score is None else {k: _number(v) for k, v in score.parts.items()},
        "note": None if score is None else score.note,
        "facts": None if score is None else dict(score.facts),
        "outcome": None if outcome is None else outcome.kind,
        "cause": None if outcome is None else outcome.cause if isinstance(outcome, Ungraded) else "",
        "finish_reason": completion.finish_reason,
        "advantage": _number(sample.advantage),
        "trained": bool(sample.in_loss),
        "versions": run_length_encode(completion.versions),
    }
    if completion.turns:
        head |= {"turns": completion.turns, "turn_rewards": sample.turn_rewards, "messages": sample.messages}
    if completion.kept_prefix_lens:
        head["kept"] = completion.kept_prefix_lens
    if completion.parents:
        head["parents"] = completion.parents
    if completion.content_spans:
        head["content"] = completion.content_spans
    if sample.turn_advantages:
        head["turn_advantages"] = sample.turn_advantages
    # The arrays are formatted in bulk and inserted before the closing brace of json.dumps' output.
    arrays = f'"tokens":{_ints(completion.tokens)},"logprobs":{_floats(completion.logprobs)}'
    if sample.teacher_logprobs is not None:
        arrays += f',"teacher_logprobs":{_floats(sample.teacher_logprobs)}'
    return f"{json.dumps(head, default=repr)[:-1]},{arrays}}}"


def group_from_record(record: dict[str, Any]) -> Group:
    """Rebuilds a group from the parsed JSON of `group_to_json`.

    In `answer`, tuples become lists, and values without a JSON form become their `repr`. The
    problem's `example` and the completions' `cached_prompt_tokens` are not restored.
    """
    problem = record["problem"]
    return Group(
        problem=Problem(
            problem["id"], tuple(problem["messages"]), problem["answer"], tools=tuple(problem.get("tools", ()))
        ),
        prompt_tokens=np.array(record["prompt_tokens"], dtype=np.int32),
        samples=tuple(_sample_from_record(sample) for sample in record["samples"]),
    )


def _sample_from_record(record: dict[str, Any]) -> Sample:
    outcome = None
    if record["reward"] is not None:
        parts = {name: float(value) for name, value in record["parts"].items()}
        outcome = Score(float(record["reward"]), parts, record["note"], record["facts"])
    elif record["outcome"] is not None:
        outcome = Ungraded(record["outcome"], record["cause"])
    versions = [version for version, count in record["versions"] for _ in range(count)]
    return Sample(
        Completion(
            tokens=np.array(record["tokens"], dtype=np.int32),
            logprobs=_array(record["logprobs"]),
            versions=np.array(versions, dtype=np.int32),
            finish_reason=record["finish_reason"],
            turns=tuple(map(tuple, record.get("turns", ()))),
            kept_prefix_lens=tuple(record.get("kept", ())),
            parents=tuple(record.get("parents", ())),
            content_spans=tuple(map(tuple, record.get("content", ()))),
        ),
        text=record["text"],
        outcome=outcome,
        advantage=float(record["advantage"]),
        turn_advantages=tuple(record.get("turn_advantages", ())),
        in_loss=record["trained"],
        teacher_logprobs=_array(record["teacher_logprobs"]) if "teacher_logprobs" in record else None,
        messages=tuple(record.get("messages", ())),
        turn_rewards=tuple(map(float, record.get("turn_rewards", ()))),
    )


def run_length_encode(values_R: np.ndarray) -> list[list[int]]:
    """Returns [[value, length of the run], ...]: [[7, 3], [8, 1]] for [7, 7, 7, 8]."""
    values_R = np.asarray(values_R)
    # The prepended value differs from the first value, so that index 0 starts a run as well.
    starts = np.flatnonzero(np.diff(values_R, prepend=values_R[:1] - 1)) if len(values_R) else []
    ends = [*starts[1:], len(values_R)]
    return [[int(values_R[start]), int(end - start)] for start, end in zip(starts, ends, strict=False)]


def _number(value: float | str) -> float | str:
    # JSON has no NaN or infinity. They are written as strings, which `float()` parses.
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _array(values: Sequence[float | str]) -> np.ndarray:
    return np.array([float(value) for value in values], dtype=np.float32)


def _ints(values_R: np.ndarray) -> str:
    return json.dumps(np.asarray(values_R).tolist(), separators=(",", ":"))


def _floats(values_R: np.ndarray) -> str:
    values_R = np.asarray(values_R, dtype=np.float32)
    if not np.isfinite(values_R).all():
        return json.dumps([_number(f"{value:.9g}") for value in values_R.tolist()])
    # Formatting in bulk is twenty times as fast as json.dumps. Nine significant digits restore
    # every float32 exactly.
    return "[" + (",".join(["%.9g"] * len(values_R)) % tuple(values_R.tolist())) + "]"

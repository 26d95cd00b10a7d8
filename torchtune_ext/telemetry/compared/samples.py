"""What several runs answered to the same problem at the same step."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_ext.groups import Group, Sample
from torchtune_ext.telemetry.compared.runs import OneRun
from torchtune_ext.telemetry.compared.settings import Setting
from torchtune_ext.telemetry.excerpts import finite, messages_of, rewards_of, sample_facts, spaced
from torchtune_ext.telemetry.pieces import cut_text
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """This says how many samples a page of several runs carries."""

    steps: int = 3  # evenly spaced over those that most runs have stored
    problems: int = 6  # of a step: those where the runs' rewards lie farthest apart
    runs: int = 12  # of a step: those of many settings before further seeds of one
    characters: int = 3000  # of a text; the middle of longer ones is left out


def shared_samples(
    runs: Sequence[OneRun], settings: Sequence[Setting], limits: SampleLimits
) -> tuple[list[dict[str, Any]], str]:
    """Finds problems that two or more runs sampled at the same step, with the best and the worst sample of each run.

    Args:
        runs: all runs of the page.
        settings: in the order in which their runs are wanted.
        limits: how much is taken.

    Returns:
        The problems, as the page reads them, and a sentence on what there is, or why there is nothing.
    """
    paths = {number: found for number, run in enumerate(runs) if (found := rollout_paths(run.path))}
    if len(paths) < 2:
        return [], "Fewer than two runs have stored rollouts."
    counts: dict[int, int] = {}
    for found in paths.values():
        for step in found:
            counts[step] = counts.get(step, 0) + 1
    most = max(counts.values())
    if most < 2:
        return [], "No two runs have stored rollouts of the same step."
    order = _order(settings)
    steps = spaced(sorted(step for step, count in counts.items() if count == most), limits.steps)
    problems = []
    for step in steps:
        storing = [number for number in order if step in paths.get(number, {})][: limits.runs]
        groups = {number: _groups(paths[number][step]) for number in storing}
        problems += _shared(step, groups, limits)
    if not problems:
        return [], f"No two runs sampled the same problem at step {_words(steps)}, which were looked at."
    return problems, (
        f"Best and worst sample of each run, of problems that two or more runs sampled at step {_words(steps)}: up to "
        f"{limits.problems} of a step, first those whose mean rewards lie farthest apart, of at most {limits.runs} runs, the "
        "best ones first."
    )


def _order(settings: Sequence[Setting]) -> list[int]:
    """Returns the runs, the first one of each setting first, then the second ones."""
    longest = max((len(setting.runs) for setting in settings), default=0)
    return [setting.runs[i] for i in range(longest) for setting in settings if i < len(setting.runs)]


def _groups(path: Any) -> list[Group]:
    try:
        return read_rollouts(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("left out of the report: %s", error)
        return []


def _shared(step: int, groups: Mapping[int, Sequence[Group]], limits: SampleLimits) -> list[dict[str, Any]]:
    found: dict[Any, dict[int, Group]] = {}
    for number, own in groups.items():
        for group in own:
            # Two tasks may give different questions the same id.
            question = tuple(str(message["content"]) for message in group.problem.messages)
            found.setdefault((group.problem.id, question), {}).setdefault(number, group)
    shared = [by_run for by_run in found.values() if len(by_run) > 1]
    shared.sort(key=lambda by_run: (len(by_run), _apart(by_run)), reverse=True)
    return [_record(step, by_run, limits) for by_run in shared[: limits.problems]]


def _apart(by_run: Mapping[int, Group]) -> float:
    means = [sum(rewards) / len(rewards) for group in by_run.values() if (rewards := rewards_of(group))]
    return max(means) - min(means) if means else 0.0


def _record(step: int, by_run: Mapping[int, Group], limits: SampleLimits) -> dict[str, Any]:
    first = next(iter(by_run.values()))
    answer = first.problem.answer
    return {
        "step": step,
        "id": first.problem.id,
        "messages": messages_of(first, limits.characters),
        "answer": cut_text(answer if isinstance(answer, str) else repr(answer), limits.characters),
        "runs": [_of_run(number, group, limits) for number, group in by_run.items()],
    }


def _of_run(number: int, group: Group, limits: SampleLimits) -> dict[str, Any]:
    rewards = rewards_of(group)
    graded = sorted((sample for sample in group.samples if sample.score is not None), key=_reward, reverse=True)
    ends = graded[:1] + graded[-1:] if len(graded) > 1 else graded or list(group.samples[:1])
    return {
        "run": number,
        "count": len(group.samples),
        "rewards": [finite(reward) for reward in rewards],
        "mean": finite(sum(rewards) / len(rewards)) if rewards else None,
        "samples": [sample_facts(sample, limits.characters) for sample in ends],
    }


def _reward(sample: Sample) -> float:
    return sample.score.reward


def _words(steps: Sequence[int]) -> str:
    told = [f"{step:,}" for step in steps]
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"

"""Trains on the stored rollouts of a run instead of sampling and grading.

With `staleness` above 0, timing decides which policy version samples which token, so two runs of
one seed differ. But the same rollouts give the same updates: on a CPU a replay ends with the
weights of the run, bit for bit. With another objective or optimizer, a replay shows the effect of
that setting on the same data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.pipeline.source import REPLAYED_RUN_KEY
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.folder import checkpoint_folders, diff_settings, read_record
from torchtune_ext.tasks.problem_stream import ProblemStream
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.manifest import Identity, Manifest

# If the value of one of these keys differs, the stored groups belong to other steps or problems.
MATCHING_KEYS = ("seed", "prompts_per_step", "samples_per_prompt")
# These settings do not affect what a run learns from given rollouts, so they may differ.
IGNORED_KEYS = (
    "output_dir",
    "model_dir",
    "model",
    "replay",
    "resume_from_checkpoint",
    "dry_run",
    "checkpoints",
    "logging",
    "profile",
    "grader",
    "task.bench",
    "evaluation",
    "engine",
    "staleness",
    "prefetch_steps",
    "depth",  # its name in records of earlier versions
    "rollouts",
    "ranks",
    "max_mismatch",
    "teacher",
)
MAX_NAMED_SETTINGS = 8  # the maximum number of differing settings in one line
# The problems of the first step must be in this many first batches. Prefetched steps and refills
# may have taken the others.
MAX_SEARCHED_BATCHES = 32


class ReplaySource:
    """The source of a replay: returns the stored groups of each step.

    Args:
        run: folder of the replayed run.
        settings: the settings of this run, as `settings.config.record` returns them.
        identity: the model and the weights that this run starts with.
        problems: the problems of this run.
        tokenizer: the tokenizer of this run.

    Raises:
        UsageError: the replayed run is missing, is this run, lacks the rollouts of a step, or had
            other problems, another model or another seed. The message names the setting.
    """

    def __init__(
        self,
        run: str | Path,
        settings: Mapping[str, Any],
        identity: Identity,
        problems: ProblemStream,
        tokenizer: ChatTokenizer,
    ):
        self._run, self._paths, self._step = Path(run), rollout_paths(run), 0
        if self._run.resolve() == Path(settings["output_dir"]).resolve():
            raise UsageError(f"replay={run} is the output_dir of this run. Fix: choose another output_dir")
        record = self._record()
        self._id, self._steps, replayed_settings = record["id"], settings["max_steps"], record.get("config", {})
        self._require_rollouts()
        self._changed = _differing_settings(replayed_settings, settings)
        self._require_same(replayed_settings, settings)
        self._require_model(replayed_settings, identity)
        self._require_problems(settings, problems, tokenizer)

    def __str__(self) -> str:
        """Describes the replayed run and the differing settings in one line."""
        text = f"replays {self._run}: {self._steps} of its {len(self._paths)} steps; no engine, no evaluation"
        if self._changed:
            text += f". Other settings in that run, so the weights may differ: {_join_settings(self._changed)}"
        return text

    def on_publish(self, version: int) -> None:
        """Does nothing: a replay does not sample."""

    def take(self, count: int, timer: object = None, progress: object = None) -> tuple[list[Group], dict[str, float]]:
        """Returns all stored groups of the next step, in the order of sampling, and no metrics.

        Raises:
            UsageError: the file of the step is damaged, or another run has started in the folder.
        """
        if (current_id := self._record()["id"]) != self._id:
            raise UsageError(
                f"replay={self._run}: expected run {self._id} in the folder, found {current_id}. Fix: set replay to the "
                f"current folder of {self._id}"
            )
        self._step += 1
        return read_rollouts(self._paths[self._step]), {}

    def refill(
        self, count: int, refill_round: int, timer: object = None, progress: object = None
    ) -> tuple[list[Group], dict[str, float]]:
        """Returns no groups: `take` has returned the groups of refills, which are stored with their step."""
        return [], {}

    def state_dict(self) -> dict[str, Any]:
        return {REPLAYED_RUN_KEY: self._id}

    def load_state_dict(self, state: Mapping[str, Any], step: int, version: int | None = None) -> None:
        """Resumes after `step`. Copies of earlier recipes pass `version`, which is unused.

        Raises:
            UsageError: the checkpoint's run was not a replay, or replayed another run.
        """
        origin = f"replayed run {state[REPLAYED_RUN_KEY]}" if REPLAYED_RUN_KEY in state else "sampled its own groups"
        if state.get(REPLAYED_RUN_KEY) != self._id:
            raise UsageError(
                f"replay={self._run} (run {self._id}) cannot resume from this checkpoint, whose run {origin}. Fix: "
                "set replay to its earlier value, or start in another output_dir"
            )
        self._step = step

    def close(self) -> None:
        """Does nothing: a replay holds no open resources."""

    def _record(self) -> dict[str, Any]:
        try:
            record = read_record(self._run)
        except (OSError, ValueError) as error:
            raise UsageError(f"replay={self._run}: {error}. Fix: name the folder of a complete run") from None
        if record is None:
            raise UsageError(f"replay={self._run}: run.json not found. Fix: name the folder of a run of a GRPO recipe")
        return record

    def _require_rollouts(self) -> None:
        missing = [step for step in range(1, self._steps + 1) if step not in self._paths]
        if not missing:
            return
        if missing[0] == 1:
            raise UsageError(
                f"replay={self._run} holds no rollouts of step 1. Fix: set replay to the folder of a run that has trained"
            )
        more = ", or resume that run first" if missing[0] > max(self._paths) else ""
        raise UsageError(
            f"replay={self._run} has no rollouts of step {missing[0]}, and max_steps={self._steps}. Fix: set "
            f"max_steps={missing[0] - 1}{more}"
        )

    def _require_same(self, replayed_settings: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        for key in MATCHING_KEYS:
            if replayed_settings.get(key) != settings[key]:
                raise UsageError(
                    f"{key}={settings[key]}, but replay={self._run} has {key}={replayed_settings.get(key)}. Fix: set "
                    f"{key}={replayed_settings.get(key)}"
                )
        # An objective without an off-policy correction is checked against this run's staleness, so
        # this staleness must cover the samples.
        staleness = replayed_settings.get("staleness", 0)
        if staleness > settings["staleness"]:
            raise UsageError(
                f"replay={self._run}: its samples are up to {staleness} versions stale; expected at most staleness="
                f"{settings['staleness']}. Fix: set staleness={staleness}"
            )

    def _require_model(self, replayed_settings: Mapping[str, Any], identity: Identity) -> None:
        # Checkpoints name the model and the weights that a run started with. Unreadable checkpoints
        # are skipped, and a run without checkpoints is not checked.
        for checkpoint in reversed(checkpoint_folders(self._run / "checkpoints")):
            try:
                replayed = Manifest.read(checkpoint).identity
            except ValueError:
                continue
            for difference, replayed_value, value in (
                ("a different model", replayed.model, identity.model),
                ("different weights", replayed.base, identity.base),
            ):
                if replayed_value != value:
                    raise UsageError(
                        f"replay={self._run}: the replayed run has {difference} ({replayed_value}; expected {value}). Fix: set "
                        f"model_dir={replayed_settings.get('model_dir')} and `model:` as in that run"
                    )
            return

    def _require_problems(self, settings: Mapping[str, Any], problems: ProblemStream, tokenizer: ChatTokenizer) -> None:
        """Requires that this run's first prompts include the prompts of the stored first step."""
        batch, coef = settings["prompts_per_step"], settings["loss"].get("environment_coef")
        # A problem may keep its id while the task's data changes, so prompt tokens are compared.
        groups = {group.problem.id: group for group in read_rollouts(self._paths[1])}
        stored = (group for path in self._paths.values() for group in read_rollouts(path)) if coef else ()
        if coef and not any(s.completion.content_spans for group in stored for s in group.samples):
            raise UsageError(
                f"loss.environment_coef={coef}, but the rollouts of replay={self._run} do not record the environment's "
                "content: they are of an earlier version, or have no replies. Fix: set loss.environment_coef=0"
            )
        for cursor in range(MAX_SEARCHED_BATCHES * batch):
            problem = problems.problem_at(cursor)
            if (
                problem is not None
                and (group := groups.get(problem.id)) is not None
                and _has_prompt(group, problem, tokenizer)
            ):
                del groups[problem.id]
            if not groups:
                return
        task_changes = [text for text in self._changed if text.startswith(("task.", "tokenizer."))]
        cause = (
            f"other settings in that run: {_join_settings(task_changes)}"
            if task_changes
            else "the task's data or code has changed since"
        )
        raise UsageError(
            f"replay={self._run} has rollouts of problems that this run lacks, for instance {next(iter(groups))!r}: {cause}"
        )


def _join_settings(settings: Sequence[str]) -> str:
    more = f", and {len(settings) - MAX_NAMED_SETTINGS} more" if len(settings) > MAX_NAMED_SETTINGS else ""
    return f"{', '.join(settings[:MAX_NAMED_SETTINGS])}{more}"


def _differing_settings(replayed_settings: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Returns the settings that differ, for instance "optimizer.lr=0.001 (here 0.0001)"."""
    # With the dot, `model` matches `model` and `model.name`, but not another key with this prefix.
    ignored_prefixes = tuple(f"{key}." for key in IGNORED_KEYS)
    return [
        f"{change.key}={change.old} (here {change.new})"
        for change in diff_settings(replayed_settings, settings)
        if not f"{change.key}.".startswith(ignored_prefixes)
    ]


def _has_prompt(group: Group, problem: Problem, tokenizer: ChatTokenizer) -> bool:
    if group.prompt_tokens.tolist() == tokenizer.prompt_ids(problem.messages, problem.tools):
        return True
    # An agent writes its first request itself, so only the problem can be compared.
    is_episode = any(sample.completion.turns for sample in group.samples)
    return is_episode and list(group.problem.messages) == list(problem.messages)

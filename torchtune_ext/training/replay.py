"""Trains again on the stored rollouts of a run, which replace the engine, the graders and the problems.

With `staleness` above 0, timing decides which version of the policy samples which token, so two runs of one seed
differ. But the same rollouts give the same updates: on a CPU a replay ends with the weights of the run, bit for bit.
With other settings of the objective or the optimizer it shows what they do to the same data.
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
from torchtune_ext.training.manifest import Identity, Manifest

# With another value of these, the stored groups would belong to other steps or problems.
MATCHING_KEYS = ("seed", "prompts_per_step", "samples_per_prompt")
# Settings that do not change what a run learns from given rollouts, so they may differ.
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
MAX_NAMED_SETTINGS = 8  # the most differing settings that one line names
# Batches of problems among which those of the first step must be. Steps ahead and refills may have taken the others.
MAX_SEARCHED_BATCHES = 32


class Replay:
    """Replaces the source of groups, with the stored groups of each step, and the publisher, without sending weights.

    Args:
        run: folder of the replayed run.
        settings: the settings of this run, as `settings.config.record` returns them.
        identity: the model and the weights that this run begins with.
        problems, tokenizer: those of this run.

    Raises:
        ValueError: there is no such run, it is this one, it lacks the rollouts of a step, or it had other problems,
            another model or another seed. The message names the setting.
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
            raise UsageError(f"replay={run} is the output_dir of this run; choose another output_dir")
        record = self._record()
        self._id, self._steps, theirs = record["id"], settings["max_steps"], record.get("config", {})
        self._require_rollouts()
        self._changed = _differing_settings(theirs, settings)
        self._require_same(theirs, settings)
        self._require_model(theirs, identity)
        self._require_problems(settings["prompts_per_step"], problems, tokenizer)

    def __str__(self) -> str:
        """Says in one line what is replayed, and which settings differ."""
        text = f"replays {self._run}: {self._steps} of its {len(self._paths)} steps; no engine, no evaluation"
        if self._changed:
            text += f". Set otherwise there, so the weights may differ: {_join_settings(self._changed)}"
        return text

    def publish(self, version: int) -> dict[str, float]:
        """Does nothing: no engine takes the weights."""
        return {}

    def prefetch(self, version: int) -> None:
        """Does nothing: nothing is sampled ahead."""

    def take(
        self, count: int, timer: Any = None, progress: Any = None, refill_round: int = 0
    ) -> tuple[list[Group], dict[str, float]]:
        """Returns all groups that were stored for the next step, in the order of sampling, and no metrics.

        Raises:
            ValueError: the file of the step is damaged, or another run has begun in the folder.
        """
        # The groups of refills are stored with their step, and were returned with it.
        if refill_round:
            return [], {}
        if (now := self._record()["id"]) != self._id:
            raise UsageError(
                f"replay={self._run}: run {self._id} is not there any more, but {now}; name its folder of now"
            )
        self._step += 1
        return read_rollouts(self._paths[self._step]), {}

    def state_dict(self) -> dict[str, Any]:
        return {REPLAYED_RUN_KEY: self._id}

    def load_state_dict(self, state: Mapping[str, Any], step: int, version: int) -> None:
        """Resumes after `step`. Raises ValueError if the earlier run was no replay, or replayed another run."""
        before = f"replayed run {state[REPLAYED_RUN_KEY]}" if REPLAYED_RUN_KEY in state else "sampled its own groups"
        if state.get(REPLAYED_RUN_KEY) != self._id:
            raise UsageError(
                f"replay={self._run} (run {self._id}) cannot go on from this checkpoint, whose run {before}: set replay as it "
                "was, or begin in another output_dir"
            )
        self._step = step

    def close(self) -> None:
        """Does nothing: nothing is open."""

    def _record(self) -> dict[str, Any]:
        try:
            record = read_record(self._run)
        except (OSError, ValueError) as error:
            raise UsageError(f"replay={self._run}: {error}; name the folder of a whole run") from None
        if record is None:
            raise UsageError(f"replay={self._run}: there is no run.json; name the folder of a run of a GRPO recipe")
        return record

    def _require_rollouts(self) -> None:
        missing = [step for step in range(1, self._steps + 1) if step not in self._paths]
        if not missing:
            return
        if missing[0] == 1:
            raise UsageError(
                f"replay={self._run} holds no rollouts of step 1: name the folder of a run that has trained"
            )
        more = ", or let that run go on first" if missing[0] > max(self._paths) else ""
        raise UsageError(
            f"replay={self._run} lacks the rollouts of step {missing[0]}, and max_steps={self._steps}: set "
            f"max_steps={missing[0] - 1}{more}"
        )

    def _require_same(self, theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        for key in MATCHING_KEYS:
            if theirs.get(key) != settings[key]:
                raise UsageError(
                    f"replay={self._run} has {key}={theirs.get(key)}, and this run {key}={settings[key]}: set it as there"
                )
        # An objective without a correction is checked against this run's staleness, so that must cover the samples.
        stale = theirs.get("staleness", 0)
        if stale > settings["staleness"]:
            raise UsageError(
                f"replay={self._run} has samples up to staleness={stale} versions old, and this run staleness="
                f"{settings['staleness']}: set staleness={stale}, so that the objective is checked for it"
            )

    def _require_model(self, theirs: Mapping[str, Any], identity: Identity) -> None:
        # Checkpoints name the model and the weights that a run began with. One that cannot be read is passed over, and
        # a run without checkpoints is not checked.
        for checkpoint in reversed(checkpoint_folders(self._run / "checkpoints")):
            try:
                other = Manifest.read(checkpoint).identity
            except ValueError:
                continue
            for what, there, here in (
                ("another model", other.model, identity.model),
                ("other weights", other.base, identity.base),
            ):
                if there != here:
                    raise UsageError(
                        f"replay={self._run} began with {what} ({there}; this run has {here}): set model_dir="
                        f"{theirs.get('model_dir')} and model as there"
                    )
            return

    def _require_problems(self, batch: int, problems: ProblemStream, tokenizer: ChatTokenizer) -> None:
        """Requires that the prompts of the first step are among the first ones of this run."""
        # A problem may have kept its name while the task's data has changed, so the ids of the prompts are compared.
        groups = {group.problem.id: group for group in read_rollouts(self._paths[1])}
        for cursor in range(MAX_SEARCHED_BATCHES * batch):
            problem = problems.problem_at(cursor)
            if (
                problem is not None
                and (group := groups.get(problem.id)) is not None
                and group.prompt_tokens.tolist() == tokenizer.prompt_ids(problem.messages, problem.tools)
            ):
                del groups[problem.id]
            if not groups:
                return
        named = [text for text in self._changed if text.startswith(("task.", "tokenizer."))]
        cause = (
            f"set otherwise there: {_join_settings(named)}" if named else "the task's data or code has changed since"
        )
        raise UsageError(f"replay={self._run} answers other problems, {next(iter(groups))!r} for instance: {cause}")


def _join_settings(settings: Sequence[str]) -> str:
    more = f", and {len(settings) - MAX_NAMED_SETTINGS} more" if len(settings) > MAX_NAMED_SETTINGS else ""
    return f"{', '.join(settings[:MAX_NAMED_SETTINGS])}{more}"


def _differing_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Returns the settings that differ, for instance "optimizer.lr=0.001 (here 0.0001)"."""
    # With the dots, `model` stands for itself and for `model.name`, but not for another key that begins alike.
    apart = tuple(f"{key}." for key in IGNORED_KEYS)
    return [
        f"{change.key}={change.old} (here {change.new})"
        for change in diff_settings(theirs, ours)
        if not f"{change.key}.".startswith(apart)
    ]

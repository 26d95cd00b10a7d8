"""Trains again on what a run has sampled: its stored rollouts stand in for the engine, the graders and the problems.

With `staleness` above 0 it is a matter of time which version of the policy samples which token, so two runs of one seed differ.
But what a run has sampled is stored, token by token with versions and log-probs. From the same weights, the same rollouts
give the same updates: on a CPU a replay ends with the weights of the run, bit for bit, however often that was killed. With
other settings of the objective or the optimizer a replay tells what these do to the same data.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune_ext.groups import Group
from torchtune_ext.run.folder import read_record
from torchtune_ext.tasks.order import ProblemStream
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths
from torchtune_ext.training.identity import Identity
from torchtune_ext.training.manifest import Manifest

# With another value the stored groups would answer other problems, or be other steps.
SAME = ("task", "tokenizer", "seed", "prompts_per_step", "samples_per_prompt")
# These settings say where and how a run works. They do not change what it learns from given rollouts.
APART = (
    "output_dir",
    "model_dir",
    "model",
    "replay",
    "resume_from_checkpoint",
    "dry_run",
    "checkpoints",
    "logging",
    "grader",
)
APART += ("evaluation", "engine", "staleness", "depth", "rollout_deadline_s", "rank_deadline_s", "max_mismatch")
NAMED = 8  # settings that differ and that one line names


class Replay:
    """What a run has where others have the source of groups and the publisher: it hands out the stored groups of each step, and
    takes weights to nobody.

    Args:
        run: folder of the run that is replayed.
        settings: those of this run, as `host.config.record` returns them.
        identity: the model and the weights that this run begins with; its run does not count.
        problems: those of this run.

    Raises:
        ValueError: there is no such run, it is this one, it lacks the rollouts of a step, or it asked other problems, began
            with another model or had another seed. The message names the setting.
    """

    def __init__(self, run: str | Path, settings: Mapping[str, Any], identity: Identity, problems: ProblemStream):
        self._run, self._paths, self._step = Path(run), rollout_paths(run), 0
        if self._run.resolve() == Path(settings["output_dir"]).resolve():
            raise ValueError(f"replay={run} is the output_dir of this run; choose another output_dir")
        try:
            found = read_record(run)
        except (OSError, ValueError) as error:
            raise ValueError(f"replay={run}: {error}; name the folder of a whole run") from None
        if found is None:
            raise ValueError(f"replay={run}: there is no run.json; name the folder of a run of a GRPO recipe")
        self._theirs = found.get("config", {})
        self._require_rollouts(settings["max_steps"])
        self._require_same(settings)
        self._require_model(identity)
        self._require_problems(settings, problems)
        self._changed = _differences(self._theirs, settings)

    def __str__(self) -> str:
        """Says in one line what is replayed, and which settings will make it end elsewhere."""
        text = f"replays {self._run}: its rollouts of {len(self._paths)} steps; no engine, no evaluation"
        if self._changed:
            more = f", and {len(self._changed) - NAMED} more" if len(self._changed) > NAMED else ""
            text += f". Set otherwise there, so the weights may differ: {', '.join(self._changed[:NAMED])}{more}"
        return text

    def publish(self, version: int) -> dict[str, float]:
        """There is no engine that could take the weights."""
        return {}

    def open(self, version: int) -> None:
        """Nothing is sampled ahead."""

    def take(
        self, count: int, watch: Any = None, watcher: Any = None, refill: int = 0
    ) -> tuple[list[Group], dict[str, float]]:
        """Returns all groups that were stored for the next step, in the order in which they were sampled, and no metrics.

        Those of refills are among them, so a further round, with `refill` from 1, brings nothing.

        Raises:
            ValueError: the file of the step is damaged.
        """
        if refill:
            return [], {}
        self._step += 1
        return read_rollouts(self._paths[self._step]), {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], step: int, version: int) -> None:
        """Goes on after `step`."""
        self._step = step

    def close(self) -> None:
        """Nothing is open."""

    def _require_rollouts(self, steps: int) -> None:
        missing = [step for step in range(1, steps + 1) if step not in self._paths]
        if not missing:
            return
        if missing[0] == 1:
            raise ValueError(
                f"replay={self._run} holds no rollouts of step 1: name the folder of a run that has trained"
            )
        raise ValueError(
            f"replay={self._run} lacks the rollouts of step {missing[0]}, and max_steps={steps}: set "
            f"max_steps={missing[0] - 1}, or let that run go on first"
        )

    def _require_same(self, settings: Mapping[str, Any]) -> None:
        for key in SAME:
            ours, theirs = settings[key], self._theirs.get(key)
            if ours == theirs:
                continue
            where = _differences({key: theirs}, {key: ours})
            raise ValueError(
                f"replay={self._run} answers other problems: {', '.join(where)}. Set {key} as it is in "
                f"{self._run}/run.json, or leave out replay"
            )

    def _require_model(self, identity: Identity) -> None:
        """Compares with the newest checkpoint, which says what the run began with. A run that has none yet is believed."""
        manifests = sorted(self._run.glob("checkpoints/step_*/manifest.json"))
        if not manifests:
            return
        theirs = Manifest.read(manifests[-1].parent).identity
        for name, ours in (("model", identity.model), ("base", identity.base)):
            if ours != getattr(theirs, name):
                what = {"model": "another model", "base": "other weights"}[name]
                raise ValueError(
                    f"replay={self._run} began with {what} ({getattr(theirs, name)}; this run has {ours}): set model_dir="
                    f"{self._theirs.get('model_dir')} and model as there"
                )

    def _require_problems(self, settings: Mapping[str, Any], problems: ProblemStream) -> None:
        """The first step's problems have to be among the first ones of the task: its file may have changed since."""
        ahead = (self._theirs.get("depth") or self._theirs.get("staleness", 0)) + self._theirs.get("refill_rounds", 0)
        first = [problems.at(cursor) for cursor in range((1 + ahead) * settings["prompts_per_step"])]
        asked = {problem.id: [dict(message) for message in problem.messages] for problem in first}
        for group in read_rollouts(self._paths[1]):
            if asked.get(group.problem.id) != [dict(message) for message in group.problem.messages]:
                raise ValueError(
                    f"replay={self._run}: step 1 there has problem {group.problem.id!r}, which the task of this run does "
                    "not ask so: the task's data or code has changed since"
                )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Names settings with both values, for instance "optimizer.lr=0.001 (here 0.0001)"."""
    theirs, ours = (dict(_leaves(node)) for node in (theirs, ours))
    keys = [key for key in (*theirs, *(k for k in ours if k not in theirs)) if key.partition(".")[0] not in APART]
    return [f"{key}={theirs.get(key)} (here {ours.get(key)})" for key in keys if theirs.get(key) != ours.get(key)]


def _leaves(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found

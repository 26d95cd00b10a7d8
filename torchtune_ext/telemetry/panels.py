"""The registry of metrics: the meaning of each metric, and its panel in the report.

`scripts/reference.py` writes the tables of docs/reference/metrics.md from it. Tests compare the
names with real runs.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchtune_ext.grading.environments import FINISH_REASONS


class Metric(NamedTuple):
    """A metric, or all metrics of a pattern such as "reward/<part>"."""

    name: str
    label: str  # in the legend of its panel; for a pattern, the matched part is appended
    meaning: str = ""  # at most 12 words; "" if an earlier panel explains the metric
    investigate: str = ""  # completes "investigate if"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of the report."""

    section: str  # the heading above the panel
    title: str
    # A pattern takes the metrics with its prefix that no earlier panel draws. Band edges lack a line.
    metrics: tuple[Metric, ...]  # () in a panel with data (`panels_for`)
    note: str = ""  # the line below the title; "": the meaning of the metrics
    unit: str = ""  # of the values: "", "percent", "seconds", "bytes", "gib", "int" or "tok/s"
    scale: str = "linear"  # of the axis of values: "linear" or "log"
    style: str = "line"  # "line", or a "stack" of areas
    # A band around a series: the metrics of the series, the lower edge and the upper edge.
    band: tuple[str, str, str] | None = None
    zero: bool = False  # whether the axis begins at zero
    baseline: float | None = None  # value of a dashed line, for instance 1 for rho
    hide_if_zero: bool = False  # whether the panel is left out while all its values are zero
    lead: bool = False  # the first such panel of a page comes first, and is larger
    uses_latest: bool = False  # counters and settings: the reading is the newest value, not a mean
    # The order of the metrics of a pattern. Other names come last, sorted.
    order: tuple[str, ...] = ()
    # The colors of `order`, from 1 to 7, so that green means good; without it in turn.
    colors: tuple[int, ...] = ()
    # The name and label of each line. In the registry they follow from `metrics`, "*" in a pattern.
    series: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.metrics:
            edges = self.band[1:] if self.band else ()
            series = [(re.sub("<.*", "*", each.name), each.label) for each in self.metrics if each.name not in edges]
            object.__setattr__(self, "series", tuple(series))


# The outcomes of a check of a measured program, from the worst to the best, and the stages of the
# curriculum. measured/matmul, which needs further packages, has them too. A test compares both.
_OUTCOMES = ("format", "forbidden", "compile_error", "timeout", "runtime_error", "wrong_result", "ok")
_STAGES = ("none", "loop_order", "blocking", "vectorization", "threads", "all")

# The report and the tables have this order. A metric that matches several patterns belongs to the
# first panel; a metric that a panel names in full belongs to that panel.
PANELS = (
    Panel("Learning", "Reward", band=("eval/reward_sampled", "eval/low", "eval/high"), lead=True,
          note="Mean reward of the step's samples, and of held-out problems with the 95% interval over them.", metrics=(
        Metric("reward/mean", "reward", "mean reward of the step's graded samples", "flat from the start"),
        Metric("eval/reward_sampled", "held-out, sampled", "mean held-out reward at the training temperature",
               "it falls while `reward/mean` rises"),
        Metric("eval/reward_greedy", "held-out, greedy", "mean held-out reward at temperature 0",
               "it falls while `reward/mean` rises"),
        Metric("eval/low", "", "lower end of the 95% interval of `eval/reward_sampled`"),
        Metric("eval/high", "", "upper end of the 95% interval of `eval/reward_sampled`"))),
    Panel("Learning", "Spread of the rewards", zero=True, metrics=(
        Metric("reward/std", "std", "standard deviation of the step's rewards", "near 0: nothing to learn"),)),
    Panel("Learning", "Solved", unit="percent", note="Fraction of held-out samples with full reward.", metrics=(
        Metric("eval/solved_sampled", "sampled", "fraction of held-out samples with reward >= 1, training temperature"),
        Metric("eval/solved_greedy", "greedy", "fraction of held-out samples with reward >= 1, temperature 0"),
        Metric("eval/pass_at_<n>", "pass at ", "fraction of held-out problems that any of n samples solves",
               "it falls while `eval/reward_sampled` rises"))),
    Panel("Learning", "Outcomes of programs", unit="percent", style="stack", zero=True, order=_OUTCOMES,
          colors=(6, 4, 5, 7, 1, 2, 3), metrics=(
        Metric("reward/outcome_<outcome>", "", "fraction of graded programs with this outcome", "`ok` stays at 0"),)),
    Panel("Learning", "Reward parts", metrics=(Metric("reward/<part>", "", "mean of a named part of the score"),)),
    Panel("Learning", "Completion length", unit="int", zero=True, metrics=(
        Metric("length/mean", "mean", "mean tokens of a completion, over all turns"),
        Metric("length/max", "max", "tokens of the step's longest completion"))),
    Panel("Learning", "Truncated", unit="percent", zero=True, metrics=(
        Metric("length/truncated", "truncated", "fraction of samples truncated at the token limit", "above 0.1 to 0.2"),)),
    Panel("Learning", "Turns of a conversation", zero=True, metrics=(
        Metric("episode/turns", "turns", "mean turns of the policy in a conversation", "it stays at the task's `max_turns`"),)),
    Panel("Learning", "Forks of a conversation", zero=True, hide_if_zero=True, metrics=(
        Metric("episode/forks", "forks", "mean branches of a conversation beyond its first path",
               "above 0, though the agent only appends to its history"),)),
    Panel("Learning", "Episodes without a response", unit="int", zero=True, hide_if_zero=True, metrics=(
        Metric("episode/no_response", "episodes", "episodes whose agent got no trained response; not trained on",
               "above 0"),)),
    Panel("Learning", "Tokens read in a conversation", unit="int", zero=True, metrics=(
        Metric("episode/read_tokens", "read", "mean tokens of a conversation that were not sampled"),)),
    Panel("Learning", "Endings of conversations", unit="percent", style="stack", zero=True, order=FINISH_REASONS,
          colors=(3, 7, 2, 4, 6, 1, 5, 1, 5), metrics=(
        Metric("episode/<ending>", "", "fraction of conversations with this ending",
               "`length` or `context_overflow` exceeds 0.1; a failure or timeout exceeds 0"),)),
    Panel("Learning", "Groups", unit="int", zero=True, metrics=(
        Metric("groups/used", "different rewards", "groups with nonzero advantages"),
        Metric("groups/no_signal", "zero variance", "zero-variance groups: all advantages zero",
               "more than half of the groups"))),
    Panel("Learning", "Groups with different rewards, by level", unit="percent", zero=True, uses_latest=True, metrics=(
        Metric("selection/<level>", "", "moving average of a level's groups whose rewards differ"),)),
    Panel("Learning", "Grading failures", unit="int", zero=True, hide_if_zero=True, metrics=(
        Metric("groups/infra_failed", "failed", "samples whose grader or environment failed, not trained on", "above 0"),
        Metric("groups/timed_out", "timed out", "samples whose grader, environment or agent timed out, or shipped grader died",
               "it grows: the policy finds texts that hang the grader"))),
    Panel("Learning", "Turns without a comparison", unit="int", zero=True, hide_if_zero=True, metrics=(
        Metric("groups/lone_turns", "turns", "turns that only one conversation of a group reached",
               "most of the later turns count"),)),
    Panel("Learning", "Skipped problems", unit="int", zero=True, uses_latest=True, metrics=(
        Metric("problems/skipped", "training", "training problems skipped since the run began: invalid or too long",
               "it grows every step"),
        Metric("eval/skipped", "held out", "held-out problems skipped", "above 0"))),
    Panel("Measured speed", "Speed-up", scale="log", baseline=1.0, metrics=(
        Metric("reward/speedup", "× naive", "mean speed-up of correct programs over the naive program"),)),
    Panel("Measured speed", "GFLOPS", zero=True, metrics=(
        Metric("reward/gflops", "GFLOPS", "mean GFLOPS of correct programs"),)),
    Panel("Measured speed", "Fraction of the peak", unit="percent", zero=True, metrics=(
        Metric("reward/peak_share", "fraction", "correct programs' mean fraction of the timed cores' measured roofline"),)),
    Panel("Measured speed", "Width of the intervals", unit="percent", zero=True, metrics=(
        Metric("reward/spread", "± seconds", "half of the time's relative 95% interval",
               "above 0.05: noisy machine or short calls"),
        Metric("reward/speedup_spread", "± speed-up", "half of the speed-up's relative 95% interval",
               "above 0.05: noisy machine or short calls"))),
    Panel("Measured speed", "Stages", unit="int", style="stack", zero=True, order=_STAGES, uses_latest=True, metrics=(
        Metric("stage/<stage>", "", "problems at this stage of the curriculum", "all problems stay at the first stage"),)),
    Panel("Measured speed", "Moves between stages", unit="int", zero=True, metrics=(
        Metric("stage/moves", "problems", "problems that moved to another stage in the step"),)),
    Panel("Measured speed", "Seconds on the bench", unit="seconds", zero=True, metrics=(
        Metric("time/bench", "bench", "checks and timings of programs",
               "above `time/sample/generate`: the bench is the bottleneck"),)),
    Panel("Measured speed", "Noisy and cached", unit="percent", zero=True, metrics=(
        Metric("bench/noisy", "noisy", "fraction of programs not graded because timing was disturbed", "above 0.05"),
        Metric("bench/cache_hits", "cached", "fraction of programs with a cached measurement",
               "near 1: the policy repeats itself"))),
    Panel("Archive", "Cells filled", unit="int", zero=True, uses_latest=True, metrics=(
        Metric("archive/cells", "cells", "cells of the archive that hold a program", "it no longer grows"),)),
    Panel("Archive", "Fastest program", scale="log", baseline=1.0, uses_latest=True, metrics=(
        Metric("archive/best_speedup", "× naive", "speed-up of the archive's fastest program over the naive program"),)),
    Panel("Policy change", "Loss", metrics=(
        Metric("loss/total", "loss", "minimized loss; its level means little in GRPO", "it jumps"),)),
    Panel("Policy change", "Negative log-likelihood", zero=True, lead=True, metrics=(
        Metric("loss/nll", "nll", "negative log-likelihood of the SFT warm-up's solutions, nats per token", "it rises"),)),
    Panel("Policy change", "Environment's content", zero=True, metrics=(
        Metric("loss/environment_nll", "nll", "cross-entropy on the environment's content, nats per token, with "
               "`loss.environment_coef`", "it does not fall"),)),
    Panel("Policy change", "KL", metrics=(
        Metric("loss/kl_ref", "reference", "KL to the reference policy, with `loss.kl_coef`", "it grows quickly"),
        Metric("loss/approx_kl", "step's first", "KL to the old policy", "it grows quickly"))),
    Panel("Policy change", "KL to the teacher", zero=True,
          note="Log-prob under the policy minus log-prob under the teacher, in nats.", metrics=(
        Metric("loss/kl_teacher", "mean", "log π_old − log p_teacher on sampled tokens, mean in nats", "it does not fall"),
        Metric("loss/kl_teacher_at_<place>", "at ", "`loss/kl_teacher` by position", "one bucket stands out"),
        Metric("loss/kl_teacher_staleness_<bucket>", "staleness ", "`loss/kl_teacher` by staleness", "one bucket stands out"))),
    Panel("Policy change", "Surprise of the teacher", unit="percent", zero=True, metrics=(
        Metric("loss/teacher_surprise", "tokens", "fraction of tokens with teacher probability below 1%",
               "it does not fall"),)),
    Panel("Policy change", "Entropy", zero=True, metrics=(
        Metric("loss/entropy", "entropy", "entropy of the policy, nats per token", "it falls toward 0: collapse"),)),
    Panel("Policy change", "Entropy coefficient", zero=True, metrics=(
        Metric("loss/entropy_coef", "coefficient", "applied `loss.entropy_coef`, with `loss.entropy_target`",
               "it keeps rising"),)),
    Panel("Policy change", "Clip fraction", unit="percent", zero=True, metrics=(
        Metric("loss/clip_fraction", "clipped", "fraction of tokens with clipped gradient (CISPO: clipped ratio)",
               "above 0.1 to 0.2"),)),
    Panel("Policy change", "Clip fraction by position", unit="percent", zero=True, hide_if_zero=True, metrics=(
        Metric("loss/clip_fraction_at_<place>", "", "`loss/clip_fraction` by position", "one bucket stands out"),)),
    Panel("Policy change", "Clip fraction by staleness", unit="percent", zero=True, hide_if_zero=True, metrics=(
        Metric("loss/clip_fraction_staleness_<bucket>", "", "`loss/clip_fraction` by staleness", "one bucket stands out"),)),
    Panel("Policy change", "Masked", unit="percent", zero=True, hide_if_zero=True,
          note="Fraction of masked tokens; by position and staleness.", metrics=(
        Metric("loss/masked_fraction", "masked", "fraction of tokens masked by importance weights or `off_policy_mask`",
               "above 0.05"),
        Metric("loss/masked_fraction_at_<place>", "at ", "`loss/masked_fraction` by position", "one bucket stands out"),
        Metric("loss/masked_fraction_staleness_<bucket>", "staleness ", "`loss/masked_fraction` by staleness",
               "one bucket stands out"))),
    Panel("Policy change", "Largest ratio", scale="log", metrics=(
        Metric("loss/ratio_max", "max ratio", "largest ratio of current to old policy, before clipping", "above 100"),)),
    Panel("Policy change", "Gradient norm", zero=True, metrics=(
        Metric("optim/grad_norm", "norm", "gradient norm before clipping", "it spikes"),)),
    Panel("Policy change", "Learning rate", zero=True, uses_latest=True, metrics=(
        Metric("optim/lr", "lr", "learning rate, mean over the step's updates"),)),
    Panel("Policy change", "Other terms of the loss", metrics=(
        Metric("loss/<term>", "", "term returned by a custom loss"),)),
    Panel("Trainer/engine mismatch", "Log-prob difference", scale="log",
          note="|Δ log-prob| of sampled tokens in nats, before any truncation.", metrics=(
        Metric("mismatch/mean_abs", "mean", "mean absolute log-prob difference on the same ids, nats", "it drifts upward"),
        Metric("mismatch/p99_abs", "p99", "99th percentile of the absolute log-prob difference, nats", "it drifts upward"),
        Metric("mismatch/max_abs", "max", "largest absolute log-prob difference, nats", "it drifts upward"),
        Metric("mismatch/k3", "k3", "estimate of KL(engine, trainer) that is never negative", "it drifts upward"))),
    Panel("Trainer/engine mismatch", "Log-prob difference by position", scale="log", metrics=(
        Metric("mismatch/mean_abs_at_<place>", "", "`mismatch/mean_abs` by position", "one bucket stands out"),)),
    Panel("Trainer/engine mismatch", "Log-prob difference by staleness", scale="log", metrics=(
        Metric("mismatch/mean_abs_staleness_<bucket>", "", "`mismatch/mean_abs` by staleness", "one bucket stands out"),)),
    Panel("Trainer/engine mismatch", "Signed difference (k1)", metrics=(
        Metric("mismatch/k1", "k1", "estimate of KL(engine, trainer) of either sign", "it drifts upward"),)),
    Panel("Trainer/engine mismatch", "Effective sample size", unit="percent", metrics=(
        Metric("mismatch/ess", "fraction", "effective sample size of importance weights per token; 1 without mismatch",
               "below 0.9"),)),
    Panel("Trainer/engine mismatch", "Canary", scale="log",
          note="|Δ log-prob| on samples of fixed prompts after each weight sync.", metrics=(
        Metric("canary/mean_abs", "mean", "mean absolute log-prob difference on fixed prompts, worst replica",
               "it jumps: the engine has other weights"),
        Metric("canary/limit", "limit", "`max_mismatch`, or its value with `auto`, without the margin for chance"))),
    Panel("Trainer/engine mismatch", "Updates that the engine reproduces", baseline=1.0, metrics=(
        Metric("canary/update_applied", "update", "fraction of the last step's log-prob change that the engine reproduces",
               "far from 1; below 0.5 the run stops"),
        Metric("canary/adapter_applied", "adapter", "fraction of the adapter's log-prob change that the engine reproduces",
               "far from 1; below 0.5 the run stops"))),
    Panel("Trainer/engine mismatch", "Values that a weight sync changed", unit="percent", zero=True, hide_if_zero=True,
          metrics=(
        Metric("publish/changed_share", "fraction", "estimated fraction of values that a weight sync changes",
               "below 0.2 with `engine.dtype` coarser than `dtype`"),)),
    Panel("Asynchronous training", "Staleness of the groups", zero=True,
          note="Policy version in training minus policy version at the start of a group.", metrics=(
        Metric("async/staleness_mean", "mean", "mean staleness of the step's groups, in policy versions",
               "well above `prefetch_steps`"),
        Metric("async/staleness_max", "max", "largest staleness of the step's groups, in policy versions"))),
    Panel("Asynchronous training", "Groups by staleness", unit="percent", style="stack", zero=True, metrics=(
        Metric("async/staleness_<versions>", "staleness ", "fraction of the step's groups with this staleness"),)),
    Panel("Asynchronous training", "Wait for groups", unit="seconds", zero=True, metrics=(
        Metric("time/wait_for_rollouts", "wait", "trainer's wait for groups",
               "it is most of `time/step`: the engine is the bottleneck"),)),
    Panel("Asynchronous training", "Groups in progress", unit="int", zero=True, metrics=(
        Metric("async/buffer", "buffer", "finished groups left after the step takes its groups"),
        Metric("async/running", "running", "groups in generation or grading when the step takes its groups"))),
    Panel("Asynchronous training", "Dropped groups", unit="int", zero=True, hide_if_zero=True, uses_latest=True, metrics=(
        Metric("async/dropped", "groups", "groups dropped as too stale since the run began; generated again", "above 0"),)),
    Panel("Asynchronous training", "Tokens of dropped groups", unit="int", zero=True, hide_if_zero=True, uses_latest=True,
          metrics=(
        Metric("async/dropped_tokens", "tokens", "tokens of dropped groups since the run began", "above 0"),)),
    Panel("Speed", "Seconds of a step", unit="seconds", style="stack", zero=True,
          note="By phase; the phases add up to the step.", metrics=(
        Metric("time/sample", "sample", "from prompts to groups with advantages"),
        Metric("time/pack", "pack", "packing of groups into rows, and rows to ranks"),
        Metric("time/train", "train", "from rows to new weights"),
        Metric("time/publish", "publish", "weight sync and its verification"),
        Metric("time/eval", "eval", "held-out evaluation, in steps with one"),
        Metric("time/save", "save", "checkpoint, in steps with one"),
        Metric("time/log", "log", "writing of metrics"))),
    Panel("Speed", "Step time", unit="seconds", zero=True, metrics=(
        Metric("time/step", "step", "whole step; the phases add up to it within 2%"),)),
    Panel("Speed", "Seconds of sampling", unit="seconds", style="stack", zero=True, metrics=(
        Metric("time/sample/generate", "generate", "generation by the engine"),
        Metric("time/sample/grade", "grade", "wait for grades after the last token"),
        Metric("time/sample/teacher", "teacher", "scoring by the teacher"),
        Metric("time/sample/store", "store", "writing of rollouts"))),
    Panel("Speed", "Seconds of training", unit="seconds", style="stack", zero=True, metrics=(
        Metric("time/train/logprobs", "log-probs", "log-probs of proximal policy and reference"),
        Metric("time/train/backward", "backward", "forward and backward"),
        Metric("time/train/wait", "wait", "wait for the other ranks"),
        Metric("time/train/optimizer", "optimizer", "optimizer step"))),
    Panel("Speed", "Seconds of a weight sync", unit="seconds", style="stack", zero=True, metrics=(
        Metric("time/publish/gather", "gather", "gathering of the weights from the ranks"),
        Metric("time/publish/copy", "copy", "copy to shared memory"),
        Metric("time/publish/pause", "pause", "pause of the engine while it loads the weights"),
        Metric("time/publish/canary", "canary", "canary check"))),
    Panel("Speed", "Seconds of an evaluation", unit="seconds", style="stack", zero=True, metrics=(
        Metric("time/eval/generate", "generate", "generation by the engine"),
        Metric("time/eval/grade", "grade", "wait for grades after the last token"))),
    Panel("Speed", "Seconds of a checkpoint", unit="seconds", zero=True, note="The checkpoint, and the checksums in it.",
          metrics=(
        Metric("time/save", "total"),
        Metric("time/save/hash", "checksums", "checksums, while the disk writes"))),
    Panel("Speed", "Throughput", unit="tok/s", zero=True, metrics=(
        Metric("speed/sampled_tokens_s", "sampled", "sampled tokens per second of generation (asynchronous: of the step)"),
        Metric("speed/trained_tokens_s", "trained", "packed tokens (`pack/tokens` x iterations) per second of `time/train`"))),
    Panel("Speed", "Tokens of a step", unit="int", zero=True, metrics=(
        Metric("length/tokens", "sampled", "sampled tokens of the step"),
        Metric("pack/tokens", "packed", "tokens in the packed rows, a prompt once per row"),
        Metric("pack/labels", "trained on", "tokens trained on"))),
    Panel("Speed", "Token reduction by shared prompts (ρ)", baseline=1.0, metrics=(
        Metric("pack/rho", "ρ", "tokens without prompt sharing over tokens with it", "near 1: sharing saves nothing"),)),
    Panel("Speed", "Packing efficiency", unit="percent", zero=True, metrics=(
        Metric("pack/efficiency", "efficiency", "fraction of computed positions with needed tokens", "below 0.8"),)),
    Panel("Speed", "Rows", unit="int", zero=True, metrics=(Metric("pack/rows", "rows", "packed rows that hold labels"),)),
    Panel("Machine", "Engine caches", unit="percent", zero=True, uses_latest=True, metrics=(
        Metric("engine/prefix_hit_rate", "prefix hits", "fraction of prompt tokens found in the prefix cache"),
        Metric("engine/kv_max", "KV peak", "peak use of the KV cache since the last start"))),
    Panel("Machine", "Requests in flight", unit="int", zero=True, uses_latest=True, metrics=(
        Metric("engine/concurrency", "limit", "limit of requests in flight, set by the throttle"),)),
    Panel("Machine", "Preemptions and restarts", unit="int", zero=True, hide_if_zero=True, uses_latest=True, metrics=(
        Metric("engine/preemptions", "preemptions", "requests preempted since the last start", "it keeps growing"),
        Metric("engines/restarts", "restarts", "replica restarts since the last start", "it keeps growing"))),
    Panel("Machine", "Engines", unit="int", zero=True, hide_if_zero=True, uses_latest=True, metrics=(
        Metric("engines/healthy", "healthy", "replicas that generate now", "fewer than you started"),
        Metric("engines/retired", "retired", "replicas retired after repeated failures", "above 0"))),
    Panel("Machine", "Weight sync size", unit="bytes", zero=True, metrics=(
        Metric("publish/bytes", "bytes", "size of a weight sync"),)),
    Panel("Machine", "Memory", unit="gib", zero=True, uses_latest=True, metrics=(
        Metric("memory/rss_gib", "host", "peak resident memory of the trainer", "it grows every step"),
        Metric("memory/gpu_gib", "device", "peak memory that the trainer allocated on its GPU"))),
)  # fmt: skip


def panels_for(names: Collection[str]) -> list[Panel]:
    """Returns the panels with data for the metrics `names`, and one more per unknown metric."""
    known = {metric for panel in PANELS for metric, _ in panel.series}
    # A band draws its edges, so they need no panels.
    known |= {metric for panel in PANELS if panel.band for metric in panel.band}
    panels = []
    for panel in PANELS:
        series = []
        for metric, label in panel.series:
            if metric.endswith("*"):
                stem = metric[:-1]
                rest = [name.removeprefix(stem) for name in names if name.startswith(stem) and name not in known]
                series += [(stem + word, label + _label_text(word)) for word in _sort_names(rest, panel.order)]
                known |= {stem + word for word in rest}
            elif metric in names:
                series.append((metric, label))
        if series:
            panels.append(_fill_panel(panel, tuple(series), names))
    other = sorted(set(names) - known)
    return panels + [Panel("Other", name, (), series=((name, name.rpartition("/")[2]),)) for name in other]


def _sort_names(words: Collection[str], order: Sequence[str]) -> list[str]:
    return [word for word in order if word in words] + sorted(set(words) - set(order), key=_natural_key)


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts "x_2" before "x_16"."""
    # Numbers and words are pairs of the same types, so that they can be compared.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _label_text(name: str) -> str:
    """Formats a name: "16–255" for "16_255", and "length penalty" for "length_penalty"."""
    return re.sub(r"(\d)_(\d)", r"\1–\2", name).replace("_", " ")


def _fill_panel(panel: Panel, series: tuple[tuple[str, str], ...], names: Collection[str]) -> Panel:
    band = panel.band if panel.band and set(panel.band) <= set(names) else None
    # Colors belong to names, so that an outcome keeps its color if others are missing.
    stem, color_of = panel.series[0][0].rstrip("*"), dict(zip(panel.order, panel.colors, strict=False))
    colors = tuple(color_of.get(name.removeprefix(stem), 6) for name, _ in series) if panel.colors else ()
    return replace(panel, metrics=(), series=series, note=panel.note or _panel_note(panel), band=band, colors=colors)


def _panel_note(panel: Panel) -> str:
    note, investigate = "; ".join(each.meaning for each in panel.metrics), panel.metrics[0].investigate
    note = f"{note[0].upper()}{note[1:]}."
    if investigate and len(panel.metrics) == 1:
        note += f" Investigate if {investigate}."
    return note.replace("`", "")

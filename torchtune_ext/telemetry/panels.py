"""Which metric the report draws where. docs/telemetry.md explains the same names; tests compare both with real runs."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torchtune_ext.grading.environments import ENDINGS


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the report."""

    section: str  # the heading above the panel
    title: str
    note: str  # one line: what is drawn, and what a good curve looks like
    # Pairs of a metric and its label. A metric "group/x*" takes all that begin so and are not yet drawn.
    series: tuple[tuple[str, str], ...]
    unit: str = ""  # of the values: "", "percent", "seconds", "bytes", "gib", "int" or "tok/s"
    scale: str = "linear"  # of the axis of values: "linear" or "log"
    style: str = "line"  # "line", or a "stack" of areas
    # A band around one of the series: its metric, then those of the lower and the upper edge.
    band: tuple[str, str, str] | None = None
    zero: bool = False  # whether the axis begins at zero
    baseline: float | None = None  # where a dashed line is drawn, for instance at 1 for rho
    quiet: bool = False  # whether the panel is left out while all its values are zero
    lead: bool = False  # the first such panel of a page stands above all others, and is larger
    newest: bool = False  # counters and settings: the reading is their newest value, not a mean
    # What a "*" stands for comes in this order. Names that are not in it come last, sorted.
    order: tuple[str, ...] = ()
    # The colors of `order`, from 1 to 7, chosen where green should be good. Else the series have the colors in turn.
    colors: tuple[int, ...] = ()


# The outcomes of a check of a measured program, from the worst to the best, and the stages of the curriculum. They are
# written out because measured/matmul needs packages that a report does without. A test compares the two.
_OUTCOMES = ("format", "forbidden", "compile_error", "timeout", "runtime_error", "wrong_result", "ok")
_STAGES = ("none", "loop_order", "blocking", "vectorization", "threads", "all")

# The page has this order. It also decides which panel gets a metric that several "*" fit: the first one. A metric that
# is named in full belongs to the panel that names it.
PANELS = (
    Panel("Learning", "Reward", "Mean reward of the step's samples; where held-out problems are evaluated, theirs "
          "with the 95% interval over them.",
          (("reward/mean", "reward"), ("eval/accuracy_sampled", "held-out, sampled"),
           ("eval/accuracy_greedy", "held-out, greedy")), band=("eval/accuracy_sampled", "eval/low", "eval/high"), lead=True),
    Panel("Learning", "Spread of the rewards", "Standard deviation over the step's samples; at zero there is nothing to learn.",
          (("reward/std", "std"),), zero=True),
    Panel("Learning", "Solved", "Share of held-out problems with a full reward.",
          (("eval/solved_sampled", "sampled"), ("eval/solved_greedy", "greedy"), ("eval/pass_at_*", "pass at ")),
          unit="percent"),
    Panel("Learning", "Outcomes of programs", "Share of the step's programs that ended so. A better policy moves them "
          "to the last one.", (("reward/outcome_*", ""),), unit="percent", style="stack", zero=True, order=_OUTCOMES,
          colors=(6, 4, 5, 7, 1, 2, 3)),
    Panel("Learning", "Reward parts", "Named components of the reward.", (("reward/*", ""),)),
    Panel("Learning", "Completion length", "Tokens of a completion.",
          (("length/mean", "mean"), ("length/max", "max")), unit="int", zero=True),
    Panel("Learning", "Truncated", "Share of samples that hit the token limit.",
          (("length/truncated", "truncated"),), unit="percent", zero=True),
    Panel("Learning", "Turns of a conversation", "Mean of the step's samples; the environment answers each turn.",
          (("episode/turns", "turns"),), zero=True),
    Panel("Learning", "Tokens read in a conversation", "What the environment answered, and what the template "
          "writes around it. Not sampled, and not trained on.", (("episode/read_tokens", "read"),), unit="int", zero=True),
    Panel("Learning", "Endings of conversations", "Share of the step's conversations that ended so.", (("episode/*", ""),),
          unit="percent", style="stack", zero=True, order=ENDINGS, colors=(3, 7, 2, 4, 6, 1, 5)),
    Panel("Learning", "Groups", "With a signal, and without (all rewards equal).",
          (("groups/used", "signal"), ("groups/no_signal", "no signal")), unit="int", zero=True),
    Panel("Learning", "Signal by level", "Share of the latest groups of a level whose rewards differ, by which `NearLevel` "
          "chooses; or the share of the problems that it hardly asks any more.", (("selection/*", ""),), unit="percent",
          zero=True, newest=True),
    Panel("Learning", "Grading failures", "The grader or environment raised or crashed, or was still "
          "busy at its deadline.", (("groups/infra_failed", "failed"), ("groups/timed_out", "timed out")), unit="int",
          zero=True, quiet=True),
    Panel("Learning", "Turns without a comparison", "Only one conversation of its group reached them, so their advantage is 0.",
          (("groups/lone_turns", "turns"),), unit="int", zero=True, quiet=True),
    Panel("Learning", "Problems passed over", "Since the run began, and of the held-out ones: rows that are broken or too long "
          "for the engine.", (("problems/skipped", "training"), ("eval/skipped", "held out")), unit="int", zero=True,
          newest=True),
    Panel("Measured speed", "Speed-up", "Over the naive program; mean of the step's programs that are right.",
          (("reward/speedup", "× naive"),), scale="log", baseline=1.0),
    Panel("Measured speed", "GFLOPS", "Mean of the step's programs that are right.",
          (("reward/gflops", "GFLOPS"),), zero=True),
    Panel("Measured speed", "Share of the peak", "Of what the timed cores can do at most; mean of the programs that are right.",
          (("reward/peak_share", "share"),), unit="percent", zero=True),
    Panel("Measured speed", "Width of the intervals", "Half of the 95% interval, as a share of what was measured; "
          "mean of the programs that are right.",
          (("reward/spread", "± seconds"), ("reward/speedup_spread", "± speed-up")), unit="percent", zero=True),
    Panel("Measured speed", "Stages", "Problems at each stage of the curriculum. Each stage permits more techniques than "
          "the one before it.", (("stage/*", ""),), unit="int", style="stack", zero=True, order=_STAGES, newest=True),
    Panel("Measured speed", "Moves between stages", "Problems that reached another stage in the step.",
          (("stage/moves", "problems"),), unit="int", zero=True),
    Panel("Measured speed", "Seconds on the bench", "Checks and timings of the step's programs.",
          (("time/bench", "bench"),), unit="seconds", zero=True),
    Panel("Measured speed", "Noisy, and measured before", "Shares of the step's programs. Noisy: so disturbed that the speed "
          "is not known and the program not graded.", (("bench/noisy", "noisy"), ("bench/cache_hits", "measured before")),
          unit="percent", zero=True),
    Panel("Archive", "Cells filled", "Sets of techniques in a band of speed that hold a program.",
          (("archive/cells", "cells"),), unit="int", zero=True, newest=True),
    Panel("Archive", "Fastest program", "Of the archive, over the naive program.", (("archive/best_speedup", "× naive"),),
          scale="log", baseline=1.0, newest=True),
    Panel("Policy change", "Loss", "Its level means little in GRPO; jumps do.", (("loss/total", "loss"),)),
    Panel("Policy change", "Negative log-likelihood", "Of the solutions in a supervised warm-up, in nats per token.",
          (("loss/nll", "nll"),), zero=True, lead=True),
    Panel("Policy change", "KL", "To the reference, and to the policy that the step's updates began with.",
          (("loss/kl_ref", "reference"), ("loss/approx_kl", "step's first"))),
    Panel("Policy change", "KL to the teacher", "Log-prob under the policy minus that under the teacher, in nats.",
          (("loss/kl_teacher", "mean"), ("loss/kl_teacher_at_*", "at "), ("loss/kl_teacher_age_*", "age ")), zero=True),
    Panel("Policy change", "Surprise of the teacher", "Share of sampled tokens that the teacher gives less than 1%.",
          (("loss/teacher_surprise", "tokens"),), unit="percent", zero=True),
    Panel("Policy change", "Entropy", "Nats per token; a fall to zero is collapse.", (("loss/entropy", "entropy"),),
          zero=True),
    Panel("Policy change", "Clip fraction", "Share of tokens whose gradient is cut (CISPO: whose weight is clipped).",
          (("loss/clip_fraction", "clipped"),), unit="percent", zero=True),
    Panel("Policy change", "Clip fraction by place", "Of the tokens that stand so far into the completion.",
          (("loss/clip_fraction_at_*", ""),), unit="percent", zero=True, quiet=True),
    Panel("Policy change", "Clip fraction by age", "Of the tokens sampled by a policy so many versions old.",
          (("loss/clip_fraction_age_*", ""),), unit="percent", zero=True, quiet=True),
    Panel("Policy change", "Masked", "Share of tokens that the importance weights leave out; by place and age.",
          (("loss/masked_fraction", "masked"), ("loss/masked_fraction_at_*", "at "), ("loss/masked_fraction_age_*", "age ")),
          unit="percent", zero=True, quiet=True),
    Panel("Policy change", "Largest ratio", "Before any clipping.", (("loss/ratio_max", "max ratio"),), scale="log"),
    Panel("Policy change", "Gradient norm", "Before clipping.", (("optim/grad_norm", "norm"),), zero=True),
    Panel("Policy change", "Learning rate", "", (("optim/lr", "lr"),), zero=True, newest=True),
    Panel("Policy change", "Other terms of the loss", "What a loss of your own returns beside the loss.", (("loss/*", ""),)),
    Panel("Agreement", "Trainer against sampler", "|Δ log-prob| of sampled tokens in nats, before any truncation. "
          "A rise means the two no longer compute the same policy.",
          (("mismatch/mean_abs", "mean"), ("mismatch/p99_abs", "p99"), ("mismatch/max_abs", "max"),
           ("mismatch/k3", "k3")), scale="log"),
    Panel("Agreement", "Mismatch by place", "Mean |Δ log-prob| of the tokens that stand so far into the completion.",
          (("mismatch/mean_abs_at_*", ""),), scale="log"),
    Panel("Agreement", "Mismatch by age", "Mean |Δ log-prob| of the tokens sampled by a policy so many versions old.",
          (("mismatch/mean_abs_age_*", ""),), scale="log"),
    Panel("Agreement", "Signed mismatch (k1)", "Mean of sampler minus trainer: estimates the KL divergence, of either sign.",
          (("mismatch/k1", "k1"),)),
    Panel("Agreement", "Effective sample size", "Of the importance weights, as a share of the tokens; 1 where the two agree.",
          (("mismatch/ess", "share"),), unit="percent"),
    Panel("Agreement", "Canary", "|Δ log-prob| on samples of fixed prompts after each publication of weights.",
          (("canary/mean_abs", "mean"), ("canary/limit", "limit")), scale="log"),
    Panel("Agreement", "Changes that the engine shows", "Share of the effect of the last update, and of the adapter, on "
          "log-probs; 1 where the engine has the new weights, no value where the effect is below the noise.",
          (("canary/update_applied", "update"), ("canary/adapter_applied", "adapter")), baseline=1.0),
    Panel("Agreement", "Values that a publication changed", "A coarse dtype keeps the others as they were.",
          (("publish/changed_share", "share"),), unit="percent", zero=True, quiet=True),
    Panel("Sampling ahead", "Age of the groups", "Versions from the policy that began a group to the one that it trains.",
          (("async/age_mean", "mean"), ("async/age_max", "max")), zero=True),
    Panel("Sampling ahead", "Groups by age", "Share of the step's groups that are so many versions old.",
          (("async/age_*", "age "),), unit="percent", style="stack", zero=True),
    Panel("Sampling ahead", "Wait for groups", "Seconds of a step in which the trainer had no groups to train on.",
          (("time/wait_for_rollouts", "wait"),), unit="seconds", zero=True),
    Panel("Sampling ahead", "Groups on their way", "Counted when the groups of a step have been taken: finished, in the "
          "buffer; still sampled or graded.",
          (("async/buffer", "buffer"), ("async/running", "running")), unit="int", zero=True),
    Panel("Sampling ahead", "Groups that became too old", "Since the run began; they are sampled again.",
          (("async/dropped", "groups"),), unit="int", zero=True, quiet=True, newest=True),
    Panel("Sampling ahead", "Tokens of groups that became too old", "Since the run began.",
          (("async/dropped_tokens", "tokens"),), unit="int", zero=True, quiet=True, newest=True),
    Panel("Speed", "Seconds of a step", "By phase; together they are the step.",
          (("time/sample", "sample"), ("time/pack", "pack"), ("time/train", "train"), ("time/publish", "publish"),
           ("time/eval", "eval"), ("time/save", "save"), ("time/log", "log")),
          unit="seconds", style="stack", zero=True),
    Panel("Speed", "Step time", "Whole step.", (("time/step", "step"),), unit="seconds", zero=True),
    Panel("Speed", "Seconds of sampling", "The engine samples; grades are waited for after its last token; rollouts are kept.",
          (("time/sample/generate", "generate"), ("time/sample/grade", "grade"),
           ("time/sample/teacher", "teacher"), ("time/sample/store", "store")),
          unit="seconds", style="stack", zero=True),
    Panel("Speed", "Seconds of training", "Log-probs of the proximal policy and the reference; forward and backward; the wait "
          "for other ranks; the optimizer.",
          (("time/train/logprobs", "log-probs"), ("time/train/backward", "backward"), ("time/train/wait", "wait"),
           ("time/train/optimizer", "optimizer")), unit="seconds", style="stack", zero=True),
    Panel("Speed", "Seconds of a publication", "Weights are gathered and copied; the engine pauses to load them; the canary "
          "proves that it did.",
          (("time/publish/gather", "gather"), ("time/publish/copy", "copy"), ("time/publish/pause", "pause"),
           ("time/publish/canary", "canary")), unit="seconds", style="stack", zero=True),
    Panel("Speed", "Seconds of an evaluation", "The engine samples; grades are waited for after its last token.",
          (("time/eval/generate", "generate"), ("time/eval/grade", "grade")), unit="seconds", style="stack", zero=True),
    Panel("Speed", "Seconds of a checkpoint", "The whole of it, and the wait for checksums in it.",
          (("time/save", "whole"), ("time/save/hash", "checksums")), unit="seconds", zero=True),
    Panel("Speed", "Throughput", "Sampled tokens per second of sampling, or of the step where the engine samples "
          "ahead; packed tokens per second of training.",
          (("speed/sampled_tokens_s", "sampled"), ("speed/trained_tokens_s", "trained")), unit="tok/s", zero=True),
    Panel("Speed", "Tokens of a step", "Sampled; put into the packed rows (prompts once); trained on.",
          (("length/tokens", "sampled"), ("pack/tokens", "packed"), ("pack/labels", "trained on")), unit="int", zero=True),
    Panel("Speed", "Token reduction by shared prompts (ρ)", "Tokens without sharing over tokens with; 1 saves nothing.",
          (("pack/rho", "ρ"),), baseline=1.0),
    Panel("Speed", "Places used", "Share of the places that the ranks compute, or wait for, that is needed.",
          (("pack/used", "used"),), unit="percent", zero=True),
    Panel("Speed", "Rows", "Packed rows of a step.", (("pack/rows", "rows"),), unit="int", zero=True),
    Panel("Machine", "Engine caches", "Share of prompt tokens found in the prefix cache; peak of the KV cache.",
          (("engine/prefix_hit_rate", "prefix hits"), ("engine/kv_max", "KV peak")), unit="percent", zero=True, newest=True),
    Panel("Machine", "Requests in flight", "Limit set by the throttle.", (("engine/concurrency", "limit"),),
          unit="int", zero=True, newest=True),
    Panel("Machine", "Engine trouble", "Since the run began. A preempted request left the cache and was done again.",
          (("engine/preemptions", "preemptions"), ("engines/restarts", "restarts")), unit="int", zero=True,
          quiet=True, newest=True),
    Panel("Machine", "Engines", "Those that sample, and those that failed too often and were given up.",
          (("engines/healthy", "healthy"), ("engines/retired", "retired")), unit="int", zero=True, quiet=True, newest=True),
    Panel("Machine", "Published bytes", "", (("publish/bytes", "bytes"),), unit="bytes", zero=True),
    Panel("Machine", "Memory", "Resident memory of the trainer and peak on the device.",
          (("memory/rss_gib", "host"), ("memory/gpu_gib", "device")), unit="gib", zero=True, newest=True),
)  # fmt: skip


def panels_for(names: Collection[str]) -> list[Panel]:
    """Returns the panels that have data among the metrics `names`, and one more for each metric that none draws."""
    known = {metric for panel in PANELS for metric, _ in panel.series}
    # A band draws its edges, so they need no panel of their own.
    known |= {metric for panel in PANELS if panel.band for metric in panel.band}
    panels = []
    for panel in PANELS:
        series = []
        for metric, label in panel.series:
            if metric.endswith("*"):
                stem = metric[:-1]
                rest = [name.removeprefix(stem) for name in names if name.startswith(stem) and name not in known]
                series += [(stem + word, label + _words(word)) for word in _sorted(rest, panel.order)]
                known |= {stem + word for word in rest}
            elif metric in names:
                series.append((metric, label))
        if series:
            panels.append(_with(panel, tuple(series), names))
    other = sorted(set(names) - known)
    return panels + [Panel("Other", name, "", ((name, name.rpartition("/")[2]),)) for name in other]


def _sorted(words: Collection[str], order: Sequence[str]) -> list[str]:
    return [word for word in order if word in words] + sorted(set(words) - set(order), key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts "x_2" before "x_16"."""
    # Both kinds of parts are pairs of the same types, so that a number can be compared with a word.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _words(name: str) -> str:
    """Spells a name: "16–255" for "16_255", and "length penalty" for "length_penalty"."""
    return re.sub(r"(\d)_(\d)", r"\1–\2", name).replace("_", " ")


def _with(panel: Panel, series: tuple[tuple[str, str], ...], names: Collection[str]) -> Panel:
    band = panel.band if panel.band and set(panel.band) <= set(names) else None
    # Colors belong to names, so that an outcome keeps its color where others are missing.
    stem, color_of = panel.series[0][0].rstrip("*"), dict(zip(panel.order, panel.colors, strict=False))
    colors = tuple(color_of.get(name.removeprefix(stem), 6) for name, _ in series) if panel.colors else ()
    return replace(panel, series=series, band=band, colors=colors)

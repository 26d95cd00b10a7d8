"""Which metric is drawn where in the report. Panels and series without data are left out; unknown metrics come last."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the report."""

    section: str  # heading it stands under
    title: str
    note: str  # one line that says what a good curve looks like
    # (metric, label) pairs; a metric "group/x*" takes all that begin so and are not yet drawn.
    series: tuple[tuple[str, str], ...]
    unit: str = ""  # "", "percent", "seconds", "bytes", "gib", "int", "tok/s"
    scale: str = "linear"  # or "log"
    style: str = "line"  # or "stack": areas upon each other
    band: tuple[str, str, str] | None = None  # (how, a, b): ("range", low, high) or ("spread", mean, std)
    zero: bool = False  # the axis begins at zero
    baseline: float | None = None  # a dashed line, e.g. 1 for rho
    quiet: bool = False  # left out of the report while all its values are zero


PANELS = (
    Panel("Learning", "Reward", "Mean over the step's samples; the band is one standard deviation of the samples.",
          (("reward/mean", "mean"),), band=("spread", "reward/mean", "reward/std")),
    Panel("Learning", "Evaluation", "Held-out accuracy; the band is the 95% interval.",
          (("eval/accuracy_sampled", "sampled"), ("eval/accuracy_greedy", "greedy")), unit="percent",
          band=("range", "eval/low", "eval/high")),
    Panel("Learning", "Solved", "Share of held-out problems with a full score.",
          (("eval/solved_sampled", "sampled"), ("eval/solved_greedy", "greedy"), ("eval/pass_at_*", "pass at ")),
          unit="percent"),
    Panel("Learning", "Reward parts", "Named components of the reward.", (("reward/*", ""),)),
    Panel("Learning", "Completion length", "Tokens of a completion.",
          (("length/mean", "mean"), ("length/max", "max")), unit="int", zero=True),
    Panel("Learning", "Truncated", "Share of samples that hit the token limit.",
          (("length/truncated", "truncated"),), unit="percent", zero=True),
    Panel("Learning", "Groups", "With a signal, and without (all rewards equal).",
          (("groups/used", "signal"), ("groups/no_signal", "no signal")), unit="int", zero=True),
    Panel("Learning", "Samples without a grade", "The grader raised, hung or crashed; kept out of the baseline.",
          (("groups/infra_failed", "ungraded"),), unit="int", zero=True, quiet=True),
    Panel("Policy change", "Loss", "Its level means little in GRPO; jumps do.", (("loss/total", "loss"),)),
    Panel("Policy change", "KL", "To the reference, and to the policy that the step's updates began with.",
          (("loss/kl_ref", "reference"), ("loss/approx_kl", "step's first"))),
    Panel("Policy change", "Entropy", "Nats per token; a fall to zero is collapse.", (("loss/entropy", "entropy"),),
          zero=True),
    Panel("Policy change", "Clip fraction", "Share of tokens whose gradient is cut (CISPO: whose weight is clipped).",
          (("loss/clip_fraction", "clipped"),), unit="percent", zero=True),
    Panel("Policy change", "Clip fraction by place", "Of the tokens that stand so far into the completion.",
          (("loss/clip_fraction_at_*", ""),), unit="percent", zero=True, quiet=True),
    Panel("Policy change", "Clip fraction by age", "Of the tokens sampled by a policy so many versions old.",
          (("loss/clip_fraction_age_*", ""),), unit="percent", zero=True, quiet=True),
    Panel("Policy change", "Masked", "Share of tokens that the importance weights leave out; by place and age.",
          (("loss/masked_fraction", "masked"), ("loss/masked_fraction_*", "")), unit="percent", zero=True, quiet=True),
    Panel("Policy change", "Largest ratio", "Before any clipping.", (("loss/ratio_max", "max ratio"),), scale="log"),
    Panel("Policy change", "Gradient norm", "Before clipping.", (("optim/grad_norm", "norm"),), zero=True),
    Panel("Policy change", "Learning rate", "", (("optim/lr", "lr"),), zero=True),
    Panel("Policy change", "Other terms of the loss", "", (("loss/*", ""),)),
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
    Panel("Agreement", "Canary", "|Δ log-prob| on fixed ids after each publication of weights.",
          (("canary/mean_abs", "mean"),), scale="log"),
    Panel("Speed", "Time per phase", "Seconds of each step by phase, stacked.",
          (("time/sample", "sample"), ("time/train", "train"), ("time/grade", "grade"), ("time/pack", "pack"),
           ("time/publish", "publish"), ("time/eval", "eval"), ("time/save", "save")),
          unit="seconds", style="stack", zero=True),
    Panel("Speed", "Step time", "Whole step.", (("time/step", "step"),), unit="seconds", zero=True),
    Panel("Speed", "Throughput", "Tokens per second while sampling and while training.",
          (("speed/sampled_tokens_s", "sampled"), ("speed/trained_tokens_s", "trained")), unit="tok/s", zero=True),
    Panel("Speed", "Tokens of a step", "Sampled, and put into the packed rows (prompts once).",
          (("length/tokens", "sampled"), ("pack/tokens", "packed")), unit="int", zero=True),
    Panel("Speed", "Token reduction by shared prompts (ρ)", "Tokens without sharing over tokens with; 1 saves nothing.",
          (("pack/rho", "ρ"),), baseline=1.0),
    Panel("Speed", "Row fill", "Share of the packed rows that holds tokens.", (("pack/fill", "fill"),),
          unit="percent", zero=True),
    Panel("Speed", "Rows", "Packed rows of a step.", (("pack/rows", "rows"),), unit="int", zero=True),
    Panel("Machine", "Engine caches", "Share of prompt tokens found in the prefix cache; peak of the KV cache.",
          (("engine/prefix_hit_rate", "prefix hits"), ("engine/kv_max", "KV peak")), unit="percent", zero=True),
    Panel("Machine", "Requests in flight", "Limit set by the throttle.", (("engine/concurrency", "limit"),),
          unit="int", zero=True),
    Panel("Machine", "Engine trouble", "Since the run began. A preempted request left the cache and was done again.",
          (("engine/preemptions", "preemptions"), ("engine/restarts", "restarts")), unit="int", zero=True,
          quiet=True),
    Panel("Machine", "Publication", "Seconds to bring the weights to the sampler.", (("time/publish_engine", "seconds"),),
          unit="seconds", zero=True),
    Panel("Machine", "Published bytes", "", (("publish/bytes", "bytes"),), unit="bytes", zero=True),
    Panel("Machine", "Memory", "Resident memory of the trainer and peak on the device.",
          (("memory/rss_gib", "host"), ("memory/gpu_gib", "device")), unit="gib", zero=True),
)  # fmt: skip


def panels_for(names: Collection[str]) -> list[Panel]:
    """The panels that have data among the metrics `names`, "group/*" filled in, one panel more per unknown metric."""
    known = {metric for panel in PANELS for metric, _ in panel.series}
    known |= {metric for panel in PANELS if panel.band for metric in panel.band[1:]}
    panels = []
    for panel in PANELS:
        series = []
        for metric, label in panel.series:
            if metric.endswith("*"):
                rest = sorted((n for n in names if n.startswith(metric[:-1]) and n not in known), key=_natural)
                series += [(name, label + _words(name.removeprefix(metric[:-1]))) for name in rest]
                known |= set(rest)
            elif metric in names:
                series.append((metric, label))
        if series:
            panels.append(_with(panel, tuple(series), names))
    other = sorted(set(names) - known)
    return panels + [Panel("Other", name, "", ((name, name.rpartition("/")[2]),)) for name in other]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts "x_2" before "x_16"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _words(name: str) -> str:
    """ "16_255" -> "16–255", "length_penalty" -> "length penalty"."""
    return re.sub(r"(\d)_(\d)", r"\1–\2", name).replace("_", " ")


def _with(panel: Panel, series: tuple[tuple[str, str], ...], names: Collection[str]) -> Panel:
    band = panel.band if panel.band and set(panel.band[1:]) <= set(names) else None
    return replace(panel, series=series, band=band)

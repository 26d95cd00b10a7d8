"""False alarms and detection delays of the mismatch gate, on synthetic runs tested by the gate's own code.

    python benchmarks/gate_simulated.py --out runs/gate_simulated [--runs 2000] [--faulty 20] [--steps 100] [--jobs 2]

The policy is a table of logits over 24 tokens with a row per context. Trainer and sampler each add rounding to the row; tokens
are drawn from the sampler's distribution. A shape is groups x samples x tokens (answer tokens whose context all samples of the
group share). A shape describes training steps or a canary, which also gets the arrival and likelihood tests. The confident
canary follows one path with a probability of .97 to .995 per token. The measured rounding is the same for all tokens, so
nothing raises the limit later. Cells in --out are read, not repeated.
"""

import argparse
import json
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from gate import test_of

from torchtune_ext.training.buckets import STALENESS_0_BUCKET
from torchtune_ext.training.mismatch import (
    SHARPER_LOGIT_SCALE,
    MismatchError,
    MismatchGate,
    PairedLogprobs,
    UpdateEffect,
    log_likelihood_ratios,
)
from torchtune_ext.training.publish import CANARY_PROMPTS, CANARY_SAMPLES, CANARY_TOKENS, NEW_SEED_TOKENS, SEED_PERIOD

VOCAB, SPREAD = 24, 2.0  # spread of the logits, in nats
UPDATES = (0.1, 0.5, 2.0, 8.0)  # effects of an update on a logit / its rounding, one for each healthy run
SHAPES = {
    "2x16x3 (3)": (2, 16, 3, 3),
    "4x8x4 (1)": (4, 8, 4, 1),
    "4x8x3 (3)": (4, 8, 3, 3),
    "8x8x3 (3)": (8, 8, 3, 3),
    "8x8x6 (1)": (8, 8, 6, 1),
    "canary": (CANARY_PROMPTS, CANARY_SAMPLES, CANARY_TOKENS, 1),
    "canary, confident": (CANARY_PROMPTS, CANARY_SAMPLES, CANARY_TOKENS, CANARY_TOKENS),
}
FAULTY_SHAPES = ("8x8x6 (1)", "canary", "canary, confident")
# Mean |d| in nats; deviation of the logarithm of a context's rounding, or None for Student's t with 3 degrees; largest |d|.
NOISES = {
    "bfloat16": (0.03, 0.8, 0.6),
    "heavier tails": (0.03, 1.3, 2.5),
    "extreme tails": (0.03, None, 5.0),
    "float32": (1e-6, 0.9, 1e-4),
    "FP8": (0.2, 0.5, 2.5),
}
HEALTHY = {
    "bfloat16": ("2x16x3 (3)", "4x8x4 (1)", "4x8x3 (3)", "8x8x3 (3)", "canary", "canary, confident"),
    "heavier tails": ("2x16x3 (3)", "4x8x4 (1)", "canary, confident"),
    "extreme tails": ("2x16x3 (3)", "4x8x4 (1)", "canary, confident"),
    "float32": ("4x8x4 (1)", "canary, confident"),
    "FP8": ("2x16x3 (3)", "4x8x4 (1)", "4x8x3 (3)", "canary, confident"),
}
FAULTS = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.9": {"temperature": 0.9},
    "temperature 0.95": {"temperature": 0.95},
    "temperature 0.98": {"temperature": 0.98},
    "temperature 1.05": {"temperature": 1.05},
    "temperature 1.1": {"temperature": 1.1},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.99": {"top_p": 0.99},
    "top-k 8": {"top_k": 8},
    "other logits (0.1)": {"other": 0.1},
    "temperature 0.7, raw log-probs": {"temperature": 0.7, "raw": True},
    "temperature 0.9, raw log-probs": {"temperature": 0.9, "raw": True},
    "temperature 1.3, raw log-probs": {"temperature": 1.3, "raw": True},
    "top-p 0.8, raw log-probs": {"top_p": 0.8, "raw": True},
    "top-p 0.95, raw log-probs": {"top_p": 0.95, "raw": True},
    "top-k 8, raw log-probs": {"top_k": 8, "raw": True},
    "weights of the previous version": {"stale": True, "update": 20.0},
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def rounding(rng: np.random.Generator, scale: np.ndarray, noise: str) -> np.ndarray:
    """Return the logit errors of one side, for contexts with these scales."""
    mean, _, largest = NOISES[noise]
    # Logits of both sides with a deviation of 1 make a mean |d| of 0.91.
    errors = rng.standard_normal((*scale.shape, VOCAB), np.float32) * scale[..., None] * np.float32(mean / 0.91)
    return np.clip(errors, -largest / 2, largest / 2)


def scales(rng: np.random.Generator, shape: tuple[int, ...], noise: str) -> np.ndarray:
    """Return the rounding scale of each context; 1 on average."""
    deviation = NOISES[noise][1]
    if deviation is None:
        return np.abs(rng.standard_t(3, shape)).astype(np.float32) / 1.1
    return np.exp(deviation * rng.standard_normal(shape) - deviation**2 / 2).astype(np.float32)


@dataclass
class Sampler:
    """Transformations that a sampler applies to its logits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = VOCAB
    other: float = 0.0  # standard deviation of the noise added to its logits
    raw: bool = False  # it reports log-probs without the transformations above
    stale: bool = False  # it samples with the previously published weights
    update: float | None = None  # effect of an update on a logit / its rounding; None: one of UPDATES

    def distributions(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of the sampling distribution and the reported log-probs."""
        drawn = log_softmax(logits / self.temperature)
        if self.top_p < 1 or self.top_k < VOCAB:
            order = np.argsort(-drawn, -1)
            p = np.take_along_axis(np.exp(drawn), order, -1)
            kept = (p.cumsum(-1) - p < self.top_p) & (np.arange(VOCAB) < self.top_k)
            drawn = log_softmax(np.where(np.take_along_axis(kept, order.argsort(-1), -1), drawn, -np.inf))
        return drawn, log_softmax(logits) if self.raw else drawn


def draw(logprobs: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Return the tokens for these uniform numbers in [0, 1) by the inverse CDF."""
    return (np.exp(logprobs).cumsum(-1) < uniform[..., None]).sum(-1).clip(max=VOCAB - 1)


def steps_of(rng: np.random.Generator, shape: str, noise: str, sampler: Sampler, steps: int):
    """Yield the tokens of each training step."""
    groups, samples, length, shared = SHAPES[shape]
    own = shared + samples * (length - shared)  # contexts of a group
    place = np.arange(length)
    within = np.where(place < shared, place, shared + np.arange(samples)[:, None] * (length - shared) + place - shared)
    index = (np.arange(groups)[:, None, None] * own + within).ravel()
    logits = rng.standard_normal((steps, groups * own, VOCAB), np.float32) * SPREAD
    scale = scales(rng, logits.shape[:2], noise)
    ours = log_softmax(logits + rounding(rng, scale, noise))
    entropy = -(np.exp(ours) * ours).sum(-1)
    logits += sampler.other * rng.standard_normal(logits.shape, np.float32)
    drawn, reported = sampler.distributions(logits + rounding(rng, scale, noise))
    labels = draw(drawn[:, index], rng.random((steps, len(index))))
    for step in range(steps):
        contexts = step * groups * own + index
        yield tokens_of(
            ours[step, index, labels[step]], reported[step, index, labels[step]], entropy[step, index], contexts
        )


def tokens_of(ours: np.ndarray, theirs: np.ndarray, entropy: np.ndarray, contexts: np.ndarray) -> PairedLogprobs:
    ours, theirs, entropy = (each.astype(np.float64) for each in (ours, theirs, entropy))
    return PairedLogprobs(ours, theirs, entropy, contexts, np.full((2, len(ours)), STALENESS_0_BUCKET))


class Canaries:
    """Canaries of several runs at once. Between canaries the policy moves a little, and rounding is drawn again."""

    def __init__(self, rng: np.random.Generator, count: int, confident: bool, noise: str, sampler: Sampler):
        self.rng, self.confident, self.noise, self.sampler = rng, confident, noise, sampler
        self.count = count
        # The effect of an update on a logit, in units of the rounding.
        self.update = (
            rng.choice(UPDATES, (count, 1, 1)).astype(np.float32) if sampler.update is None else sampler.update
        )

    def begin(self) -> None:
        """Draw new seeds."""
        # Contexts are in the order of their position in the answer.
        shape = self.count, NEW_SEED_TOKENS * CANARY_PROMPTS * (1 + CANARY_SAMPLES)
        self.logits = self.rng.standard_normal((*shape, VOCAB), np.float32) * SPREAD
        if self.confident:
            share = self.rng.choice([0.97, 0.99, 0.995], shape)
            self.logits[..., 0] = np.log(np.exp(self.logits[..., 1:]).sum(-1)) + np.log(share / (1 - share))
        self.scale = scales(self.rng, shape, self.noise)
        self.uniform = self.rng.random((self.count, CANARY_PROMPTS, CANARY_SAMPLES, NEW_SEED_TOKENS))
        self.before = None

    def publish(self, version: int):
        """Yield for each run the tokens, the measured update effect, and `log_likelihood_ratios`."""
        if version % SEED_PERIOD == 0:
            self.begin()
        elif version % SEED_PERIOD == 1:
            # Answers are shorter from now on.
            kept = CANARY_TOKENS * CANARY_PROMPTS * (1 + CANARY_SAMPLES)
            self.logits, self.scale, self.uniform = (
                self.logits[:, :kept],
                self.scale[:, :kept],
                self.uniform[..., :CANARY_TOKENS],
            )
            self.before = tuple(each[:, :kept] for each in self.before)
        rng, old, sampler = self.rng, self.logits, self.sampler
        self.logits = old + self.update * NOISES[self.noise][0] * rng.standard_normal(old.shape, np.float32)
        ours = log_softmax(self.logits + rounding(rng, self.scale, self.noise))
        theirs = (old if sampler.stale else self.logits) + rounding(rng, self.scale, self.noise)
        if sampler.other:
            theirs = theirs + sampler.other * rng.standard_normal(theirs.shape, np.float32)
        drawn, reported = sampler.distributions(theirs)
        contexts, labels = self.walk(drawn)
        at = np.arange(self.count)[:, None], contexts, labels
        entropy, sharp = -(np.exp(ours) * ours).sum(-1)[at[:2]], log_softmax(ours * SHARPER_LOGIT_SCALE)[at]
        p, q = ours[at].astype(np.float64), reported[at].astype(np.float64)
        # The trainer's log-probs of tokens that the previous canary also had.
        known, off = np.zeros(p.shape, bool), p
        if self.before is not None:
            old_ours, seen = self.before
            known, off = seen[at], old_ours[at].astype(np.float64)
        seen = np.zeros(ours.shape, bool)
        seen[at] = True
        self.before = ours, seen
        for i in range(self.count):
            index = np.unique(contexts[i, known[i]], return_inverse=True)[1]
            applied = UpdateEffect.estimate((p - off)[i, known[i]], (q - off)[i, known[i]], index, "samples as before")
            log_ratios = log_likelihood_ratios(*(torch.from_numpy(each[i]) for each in (p, q, entropy, sharp)))
            yield tokens_of(p[i], q[i], entropy[i], contexts[i]), applied, log_ratios

    def walk(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the context and label of each token; samples on the same path of a prompt share a context."""
        prompt, sample = np.arange(CANARY_PROMPTS)[:, None], np.arange(CANARY_SAMPLES)
        on_path, run = np.ones(self.uniform.shape[:3], bool), np.arange(self.count)[:, None, None]
        contexts, labels = [], []
        for place in range(self.uniform.shape[-1]):
            context = (place * CANARY_PROMPTS + prompt) * (1 + CANARY_SAMPLES) + np.where(on_path, 0, 1 + sample)
            label = draw(drawn[run, context], self.uniform[..., place])
            on_path &= (label == 0) if self.confident else False
            contexts.append(context)
            labels.append(label)
        return tuple(np.stack(each, -1).reshape(self.count, -1) for each in (contexts, labels))


def gate_verdict(
    gate: MismatchGate, step: int, tokens: PairedLogprobs, canary: tuple[UpdateEffect, np.ndarray] | None = None
) -> str:
    """Return the test that stops the run, or ""."""
    try:
        gate.check_tokens(tokens, (), "", 0 if canary is None else None, canary[:1] if canary else ())
        if canary:
            gate.update_likelihood_ratio(canary[1], "", "engine", step // SEED_PERIOD)
    except MismatchError as error:
        return test_of(str(error)).split(",")[0]
    return ""


def runs(shape: str, noise: str, fault: str, steps: int, seeds: range) -> list[tuple[str, int]]:
    """Return for each run the test that stopped it, if any, and the step."""
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - every gate prints its limit
    rng = np.random.default_rng([seeds.start, *f"{shape}{noise}{fault}".encode()])
    sampler, measured = Sampler(**FAULTS.get(fault, {})), NOISES[noise][0] / 2**0.5
    gates, found = [MismatchGate("auto", lambda rows: measured) for _ in seeds], [("", steps)] * len(seeds)
    if shape.startswith("canary"):
        canaries = Canaries(rng, len(seeds), "confident" in shape, noise, sampler)
        for step in range(steps):
            for i, (tokens, *canary) in enumerate(canaries.publish(step)):
                if not found[i][0] and (name := gate_verdict(gates[i], step, tokens, canary)):
                    found[i] = name, step + 1
    else:
        for i, gate in enumerate(gates):
            for step, tokens in enumerate(steps_of(rng, shape, noise, sampler, steps)):
                if name := gate_verdict(gate, step, tokens):
                    found[i] = name, step + 1
                    break
    return found


def cell(
    pool: ProcessPoolExecutor, out: Path, shape: str, noise: str, fault: str, steps: int, count: int
) -> list[list]:
    """Return the results of `count` runs; run them if they are missing."""
    path = out / f"{shape}, {noise}, {fault}, {count} x {steps}.json".replace(" ", "_")
    if not path.exists():
        parts = [range(start, min(start + 20, count)) for start in range(0, count, 20)]
        done = pool.map(partial(runs, shape, noise, fault, steps), parts)
        path.write_text(json.dumps([each for part in done for each in part]))
        print(f"{path.name}: {Counter(name for name, _ in json.loads(path.read_text()))}", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=2000, help="healthy runs of a cell")
    parser.add_argument("--faulty", type=int, default=20, help="runs of a fault")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--noises", nargs="+", default=list(NOISES), choices=NOISES, metavar="NOISE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    tests = ("scale", "sharpness", "identity", "effect", "likelihood")
    with ProcessPoolExecutor(args.jobs) as pool:
        print("| rounding | shape | healthy runs | " + " | ".join(tests) + " |\n|" + "---|" * (3 + len(tests)))
        for noise, shape in [(n, s) for n in args.noises for s in HEALTHY[n] if args.runs]:
            found = Counter(name for name, _ in cell(pool, args.out, shape, noise, "none", args.steps, args.runs))
            print(f"| {noise} | {shape} | {args.runs} | {' | '.join(str(found[test]) for test in tests)} |", flush=True)
        columns = [(noise, shape) for noise in args.noises for shape in FAULTY_SHAPES if args.faulty]
        print(f"\n| fault | {' | '.join(', '.join(column) for column in columns)} |\n|{'---|' * (1 + len(columns))}")
        for fault in FAULTS:
            texts = []
            for noise, shape in columns:
                found = cell(pool, args.out, shape, noise, fault, args.steps, args.faulty)
                seen = [step for name, step in found if name]
                most = Counter(name for name, _ in found if name).most_common(1)
                share = f" ({len(seen)} of {len(found)})" if len(seen) < len(found) else ""
                texts.append(f"{most[0][0]}: {median(seen):g}{share}" if seen else "not found")
            print(f"| {fault} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()

"""Runs in a folder, as the report reads them, with texts that try to break its HTML."""

import json

import numpy as np

from helpers.records import make_sample
from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import RolloutStore
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.metrics import MetricLogger

HOSTILE = (
    "</script></pre><script>document.title='broken'</script><!-- <img src=x onerror=\"document.title='broken'\"> {{js}}"
)


def make_group(step, number, num_samples=6, length=20, spread=1.0):
    rng = np.random.default_rng(100 * step + number)
    samples = []
    for i in range(num_samples):
        reward = 0.5 + spread * (i / num_samples - 0.5)
        outcome = Score(reward, {"accuracy": reward}, f"note {HOSTILE}")
        if i == 0 and number == 1:
            outcome = Ungraded("infra_failed", HOSTILE)
        samples.append(
            make_sample(
                rng.integers(0, 9, length),
                -rng.gamma(0.4, 1.0, length),
                np.r_[np.full(length // 2, step), np.full(length - length // 2, step + 1)],
                text=f"sample {i} {HOSTILE}",
                outcome=outcome,
                advantage=reward - 0.5,
                in_loss=spread > 0 and isinstance(outcome, Score),
            )
        )
    problem = Problem(f"problem-{number} {HOSTILE}", ({"role": "user", "content": HOSTILE},), {"A": HOSTILE})
    return Group(problem, np.arange(11, dtype=np.int32), tuple(samples))


def make_run(folder, steps=12, groups=4, keep_every=3, **shape):
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"task": {"path": HOSTILE}, "lr": 1e-6}
    (folder / "run.json").write_text(json.dumps({"id": "ab", "name": f"run {HOSTILE}", "config": settings}))
    with MetricLogger(folder, sinks=()) as metrics:
        store = RolloutStore(folder)
        for step in range(1, steps + 1):
            values = {
                "reward/mean": step / steps,
                "loss/kl_ref": float("nan") if step == 2 else 0.1,
                f"odd/{HOSTILE}": 1.0,
                "time/step": 2.0,
            }
            metrics.log(step, values)
            if step % keep_every == 0:
                store.write(step, [make_group(step, n, spread=n / groups, **shape) for n in range(groups)])
    return folder


def byte_tokenizer(texts, size=300):
    """Train a tokenizer of bytes and of some words in `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer

"""The plain computation that packed rows are compared with: one sample at a time, stock forward, whole logits."""

import numpy as np
import torch
from records import sampled
from torchtune.models.qwen2 import qwen2

from torchtune_ext.grading import Outcome
from torchtune_ext.groups import Group
from torchtune_ext.tasks.task import Problem, Score

VOCAB, PAD = 61, 2  # PAD is also the stop token: nothing may depend on its value


CPU = torch.device("cpu")


def tiny_model(tied=True, builder=qwen2):
    torch.manual_seed(0)
    extra = {} if builder is qwen2 else {"scale_factor": 8}
    if builder is qwen2:
        extra["tie_word_embeddings"] = tied
    model = builder(
        vocab_size=VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        intermediate_dim=48,
        max_seq_len=64,
        **extra,
    )
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    return model


def make_groups(rng, shapes, untrained=0.0):
    """shapes: list of (prompt length, [completion lengths])."""
    groups = []
    for g, (prompt, completions) in enumerate(shapes):
        samples = tuple(
            sampled(
                rng.integers(0, VOCAB, n),
                rng.normal(-3, 1, n),
                outcome=Outcome("scored", Score(0.0, {}), ""),
                advantage=float(rng.normal()),
                trained=bool(rng.random() >= untrained),
            )
            for n in completions
        )
        prompt_tokens = rng.integers(0, VOCAB, prompt).astype(np.int32)
        groups.append(Group(Problem(f"p{g}", (), None), prompt_tokens, samples))
    return groups


def trained_samples(groups):
    return [(g, s) for g in groups for s in g.samples if s.trained]


def reference(model, groups, loss, aggregation, temperature, ref_model=None):
    """Loss, gradients, log-probs and the sizes of the gradients, from one forward and backward per sample.

    The size of a gradient is the sum of the largest elements of what each sample adds to it: samples cancel each other, but not
    their rounding.
    """

    def logprobs_and_entropy(m, group, sample):
        ids = torch.tensor(np.concatenate([group.prompt_tokens, sample.completion.tokens]), dtype=torch.long)
        logp = torch.log_softmax(m(ids[None, :-1])[0].double() / temperature, -1)[len(group.prompt_tokens) - 1 :]
        labels = ids[len(group.prompt_tokens) :]
        return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    model.zero_grad()
    pairs = trained_samples(groups)
    total, scored, sizes = 0.0, {}, {name: 0.0 for name, _ in model.named_parameters()}
    labels = sum(len(s.completion.tokens) for _, s in pairs)
    for group, sample in pairs:
        logp, entropy = logprobs_and_entropy(model, group, sample)
        ratio = (logp - logp.detach()).exp()
        importance = (logp.detach() - torch.tensor(sample.completion.logprobs).double()).exp().clamp(max=2.0)  # TIS
        per_token = -importance * ratio * sample.advantage - loss.entropy_coef * entropy
        if ref_model is not None:
            with torch.no_grad():
                d = logprobs_and_entropy(ref_model, group, sample)[0] - logp.detach()
            d = d - (logp - logp.detach())
            per_token = per_token + loss.kl_coef * (d.exp() - 1 - d)
        mean = {"token": per_token.sum() / labels, "sequence": per_token.mean() / len(pairs)}[aggregation]
        before = {n: 0.0 if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        mean.backward()
        for n, p in model.named_parameters():
            sizes[n] += (p.grad - before[n]).abs().max().item()
        total += mean.item()
        scored[id(sample)] = logp.detach()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return total, grads, scored, sizes


def packed_logprobs_by_sample(rows, scored_rows, groups):
    """Finds each sample's log-probs again by its tokens and behavior log-probs; every label exactly once."""
    by_key = {}
    for row, scores in zip(rows, scored_rows, strict=True):
        for i in range(int(row.samples_L.max()) + 1 if row.num_labels else 0):
            at = row.samples_L == i
            key = (tuple(row.labels_L[at].tolist()), tuple(row.logprobs_L[at].tolist()))
            by_key.setdefault(key, []).append(scores.logprobs_L[at])
    result = {}
    for _, s in trained_samples(groups):
        result[id(s)] = by_key[(tuple(s.completion.tokens.tolist()), tuple(s.completion.logprobs.tolist()))].pop()
    assert not any(by_key.values()), "a label was counted that no sample has"
    return result


def relative_error(grads, reference_grads, sizes):
    """Worst error of a parameter's gradient, relative to its size (see `reference`).

    A gradient that is zero in truth (of q and k where a token attends to itself alone) holds rounding of the size of
    float32's epsilon times the model's largest gradient: smaller ones count as if they were so large that two epsilons are 1e-5.
    """
    floor = 2 * torch.finfo(torch.float32).eps / 1e-5 * max(sizes.values())
    return max((grads[n] - reference_grads[n]).abs().max().item() / max(sizes[n], floor) for n in reference_grads)

"""Reference computation for packed rows: one sample at a time, stock forward, full logits."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torchtune.models.qwen2 import qwen2

from helpers.learners import single_process_learner
from helpers.records import make_sample
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.policy.hf_model import clean_name
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.tasks.task import Problem, Score

VOCAB, PAD = 61, 2  # PAD is also the stop token: no result may depend on its value


CPU = torch.device("cpu")


def tiny_model(tied=True, builder=qwen2, dtype=torch.float32):
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
    return model.to(dtype)


def make_groups(rng, shapes, untrained=0.0):
    """Return random groups. `shapes`: (prompt length, [completion lengths]). Advantages are float32 numbers, as in rows."""
    groups = []
    for g, (prompt, completions) in enumerate(shapes):
        samples = tuple(
            make_sample(
                rng.integers(0, VOCAB, n),
                rng.normal(-3, 1, n),
                outcome=Score(0.0, {}),
                advantage=float(np.float32(rng.normal())),
                in_loss=bool(rng.random() >= untrained),
            )
            for n in completions
        )
        prompt_tokens = rng.integers(0, VOCAB, prompt).astype(np.int32)
        groups.append(Group(Problem(f"p{g}", (), None), prompt_tokens, samples))
    return groups


def as_conversations(rng, groups):
    """Return the groups with completions split into conversations: turns of 1 to 4 tokens, separated by replies of 1 to 3.
    Some conversations have per-turn advantages."""

    def conversation(sample):
        length, turns, start = len(sample.completion.tokens), [], 0
        while start < length:
            turns.append((start, min(start + int(rng.integers(1, 5)), length)))
            start = turns[-1][1] + int(rng.integers(1, 4))
        own = tuple(map(float, rng.normal(size=len(turns)).astype(np.float32))) if rng.integers(2) else ()
        return replace(sample, completion=replace(sample.completion, turns=tuple(turns)), turn_advantages=own)

    return [replace(group, samples=tuple(map(conversation, group.samples))) for group in groups]


def as_branched_conversations(rng, groups):
    """Return conversations as in `as_conversations`, where the context of a turn may be a prefix of an earlier context: of the
    previous turn with its context, in every other conversation of any turn, or of the prompt. A few keep nothing."""

    def branching(group, sample):
        lengths, begin, kept, parents = [len(group.prompt_tokens)], 0, [], []  # lengths[-1]: of the prompt
        is_tree = bool(rng.integers(2))
        for turn, (start, stop) in enumerate(sample.completion.turns):
            parents.append(int(rng.integers(-1, turn)) if is_tree else turn - 1)
            path = lengths[parents[-1]]
            near, anywhere = rng.integers(max(1, path - 4), path + 1), rng.integers(start == begin, path + 1)
            kept.append(int(rng.choice([path, near, near, anywhere])))
            lengths.insert(turn, kept[-1] + stop - begin)
            begin = stop
        parents = tuple(parents) if is_tree else ()
        return replace(sample, completion=replace(sample.completion, kept_prefix_lens=tuple(kept), parents=parents))

    return [
        replace(group, samples=tuple(branching(group, s) for s in group.samples))
        for group in as_conversations(rng, groups)
    ]


def with_content(rng, groups):
    """Return conversations in which a part of some replies is content of the environment."""

    def marked(sample):
        completion, begin, spans = sample.completion, 0, []
        for turn, (start, stop) in enumerate(completion.turns):
            # Content follows a token of its context.
            first = begin + (completion.kept_prefix_lens[turn : turn + 1] == (0,))
            if first < start and rng.integers(4):
                spans.append((low := int(rng.integers(first, start)), int(rng.integers(low + 1, start + 1))))
            begin = stop
        return replace(sample, completion=replace(completion, content_spans=tuple(spans)))

    return [replace(group, samples=tuple(map(marked, group.samples))) for group in groups]


def paths_of(group, sample, indices=None):
    """Yield each path of a sample as ids, with the positions of its labels: the tokens of the completion at `indices`, which
    are the sampled ones by default, in order."""
    completion, ids = sample.completion, group.prompt_tokens.tolist()
    indices = completion.sampled_indices if indices is None else indices
    if not completion.kept_prefix_lens:
        yield [*ids, *completion.tokens.tolist()], len(ids) + indices
        return
    begin, paths = 0, {-1: ids}
    for turn, ((_, stop), keeps) in enumerate(zip(completion.turns, completion.kept_prefix_lens, strict=True)):
        parent = completion.parents[turn] if completion.parents else turn - 1
        paths[turn] = ids = paths[parent][:keeps] + completion.tokens[begin:stop].tolist()
        yield ids, len(ids) - stop + indices[(indices >= begin) & (indices < stop)]
        begin = stop


def token_advantages(sample):
    """Return the advantage of each sampled token."""
    if not sample.turn_advantages:
        return sample.advantage
    turns = zip(sample.completion.turns, sample.turn_advantages, strict=True)
    return torch.tensor([advantage for (start, stop), advantage in turns for _ in range(start, stop)]).double()


def trained_samples(groups):
    return [(g, s) for g in groups for s in g.samples if s.in_loss]


@contextmanager
def keep_float64():
    """Inside the block, `float()` keeps float64 tensors. Otherwise torchtune computes norms, RoPE and logits in float32."""
    to_float32 = torch.Tensor.float
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else to_float32(x)
    try:
        yield
    finally:
        del torch.Tensor.float  # torch.Tensor inherits its own


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Results of the float64 reference, and the magnitudes of their summands."""

    loss: float
    grads: dict[str, torch.Tensor]  # by parameter
    logprobs: dict[int, torch.Tensor]  # by id(sample)
    loss_size: float  # sum over the labels of what a relative change of the logits makes of each term
    grad_size: float  # of the largest parameter: the gradient's largest element, summed over samples and terms
    logit_size: float  # largest logit
    terms: int  # numbers that are added up between input and gradient


def reference(model, groups, loss, aggregation, temperature, ref_model=None):
    """One forward and backward per sample and term of the loss in float64, of a copy of the model.

    Weights and advantages are rounded to float32 first, as in rows. Samples and terms cancel each other, but their rounding
    does not: sizes are sums of magnitudes. The largest parameter counts, since some exact gradients are zero (q and k of a
    token that attends only to itself, the bias of k) and contain rounding of the size of the other gradients.
    """
    model, ref_model = (None if m is None else copy.deepcopy(m).double() for m in (model, ref_model))

    def logprobs_and_entropy(m, group, sample):
        indices = np.sort(np.concatenate([sample.completion.sampled_indices, sample.completion.content_indices]))
        is_content = torch.from_numpy(np.isin(indices, sample.completion.content_indices))
        paths = [(torch.tensor(ids), places) for ids, places in paths_of(group, sample, indices)]
        logits = torch.cat([m(ids[None, :-1])[0][places - 1] for ids, places in paths]) / temperature
        logp, labels = torch.log_softmax(logits, -1), torch.cat([ids[places] for ids, places in paths])
        of_label, entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        return of_label[~is_content], entropy[~is_content], logits.abs().max().item(), of_label[is_content]

    pairs = trained_samples(groups)
    labels = sum(len(s.completion.sampled_indices) for _, s in pairs)
    contents = sum(len(s.completion.content_indices) for _, s in pairs)
    total, loss_size, logit_size, scored = 0.0, 0.0, 0.0, {}
    params = dict(model.named_parameters())
    grads, sizes = {name: torch.zeros_like(p) for name, p in params.items()}, dict.fromkeys(params, 0.0)
    with keep_float64():
        for group, sample in pairs:
            logp, entropy, largest, content = logprobs_and_entropy(model, group, sample)
            ratio = (logp - logp.detach()).exp()
            behavior = torch.tensor(sample.completion.logprobs[sample.completion.sampled_indices]).double()
            importance = (logp.detach() - behavior).exp().clamp(max=2.0)  # TIS
            terms = [-importance * ratio * token_advantages(sample), -loss.entropy_coef * entropy]
            changes = list(terms)
            if ref_model is not None:
                with torch.no_grad():
                    d = logprobs_and_entropy(ref_model, group, sample)[0] - logp.detach()
                d = d - (logp - logp.detach())
                terms.append(loss.kl_coef * (d.exp() - 1 - d))
                changes.append(loss.kl_coef * (d.exp() + 1))
            of_label = (
                1 / labels if aggregation == "token" else 1 / (len(pairs) * len(sample.completion.sampled_indices))
            )
            weights = [float(np.float32(of_label))] * len(terms)
            if loss.environment_coef and len(content):
                terms.append(-content)
                weights.append(loss.environment_coef * float(np.float32(1 / contents)))
                loss_size += weights[-1] * terms[-1].sum().item()
            for weight, term in zip(weights, terms, strict=True):
                total += weight * term.sum().item()
                term_grads = torch.autograd.grad(weight * term.sum(), params.values(), retain_graph=True)
                for name, grad in zip(params, term_grads, strict=True):
                    grads[name] += grad
                    sizes[name] += grad.abs().max().item()
            loss_size += weights[0] * sum(change.abs().sum().item() for change in changes)
            logit_size = max(logit_size, largest)
            scored[id(sample)] = logp.detach()
    matrices = [p for m in model.modules() for p in m.parameters(recurse=False) if p.dim() == 2]
    tokens = sum(len(g.prompt_tokens) + len(s.completion.tokens) for g, s in pairs)
    terms = sum(sum(p.shape) for p in matrices) + tokens
    return ReferenceResult(total, grads, scored, loss_size, max(sizes.values()), logit_size, terms)


def packed_logprobs_by_sample(rows, scored_rows, groups):
    """Match each sample's log-probs by its tokens and behavior log-probs; every label exactly once."""
    by_key = {}
    for row, scores in zip(rows, scored_rows, strict=True):
        for i in range(int(row.completion_index_L.max()) + 1 if row.num_labels else 0):
            at = row.completion_index_L == i
            key = (tuple(row.labels_L[at].tolist()), tuple(row.logprobs_L[at].tolist()))
            by_key.setdefault(key, []).append(scores.logprobs_L[at])
    result = {}
    for _, s in trained_samples(groups):
        tokens, logprobs = (each[s.completion.sampled_indices] for each in (s.completion.tokens, s.completion.logprobs))
        result[id(s)] = by_key[(tuple(tokens.tolist()), tuple(logprobs.tolist()))].pop()
    assert not any(by_key.values()), "a label was counted that no sample has"
    return result


def assert_equal_to_plain(policy, rows, groups, loss, want, temperature, ref_model=None):
    """Log-probs, loss and gradients of packed rows are those of the plain computation. Returns each error over its bound.

    In float64 the bound is 1e-10 of what was summed up. In float32 it is n u, u = 2^-24, for n numbers that are added up one
    after the other: every matrix is contracted along its rows forward and along its columns backward, and the gradients of the
    samples' tokens are added up. A sum of k products, rounded, is the exact one with factors that are changed by sqrt(k) u, as
    roundings have no common sign. All weights of `tiny_model` changed by random signs times e change the gradients by up to 40 e
    of their size; k is at most 61, and with forward and backward that is 620 u, where n is more than 1,000. One rounding to
    float16 is above n u.
    """
    with keep_float64():
        scored = None
        if ref_model is not None:
            with torch.no_grad():
                scored = [PackedPolicy(ref_model)(row, temperature) for row in rows]
        scored, metrics = single_process_learner(policy, loss, temperature=temperature).forward_backward(
            rows, reference=scored
        )
    grads = {clean_name(n): p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
    assert grads.keys() == want.grads.keys()
    logprobs = packed_logprobs_by_sample(rows, scored, groups)
    assert logprobs.keys() == want.logprobs.keys()
    dtype = next(iter(grads.values())).dtype
    assert {t.dtype for t in (*grads.values(), *logprobs.values())} == {dtype}
    bound = 1e-10 if dtype == torch.float64 else want.terms * 2.0**-24
    ratios = {
        "log-probs": max((logprobs[key] - want.logprobs[key]).abs().max().item() for key in logprobs) / want.logit_size,
        "loss": abs(metrics["loss/total"] - want.loss) / (want.loss_size * max(1.0, want.logit_size)),
        "gradients": max((grads[name] - want.grads[name]).abs().max().item() for name in grads) / want.grad_size,
    }
    ratios = {name: error / bound for name, error in ratios.items()}
    assert max(ratios.values()) < 1.0, ratios
    return ratios

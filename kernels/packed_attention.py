"""Computes attention over packed rows: a completion sees its prompt and itself, but no other completion.

This is the rule for query i and key j of a row. `dense_mask` is the reference, which everything else must equal::

    allowed[i, j] = j <= i  and  (group[i] == group[j]  or  parent[i] == group[j])

The computation depends on the device:

* On **CUDA** it is FlexAttention with a block mask made from the ids. Tiles of 128 x 128 in which nothing is allowed
  are never loaded, so the cost grows with the allowed area, and there is no T x T mask.
* On **CPU** FlexAttention has no backward pass, and a dense mask wastes three quarters of the work. But the structure
  is known: causal attention inside the prompt, then every completion over [prompt, itself]. Completions of one prompt
  are stacked, sorted by length, so that there is little padding. They share one mask [R, P + R], because the padding of
  a shorter one comes after its own tokens. A group needs two fused SDPA calls if all its completions are in one stack.

Both are exact: they equal the dense mask up to rounding, in value and gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtune_ext.packing import LENGTHS, Row, Segment

TILE = 128  # queries, and keys, in a block of FlexAttention
TILES_AT_ONCE = 8  # query tiles whose mask is computed at a time while a block mask is made
MAX_PADDING = 0.25  # largest share of padding in a stacked completion


def dense_mask(group_ids_T: Tensor, parent_ids_T: Tensor) -> Tensor:
    """Returns the reference mask, bool [T, T], True where a query (first axis) may see a key. Needs O(T^2) memory."""
    same = group_ids_T[:, None] == group_ids_T[None, :]
    child = parent_ids_T[:, None] == group_ids_T[None, :]
    return (same | child).tril()


def block_mask(group_ids_T: Tensor, parent_ids_T: Tensor) -> BlockMask:
    """Returns the rule of `dense_mask` as a block mask of FlexAttention."""

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((group_ids_T[i] == group_ids_T[j]) | (parent_ids_T[i] == group_ids_T[j]))

    T, device = group_ids_T.numel(), group_ids_T.device
    num_tiles = -(-T // TILE)
    columns = torch.arange(T, device=device)[None]
    counts = torch.empty(num_tiles, num_tiles, dtype=torch.int64, device=device)  # allowed pairs in each tile
    # The loop handles some queries at a time, so that memory grows with T and not with T^2.
    for start in range(0, T, TILES_AT_ONCE * TILE):
        rows = torch.arange(start, min(start + TILES_AT_ONCE * TILE, T), device=device)[:, None]
        strip = F.pad(allowed(None, None, rows, columns), (0, -T % TILE, 0, -rows.numel() % TILE))
        tiles = strip.view(-1, TILE, num_tiles, TILE)
        counts[start // TILE : start // TILE + tiles.shape[0]] = tiles.sum(dim=(1, 3))
    full = counts == TILE * TILE
    partial = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=TILE, mask_mod=allowed, seq_lengths=(T, T)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the key tiles that each query tile needs, in the form of FlexAttention.

    Returns:
        The number of key tiles, [1, 1, n], and their indices, [1, 1, n, n], the needed ones first.
    """
    which = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(dim=1).int()[None, None], which.int()[None, None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """N completions of one prompt that are computed together, each padded to R places."""

    prompt: int  # number of the prompt among those of the row
    count: int  # N
    mask: Tensor  # [R, P + R] bool


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """The plan by which the CPU computes a row. It is made once and used by every layer.

    The row is put in the order in which it is computed, all prompts and then all stacks, and its parts are views of that.
    """

    order_S: Tensor  # int64, places in the row; a shorter completion of a stack is padded with its last place
    sizes: tuple[int, ...]  # places of each prompt, and of each stack
    stacks: tuple[_Stack, ...]
    back_T: Tensor  # int64, for each place of the row, its index in S; S itself on padding


def packed_mask(row: Row) -> BlockMask | SegmentMask:
    """Returns the mask object of a row for the device that its tensors are on."""
    if row.tokens_T.is_cuda:
        return block_mask(row.group_ids_T, row.parent_ids_T)
    return segment_mask(row.segments, row.tokens_T.numel())


def segment_mask(segments: tuple[Segment, ...], num_tokens: int) -> SegmentMask:
    """Makes the plan for the CPU: which completions are stacked, and how the results return to their places."""
    places = [torch.arange(*segment.prompt) for segment in segments]
    valid = [torch.ones_like(each, dtype=torch.bool) for each in places]
    stacks = []
    for prompt, segment in enumerate(segments):
        for index_NR, valid_NR in _stacked(segment.completions):
            (count, longest), shared = index_NR.shape, places[prompt].numel()
            mask = torch.ones(longest, shared + longest, dtype=torch.bool).tril(shared)
            stacks.append(_Stack(prompt, count, mask))
            places.append(index_NR.flatten())
            valid.append(valid_NR.flatten())
    sizes = tuple(each.numel() for each in places)
    order, valid = (torch.cat(each) if each else torch.empty(0, dtype=torch.int64) for each in (places, valid))
    back = torch.full((num_tokens,), order.numel())
    back[order[valid]] = torch.arange(order.numel())[valid]
    return SegmentMask(order, sizes, tuple(stacks), back)


def _stacked(completions: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the places [N, R] of completions that are computed together, and whether each is one or padding."""
    spans = sorted((span for span in completions if span[1] > span[0]), key=lambda span: span[0] - span[1])
    while spans:
        longest = spans[0][1] - spans[0][0]
        stack = [span for span in spans if span[1] - span[0] >= (1 - MAX_PADDING) * longest]
        spans = spans[len(stack) :]
        start = torch.tensor([a for a, _ in stack])[:, None]
        stop = torch.tensor([b for _, b in stack])[:, None]
        index = start + torch.arange(longest)
        yield index.minimum(stop - 1), index < stop


@torch.compiler.disable(recursive=False)
def _segment_attention(q: Tensor, k: Tensor, v: Tensor, mask: SegmentMask) -> Tensor:
    """Computes attention on the CPU. q, k, v and the result are [1, H, T, D]; the result is zero on padding."""
    # In a row of only padding every parameter must still get a gradient. Otherwise this rank would make fewer
    # collectives than the others.
    if not mask.sizes:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # In bfloat16 torch's backward of fused attention on a CPU takes up to three times as long as in float32.
    dtype, accumulate = q.dtype, torch.promote_types(q.dtype, torch.float32)
    # Each slice of the row by itself would fill an array of the row's size with zeros in the backward.
    q, k, v = (x[0].to(accumulate).index_select(1, mask.order_S).split(mask.sizes, dim=1) for x in (q, k, v))
    prompts = len(mask.sizes) - len(mask.stacks)
    results = [
        F.scaled_dot_product_attention(q[i][None], k[i][None], v[i][None], is_causal=True)[0] for i in range(prompts)
    ]
    for i, stack in enumerate(mask.stacks, start=prompts):
        own_q, own_k, own_v = (x[i].unflatten(1, (stack.count, -1)).transpose(0, 1) for x in (q, k, v))  # [N, H, R, D]
        prompt_k, prompt_v = (x[stack.prompt].expand(stack.count, -1, -1, -1) for x in (k, v))
        keys, values = torch.cat([prompt_k, own_k], dim=2), torch.cat([prompt_v, own_v], dim=2)
        out = F.scaled_dot_product_attention(own_q, keys, values, attn_mask=stack.mask)
        results.append(out.transpose(0, 1).flatten(1, 2))
    results.append(results[0].new_zeros(results[0].shape[0], 1, results[0].shape[2]))
    return torch.cat(results, dim=1).index_select(1, mask.back_T)[None].to(dtype)


# It is compiled for each length of a row, with gradient and without. Beyond the limit, PyTorch would no longer compile it,
# and a GPU has no room for the T x T scores that it then holds.
torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * LENGTHS)
_flex_attention = torch.compile(flex_attention, dynamic=False)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | SegmentMask | Tensor | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Replaces torchtune's `MultiHeadAttention._attention_call`. q, k, v and the result are [1, H, T, D]."""
    if isinstance(mask, SegmentMask):
        return _segment_attention(q, k, v, mask)
    if isinstance(mask, BlockMask):
        return _flex_attention(q, k, v, block_mask=mask)
    dense = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, dropout_p=dropout_p, is_causal=is_causal)


def use_packed_attention(model: nn.Module) -> None:
    """Makes every layer of a torchtune decoder use `packed_attention`. Its `mask` may then come from `packed_mask`."""
    for layer in model.layers:
        layer.attn._attention_call = packed_attention

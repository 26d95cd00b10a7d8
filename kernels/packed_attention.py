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
    """N completions of one prompt that are computed together."""

    prompt: tuple[int, int]
    index_NR: Tensor  # int64, places in the row; short completions are padded with their last place
    valid_NR: Tensor  # bool, False on padding
    mask: Tensor  # [R, P + R] bool


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """The plan by which the CPU computes a row. It is made once and used by every layer."""

    prompts: tuple[tuple[int, int], ...]
    stacks: tuple[_Stack, ...]
    order_T: Tensor  # int64, for each place of the row, its index in the concatenated results


def packed_mask(row: Row) -> BlockMask | SegmentMask:
    """Returns the mask object of a row for the device that its tensors are on."""
    if row.tokens_T.is_cuda:
        return block_mask(row.group_ids_T, row.parent_ids_T)
    return segment_mask(row.segments, row.tokens_T.numel())


def segment_mask(segments: tuple[Segment, ...], num_tokens: int) -> SegmentMask:
    """Makes the plan for the CPU: which completions are stacked, and how the results return to their places."""
    stacks = tuple(stack for segment in segments for stack in _stacks(segment))
    places = [torch.arange(*segment.prompt) for segment in segments]
    places += [stack.index_NR[stack.valid_NR] for stack in stacks]
    used = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    # Padding gets the index of a zero that is appended to the results.
    order = torch.full((num_tokens,), used.numel(), dtype=torch.int64)
    order[used] = torch.arange(used.numel())
    return SegmentMask(tuple(segment.prompt for segment in segments), stacks, order)


def _stacks(segment: Segment) -> list[_Stack]:
    spans = sorted((span for span in segment.completions if span[1] > span[0]), key=lambda span: span[0] - span[1])
    stacks: list[_Stack] = []
    while spans:
        longest = spans[0][1] - spans[0][0]
        taken = [span for span in spans if span[1] - span[0] >= (1 - MAX_PADDING) * longest]
        spans = spans[len(taken) :]
        start = torch.tensor([a for a, _ in taken])[:, None]
        stop = torch.tensor([b for _, b in taken])[:, None]
        index = start + torch.arange(longest)
        mask = torch.ones(longest, segment.prompt[1] - segment.prompt[0] + longest, dtype=torch.bool)
        mask = mask.tril(segment.prompt[1] - segment.prompt[0])
        stacks.append(_Stack(segment.prompt, index.minimum(stop - 1), index < stop, mask))
    return stacks


@torch.compiler.disable(recursive=False)
def _segment_attention(q: Tensor, k: Tensor, v: Tensor, mask: SegmentMask) -> Tensor:
    """Computes attention on the CPU. q, k, v and the result are [1, H, T, D]; the result is zero on padding."""
    # In a row of padding alone every parameter must still get a gradient. Otherwise this rank would make fewer
    # collectives than the others.
    if not mask.prompts:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = q[0], k[0], v[0]  # [H, T, D]
    results = []
    for a, b in mask.prompts:
        results.append(
            F.scaled_dot_product_attention(q[None, :, a:b], k[None, :, a:b], v[None, :, a:b], is_causal=True)[0]
        )
    for stack in mask.stacks:
        a, b = stack.prompt
        N, R = stack.index_NR.shape
        own_q, own_k, own_v = (x[:, stack.index_NR].transpose(0, 1) for x in (q, k, v))  # [N, H, R, D]
        keys = torch.cat([k[None, :, a:b].expand(N, -1, -1, -1), own_k], dim=2)
        values = torch.cat([v[None, :, a:b].expand(N, -1, -1, -1), own_v], dim=2)
        out = F.scaled_dot_product_attention(own_q, keys, values, attn_mask=stack.mask)
        results.append(out.transpose(0, 1)[:, stack.valid_NR])
    results.append(q.new_zeros(q.shape[0], 1, q.shape[2]))
    return torch.cat(results, dim=1)[:, mask.order_T][None]


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

"""Attention over packed rows: a completion sees its prompt and itself, never its siblings.

The rule, for query i and key j of a row (`dense_mask` is the reference; everything else must equal it)::

    allowed[i, j] = j <= i  and  (group[i] == group[j]  or  parent[i] == group[j])

How it is computed depends on the device:

* **CUDA**: FlexAttention with a block mask made from the ids. Tiles of 128 x 128 in which nothing is allowed are never
  loaded, so the cost follows the allowed area and no T x T mask exists.
* **CPU**: FlexAttention has no backward there, and a dense mask wastes three quarters of the work. But the structure is
  known: causal attention inside the prompt, then every completion over [prompt, itself]. Completions of one prompt are
  stacked (sorted by length, so that little is padded) and share one mask [R, P + R], since what a shorter one is padded
  with lies after its own tokens. Two fused SDPA calls a group do the work of a row.

Both are exact: they equal the dense mask to rounding, in value and gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtune_ext.packing import Row, Segment

TILE = 128  # FlexAttention's block of queries, and of keys
TILES_AT_ONCE = 8  # query tiles whose mask is looked at together while a block mask is made
MAX_PADDING = 0.25  # completions are stacked while the shortest has at least this share less padding than its length


def dense_mask(group_ids_T: Tensor, parent_ids_T: Tensor) -> Tensor:
    """[T, T] bool, True where query (row) may see key (column). The reference; O(T^2) memory."""
    same = group_ids_T[:, None] == group_ids_T[None, :]
    child = parent_ids_T[:, None] == group_ids_T[None, :]
    return (same | child).tril()


def block_mask(group_ids_T: Tensor, parent_ids_T: Tensor) -> BlockMask:
    """The same rule as a FlexAttention block mask."""

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((group_ids_T[i] == group_ids_T[j]) | (parent_ids_T[i] == group_ids_T[j]))

    T, device = group_ids_T.numel(), group_ids_T.device
    num_tiles = -(-T // TILE)
    columns = torch.arange(T, device=device)[None]
    counts = torch.empty(num_tiles, num_tiles, dtype=torch.int64, device=device)  # of allowed pairs in each tile
    for start in range(0, T, TILES_AT_ONCE * TILE):  # a strip of queries at a time: memory grows with T, not with T^2
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
    """Which key tiles each query tile needs, as FlexAttention wants it: how many, [1, 1, n], and which, [1, 1, n, n]."""
    which = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(dim=1).int()[None, None], which.int()[None, None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Completions of one prompt that are computed together."""

    prompt: tuple[int, int]
    index_NR: Tensor  # int64, places in the row; short completions are padded with their last place
    valid_NR: Tensor  # bool, False on that padding
    mask: Tensor  # [R, P + R] bool


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """What the CPU path needs of a row, made once and used by every layer."""

    prompts: tuple[tuple[int, int], ...]
    stacks: tuple[_Stack, ...]
    order_T: Tensor  # int64, where each place of the row stands in the concatenated results


def packed_mask(row: Row) -> BlockMask | SegmentMask:
    """The mask object of a row for the device that its tensors lie on."""
    if row.tokens_T.is_cuda:
        return block_mask(row.group_ids_T, row.parent_ids_T)
    return segment_mask(row.segments, row.tokens_T.numel())


def segment_mask(segments: tuple[Segment, ...], num_tokens: int) -> SegmentMask:
    """Plans the CPU path: which completions are stacked, and how results return to their places."""
    stacks = tuple(stack for segment in segments for stack in _stacks(segment))
    places = [torch.arange(*segment.prompt) for segment in segments]
    places += [stack.index_NR[stack.valid_NR] for stack in stacks]
    used = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    order = torch.full((num_tokens,), used.numel(), dtype=torch.int64)  # padding reads a zero appended at the end
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
    """q, k, v: [1, H, T, D] -> [1, H, T, D]; zero on padding."""
    if not mask.prompts:  # a row of padding alone: every parameter must still get a gradient, or ranks fall out of step
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


_flex_attention = torch.compile(flex_attention, dynamic=False)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | SegmentMask | Tensor | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Stands in for torchtune's `MultiHeadAttention._attention_call`; q, k, v: [1, H, T, D]."""
    if isinstance(mask, SegmentMask):
        return _segment_attention(q, k, v, mask)
    if isinstance(mask, BlockMask):
        return _flex_attention(q, k, v, block_mask=mask)
    dense = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, dropout_p=dropout_p, is_causal=is_causal)


def use_packed_attention(model: nn.Module) -> None:
    """Gives every layer of a torchtune decoder `packed_attention`; `mask` may then be what `packed_mask` returns."""
    for layer in model.layers:
        layer.attn._attention_call = packed_attention

"""Computes attention over packed rows, in which a token sees only its own path in the prefix tree.

For query i and key j of a row::

    allowed[i, j] = j <= i < end[j]                                           # a layer without window
    allowed[i, j] = j <= i < end[j] and position[i] - position[j] < window    # a sliding window

* On **CUDA**, FlexAttention uses a block mask computed from the ends. It never loads tiles of 128 x
  128 without an allowed pair, so the cost grows with the allowed area. The T x T mask is never
  materialized.
* On **CPU**, FlexAttention has no backward pass, and a dense mask would waste three quarters of the
  work. Instead, consecutive tokens with equal ends form a segment, which sees itself, causally, and
  all of its ancestor segments. Segments are stacked and computed by fused SDPA. A group takes two
  calls if all its completions are in one stack. With a window, a call has 128 queries of each
  segment and only the keys that they see.

Both equal attention with the dense mask up to rounding, in value and gradient. If some layers have
a window, the mask of a row is a dict with a mask for each distinct window.

Shape letters of this module: N segments of a stack, R tokens of its longest segment, A tokens of
its ancestors in the window, C queries and K keys of an SDPA call, S tokens of the row in the order
of the stacks, with padding, H heads, D head width.
"""

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention
from torch.utils.checkpoint import checkpoint

TILE_SIZE = 128  # queries and keys per block of FlexAttention
FLEX_BUCKETS_PER_OCTAVE = 2  # compiled lengths of FlexAttention between two powers of two
# Kernels that PyTorch may compile for FlexAttention: 2 * FLEX_BUCKETS_PER_OCTAVE for each of 64
# octaves of lengths, or of 32 octaves with two windows.
RECOMPILE_LIMIT = 256
FLOAT32_SHARED_MEMORY = 160 << 10  # bytes of shared memory for FlexAttention's default tiles in float32
MASK_CHUNK_TILES = 8  # query tiles per step of the block mask computation
MAX_PADDING_FRACTION = 0.25  # maximum fraction of padding in a stacked completion
WINDOW_QUERIES = 128  # queries of a segment in one call on a CPU, with a window or soft cap


def dense_mask(ends_T: Tensor, positions_T: Tensor | None = None, window: int | None = None) -> Tensor:
    """Returns the reference mask, bool [T, T]: True where a query (first axis) may see a key.

    Args:
        ends_T: one past the last index that sees the token.
        positions_T: position of the token in its path; needed only with a window.
        window: number of keys that a query sees at most, including itself; None: all.
    """
    query_index_T1 = torch.arange(ends_T.numel(), device=ends_T.device)[:, None]
    mask_TT = (query_index_T1 < ends_T).tril()
    if window is None:
        return mask_TT
    assert positions_T is not None
    return mask_TT & (positions_T[:, None] - positions_T < window)


def block_mask(ends_T: Tensor, positions_T: Tensor | None = None, window: int | None = None) -> BlockMask:
    """Returns the mask of `dense_mask` as a block mask of FlexAttention.

    The ends may be padded by `pad_ends`. The positions need not be padded.
    """

    def on_path(b: Tensor | None, h: Tensor | None, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i < ends_T[j])

    allowed = on_path
    if window is not None:
        assert positions_T is not None
        # Padding sees only itself, at any position.
        padded_T = F.pad(positions_T.int(), (0, ends_T.numel() - positions_T.numel()))

        def in_window(b: Tensor | None, h: Tensor | None, i: Tensor, j: Tensor) -> Tensor:
            return on_path(b, h, i, j) & (padded_T[i] - padded_T[j] < window)

        allowed = in_window
    T, device = ends_T.numel(), ends_T.device
    num_tiles = -(-T // TILE_SIZE)
    columns = torch.arange(T, device=device)[None]
    counts = torch.empty(num_tiles, num_tiles, dtype=torch.int64, device=device)  # allowed pairs in each tile
    # `create_block_mask` would materialize the T x T mask. A few query tiles at a time need only
    # O(T) memory.
    for start in range(0, T, MASK_CHUNK_TILES * TILE_SIZE):
        rows = torch.arange(start, min(start + MASK_CHUNK_TILES * TILE_SIZE, T), device=device)[:, None]
        strip = F.pad(allowed(None, None, rows, columns), (0, -T % TILE_SIZE, 0, -rows.numel() % TILE_SIZE))
        tiles = strip.view(-1, TILE_SIZE, num_tiles, TILE_SIZE)
        counts[start // TILE_SIZE : start // TILE_SIZE + tiles.shape[0]] = tiles.sum(dim=(1, 3))
    # The kernel evaluates `allowed` only in partial tiles.
    full = counts == TILE_SIZE * TILE_SIZE
    partial = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_kv_block_indices(partial),
        *_kv_block_indices(full),
        BLOCK_SIZE=TILE_SIZE,
        mask_mod=allowed,
        seq_lengths=(T, T),
    )


def _kv_block_indices(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, per query tile, the number of key tiles [1, 1, n] and their indices [1, 1, n, n].

    The needed key tiles come first.
    """
    key_tiles = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(dim=1).int()[None, None], key_tiles.int()[None, None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """N segments with the same ancestors that are computed together, each padded to R tokens."""

    # For each ancestor segment in the window: its index and its first token in the window. A tokens
    # in total. Each is a stack of one segment.
    ancestors: tuple[tuple[int, int], ...]
    num_segments: int  # N
    query_sizes: tuple[int, ...]  # queries C of each SDPA call, R in total
    key_sizes: tuple[int, ...]  # keys of each chunk, A + R in total
    # For each SDPA call: its chunks of keys, K tokens in total, and its mask, bool [C, K]; None: causal.
    # All N segments share it: the padding of a shorter segment follows its tokens, which do not see it.
    calls: tuple[tuple[slice, Tensor | None], ...]


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """The plan for the attention of a row on a CPU. It is made once and used by every layer.

    The row is reordered by stacks (S tokens with padding), first the segments with descendants. The
    tensors of a stack are views into the reordered row.
    """

    order_S: Tensor  # int64, indices into the row; a shorter segment of a stack is padded with its last index
    sizes: tuple[int, ...]  # number of tokens of each stack, with padding
    stacks: tuple[_Stack, ...]
    inverse_order_T: Tensor  # int64, index into the results of all SDPA calls of each token of the row


LayerMask = BlockMask | SegmentMask | Tensor  # a tensor is bool [1, T, T]


def packed_mask(
    ends_T: Tensor, positions_T: Tensor, windows: Iterable[int | None] = (None,), max_path_len: float = math.inf
) -> LayerMask | dict[int | None, LayerMask]:
    """Returns the mask of a row for the device of its ends.

    Args:
        ends_T: one past the last index that sees the token.
        positions_T: position of the token in its path.
        windows: distinct windows of the model's layers; None: a layer without window.
        max_path_len: tokens of the row's longest path. Layers with a larger window share the mask of
            layers without one.

    Returns:
        The mask. If a layer has a window: a mask for each of the windows.
    """
    # Window of a layer -> window of its mask.
    effective = {window: None if (window or math.inf) >= max_path_len else window for window in windows}
    masks: dict[int | None, LayerMask] = {}
    for window in set(effective.values()):
        if ends_T.is_cuda:
            _compile_flex_attention()
            masks[window] = block_mask(pad_ends(ends_T), positions_T, window)
        else:
            masks[window] = segment_mask(ends_T, window)
    return masks[None] if [*effective] == [None] else {window: masks[each] for window, each in effective.items()}


def padded_length(tokens: int, tile: int, buckets_per_octave: int) -> int:
    """Rounds up to one of a few lengths, which are evenly spaced between two powers of two.

    Args:
        tokens: tokens of a row, at least 1.
        tile: every length is a multiple of it.
        buckets_per_octave: number of lengths between two powers of two, if the tile allows as many.
    """
    octave = 2 ** (tokens - 1).bit_length() // 2
    spacing = math.ceil(max(1, octave // buckets_per_octave) / tile) * tile
    return math.ceil(tokens / spacing) * spacing


def pad_ends(ends_T: Tensor) -> Tensor:
    """Pads to 1, 2, 3, 4, 6, 8, 12, 16, ... tiles with tokens that see only themselves."""
    # FlexAttention is compiled for each length, so only a few lengths are used.
    T = ends_T.numel()
    length = padded_length(T, TILE_SIZE, FLEX_BUCKETS_PER_OCTAVE)
    return torch.cat([ends_T, torch.arange(T + 1, length + 1, dtype=ends_T.dtype, device=ends_T.device)])


def segment_mask(ends_T: Tensor, window: int | None = None) -> SegmentMask:
    """Returns the plan for a CPU: stacks of segments, and the order of the tokens."""
    # Positions are not needed: the positions of a path's tokens are 0, 1, 2, ...
    interior_segments: list[tuple[int, int]] = []  # intervals [start, stop) of segments with descendants
    stack_candidates: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []  # (ancestors, their child segments)
    leaf_segments: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # segments without descendants, by ancestors
    ancestors: list[int] = []
    ends = ends_T.tolist()
    starts = [index for index, end in enumerate(ends) if not index or end != ends[index - 1]]
    for start, stop in pairwise([*starts, len(ends)]):
        # `ancestors` is the path to this segment. Leave segments that end before it.
        while ancestors and ends[interior_segments[ancestors[-1]][0]] <= start:
            ancestors.pop()
        # No other segment sees this segment, so it is a leaf. Leaves with the same ancestors can be
        # stacked.
        if ends[start] == stop:
            leaf_segments.setdefault(tuple(ancestors), []).append((start, stop))
            continue
        stack_candidates.append((tuple(ancestors), [(start, stop)]))
        ancestors.append(len(interior_segments))
        interior_segments.append((start, stop))
    stack_candidates += leaf_segments.items()
    stacks, indices, results, valid = [], [], [], []
    for stack_ancestors, segments in stack_candidates:
        lengths = [interior_segments[i][1] - interior_segments[i][0] for i in stack_ancestors]
        # The first query of a segment sees window - 1 tokens of its ancestors at most.
        outside = 0 if window is None else max(0, sum(lengths) - window + 1)
        in_window, context = [], sum(lengths) - outside
        for ancestor, length in zip(stack_ancestors, lengths, strict=True):
            if outside < length:
                in_window.append((ancestor, outside))
            outside = max(0, outside - length)
        for index_NR, valid_NR in _stack_segments(segments):
            num_segments, longest = index_NR.shape
            query_sizes, key_sizes, calls = _attention_calls(context, longest, window)
            stacks.append(_Stack(tuple(in_window), num_segments, query_sizes, key_sizes, calls))
            indices.append(index_NR.flatten())
            results += [part.flatten() for part in index_NR.split(query_sizes, dim=1)]
            valid += [part.flatten() for part in valid_NR.split(query_sizes, dim=1)]
    result_order_S, valid_S = torch.cat(results), torch.cat(valid)
    inverse_order_T = torch.empty(len(ends), dtype=torch.int64)
    inverse_order_T[result_order_S[valid_S]] = torch.arange(valid_S.numel())[valid_S]
    return SegmentMask(torch.cat(indices), tuple(index.numel() for index in indices), tuple(stacks), inverse_order_T)


def _attention_calls(
    context: int, longest: int, window: int | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[slice, Tensor | None], ...]]:
    """Returns `query_sizes`, `key_sizes` and `calls` of a stack.

    Args:
        context: tokens of the ancestors in the window, A.
        longest: tokens of the longest segment, R.
        window: number of keys that a query sees at most, including itself; None: all.
    """
    if window is None or context + longest <= window:
        mask = torch.ones(longest, context + longest, dtype=torch.bool).tril(context) if context else None
        return (longest,), (context + longest,), ((slice(1), mask),)
    query_sizes = _chunk_sizes(longest)
    # The ancestors' chunks end where the segments begin; the first one is shorter.
    context_sizes = _chunk_sizes(context)[::-1]
    key_sizes = (*context_sizes, *query_sizes)
    begins = [0, *itertools.accumulate(key_sizes)]
    calls = []
    for last, size in enumerate(query_sizes, len(context_sizes)):
        # The first chunk with a key in the window of the first query.
        first = bisect_right(begins, max(0, begins[last] - window + 1)) - 1
        diagonal = begins[last] - begins[first]  # the first query as a key
        mask = torch.ones(size, diagonal + size, dtype=torch.bool).tril(diagonal).triu(diagonal - window + 1)
        calls.append((slice(first, last + 1), mask))
    return query_sizes, key_sizes, tuple(calls)


def _chunk_sizes(length: int) -> tuple[int, ...]:
    """Returns sizes of `WINDOW_QUERIES`, and of a shorter rest, that add up to a length."""
    rest = length % WINDOW_QUERIES
    return (WINDOW_QUERIES,) * (length // WINDOW_QUERIES) + ((rest,) if rest else ())


def _stack_segments(segments: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields stacks: the row indices [N, R] of their segments, and a bool mask, False for padding."""
    # Longest first, so that segments of similar length are stacked, with little padding.
    unstacked = sorted(segments, key=lambda segment: segment[0] - segment[1])
    while unstacked:
        longest = unstacked[0][1] - unstacked[0][0]
        stack = [(a, b) for a, b in unstacked if b - a >= (1 - MAX_PADDING_FRACTION) * longest]
        unstacked = unstacked[len(stack) :]
        start_N1 = torch.tensor([a for a, _ in stack])[:, None]
        stop_N1 = torch.tensor([b for _, b in stack])[:, None]
        index_NR = start_N1 + torch.arange(longest)
        yield index_NR.minimum(stop_N1 - 1), index_NR < stop_N1


@torch.compiler.disable(recursive=False)
def _segment_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: SegmentMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Computes attention on the CPU. q, k, v and the result are [1, H, T, D]."""
    # torch's backward of fused attention on a CPU is up to three times slower in bfloat16 than in
    # float32.
    dtype, accumulate = q.dtype, torch.promote_types(q.dtype, torch.float32)
    # The backward of a slice allocates zeros of the row's size. The backward of one `split` does
    # not.
    qkv_stacks = [x[0].to(accumulate).index_select(1, mask.order_S).split(mask.sizes, dim=1) for x in (q, k, v)]
    results = []
    for i, stack in enumerate(mask.stacks):
        # Each is [N, H, R, D].
        queries, stack_keys, stack_values = (
            x[i].unflatten(1, (stack.num_segments, -1)).transpose(0, 1) for x in qkv_stacks
        )
        keys, values = (
            torch.cat(
                [*(x[j][:, first:].expand(stack.num_segments, -1, -1, -1) for j, first in stack.ancestors), stack_x],
                dim=2,
            )
            for x, stack_x in zip(qkv_stacks[1:], (stack_keys, stack_values), strict=True)
        )
        # As above, each tensor is split once, because the backward of a slice per call would be quadratic.
        query_parts, key_parts, value_parts = (
            x.split(sizes, dim=2) if len(sizes) > 1 else (x,)
            for x, sizes in ((queries, stack.query_sizes), (keys, stack.key_sizes), (values, stack.key_sizes))
        )
        for query, (chunks, call_mask) in zip(query_parts, stack.calls, strict=True):
            key, value = (
                torch.cat(parts[chunks], dim=2) if len(stack.key_sizes) > 1 else parts[0]
                for parts in (key_parts, value_parts)
            )
            call_qkv = query, key, value
            if softcap is None:
                out = F.scaled_dot_product_attention(
                    *call_qkv, attn_mask=call_mask, is_causal=call_mask is None, scale=scale
                )
            else:
                out = _capped_attention(*call_qkv, call_mask, scale, softcap)
            results.append(out.transpose(0, 1).flatten(1, 2))
    return torch.cat(results, dim=1).index_select(1, mask.inverse_order_T)[None].to(dtype)


@torch.compiler.disable(recursive=True)
def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """Computes attention of q [N, H, C, D], the last C of the K tokens of k and v [N, H, K, D]; mask None: causal."""

    def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        return (softcap * torch.tanh(scores / softcap)).masked_fill(~allowed, -torch.inf).softmax(-1) @ v

    # Fused SDPA has no cap. The backward pass computes the scores again, so that memory holds the
    # scores of a few queries only.
    C, context = q.shape[2], k.shape[2] - q.shape[2]
    if mask is None:
        mask = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    results = []
    for start in range(0, C, WINDOW_QUERIES):
        queries = slice(start, min(start + WINDOW_QUERIES, C))
        keys = slice(context + queries.stop)
        inputs = q[:, :, queries], k[:, :, keys], v[:, :, keys], mask[..., queries, keys]
        results.append(checkpoint(attention, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(results, dim=2)


# FlexAttention as `packed_attention` calls it: compiled on CUDA.
_flex_attention = flex_attention


def _compile_flex_attention() -> None:
    """Compiles FlexAttention once, on CUDA only: importing the compiler takes over a second."""
    global _flex_attention
    if _flex_attention is flex_attention:
        # Each padded length is compiled, with and without gradient, in 5 to 8 s. Beyond the limit
        # PyTorch falls back to eager mode, whose T x T scores do not fit into GPU memory.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        _flex_attention = torch.compile(flex_attention, dynamic=False)


def flex_kernel_options(dtype: torch.dtype, head_dim: int, shared_memory: int) -> FlexKernelOptions | None:
    """Returns the options of FlexAttention's kernels; None: its defaults.

    Args:
        dtype: dtype of q, k and v.
        head_dim: values of a head.
        shared_memory: bytes of shared memory that a block may use on the GPU.
    """
    # A consumer GPU (compute capability 8.6, 8.9, 12.0) has 101,376 bytes.
    if shared_memory >= FLOAT32_SHARED_MEMORY:
        return None
    # With heads of 256 (Gemma), the defaults need 147,456 bytes also in bfloat16.
    if head_dim > 128:
        return {
            "BLOCK_M": 32,
            "BLOCK_N": 32,
            "BLOCK_M1": 32,
            "BLOCK_N1": 32,
            "BLOCK_M2": 32,
            "BLOCK_N2": 32,
            "num_stages": 1,
        }
    # In float32 with heads of 128, the defaults need up to 148,224 bytes, and these tiles 57,344.
    if dtype == torch.float32:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}
    return None


@cache
def _shared_memory(device: torch.device) -> int:
    # torch's stub lacks this property.
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # pyright: ignore[reportAttributeAccessIssue]


# A compiled layer must not inline FlexAttention: its graph gets a symbolic length at the second
# length, for which FlexAttention has slower kernels.
@torch.compiler.disable(recursive=False)
def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Computes attention by FlexAttention. q, k, v and the result are [1, H, T, D]."""
    # The mask has the padded length. Padded or not, the layout is the same, because each layout
    # would be compiled, too.
    T, length = q.shape[2], mask.seq_lengths[0]
    q, k, v = (F.pad(x, (0, 0, 0, length - T)) if length > T else x.contiguous() for x in (q, k, v))
    options = flex_kernel_options(q.dtype, q.shape[-1], _shared_memory(q.device)) if q.is_cuda else None
    score_mod = None if softcap is None else lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    out = _flex_attention(q, k, v, score_mod, block_mask=mask, scale=scale, kernel_options=options)
    return out[:, :, :T]


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: LayerMask | dict[int | None, LayerMask] | None,
    dropout_p: float,
    is_causal: bool,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Replaces torchtune's `MultiHeadAttention._attention_call`. The result is [1, H, T, D].

    Args:
        q: queries, [1, H, T, D].
        k: keys, [1, H, T, D].
        v: values, [1, H, T, D].
        mask: mask of `packed_mask`, or bool [1, T, T]; None: one sequence from position 0.
        dropout_p: dropout probability, used only with a dense mask.
        is_causal: without a mask, whether a token sees only the tokens before it.
        window: number of keys that a query sees at most, including itself; None: all.
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: a score s becomes softcap * tanh(s / softcap) before the mask; None: no cap.
    """
    if isinstance(mask, dict):
        mask = mask[window]
    if isinstance(mask, SegmentMask):
        return _segment_attention(q, k, v, mask, scale, softcap)
    if isinstance(mask, BlockMask):
        return _block_attention(q, k, v, mask, scale, softcap)
    if mask is None and is_causal and window is not None:
        positions_T = torch.arange(q.shape[2], device=q.device)
        mask = dense_mask(torch.full_like(positions_T, q.shape[2]), positions_T, window)[None]
    dense = None if mask is None else mask[:, None]
    if softcap is not None:
        return _capped_attention(q, k, v, dense, scale, softcap)
    is_causal = is_causal and dense is None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )


def use_packed_attention(model: nn.Module) -> dict[int | None, float]:
    """Replaces the attention of every layer of a torchtune decoder by `packed_attention`.

    The decoder then accepts the masks of `packed_mask`. The optional attributes `window`, `scale`
    and `softcap` of a layer's attention are arguments of `packed_attention`.

    Returns:
        The fraction of the layers that have each window; {None: 1.0} without windows.
    """
    layers: list[Any] = [*model.get_submodule("layers").children()]
    windows: Counter[int | None] = Counter()
    # Layers with equal options share a function, because compiled layers are compiled for each.
    functions: dict[tuple[Any, ...], Callable[..., Tensor]] = {(None, None, None): packed_attention}
    for layer in layers:
        options = {name: getattr(layer.attn, name, None) for name in ("window", "scale", "softcap")}
        key = tuple(options.values())
        layer.attn._attention_call = functions.setdefault(key, partial(packed_attention, **options))
        windows[options["window"]] += 1
    return {window: count / len(layers) for window, count in windows.items()}

"""FlexAttention in compiled layers: the graphs that PyTorch compiles. (tests/gpu runs the kernels.)"""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from helpers.fp8_models import write_model_dir
from helpers.unpacked_reference import make_groups
from torchtune_ext.kernels import packed_attention as module
from torchtune_ext.kernels.packed_attention import (
    TILE_SIZE,
    block_mask,
    flex_kernel_options,
    pad_ends,
    use_packed_attention,
)
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy

# Rows with and without padding have the same kernels.
LENGTHS, PADDED = (300, 384, 500, 700, 100, 128), (384, 512, 768, 128)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("flex") / "model", num_hidden_layers=3)


@pytest.fixture
def graphs(monkeypatch):
    """Compiles with a backend that records each graph: the shapes of q in it, and its number of symbolic sizes."""
    graphs, compile_ = [], torch.compile

    def record(graph, inputs):
        calls = [node for node in graph.graph.nodes if "flex_attention" in str(node.target)]
        shapes = [node.args[0].meta["example_value"].shape for node in calls]
        graphs.append((shapes, sum(isinstance(value, torch.SymInt) for value in inputs)))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=record, **options))
    monkeypatch.setattr(module, "_flex_attention", flex_attention)  # it is restored afterwards
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def block_masks(ends_T, positions_T, windows, _):
    masks = {window: block_mask(pad_ends(ends_T), positions_T, window) for window in windows}
    return masks if len(masks) > 1 else masks[None]


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "windows"),
    [(torch.float32, False, [None]), (torch.bfloat16, True, [None]), (torch.float32, True, [20, None])],
    ids=["f32", "bf16 FSDP2 checkpointing", "windows"],
)
def test_compiled_layers_share_one_kernel_per_length(dtype, checkpointing, windows, source, graphs):
    build = partial(build_policy, partial(from_config, str(source.path)), source, torch.device("cpu"), dtype)
    policy, plain = build(compile_layers=True, activation_checkpointing=checkpointing), build()
    for each in (policy, plain):
        for layer, window in zip(each.model.layers, [*windows, *windows, *windows], strict=False):
            layer.attn.window = window
        each.windows = use_packed_attention(each.model)
    module._compile_flex_attention()
    groups = make_groups(np.random.default_rng(0), [(9, [20, 30]), (8, [5, 9])])
    for length in LENGTHS:
        (row,) = pack(groups, length, cost_model=RowCostModel(tile=length))[0]
        assert row.tokens_T.numel() == length
        with torch.no_grad():
            expected = plain(row).logprobs_L
            with mock.patch("torchtune_ext.policy.logprobs.packed_mask", block_masks):
                error = (policy(row).logprobs_L - expected).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2**-6)
    attention = [(shapes, symbols) for shapes, symbols in graphs if shapes]
    assert [(int(shape[2]), symbols) for (shape,), symbols in attention] == [
        (length, 0) for length in PADDED for _ in windows
    ]
    # For each window, the rest of a layer is compiled once for the first length and once for all others.
    assert len(graphs) - len(attention) <= 10 * len(windows)


@pytest.mark.parametrize(
    ("gpu", "shared_memory", "limited"),
    [("RTX 4090", 101_376, True), ("A100", 166_912, False), ("H100", 232_448, False), ("T4", 65_536, True)],
)
def test_flex_options_limit_float32_on_small_shared_memory(gpu, shared_memory, limited):
    options = flex_kernel_options(torch.float32, 128, shared_memory)
    assert options == ({"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1} if limited else None)
    assert flex_kernel_options(torch.bfloat16, 128, shared_memory) is None
    # Gemma's heads of 256 need small tiles in every dtype: 3 x 32 x 256 values fit into 99 KiB.
    wide = flex_kernel_options(torch.bfloat16, 256, shared_memory)
    assert wide == flex_kernel_options(torch.float32, 256, shared_memory) and (wide is not None) is limited
    if wide:
        assert all(value == 32 for name, value in wide.items() if name.startswith("BLOCK")) and wide["num_stages"] == 1
    if options:
        assert TILE_SIZE % options["BLOCK_M"] == TILE_SIZE % options["BLOCK_N"] == 0

"""Qwen3 against transformers; packed rows of all that `decoder` builds against one sample at a time; adapters against PEFT."""

from functools import partial

import adapters
import numpy as np
import pytest
import torch
import unpacked
from safetensors.torch import load_file, save_file
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.packing import pack
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_policy, on_meta
from torchtune_ext.policy.decoder import decoder, lora_decoder
from torchtune_ext.policy.hf_model import HFModel, load_weights
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.policy.scratch import Shape, make_tokenizer, write_model
from torchtune_ext.training.export import export_adapter, export_model

CPU = torch.device("cpu")
DIMS = {**adapters.DIMS, "head_dim": 16}  # 4 heads in a width of 32: twice as wide as the model
KINDS = {
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "whole", "norm_behind": True},
    "smollm3": {"unrotated": [1]},
}


@torch.no_grad()
def randomize(model, std=0.2):
    """Every weight, those of the norms most of all: left at one, a norm in the wrong place would hardly show."""
    generator = torch.Generator().manual_seed(0)
    for _, param in sorted(model.named_parameters()):
        noise = torch.randn(param.shape, generator=generator)
        param.copy_(1 + 0.5 * noise if param.dim() == 1 else std * noise)
    return model


def save(folder, width=32, heads=4, kv_heads=2, head_dim=16, layers=2, mlp=48, tied=True, theta=5e5):
    """A random Qwen3 of transformers, and the folder it was saved in."""
    config = Qwen3Config(
        vocab_size=unpacked.VOCAB,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
    )
    model = randomize(Qwen3ForCausalLM(config).float().eval(), std=2 * width**-0.5)
    model.save_pretrained(folder)
    return model, HFModel(folder)


def loaded(source):
    model = from_config(str(source.path))
    load_weights(model, source)
    return model.eval()


def difference(ours, theirs, length=24):
    """Largest difference between two models' logits, in standard deviations of these."""
    ids = torch.randint(0, unpacked.VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(ids).logits
        return ((ours(ids) - want).abs().max() / want.std()).item()


SHAPES = [
    {},
    {"tied": False},
    {"head_dim": 8, "kv_heads": 4},  # heads as wide as the model, as many keys as queries
    {"width": 48, "heads": 6, "kv_heads": 1, "head_dim": 32, "layers": 3, "tied": False},
    {"width": 64, "heads": 2, "kv_heads": 2, "head_dim": 8, "theta": 1e6},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_those_of_transformers_and_weights_go_both_ways(shape, tmp_path):
    theirs, source = save(tmp_path / "theirs", **shape)
    ours = loaded(source)
    assert difference(ours, theirs) < 1e-4
    (tmp_path / "ours").mkdir()
    export_model(tmp_path / "ours", ours, source, torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    stored, returned = theirs.state_dict(), again.state_dict()
    assert stored.keys() == returned.keys()
    assert all(torch.equal(stored[name], returned[name]) for name in stored)


def test_a_norm_out_of_place_would_show(tmp_path):
    theirs, source = save(tmp_path)
    ours = loaded(source)
    for name in ("q_norm", "k_norm"):
        norm = getattr(ours.layers[1].attn, name)
        setattr(ours.layers[1].attn, name, None)
        assert difference(ours, theirs) > 0.01
        setattr(ours.layers[1].attn, name, norm)
    assert difference(ours, theirs) < 1e-4


def test_a_tied_checkpoint_may_also_store_its_output_head(tmp_path):
    theirs, source = save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}, file)
    assert difference(loaded(source), theirs) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_gives_the_same_logits(kind):
    model = randomize(decoder(**DIMS, **KINDS[kind], tie_word_embeddings=True)).double().eval()
    ids = torch.randint(0, unpacked.VOCAB, (2, 9))
    with torch.no_grad(), unpacked.whole_float64():
        whole = model(ids)
        model.setup_caches(batch_size=2, dtype=torch.float64, decoder_max_seq_len=9)
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        steps = [(0, 5), (5, 6), (6, 9)]  # the prompt, a token, three tokens
        parts = [
            model(ids[:, a:b], mask=mask[a:b].expand(2, -1, -1), input_pos=torch.arange(a, b)[None]) for a, b in steps
        ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-10 * whole.std()


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *(("qwen3", variant) for variant in ("tied", "untied", "checkpointing", "compiled")),
        ("olmo2", "untied"),
        ("smollm3", "tied"),
    ],
)
def test_packed_rows_equal_one_sample_at_a_time(kind, variant):
    groups = unpacked.make_groups(np.random.default_rng(3), adapters.SHAPES)
    model = randomize(decoder(**DIMS, **KINDS[kind], tie_word_embeddings=variant != "untied")).double()
    loss = PolicyLoss(importance="tis", entropy_coef=0.01)
    want = unpacked.reference(model, groups, loss, "token", 0.9)
    assert all(gradient.abs().max() > 0 for name, gradient in want.grads.items() if name.endswith("scale"))
    rows, _ = pack(groups, 64 if variant == "compiled" else 40)  # one row: one shape to compile
    policy = PackedPolicy(model)
    if variant == "compiled":
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend="eager")
    if variant in ("checkpointing", "compiled"):
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    unpacked.assert_equal_to_plain(policy, rows, groups, loss, want, 0.9)


@pytest.mark.parametrize(
    ("kind", "dora", "output"),
    [
        *(("qwen3", dora, output) for dora in (False, True) for output in (False, True)),
        ("olmo2", True, True),
        ("smollm3", False, False),
    ],
)
def test_packed_adapters_equal_merged_weights(kind, dora, output):
    build = partial(lora_decoder, **KINDS[kind])
    model = adapters.adapted(
        build, use_dora=dora, apply_lora_to_output=output, tie_word_embeddings=not output, head_dim=16
    ).double()
    for name, param in model.named_parameters():
        if name.endswith("scale"):
            torch.nn.init.normal_(param, 1.0, 0.5)
    stock = adapters.Plain(model, decoder(**DIMS, **KINDS[kind], tie_word_embeddings=not output))
    groups, loss = unpacked.make_groups(np.random.default_rng(3), adapters.SHAPES), PolicyLoss(importance="tis")
    want = unpacked.reference(stock, groups, loss, "token", 0.9)
    assert len(want.grads) == (2 + dora) * (7 * 2 + output)
    unpacked.assert_equal_to_plain(PackedPolicy(model), pack(groups, 40)[0], groups, loss, want, 0.9)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"quantize_base": True}], ids=["lora", "dora", "qlora"])
def test_adapters_are_what_peft_makes_of_them(options, tmp_path):
    """Fresh they change nothing; moved, PEFT over the base, the merged model, and W + s B A all give our log-probs."""
    peft = pytest.importorskip("peft")
    # NF4 wants whole groups of 256 blocks of 64 values
    base, source = save(tmp_path / "model", width=128, heads=4, kv_heads=2, head_dim=64, mlp=256, tied=False)
    arguments = {"lora_attn_modules": adapters.ATTENTION, "apply_lora_to_mlp": True, "lora_rank": 4, **options}
    make = partial(from_config, str(source.path), **arguments)
    policy, spec = build_policy(make, source, CPU, torch.float32), lora.adapter_spec(on_meta(make), source, arguments)
    assert spec.targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
    assert (
        spec.quantized
        == isinstance(policy.model.layers[0].attn.q_proj.weight, NF4Tensor)
        == ("quantize_base" in options)
    )

    group = unpacked.make_groups(np.random.default_rng(1), [(9, [14])])[0]
    row = pack([group], 64)[0][0]
    ids = torch.tensor(np.concatenate([group.prompt_tokens, group.samples[0].completion.tokens]), dtype=torch.long)[
        None
    ]

    def logprobs(model):
        with torch.no_grad():
            return model(ids).logits[0, 8:-1].log_softmax(-1).gather(1, ids[0, 9:, None])[:, 0]

    def ours():
        with torch.no_grad():
            return policy(row).logprobs_L

    if spec.quantized:  # the adapter belongs to the model that NF4 left
        before = logprobs(base)
        base.load_state_dict(dict(lora.base_hf_tensors(policy.model, source, torch.float32)))
        assert (logprobs(base) - before).abs().max() > 0.01
    assert (ours() - logprobs(base)).abs().max() < adapters.PEFT_BOUND
    adapters.move(policy.model)
    assert (ours() - logprobs(base)).abs().max() > 0.1

    stored = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = dict(lora.merged_hf_tensors(policy.model, source, torch.float32))
    for name, module in lora.adapted_modules(policy.model).items():
        hf_name, _ = source.to_hf(f"{name}.weight", module.lora_b.weight)
        want, bound = adapters.merged_by_hand(stored.pop(hf_name), module)
        assert ((merged.pop(hf_name).double() - want).abs() <= bound).all(), name
    assert stored.keys() == merged.keys() and all(torch.equal(stored[n], merged[n]) for n in stored)

    export_adapter(tmp_path, policy.model, source, spec, merged=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    for other in (whole, with_adapter):
        assert (logprobs(other) - ours()).abs().max() < adapters.PEFT_BOUND


def test_a_model_from_nothing(tmp_path):
    shape = Shape(model_type="qwen3", hidden_size=64, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, intermediate_size=48, vocab_size=400)  # fmt: skip
    write_model(tmp_path, make_tokenizer(["some text\n"] * 9, ["x"], [], 400), shape, seed=0)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), loaded(HFModel(tmp_path))
    assert isinstance(theirs, Qwen3ForCausalLM) and ours.layers[0].attn.head_dim == 64
    assert difference(ours, theirs) < 1e-4
    for change, message in (
        ({"model_type": "qwen9"}, r"shape.model_type='qwen9' is unknown; known: \['qwen2', 'qwen3'\]"),
        ({"model_type": "qwen2", "head_dim": 64}, "shape.head_dim=64 must be hidden_size / num_attention_heads"),
        ({"model_type": "qwen3", "head_dim": 48}, "heads of 48 .* make it a multiple of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            Shape(**change)

"""Linear layers in FP8 against explicitly dequantized operands in float64; which layers, and the bytes that the sampler gets."""

import json
from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import unpacked
from fp8_bounds import quantization_error
from learners import alone
from safetensors.torch import load_file, save_file
from torch import library
from torchtune.models.llama3_1 import llama3_1

from torchtune_ext.kernels.fp8_quantize import (
    BLOCK,
    FP8,
    TILES,
    Fp8Blocks,
    dequantize,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.packing import pack
from torchtune_ext.policy import from_config, lora, scratch
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.fp8 import linear as fp8_linear
from torchtune_ext.policy.fp8 import plan as fp8
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8Config
from torchtune_ext.policy.fp8.plan import convert, fp8_hf_tensors, plan
from torchtune_ext.policy.hf_model import HFModel, load_weights, named_hf_tensors
from torchtune_ext.policy.logprobs import PackedPolicy

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
IN, OUT = 256, 384
GROUPS = [(9, [50, 70, 3]), (30, [20, 41])]


def layer(bias=False, dtype=F32, **options):
    torch.manual_seed(0)
    linear = Fp8BlockLinear(IN, OUT, bias=bias, dtype=dtype)
    linear.fp8 = Fp8Config(**options)
    return linear


def activations(*shape, seed=1):
    """Every hundredth number is ten times larger."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.where(rng.random(shape) < 0.01, 10, 1)
    return torch.from_numpy(x.astype(np.float32))


def run(linear, x, dy):
    x = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


def summation(terms):
    """Of a float32 sum of so many products, each with two dequantized factors, relative to the sum of their magnitudes."""
    n = (terms + 3) * 2**-24
    return n / (1 - n)


@pytest.mark.parametrize("options", [{}, {"save_activations": "full"}, {"power_of_two": True}], ids=str)
@pytest.mark.parametrize("tokens", [1, 127, 129, 200])
def test_forward_and_gradients_are_those_of_the_dequantized_operands(tokens, options):
    linear, x, dy = layer(bias=True, **options), activations(tokens, IN), 1e-6 * activations(tokens, OUT, seed=2)
    y, dx, dw = (t.double() for t in run(linear, x, dy))
    p2, exact = options.get("power_of_two", False), partial(dequantize, dtype=torch.float64)
    w = exact(quantize_weight(linear.weight.detach(), p2))
    x_rows, x_columns = exact(quantize_rows(x, p2)), exact(quantize_columns(x, p2))
    dy_rows, dy_columns = exact(quantize_rows(dy, p2)), exact(quantize_columns(dy, p2))
    product = x_rows @ w.T
    bound = summation(IN) * (x_rows.abs() @ w.abs().T) + 2**-23 * (product.abs() + linear.bias.double().abs())
    assert ((y - product - linear.bias.double()).abs() <= bound).all()
    assert ((dx - dy_rows @ w).abs() <= summation(OUT) * (dy_rows.abs() @ w.abs())).all()
    assert ((dw - dy_columns.T @ x_columns).abs() <= summation(tokens) * (dy_columns.abs().T @ x_columns.abs())).all()
    assert (linear.bias.grad - dy.sum(0)).abs().max() <= tokens * 2**-23 * dy.abs().sum(0).max()


def test_distance_from_the_product_before_rounding():
    linear, x, dy = layer(), activations(200, IN), activations(200, OUT, seed=2)
    w = linear.weight.detach()
    forms = {
        "y": (x, quantize_rows(x), w, quantize_weight(w), lambda a, b: a @ b.T, IN),
        "dx": (dy, quantize_rows(dy), w, quantize_weight(w), lambda a, b: a @ b, OUT),
        "dw": (dy, quantize_columns(dy), x, quantize_columns(x), lambda a, b: a.T @ b, 200),
    }
    for got, (a, a_q, b, b_q, product, terms) in zip(run(linear, x, dy), forms.values(), strict=True):
        a, b = a.double(), b.double()
        e_a, e_b = quantization_error(a, a_q), quantization_error(b, b_q)
        most = product(a.abs() + e_a, b.abs() + e_b)
        error = got.double() - product(a, b)
        assert (error.abs() <= most - product(a.abs(), b.abs()) + summation(terms) * most).all()
        # spread evenly over its interval, an error has 1/sqrt(3) of 2^-4 as root mean square; two factors, without a sign
        assert error.norm() / product(a, b).norm() < (2 / 3) ** 0.5 * 2**-4


@pytest.mark.parametrize("options", [{}, {"save_activations": "full"}], ids=str)
def test_no_tokens_and_any_leading_dimensions(options):
    linear = layer(bias=True, **options)
    y, dx, dw = run(linear, torch.empty(2, 0, IN), torch.empty(2, 0, OUT))
    assert y.shape == (2, 0, OUT) and dx.shape == (2, 0, IN) and not dw.any()
    x, dy = activations(2, 3, 25, IN), activations(2, 3, 25, OUT)
    deep, flat = run(linear, x, dy), run(linear, x.flatten(0, 2), dy.flatten(0, 2))
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(deep, flat, strict=True))


def test_saved_in_fp8_or_in_full_gives_the_same_bits_and_the_backward_may_stay_full():
    x, dy = activations(130, IN).to(BF16), activations(130, OUT).to(BF16)
    kept, full = run(layer(dtype=BF16), x, dy), run(layer(dtype=BF16, save_activations="full"), x, dy)
    assert all(torch.equal(a, b) and a.dtype == BF16 for a, b in zip(kept, full, strict=True))
    linear = layer(dtype=BF16, save_activations="full", backward="full")
    y, dx, dw = run(linear, x, dy)
    plain = torch.nn.Linear(IN, OUT, bias=False, dtype=BF16)
    plain.weight.data = linear.weight.data
    _, plain_dx, plain_dw = run(plain, x, dy)
    assert torch.equal(y, kept[0]) and torch.equal(dx, plain_dx) and torch.equal(dw, plain_dw)


@pytest.mark.parametrize(
    "options", [{}, {"save_activations": "full"}, {"save_activations": "full", "backward": "full"}], ids=str
)
def test_either_gradient_alone(options):
    linear, x, dy = layer(**options), activations(130, IN).requires_grad_(), activations(130, OUT)
    _, dx, dw = run(linear, x.detach(), dy)
    (only_dx,) = torch.autograd.grad(linear(x), x, dy)
    (only_dw,) = torch.autograd.grad(linear(x), linear.weight, dy)
    (not_from_x,) = torch.autograd.grad(linear(x.detach()), linear.weight, dy)
    assert torch.equal(only_dx, dx) and torch.equal(only_dw, dw) and torch.equal(not_from_x, dw)


def test_a_token_is_rounded_alone():
    """Blocks of 1x128 lie within a token: its codes do not depend on the row that it is packed in, nor does its output."""
    linear, x = layer(), activations(200, IN)
    together = linear(x).detach()
    for part in (slice(0, 1), slice(3, 130)):
        alone, q = linear(x[part]).detach(), quantize_rows(x)
        assert torch.equal(quantize_rows(x[part]).values.view(torch.uint8), q.values[part].view(torch.uint8))
        assert torch.equal(quantize_rows(x[part]).scales, q.scales[part])
        magnitude = dequantize(q)[part].abs() @ dequantize(quantize_weight(linear.weight.detach())).abs().T
        assert ((alone - together[part]).abs() <= 2 * summation(IN) * magnitude).all()  # the order of the sum


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("fp8") / "model")


def directory(folder, **changes):
    """A model directory: heads of 64, keys and values of 128 features."""
    text = ["Write about something. Go on. The quick brown fox jumps over the lazy dog.\n"] * 8
    sizes = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384,
                 max_position_embeddings=256, vocab_size=400)  # fmt: skip
    scratch.write_model(folder, scratch.make_tokenizer(text, ["x"], [], 400), scratch.Shape(**sizes | changes), seed=3)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for weight in weights.values():
        if weight.dim() > 1:  # as transformers draws them (initializer_range)
            weight.normal_(std=0.02, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return HFModel(folder)


FP8_BLOCKS = Fp8Config()


def policy_of(source, config=FP8_BLOCKS, dtype=F32, **options):
    return build_policy(partial(from_config, str(source.path)), source, CPU, dtype, fp8=config, **options)


def some_rows(length=256):
    return pack(unpacked.make_groups(np.random.default_rng(0), GROUPS), length)[0]


def gradients(policy, rows, factor=1.0):
    def loss(tokens):
        values_L, _ = PolicyLoss(importance="tis")(tokens)
        return factor * values_L, {}

    policy.model.zero_grad()
    scored = alone(policy, loss).forward_backward(rows).logprobs
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in policy.model.named_parameters()}
    return grads, scored


def cosine(one, other):
    a, b = (torch.cat([grads[n].flatten() for n in one]).double() for grads in (one, other))
    return (a @ b / a.norm() / b.norm()).item()


def test_gradient_of_a_policy_loss_whatever_its_scale(source):
    rows = some_rows()
    full, _ = gradients(policy_of(source, None), rows)
    policy = policy_of(source)
    found, _ = gradients(policy, rows)
    found = {name: grad.clone() for name, grad in found.items()}
    assert cosine(full, found) > 0.99
    converted = {n for n, m in policy.model.named_modules() if isinstance(m, Fp8BlockLinear)}
    assert len(converted) == 14 and all(
        cosine({n: full[n]}, {n: found[n]}) > 0.97 for n in (f"{m}.weight" for m in converted)
    )
    # by a power of two every product and every scale is smaller by just that: a floor of amax that bites would show
    small, _ = gradients(policy, rows, 2.0**-5)
    assert all(torch.equal(small[name], 2.0**-5 * grad) for name, grad in found.items())
    # with a floor of 1e-4 (DeepGEMM's) nothing would be left of a gradient that is smaller by 1e-5
    tiny = {name: grad.clone() for name, grad in gradients(policy, rows, 1e-5)[0].items()}
    assert cosine(full, tiny) > 0.99 and cosine(found, tiny) > 0.999


def test_packed_rows_score_like_single_samples(source):
    """Apart from rounding in front of a layer, which moves a few values to the neighboring code."""
    groups = unpacked.make_groups(np.random.default_rng(0), GROUPS)
    policy, gaps = policy_of(source), []
    rows = pack(groups, 256)[0]
    _, scored = gradients(policy, rows)
    packed = unpacked.packed_logprobs_by_sample(rows, scored, groups)
    in_full = PackedPolicy(policy_of(source, None).model)
    rounding = []
    for group, sample in unpacked.trained_samples(groups):
        (row,) = pack([type(group)(group.problem, group.prompt_tokens, (sample,))], 256)[0]
        with torch.no_grad():
            alone = policy(row).logprobs_L
            rounding.append((alone - in_full(row).logprobs_L).abs())
        gaps.append((alone - packed[id(sample)]).abs())
    assert torch.cat(gaps).median() < 1e-5
    assert torch.cat(gaps).mean() < 0.01 * torch.cat(rounding).mean()


def test_checkpointing_changes_no_bit(source):
    rows = some_rows()
    plain, scored = gradients(policy_of(source), rows)
    checkpointed, again = gradients(policy_of(source, activation_checkpointing=True), rows)
    assert torch.equal(scored[0].logprobs_L, again[0].logprobs_L)
    assert plain.keys() == checkpointed.keys() and all(torch.equal(plain[n], checkpointed[n]) for n in plain)


@contextmanager
def saved_tensors():
    """{address of storage: (bytes, dtype)} of all that autograd keeps inside."""
    found = {}

    def pack_hook(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (storage.nbytes(), tensor.dtype, storage)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        yield found


def test_what_is_kept_for_the_backward(source):
    """Per token the inputs of qkv, the output projection, gate and up, down: 3 D + F numbers, each once. Attention keeps its
    output, the second of these, for itself, too."""
    tokens, numbers = 200, 3 * 256 + 384
    x, kept = torch.randn(1, tokens, 256), {}
    for name, config in {
        "fp8": Fp8Config(),
        "full": Fp8Config(save_activations="full"),
        "none": None,
    }.items():
        block = policy_of(source, config).model.layers[0]
        block.attn._attention_call = lambda q, k, v, mask, dropout_p, is_causal: F.scaled_dot_product_attention(q, k, v)
        with saved_tensors() as found:
            block(x)
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
        kept[name] = {key: value for key, value in found.items() if key not in weights}
    total = {name: sum(nbytes for nbytes, _, _ in found.values()) for name, found in kept.items()}
    in_fp8 = sum(nbytes for nbytes, dtype, _ in kept["fp8"].values() if dtype == FP8)
    padded = 256  # 200 tokens in blocks of 128
    assert in_fp8 == padded * numbers and not any(dtype == FP8 for _, dtype, _ in kept["full"].values())
    scales = padded // BLOCK * numbers * 4
    assert total["full"] - (total["fp8"] - in_fp8 - scales) == tokens * (numbers - 256) * 4  # float32 here
    assert total["none"] == total["full"]


def test_an_activation_is_quantized_once_for_the_layers_that_read_it(source, monkeypatch):
    calls, quantize = [], fp8_linear.quantize_rows_and_columns
    monkeypatch.setattr(fp8_linear, "quantize_rows_and_columns", lambda *a: (calls.append(a), quantize(*a))[1])
    policy = policy_of(source)
    scores = policy(some_rows()[0])
    assert len(calls) == 2 * 4
    scores.logprobs_L.sum().backward()
    assert len(calls) == 2 * (4 + 7)  # each layer has an output gradient of its own
    assert fp8_linear._last[2] is None, "forms outlive their activation"
    for block in policy.model.layers:
        block.compile(backend="aot_eager")
    calls.clear()
    policy(some_rows()[0]).logprobs_L.sum().backward()
    assert len(calls) == 2 * (4 + 7), "equal calls in a graph are not one"
    linear, x = layer(), activations(5, IN)
    before = linear(x)
    x.mul_(2)  # a power of two
    assert torch.equal(linear(x), 2 * before)


@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_operators_keep_what_they_promise_to_compilers(tokens):
    """Shapes, strides and dtypes of fake tensors; where inputs are not FP8, which torch cannot compare, aliases, too."""
    x, dy, w = activations(tokens, IN).to(BF16), activations(tokens, OUT).to(BF16), activations(OUT, IN)
    check = partial(library.opcheck, test_utils="test_faketensor")
    for which in ((True, True), (True, False), (False, True)):
        library.opcheck(fp8_linear._quantize, (x, False, *which), test_utils=("test_schema", "test_faketensor"))
    rows, row_scales, columns, column_scales = fp8_linear._quantize(x, False, True, True)
    check(fp8_linear._fprop, (rows, row_scales, w, BF16, False, "auto"))
    for which in ((True, True), (True, False), (False, True)):
        check(fp8_linear._backward, (dy, w, columns, column_scales, *which, False, "auto"))


def test_compiled_layers_give_the_bits_of_eager_ones(source):
    torch._dynamo.reset()
    linear, x, dy = layer(bias=True), activations(200, IN), activations(200, OUT, seed=2)
    eager = run(linear, x, dy)
    linear.compile(fullgraph=True)  # inductor: our operators stay what they are
    assert all(torch.equal(a, b) for a, b in zip(eager, run(linear, x, dy), strict=True))


def test_compiled_layers_share_their_code(tmp_path):
    torch._dynamo.reset()
    source = directory(tmp_path / "deep", num_hidden_layers=9)
    policy, rows = policy_of(source), some_rows()  # nine: dynamo compiles a piece of code eight times at most
    plain, scored = gradients(policy, rows)
    plain = {name: grad.clone() for name, grad in plain.items()}
    for block in policy.model.layers:
        # A backend that takes gradients of norms apart rounds them otherwise in the last bit; that moves a few FP8 codes by a
        # whole step, which moves more of them in the next layer: nine layers of that are the noise of FP8 itself, no bound.
        block.compile(backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled, again = gradients(policy, rows)
    assert torch.equal(scored[0].logprobs_L, again[0].logprobs_L)
    assert all(torch.equal(plain[n], compiled[n.replace("_orig_mod.", "")]) for n in plain)


# --- which layers -----------------------------------------------------------------------------------------------------


def hugging_face_linears(source):
    """What the model of transformers has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.path))
    return {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


@pytest.mark.parametrize(
    ("changes", "skip", "converted"),
    [
        ({}, (), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ({"num_key_value_heads": 1}, (), {"o_proj", "gate_proj", "up_proj", "down_proj"}),  # k and v: 64, so q stays, too
        ({"intermediate_size": 320}, (), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({}, ("up_proj", "o_proj"), {"q_proj", "k_proj", "v_proj", "down_proj"}),
        ({"model_type": "qwen3", "head_dim": 128}, (), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
    ids=["whole", "narrow keys", "narrow mlp", "asked", "qwen3"],
)  # fmt: skip
def test_trainer_and_vllm_quantize_the_same_layers(tmp_path, changes, skip, converted):
    source = directory(tmp_path / "model", **changes)
    make = from_config
    policy = build_policy(partial(make, str(source.path)), source, CPU, F32, fp8=Fp8Config(skip=skip))
    receipt = policy.fp8
    assert {layer.name: layer.shape for layer in receipt.layers} == hugging_face_linears(source)
    assert {name.rpartition(".")[2] for name in receipt.converted} == converted
    assert len(receipt.converted) == 2 * len(converted)
    stored = {
        source.to_hf(f"{n}.weight", m.weight)[0]
        for n, m in policy.model.named_modules()
        if isinstance(m, Fp8BlockLinear)
    }
    assert stored == {f"{name}.weight" for name in receipt.converted}
    assert dict(policy.model.named_parameters()).keys() == dict(make(str(source.path)).named_parameters()).keys()

    vllm_fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    asked = vllm_fp8.Fp8Config.from_config(receipt.quantization_config())
    mapping = Qwen2ForCausalLM.packed_modules_mapping
    assert sorted(mapping.values()) == sorted(map(list, fp8.FUSED))
    parts = {f"model.layers.{i}.{at}": mapping.get(at.rpartition(".")[2], [at.rpartition(".")[2]]) for i in range(2)
             for at in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")}  # fmt: skip
    for name, shards in parts.items():
        skipped = vllm_fp8.is_layer_skipped(
            name, asked.ignored_layers, mapping, match_mode=asked.ignored_layers_match_mode
        )
        assert skipped == (f"{name.rpartition('.')[0]}.{shards[0]}" not in receipt.converted), name


def test_receipt(source):
    receipt = policy_of(source).fp8
    vocabulary = source.config["vocab_size"]
    inside = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 384)
    assert receipt.share == pytest.approx(inside / (inside + 256 * vocabulary))
    assert {(gemm, shape) for gemm, shape, _ in receipt.choices} == {
        (gemm, shape)
        for gemm in ("fprop", "dgrad", "wgrad")
        for shape in ((256, 256), (128, 256), (384, 256), (256, 384))
    }
    assert all(
        c.backend == "reference" and "not scaled_mm, deep_gemm, torchao: it needs a CUDA device" in c.reason
        for _, _, c in receipt.choices
    )
    table = receipt.table()
    assert "14 of 15 linear layers" in table and "4 x k_proj" not in table and len(table.splitlines()) == 10
    assert "output head" in table
    assert "reference for fprop, dgrad, wgrad of 256x256, 128x256, 384x256, 256x384 (not scaled_mm" in table
    planned = plan(policy_of(source, None).model, source, Fp8Config(), BF16)
    assert planned.layers == receipt.layers and not planned.choices


# --- the sampler's bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_sampler_gets_the_bytes_that_the_forward_used(source, monkeypatch, power_of_two):
    """In bfloat16 FSDP2 hands out rounded copies of float32 masters."""
    policy = policy_of(source, Fp8Config(power_of_two=power_of_two), BF16)
    with torch.no_grad():
        for param in policy.trainable():  # masters that bfloat16 does not hold
            param.mul_(1 + 2**-10 / 3)
    used = []

    def spy(weight, *options):
        assert weight.dtype == BF16
        used.append(quantize_weight(weight, *options))
        return used[-1]

    monkeypatch.setattr(fp8_linear, "quantize_weight", spy)
    gradients(policy, some_rows())
    order = ["q", "k", "v", "o", "gate", "up", "down"]
    names = [f"model.layers.{i}.{'self_attn' if n in 'qkvo' else 'mlp'}.{n}_proj" for i in range(2) for n in order]
    assert len(used) == 2 * len(names)  # DGrad again, from the last layer to the first
    sent = dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, BF16), policy.fp8, F32))
    calls = Counter((q.scales.numpy().tobytes(), q.values.view(torch.uint8).numpy().tobytes()) for q in used)
    assert len(calls) == len(names) and set(calls.values()) == {2}
    for name, q in zip(names, used, strict=False):
        assert torch.equal(sent[f"{name}.weight"].view(torch.uint8), q.values.view(torch.uint8)), name
        assert torch.equal(sent[f"{name}.weight_scale_inv"], q.scales) and q.scales.dtype == F32
    plain = dict(named_hf_tensors(policy.model, source, BF16))
    scales = {f"{name}.weight_scale_inv" for name in names}
    assert sent.keys() == plain.keys() | scales
    for name in plain.keys() - {f"{name}.weight" for name in names}:
        assert sent[name].dtype == F32 and torch.equal(sent[name], plain[name].float())


def test_weights_of_another_dtype_or_too_few_are_refused(source):
    policy = policy_of(source)
    with pytest.raises(ValueError, match="comes as torch.bfloat16, the forward quantizes torch.float32"):
        dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, BF16), policy.fp8, BF16))
    some = ((n, t) for n, t in named_hf_tensors(policy.model, source, F32) if "layers.1" not in n)
    with pytest.raises(ValueError, match="7 layers in FP8 were not among the tensors"):
        dict(fp8_hf_tensors(some, policy.fp8, BF16))


def llama(folder, head_dim, heads=4, kv_heads=2):
    width = 384 if head_dim == 96 else heads * head_dim
    folder.mkdir()
    shape = {"model_type": "llama", "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "head_dim": head_dim, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 32}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(0)
    model = llama3_1(32, 1, heads, kv_heads, width, 64, intermediate_dim=128)
    return model, HFModel(folder)


def test_llamas_order_of_rows_is_harmless_inside_a_tile(tmp_path):
    """Hugging Face has the rows of a head in another order. Heads of 64: a tile holds two whole heads, so rounding and
    reordering commute. Heads of 96 lie across tiles: they do not, and q, k, v stay out."""
    model, names = llama(tmp_path / "whole", 64)
    receipt = convert(model, names, Fp8Config(), F32, CPU)
    assert {"q_proj", "k_proj"} <= {name.rpartition(".")[2] for name in receipt.converted}
    sent = dict(fp8_hf_tensors(named_hf_tensors(model, names, F32), receipt, F32))
    for part in ("q_proj", "k_proj"):
        used = quantize_weight(model.get_parameter(f"layers.0.attn.{part}.weight").detach())
        at = f"model.layers.0.self_attn.{part}.weight"
        _, reordered = names.to_hf(f"layers.0.attn.{part}.weight", used.values.float())
        assert not torch.equal(reordered, used.values.float())
        assert torch.equal(sent[at].float(), reordered) and torch.equal(sent[f"{at}_scale_inv"], used.scales)

    model, names = llama(tmp_path / "across", 96, kv_heads=4)
    weight = model.layers[0].attn.q_proj.weight.detach()
    weight *= torch.linspace(1, 4, 384)[:, None]  # rows that differ in size
    first, then = quantize_weight(weight), quantize_weight(names.to_hf("layers.0.attn.q_proj.weight", weight)[1])
    assert not torch.equal(names.to_hf("layers.0.attn.q_proj.weight", dequantize(first))[1], dequantize(then))
    receipt = convert(model, names, Fp8Config(), F32, CPU)
    assert {name.rpartition(".")[2] for name in receipt.converted} == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in receipt.layers}
    assert "across tiles of 128" in reasons["q_proj"] and "fuses it with q_proj" in reasons["v_proj"]


# --- adapters, other scalings, bad input -------------------------------------------------------------------------------


def test_adapters_over_a_base_in_fp8(source):
    asked = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4}
    make = partial(from_config, str(source.path), **asked)
    policy, rows = build_policy(make, source, CPU, F32, fp8=Fp8Config()), some_rows()
    plain = policy_of(source)
    assert policy.fp8.converted == plain.fp8.converted
    assert {gemm for gemm, _, _ in policy.fp8.choices} == {"fprop", "dgrad"}
    with torch.no_grad():
        before = plain(rows[0]).logprobs_L
        assert torch.equal(policy(rows[0]).logprobs_L, before)  # B is zero
        for name in sorted(lora.adapter_names(policy.model)):
            policy.model.get_parameter(name).add_(0.05 * torch.randn(policy.model.get_parameter(name).shape))
        with lora.AdapterOff(policy.model).swapped_in():
            assert torch.equal(policy(rows[0]).logprobs_L, before)
    with saved_tensors() as found:
        scores = policy(rows[0])
    assert not any(dtype == FP8 for _, dtype, _ in found.values())  # no WGrad below an adapter
    scores.logprobs_L.sum().backward()
    exact = build_policy(make, source, CPU, F32)
    exact.model.load_state_dict(policy.model.state_dict())
    exact(rows[0]).logprobs_L.sum().backward()
    one, other = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (exact.model, policy.model))
    assert one.keys() == lora.adapter_names(policy.model) and cosine(one, other) > 0.99
    base = dict(fp8_hf_tensors(lora.base_hf_tensors(policy.model, source, F32), policy.fp8, BF16))
    full = dict(fp8_hf_tensors(named_hf_tensors(plain.model, source, F32), plain.fp8, BF16))
    assert base.keys() == full.keys() and all(torch.equal(base[n].float(), full[n].float()) for n in full)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "DoRA: no sampler"), ({"quantize_base": True}, "its weight is NF4")],
    ids=str,
)
def test_adapters_that_keep_their_layers_out(source, options, reason):
    make = partial(from_config, str(source.path), lora_attn_modules=["q_proj"], lora_rank=4, **options)
    receipt = build_policy(make, source, CPU, F32, fp8=Fp8Config()).fp8
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in receipt.layers}
    assert reason in reasons["q_proj"] and "fuses it with q_proj" in reasons["k_proj"] == reasons["v_proj"]
    assert {name.rpartition(".")[2] for name in receipt.converted} == {"o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_scalings_of_torchao(source, scaling):
    rows = some_rows()
    full, _ = gradients(policy_of(source, None), rows)
    policy = policy_of(source, Fp8Config(scaling=scaling))
    found, _ = gradients(policy, rows)
    assert found.keys() == full.keys() and 0.95 < cosine(full, found) < 0.99999
    assert len([m for m in policy.model.modules() if type(m).__name__ == "Float8Linear"]) == 14
    with pytest.raises(ValueError, match=f"precision.scaling={scaling}: no sampler computes like it"):
        policy.fp8.quantization_config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cublas"}, "precision.backend='cublas' is unknown: choose one of auto, scaled_mm"),
        ({"scaling": "mx"}, "precision.scaling='mx' is unknown"),
        ({"backward": "full"}, "set precision.save_activations=full"),
        ({"skip": "o_proj"}, r"must be a list of names: \[o_proj\]"),
        (
            {"skip": ("w1",)},
            "precision.skip names 'w1', which no layer is; give a kind, down_proj, .* like 'model.layers.0.self_attn.q_proj'",
        ),
        ({"skip": ("down_prj",)}, "precision.skip names 'down_prj', which no layer is; did you mean 'down_proj'?"),
        ({"skip": ("model.layers.7.mlp.up_proj",)}, "did you mean 'model.layers.1.mlp.up_proj'?"),
        (
            {"backend": "scaled_mm"},
            "precision.backend=scaled_mm cannot run fprop of model.layers.0.self_attn.q_proj: it needs a CUDA device",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(source, options, message):
    with pytest.raises(ValueError, match=message):
        policy_of(source, Fp8Config(**options))


def test_a_model_without_a_layer_that_fits_is_refused(tmp_path):
    source = directory(tmp_path / "narrow", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(
        ValueError, match=r"2 x q_proj .*no whole tiles(.|\n)*no layer of model_dir=.* can compute in FP8"
    ):
        policy_of(source)


def test_a_quantized_checkpoint_is_refused(tmp_path, source):
    policy = policy_of(source)
    folder = tmp_path / "quantized"
    folder.mkdir()
    weights = dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, F32), policy.fp8, BF16))
    save_file(weights, folder / "model.safetensors")
    assert load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].dtype == FP8
    for quantization in (policy.fp8.quantization_config(), None):
        (folder / "config.json").write_text(json.dumps(source.config | {"quantization_config": quantization}))
        for config in (Fp8Config(), None):
            with pytest.raises(ValueError, match="take the model in bfloat16"):
                policy_of(HFModel(folder), config)


def test_what_vllm_reads_is_what_was_meant(source):
    """weight * weight_scale_inv, tile by tile, is the weight to within half a step of E4M3."""
    policy = policy_of(source)
    sent = dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, F32), policy.fp8, BF16))
    model = from_config(str(source.path))
    load_weights(model, source)
    for name, weight in named_hf_tensors(model, source, F32):
        if f"{name}_scale_inv" in sent:
            scales = sent[f"{name}_scale_inv"]
            meant = sent[name].float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            q = Fp8Blocks(sent[name], scales, TILES, tuple(weight.shape))
            assert ((meant.double() - weight.double()).abs() <= quantization_error(weight, q)).all()

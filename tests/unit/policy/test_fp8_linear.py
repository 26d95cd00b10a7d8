"""An FP8 linear layer equals dequantized operands in float64; its operators satisfy torch's checks."""

from functools import partial

import pytest
import torch
from torch import library

from helpers.fp8_models import BF16, IN, OUT, activations, make_layer, run
from torchtune_ext.kernels.fp8_quantize import (
    dequantize,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)
from torchtune_ext.policy.fp8 import linear as fp8_linear


def summation(terms):
    """Error bound of a float32 sum of products of two dequantized factors, relative to the magnitudes."""
    n = (terms + 3) * 2**-24
    return n / (1 - n)


@pytest.mark.parametrize("options", [{}, {"save_activations": "full"}], ids=str)
@pytest.mark.parametrize("tokens", [1, 127, 129, 200])
def test_fp8_linear_equals_dequantized_forward_and_gradients(tokens, options):
    linear, x, dy = make_layer(bias=True, **options), activations(tokens, IN), 1e-6 * activations(tokens, OUT, seed=2)
    y, dx, dw = (t.double() for t in run(linear, x, dy))
    exact = partial(dequantize, dtype=torch.float64)
    w = exact(quantize_weight(linear.weight.detach()))
    x_rows, x_columns = exact(quantize_rows(x)), exact(quantize_columns(x))
    dy_rows, dy_columns = exact(quantize_rows(dy)), exact(quantize_columns(dy))
    product = x_rows @ w.T
    bound = summation(IN) * (x_rows.abs() @ w.abs().T) + 2**-23 * (product.abs() + linear.bias.double().abs())
    assert ((y - product - linear.bias.double()).abs() <= bound).all()
    assert ((dx - dy_rows @ w).abs() <= summation(OUT) * (dy_rows.abs() @ w.abs())).all()
    assert ((dw - dy_columns.T @ x_columns).abs() <= summation(tokens) * (dy_columns.abs().T @ x_columns.abs())).all()
    assert (linear.bias.grad - dy.sum(0)).abs().max() <= tokens * 2**-23 * dy.abs().sum(0).max()


@pytest.mark.parametrize("options", [{}, {"save_activations": "full"}], ids=str)
def test_fp8_linear_partial_output_tiles_equal_zero_padding(options):
    out = OUT - 56
    whole, ragged = make_layer(**options), make_layer(**options)
    with torch.no_grad():
        whole.weight[out:] = 0
        ragged.weight = torch.nn.Parameter(whole.weight[:out].clone())
    x, dy = activations(130, IN), activations(130, out, seed=2)
    y, dx, dw = run(ragged, x, dy)
    whole_y, whole_dx, whole_dw = run(whole, x, torch.nn.functional.pad(dy, (0, 56)))
    assert torch.equal(y, whole_y[:, :out]) and torch.equal(dx, whole_dx) and torch.equal(dw, whole_dw[:out])
    assert torch.equal(torch.autograd.grad(ragged(x), ragged.weight, dy)[0], dw)


@pytest.mark.parametrize("options", [{}, {"save_activations": "full"}], ids=str)
def test_no_tokens_and_any_leading_dimensions(options):
    linear = make_layer(bias=True, **options)
    y, dx, dw = run(linear, torch.empty(2, 0, IN), torch.empty(2, 0, OUT))
    assert y.shape == (2, 0, OUT) and dx.shape == (2, 0, IN) and not dw.any()
    x, dy = activations(2, 3, 25, IN), activations(2, 3, 25, OUT)
    deep, flat = run(linear, x, dy), run(linear, x.flatten(0, 2), dy.flatten(0, 2))
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(deep, flat, strict=True))


def test_fp8_linear_full_saving_and_backward_keep_bits():
    x, dy = activations(130, IN).to(BF16), activations(130, OUT).to(BF16)
    kept, full = run(make_layer(dtype=BF16), x, dy), run(make_layer(dtype=BF16, save_activations="full"), x, dy)
    assert all(torch.equal(a, b) and a.dtype == BF16 for a, b in zip(kept, full, strict=True))
    linear = make_layer(dtype=BF16, save_activations="full", backward="full")
    y, dx, dw = run(linear, x, dy)
    plain = torch.nn.Linear(IN, OUT, bias=False, dtype=BF16)
    plain.weight.data = linear.weight.data
    _, plain_dx, plain_dw = run(plain, x, dy)
    assert torch.equal(y, kept[0]) and torch.equal(dx, plain_dx) and torch.equal(dw, plain_dw)


@pytest.mark.parametrize(
    "options", [{}, {"save_activations": "full"}, {"save_activations": "full", "backward": "full"}], ids=str
)
def test_either_gradient_alone(options):
    linear, x, dy = make_layer(**options), activations(130, IN).requires_grad_(), activations(130, OUT)
    _, dx, dw = run(linear, x.detach(), dy)
    (only_dx,) = torch.autograd.grad(linear(x), x, dy)
    (only_dw,) = torch.autograd.grad(linear(x), linear.weight, dy)
    (not_from_x,) = torch.autograd.grad(linear(x.detach()), linear.weight, dy)
    assert torch.equal(only_dx, dx) and torch.equal(only_dw, dw) and torch.equal(not_from_x, dw)


def test_a_token_is_rounded_alone():
    """A 1x128 block is within one token, so codes and output of a token do not depend on its row."""
    linear, x = make_layer(), activations(200, IN)
    together = linear(x).detach()
    for part in (slice(0, 1), slice(3, 130)):
        alone, q = linear(x[part]).detach(), quantize_rows(x)
        assert torch.equal(quantize_rows(x[part]).values.view(torch.uint8), q.values[part].view(torch.uint8))
        assert torch.equal(quantize_rows(x[part]).scales, q.scales[part])
        magnitude = dequantize(q)[part].abs() @ dequantize(quantize_weight(linear.weight.detach())).abs().T
        assert ((alone - together[part]).abs() <= 2 * summation(IN) * magnitude).all()  # the order of the sum


@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_fp8_operators_pass_opcheck(tokens):
    """Shapes, strides and dtypes of fake tensors; also aliases if no input is FP8, which torch cannot compare."""
    x, dy, w = activations(tokens, IN).to(BF16), activations(tokens, OUT).to(BF16), activations(OUT, IN)
    check = partial(library.opcheck, test_utils="test_faketensor")
    for which in ((True, True), (True, False), (False, True)):
        library.opcheck(fp8_linear._quantize, (x, *which), test_utils=("test_schema", "test_faketensor"))
    rows, row_scales, columns, column_scales = fp8_linear._quantize(x, True, True)
    check(fp8_linear._fprop, (rows, row_scales, w, BF16, "auto"))
    for which in ((True, True), (True, False), (False, True)):
        check(fp8_linear._backward, (dy, w, columns, column_scales, *which, "auto"))


@pytest.mark.rest  # inductor; test_fp8_policy.py compiles the layers of a model with another backend
def test_fp8_compiled_layers_equal_eager_bits():
    torch._dynamo.reset()
    linear, x, dy = make_layer(bias=True), activations(200, IN), activations(200, OUT, seed=2)
    eager = run(linear, x, dy)
    linear.compile(fullgraph=True)  # inductor keeps our operators opaque
    assert all(torch.equal(a, b) for a, b in zip(eager, run(linear, x, dy), strict=True))

"""Tiny models with adapters, and references with the adapters merged by hand."""

import torch
from torch.func import functional_call
from torchtune.models.qwen2 import lora_qwen2
from torchtune.modules.peft import DoRALinear

from helpers import unpacked_reference
from torchtune_ext.policy import lora

CPU = torch.device("cpu")


SHAPES = [(7, [5, 1, 9, 3]), (4, [12, 11]), (1, [1, 1])]


DIMS = dict(
    vocab_size=unpacked_reference.VOCAB,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
)


# Bound on float32 log-probs of two libraries: over the 5,000 sequential additions of these models, roundings of 2^-24
# accumulate to 4e-6 (root mean square) on each side, and a relative change of all weights is ten times larger in a logit.
PEFT_BOUND = 1e-4


ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


def build_adapted_model(builder=lora_qwen2, rank=3, perturb=True, attention=ATTENTION, **options):
    """Build a model with effective adapters on every linear layer."""
    torch.manual_seed(0)
    arguments = {"lora_rank": rank, "lora_alpha": 2.0 * rank, "apply_lora_to_mlp": True, **options}
    model = builder(attention, **arguments, **DIMS)
    lora.freeze_base(model, torch.float32)
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.2)
    lora.init_adapters(model, seed=1)
    if perturb:
        with torch.no_grad():
            for name in sorted(lora.adapter_names(model)):
                model.get_parameter(name).add_(0.1 * torch.randn_like(model.get_parameter(name)))
    return model


def expected_merged_weight(stored, module):
    """Return the merged weight of adapter and base in float64, and a bound on the error of a float32 merge.

    u = 2^-24 bounds each rounding of a sum of r products, its factor and the base: (r + 2) u of the magnitudes. The norm of a
    row of n numbers adds the error of these roundings and n u / 2 of its own; the division and the product add u each.
    """
    a, b, u, scaling = module.lora_a.weight.double(), module.lora_b.weight.double(), 2.0**-24, 4.0
    want, size = stored.double() + scaling * b @ a, stored.double().abs() + scaling * b.abs() @ a.abs()
    bound = (a.shape[0] + 2) * u * size
    if isinstance(module, DoRALinear):
        factor = (module.magnitude.double() / want.norm(dim=1))[:, None]
        norm_bound = bound.norm(dim=1, keepdim=True) / want.norm(dim=1, keepdim=True) + (a.shape[1] / 2 + 2) * u
        want, bound = factor * want, factor * bound + (factor * want).abs() * norm_bound
    return want.detach(), bound.detach()


class MergedReference(torch.nn.Module):
    """Model for `unpacked_reference.reference`: the stock model, called with the merged weights, with gradients."""

    def __init__(self, model, stock):
        super().__init__()
        self.adapted, self.stock = model, stock

    def forward(self, ids):
        params = dict(self.adapted.named_parameters())
        stock_params = {name: p for name, p in params.items() if name not in lora.adapter_names(self.adapted)}
        for name in lora.adapted_modules(self.adapted):
            scaling = 2.0  # alpha / rank
            v = params[f"{name}.weight"] + scaling * params[f"{name}.lora_b.weight"] @ params[f"{name}.lora_a.weight"]
            if f"{name}.magnitude" in params:
                v = params[f"{name}.magnitude"][:, None] * v / v.pow(2).sum(1, keepdim=True).sqrt().detach()
            stock_params[f"{name}.weight"] = v
        return functional_call(self.stock, stock_params, (ids,))

    def named_parameters(self, *args, **kwargs):
        return [(n, p) for n, p in self.adapted.named_parameters() if p.requires_grad]


def perturb_adapters(model):
    torch.manual_seed(7)
    with torch.no_grad():
        for name in sorted(lora.adapter_names(model)):
            model.get_parameter(name).add_(0.1 * torch.randn_like(model.get_parameter(name)))

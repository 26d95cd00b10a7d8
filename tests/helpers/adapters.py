"""Tiny models with adapters, and the same with the adapters' weights added by hand."""

import torch
import unpacked
from torch.func import functional_call
from torchtune.models.qwen2 import lora_qwen2

from torchtune_ext.policy import lora

CPU = torch.device("cpu")


SHAPES = [(7, [5, 1, 9, 3]), (4, [12, 11]), (1, [1, 1])]


DIMS = dict(
    vocab_size=unpacked.VOCAB,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
)


ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


def adapted(builder=lora_qwen2, rank=3, moved=True, attention=ATTENTION, **options):
    """A model with adapters on every linear layer that have an effect."""
    torch.manual_seed(0)
    arguments = {"lora_rank": rank, "lora_alpha": 2.0 * rank, "apply_lora_to_mlp": True, **options}
    model = builder(attention, **arguments, **DIMS)
    lora.prepare(model, torch.float32)
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.2)
    lora.initialize(model, seed=1)
    if moved:
        with torch.no_grad():
            for name in sorted(lora.adapter_names(model)):
                model.get_parameter(name).add_(0.1 * torch.randn_like(model.get_parameter(name)))
    return model


def plain(model):
    """A function that makes the weights of the stock model out of those with adapters, with gradients."""

    def weights():
        params = dict(model.named_parameters())
        made = {name: p for name, p in params.items() if name not in lora.adapter_names(model)}
        for name in lora.adapted_modules(model):
            scaling = 2.0  # alpha / rank
            v = params[f"{name}.weight"] + scaling * params[f"{name}.lora_b.weight"] @ params[f"{name}.lora_a.weight"]
            if f"{name}.magnitude" in params:
                v = params[f"{name}.magnitude"][:, None] * v / v.pow(2).sum(1, keepdim=True).sqrt().detach()
            made[f"{name}.weight"] = v
        return made

    return weights


class Plain(torch.nn.Module):
    """What `unpacked.reference` takes for a model: the stock one, called with merged weights."""

    def __init__(self, model, stock):
        super().__init__()
        self.adapted = [model]  # not a submodule
        self.stock, self.weights = stock, plain(model)

    def forward(self, ids):
        return functional_call(self.stock, self.weights(), (ids,))

    def named_parameters(self, *args, **kwargs):
        return [(n, p) for n, p in self.adapted[0].named_parameters() if p.requires_grad]

    def zero_grad(self):
        self.adapted[0].zero_grad()


def move(model):
    torch.manual_seed(7)
    with torch.no_grad():
        for name in sorted(lora.adapter_names(model)):
            model.get_parameter(name).add_(0.1 * torch.randn_like(model.get_parameter(name)))

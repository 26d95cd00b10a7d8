"""A small model, its optimizer and its checkpoints, for the tests of checkpoints."""

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.training.checkpoints import CheckpointConfig, Checkpoints
from torchtune_ext.training.export import export_model
from torchtune_ext.training.manifest import Identity

SHAPE = ModelShape(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
              max_position_embeddings=64, vocab_size=400)  # fmt: skip
MINE = Identity("run-a", "qwen2 of 2 layers", "26 tensors, aaaa")


def make_source(folder: Path, seed: int = 1, shape: ModelShape = SHAPE) -> HFModel:
    texts = [f"- Mrs. White was in the Lounge {i}\n" for i in range(20)]
    write_model(folder, make_tokenizer(texts, ["A. Lounge"], ["Lounge"], 400), shape, seed)
    return HFModel(folder)


def make_model(source: HFModel) -> torch.nn.Module:
    return from_config(str(source.path))


def build(source: HFModel) -> torch.nn.Module:
    return build_policy(partial(make_model, source), source, torch.device("cpu"), torch.float32).model


def checkpoints_in(folder: Path, identity: Identity | None = MINE, **config) -> Checkpoints:
    return Checkpoints(folder, identity, CheckpointConfig(**config))


class TrainedModel:
    """A model with an optimizer that has state."""

    def __init__(self, source: HFModel):
        self.source, self.model = source, build(source)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, steps: int, seed: int) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            torch.manual_seed(1000 * seed + step)
            for p in self.model.parameters():
                p.grad = torch.randn_like(p)
            self.optimizer.step()

    def save(self, checkpoints: Checkpoints, step: int, eval_reward: float | None = None) -> float:
        export = partial(export_model, model=self.model, hf_model=self.source, dtype=torch.float32)
        return checkpoints.save(step, self.model, self.optimizer, export, {"cursor": 7 * step}, eval_reward)

    def load(self, checkpoints: Checkpoints, path: Path) -> dict:
        return checkpoints.load(path, self.model, self.optimizer)

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [t.detach().clone() for t in [*self.model.parameters(), *moments]]


def fork(action: Callable[[], None], errors: Path) -> int:
    """Run `action` in a forked child, which shares imports and objects, and return the child's process id.

    The child exits with status 0, or with 1 and its traceback in the file `errors`.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        action()
        status = 0
    except BaseException:
        errors.write_text(traceback.format_exc())
    finally:
        os._exit(status)

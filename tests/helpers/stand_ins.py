"""Placeholder model directories without disk usage: config.json of a public model, a small tokenizer, and sparse safetensors
files with the right header."""

import json
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from torchtune.modules import TiedLinear

from helpers.public_configs import write_config
from torchtune_ext.chat import CHATML
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.scratch import SPECIAL_TOKENS, make_tokenizer

WORDS = ["It was Mrs. White in the Lounge at 11:30 PM.\n", "What is 12 + 34? It is 46, of course.\n"] * 8


@contextmanager
def nf4_in_one_piece():
    """Quantize in one chunk: torchao's chunks of a million weights are slow for billions of weights on the meta device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchao.dtypes.nf4tensor.CHUNK_SIZE", 2**40)
        yield


@cache
def _tokenizer() -> str:
    return make_tokenizer(WORDS, ["x"], [], 400).to_str()


def write_stand_in(folder: Path, name: str) -> Path:
    """Write the placeholder of a public model into a folder of its name."""
    path = write_config(folder, name)
    (path / "tokenizer.json").write_text(_tokenizer())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[2],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(CHATML)
    model = build_on_meta(lambda: from_config(str(path)))
    stored = map(HFModel(path).to_hf, *zip(*model.named_parameters(), strict=True))
    shapes = {name: list(param.shape) for name, param in stored}
    assert ("lm_head.weight" in shapes) != isinstance(model.output, TiedLinear)
    write_hollow(path / "model.safetensors", shapes)
    return path


def write_hollow(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write a sparse bfloat16 safetensors file, whose tensors read as zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for width in shape:
            size *= width
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)

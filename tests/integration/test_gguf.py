"""A GGUF file that is written here becomes a model directory: the same weights, as far as the file has them, and tokenizer."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.cli.cli import main
from torchtune_ext.cli.gguf import convert
from torchtune_ext.policy import scratch
from torchtune_ext.policy.hf_model import HFModel

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name):
    name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder, lines = (
        tmp_path_factory.mktemp("source") / "model",
        [f"{i} times {i + 1} makes {i * (i + 1)}\n" for i in range(99)],
    )
    shape = scratch.ModelShape(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=96,
        max_position_embeddings=256, vocab_size=384,
    )  # fmt: skip
    scratch.write_model(folder, scratch.make_tokenizer(lines, ["x"], [], 384), shape, seed=3)
    return HFModel(folder)


def write(path, source, architecture="qwen2", tokenizer="gpt2"):
    """The file, and the values that are left of each weight: matrices of the layers in Q8_0, all else in float32."""
    config, left = source.config, {}
    vocabulary = json.loads((source.path / "tokenizer.json").read_text())
    special = {each["content"]: each["id"] for each in vocabulary["added_tokens"]}
    tokens = sorted(ids := vocabulary["model"]["vocab"] | special, key=ids.get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if text in special else 1 for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((source.path / "chat_template.jinja").read_text())
    for name, weight in load_file(source.path / "model.safetensors").items():
        values, kind = weight.float().numpy(), GGMLQuantizationType.F32
        if "proj.weight" in name:
            kind = GGMLQuantizationType.Q8_0
            packed = quantize(values, kind)
            values = dequantize(packed, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
        left[name] = torch.from_numpy(np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def test_gguf_file_converts_to_weights_and_tokenizer(source, tmp_path, capsys):
    left = write(tmp_path / "small.gguf", source)
    assert main(["gguf", str(tmp_path / "small.gguf"), str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "million parameters in bfloat16" in output and "Q8_0" in output and "is not restored" in output
    model = HFModel(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == left.keys()
    assert all(torch.equal(written[name], left[name].bfloat16()) for name in left)
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
        "tie_word_embeddings",
        "architectures",
    )
    assert {key: model.config[key] for key in same} == {key: source.config[key] for key in same}
    assert "quantization_config" not in model.config and (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o077
    ours, theirs = ChatTokenizer(tmp_path / "out"), ChatTokenizer(source.path)
    messages = [{"role": "user", "content": "7 times 8 makes what?"}]
    # A GGUF file has no room for our way of splitting words, so the ids may differ, and what they stand for may not.
    (mine, real) = (tokenizer.prompt_ids(messages) for tokenizer in (ours, theirs))
    assert ours.decode(mine) == theirs.decode(real) and mine[0] == real[0]
    assert ours.stop_token_ids == theirs.stop_token_ids


def test_gguf_usage_errors_are_reported(source, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "x.gguf"

    def refused(*words):
        with pytest.raises(SystemExit) as ended:
            main(["gguf", *map(str, words)])
        assert ended.value.code == 2
        assert not out.exists() and not list(tmp_path.glob("*partial*"))
        return capsys.readouterr().err

    assert "file not found" in refused(file, out)
    file.write_bytes(b"PK not a model")
    assert "not a GGUF file" in refused(file, out)
    write(tmp_path / "whole.gguf", source)
    file.write_bytes((tmp_path / "whole.gguf").read_bytes()[:2000])
    assert "truncated or damaged" in refused(file, out)
    write(tmp_path / "narrow.gguf", source, architecture="qwen3")
    assert "head_dim is 32, but transformers does not read it" in refused(tmp_path / "narrow.gguf", out)
    write(tmp_path / "other.gguf", source, architecture="gemma3")
    assert "unsupported architecture 'gemma3'; expected one of: llama, qwen2" in refused(tmp_path / "other.gguf", out)
    write(tmp_path / "words.gguf", source, tokenizer="no-such-kind")
    assert "the tokenizer cannot be read" in refused(tmp_path / "words.gguf", out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert(tmp_path / "whole.gguf", tmp_path / "full")

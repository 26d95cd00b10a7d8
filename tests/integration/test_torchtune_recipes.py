"""torchtune's own SFT recipe runs beside ours, by the same command, and writes a folder that we can train."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torchtune.models.qwen2._tokenizer import bytes_to_unicode
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchtune_ext.policy.builder import from_config
from torchtune_ext.policy.hf_model import HFModel, load_weights

VOCABULARY = 151_936  # the special tokens of torchtune's tokenizer have fixed ids
CONFIG = """
output_dir: sft
model:
  _component_: torchtune_ext.policy.from_config
  model_dir: model
tokenizer:
  _component_: torchtune.models.qwen2.qwen2_tokenizer
  path: model/vocab.json
  merges_file: model/merges.txt
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: rows.json
  conversation_column: messages
  conversation_style: openai
  split: train
  packed: false
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: model
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
  model_type: QWEN2
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-2}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: sft/logs}
device: cpu
dtype: fp32
seed: 0
shuffle: true
batch_size: 2
epochs: 1
max_steps_per_epoch: 4
gradient_accumulation_steps: 1
resume_from_checkpoint: false
optimizer_in_bwd: false
clip_grad_norm: null
compile: false
enable_activation_checkpointing: false
enable_activation_offloading: false
log_every_n_steps: 1
log_peak_memory_stats: false
"""


@pytest.mark.rest
def test_torchtune_sft_recipe_trains_our_model(tmp_path):
    model = tmp_path / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(model)
    (model / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(sorted(bytes_to_unicode().values()))}))
    (model / "merges.txt").write_text("#version: 0.2\n")
    rows = [
        {"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(16)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "sft.yaml").write_text(CONFIG)

    command = [
        sys.executable,
        "-m",
        "torchtune._cli.tune",
        "run",
        "full_finetune_single_device",
        "--config",
        "sft.yaml",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    (log,) = (tmp_path / "sft" / "logs").iterdir()
    losses = [float(loss) for loss in re.findall(r"loss:([\d.]+)", log.read_text())]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3, losses
    folder = tmp_path / "sft" / "epoch_0"
    ours = from_config(str(folder))
    load_weights(ours, HFModel(folder))
    theirs = Qwen2ForCausalLM.from_pretrained(folder)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)

"""TRL's side of step.py: its GRPOTrainer on given samples."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from torchtune_ext.pipeline.groups import Group


def prepare(
    folder: Path, groups: list[Group], device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, int, Callable[..., None]]:
    """Build the trainer. All groups have the same prompt length and number of samples.

    Args:
        folder: folder of the model.
        dtype: float32 or float64, or bfloat16 as in TRL: autocast over float32 weights.

    Returns:
        The model, its tokens per step, and the step, which accumulates the gradient of the loss in the model.
        `step(labels_only=True)` computes log-probs of labels only, also on a CPU.
    """
    # TRL would import the installed vLLM, whose version it may not support. vLLM is not used here.
    with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
        from trl import GRPOConfig, GRPOTrainer
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    class Trainer(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            """Return the batch unchanged, where TRL would sample one."""
            return inputs

    disable_progress_bar()
    num_samples = len(groups[0].samples)
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=num_samples,
        num_generations=num_samples,
        gradient_accumulation_steps=len(groups),
        gradient_checkpointing=False,
        bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu",
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # The trainer requires rewards and problems, but uses neither.
    trainer = Trainer(model, lambda **_: [], config, Dataset.from_dict({"prompt": [""]}))
    trainer.current_gradient_accumulation_steps = len(groups)
    if dtype == torch.float64:
        model.double()
    batches = padded(groups, device)

    def step(labels_only: bool = False) -> None:
        # TRL uses this function to detect a GPU, where it skips tokens that are not labels.
        as_on_gpu = mock.patch("trl.trainer.utils._use_triton", return_value=True) if labels_only else nullcontext()
        with as_on_gpu:
            for batch in batches:
                trainer.training_step(model, batch, None)

    tokens = sum(batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in batches)
    return model, tokens, step


def padded(groups: list[Group], device: torch.device) -> list[dict[str, Tensor]]:
    """Return the trainer's batches: one per group, all padded to the longest completion."""
    num_samples = len(groups[0].samples)
    completions = [torch.from_numpy(s.completion.tokens).long() for group in groups for s in group.samples]
    completion_ids = nn.utils.rnn.pad_sequence(completions, batch_first=True)
    lengths = torch.tensor([len(completion) for completion in completions])
    prompt_ids = torch.stack([torch.from_numpy(group.prompt_tokens).long() for group in groups])
    prompt_ids = prompt_ids.repeat_interleave(num_samples, dim=0)
    whole = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": (torch.arange(completion_ids.shape[1]) < lengths[:, None]).long(),
        "advantages": torch.tensor([s.advantage for group in groups for s in group.samples]),
    }
    parts = {name: tensor.to(device).split(num_samples) for name, tensor in whole.items()}
    labels = {"num_items_in_batch": lengths.sum().to(device)}
    return [{name: part[i] for name, part in parts.items()} | labels for i in range(len(groups))]

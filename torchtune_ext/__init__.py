"""GRPO for torchtune: packed shared prompts, vLLM sampling, verifiable rewards."""

__version__ = "0.1.0"

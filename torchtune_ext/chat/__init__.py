"""Converts between messages, text and token ids, and tells which tokens the model writes itself."""

from torchtune_ext.chat.templates import CHATML
from torchtune_ext.chat.tokenizer import ChatTokenizer

__all__ = ["CHATML", "ChatTokenizer"]

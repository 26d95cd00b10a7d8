"""Converts between messages, text and token ids, and marks the tokens that the model writes itself."""

from torchtune_ext.chat.templates import CHATML
from torchtune_ext.chat.tokenizer import ChatTokenizer

__all__ = ["CHATML", "ChatTokenizer"]

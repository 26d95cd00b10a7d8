"""Converts between messages, text and token ids, and masks the tokens that the policy generates."""

from torchtune_ext.chat.templates import CHATML
from torchtune_ext.chat.tokenizer import ChatTokenizer

__all__ = ["CHATML", "ChatTokenizer"]

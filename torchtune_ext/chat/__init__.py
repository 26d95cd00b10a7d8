"""Text and token ids: what the model reads, and which tokens it writes itself."""

from torchtune_ext.chat.templates import CHATML
from torchtune_ext.chat.tokenizer import ChatTokenizer

__all__ = ["CHATML", "ChatTokenizer"]

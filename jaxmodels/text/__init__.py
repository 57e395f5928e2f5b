"""Text instructions: tokenizers on the host, text encoders on the device.

`small` is trained with its policy and needs no file; `clip` is CLIP's text tower (https://arxiv.org/abs/2103.00020),
whose weights come from elsewhere and stay as they are.
"""

from jaxmodels.text.encoder import TextConfig, TextEncoder
from jaxmodels.text.tokenizers import PromptTokenizer, Tokenizer, tokenizer

__all__ = ["PromptTokenizer", "TextConfig", "TextEncoder", "Tokenizer", "tokenizer"]

"""Texts to tokens by the vocabulary of a ``tokenizer.json``, through the `tokenizers` package (extra ``language``)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.text.config import TextConfig

FILE = "tokenizer.json"


class VocabularyTokenizer:
    """What the file says; longer texts lose their end, as with CLIP, and keep the tokens that begin and end a text.

    Shorter ones are filled up with their last token. Nobody looks there: CLIP's own models were trained like that.
    """

    def __init__(self, config: TextConfig, file: bytes | None):
        """
        Raises:
            CheckpointError: the file is missing, malformed, or has more tokens than the encoder knows.
            ConfigError: the package that reads it is not installed.
        """
        if file is None:
            raise CheckpointError(
                f"{FILE}: missing; a text encoder of kind {config.kind!r} needs it. Copy it from the model that the "
                "encoder's weights are from"
            )
        self.length = config.length
        self._read = _reader(file, config)

    def __call__(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
        ids = np.zeros((len(texts), self.length), np.int32)
        mask = np.zeros((len(texts), self.length), bool)
        for row, text in enumerate(texts):
            # A lone surrogate is no text for the package, which is written in Rust.
            found = self._read.encode(text.encode("utf-8", "replace").decode()).ids
            ids[row] = [*found, *found[-1:] * (self.length - len(found))]
            mask[row, : len(found)] = True
        return ids, mask


def _reader(file: bytes, config: TextConfig) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"a text encoder of kind {config.kind!r} reads {FILE} with the package tokenizers, which is not "
            "installed; pip install 'robojax[language]'"
        ) from error
    try:
        found = Tokenizer.from_str(file.decode())
    except Exception as error:  # the package raises no class of its own
        raise CheckpointError(
            f"{FILE}: cannot be read ({error}); wanted what transformers' save_pretrained wrote"
        ) from (error)
    largest = max(found.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= config.vocabulary:
        raise CheckpointError(
            f"{FILE}: has a token {largest}, and the text encoder a vocabulary of {config.vocabulary}; they are not of "
            "one model"
        )
    found.enable_truncation(config.length)
    found.no_padding()
    if not found.encode("").ids:
        raise CheckpointError(f"{FILE}: begins and ends no text with a token of its own; wanted CLIP's")
    return found

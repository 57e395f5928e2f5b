"""Texts to tokens, on the host."""

import unicodedata
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from jaxmodels.errors import ObservationError
from jaxmodels.text.config import BYTES, CLIP, TextConfig
from jaxmodels.text.vocabulary import VocabularyTokenizer

START = BYTES - 1


@runtime_checkable
class Tokenizer(Protocol):
    """Reads texts into tokens of a fixed number."""

    def __call__(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
        """Tokens, int32, and which of them are part of the text. The first always is.

        Raises:
            ObservationError: a text cannot be read.
        """
        ...


def tokenizer(config: TextConfig, file: bytes | None = None) -> Tokenizer:
    """The tokenizer of a text encoder.

    Args:
        file: the content of its ``tokenizer.json``; ``small`` needs none.

    Raises:
        CheckpointError: the file is missing or cannot be read.
        ConfigError: the package that reads it is not installed.
    """
    if config.kind == CLIP:
        return VocabularyTokenizer(config, file)
    return ByteTokenizer(config.length)


class ByteTokenizer:
    """One token starts the text, then every byte of it is one: small letters, no blanks around it, NFKC, UTF-8."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
        ids = np.zeros((len(texts), self.length), np.int32)
        mask = np.zeros((len(texts), self.length), bool)
        for row, text in enumerate(texts):
            said = unicodedata.normalize("NFKC", text).lower().strip().encode("utf-8", "surrogatepass")
            if len(said) >= self.length:
                raise ObservationError(
                    f"the instruction {text[:40]!r}... has {len(said)} bytes; this policy reads {self.length - 1}. "
                    "Say it in fewer words"
                )
            ids[row, : len(said) + 1] = [START, *said]
            mask[row, : len(said) + 1] = True
        return ids, mask

"""Tokenizers of bytes and of vocabularies."""

import unicodedata
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int

from jaxmodels.checkpoints.tokenizer_files import TOKENIZER
from jaxmodels.checkpoints.tokenizer_process import open_tokenizer
from jaxmodels.errors import CheckpointError, ObservationError
from jaxmodels.text.encoder import BYTES, CLIP, TextConfig


class VocabularyTokenizer:
    """Tokenizer of a ``tokenizer.json`` for CLIP: texts are cut at the end or padded with their last token."""

    def __init__(self, config: TextConfig, file: bytes | None):
        """Read the file; raises CheckpointError if it does not fit, ConfigError if its package is not installed."""
        if file is None:
            raise CheckpointError(
                f"{TOKENIZER}: missing; a text encoder of kind {config.kind!r} needs it. Copy it from the model "
                "that the encoder's weights are from"
            )
        self.length = config.length
        self._read = open_tokenizer(file, f"a text encoder of kind {config.kind!r}", config.vocabulary)
        if not self._read.encode(""):
            raise CheckpointError(f"{TOKENIZER}: adds no token at the start or end of a text; CLIP's does")

    def __call__(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
        ids = np.zeros((len(texts), self.length), np.int32)
        mask = np.zeros((len(texts), self.length), bool)
        for row, text in enumerate(texts):
            tokens = self._read.encode(text, self.length)
            ids[row] = [*tokens, *tokens[-1:] * (self.length - len(tokens))]
            mask[row, : len(tokens)] = True
        return ids, mask


class PromptTokenizer:
    """Tokenizer of a language model's ``tokenizer.json``; shorter prompts are filled up on the right, longer ones cut.

    Args:
        length: tokens that the policy reads.
        vocabulary: tokens that it knows.

    Raises:
        CheckpointError: the file is malformed, or has more tokens than the policy knows.
        ConfigError: the package that reads it is not installed.
    """

    def __init__(self, file: bytes, length: int, vocabulary: int):
        self.length = length
        self._read = open_tokenizer(file, "this policy", vocabulary)

    def __call__(self, text: str) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], int]:
        """Return tokens of a prompt, their mask, and the number of tokens before the cut."""
        tokens = self._read.encode(text)
        # LeRobot cuts the same way: tokens that begin or end every text stay.
        used = self._read.encode(text, self.length) if len(tokens) > self.length else tokens
        ids, mask = np.zeros(self.length, np.int32), np.zeros(self.length, bool)
        ids[: len(used)], mask[: len(used)] = used, True
        return ids, mask, len(tokens)


START = BYTES - 1


# Texts to a fixed number of tokens, int32, and their mask, whose first token is always valid; raises ObservationError.
Tokenizer: TypeAlias = Callable[[Sequence[str]], tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]]


def tokenizer(config: TextConfig, file: bytes | None = None) -> Tokenizer:
    """Return the tokenizer of a text encoder.

    Args:
        file: content of its ``tokenizer.json``; ``small`` needs no file.

    Raises:
        CheckpointError: the file is missing or cannot be read.
        ConfigError: the package that reads it is not installed.
    """
    if config.kind == CLIP:
        return VocabularyTokenizer(config, file)
    return ByteTokenizer(config.length)


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes after a start token; texts are lower-cased, stripped and NFKC-normalised."""

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
                    "Use fewer words"
                )
            ids[row, : len(said) + 1] = [START, *said]
            mask[row, : len(said) + 1] = True
        return ids, mask

"""Tokenizers of bytes and of vocabularies."""

import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from jaxmodels.checkpoints.folder import TOKENIZER_BYTES as LIMIT
from jaxmodels.checkpoints.folder import Folder, open_source
from jaxmodels.errors import CheckpointError, ConfigError, ObservationError
from jaxmodels.text.encoder import BYTES, CLIP, TextConfig

FILE = "tokenizer.json"


class VocabularyTokenizer:
    """Tokenizer of a ``tokenizer.json``; longer texts are cut at the end, as with CLIP, and keep their outer tokens.

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
            tokens = self._read.encode(text.encode("utf-8", "replace").decode()).ids
            ids[row] = [*tokens, *tokens[-1:] * (self.length - len(tokens))]
            mask[row, : len(tokens)] = True
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
        reader = Tokenizer.from_str(file.decode())
    except Exception as error:  # the package raises no class of its own
        raise CheckpointError(
            f"{FILE}: cannot be read ({error}); wanted what transformers' save_pretrained wrote"
        ) from (error)
    largest = max(reader.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= config.vocabulary:
        raise CheckpointError(
            f"{FILE}: has a token {largest}, and the text encoder a vocabulary of {config.vocabulary}; they are not of "
            "one model"
        )
    reader.enable_truncation(config.length)
    reader.no_padding()
    if not reader.encode("").ids:
        raise CheckpointError(f"{FILE}: begins and ends no text with a token of its own; wanted CLIP's")
    return reader


START = BYTES - 1


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of tokenizers: texts to tokens of a fixed number."""

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
                    "Say it in fewer words"
                )
            ids[row, : len(said) + 1] = [START, *said]
            mask[row, : len(said) + 1] = True
        return ids, mask


TOKENIZER = "tokenizer.json"


def read_tokenizer(folder: Folder) -> bytes | None:
    """Contents of a folder's ``tokenizer.json``; None without one.

    Raises:
        CheckpointError: it cannot be read, or is longer than any tokenizer.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return None
    try:
        with open_source(path) as file:
            raw = file.read(0, LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{TOKENIZER}: cannot be read ({error.strerror})") from error
    if len(raw) > LIMIT:
        raise CheckpointError(f"{TOKENIZER}: longer than {LIMIT} bytes; wanted a tokenizer's description")
    return raw

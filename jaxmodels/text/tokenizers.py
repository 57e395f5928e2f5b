"""Tokenizers of bytes and of vocabularies."""

import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from jaxmodels.checkpoints.files import check_lfs_pointer
from jaxmodels.checkpoints.folder import TOKENIZER_BYTES as LIMIT
from jaxmodels.checkpoints.folder import Folder, open_source
from jaxmodels.errors import CheckpointError, ConfigError, ObservationError
from jaxmodels.hub import find_in_cache
from jaxmodels.text.encoder import BYTES, CLIP, TextConfig

TOKENIZER = "tokenizer.json"


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
        self._read = _reader(file, config.vocabulary, f"a text encoder of kind {config.kind!r}")
        self._read.enable_truncation(config.length)
        if not self._read.encode("").ids:
            raise CheckpointError(f"{TOKENIZER}: begins and ends no text with a token of its own; wanted CLIP's")

    def __call__(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
        ids = np.zeros((len(texts), self.length), np.int32)
        mask = np.zeros((len(texts), self.length), bool)
        for row, text in enumerate(texts):
            # A lone surrogate is no text for the package, which is written in Rust.
            tokens = self._read.encode(text.encode("utf-8", "replace").decode()).ids
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
        self._read = _reader(file, vocabulary, "this policy")
        self._read.no_truncation()

    def __call__(self, text: str) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], int]:
        """Tokens of a prompt, which of them are part of it, and how many it has with those that were cut."""
        tokens = self._encode(text)
        used = self._cut(text) if len(tokens) > self.length else tokens
        ids, mask = np.zeros(self.length, np.int32), np.zeros(self.length, bool)
        ids[: len(used)], mask[: len(used)] = used, True
        return ids, mask, len(tokens)

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate is no text for the package, which is written in Rust.
        return list(self._read.encode(text.encode("utf-8", "replace").decode()).ids)

    def _cut(self, text: str) -> list[int]:
        """As LeRobot cuts: tokens that begin or end every text stay."""
        self._read.enable_truncation(self.length)
        try:
            return self._encode(text)
        finally:
            self._read.no_truncation()


def _reader(file: bytes, vocabulary: int, what: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"{what} reads {TOKENIZER} with the package tokenizers, which is not installed; "
            "pip install -e '.[language]'"
        ) from error
    try:
        reader = Tokenizer.from_str(file.decode())
    except Exception as error:  # the package raises no class of its own
        raise CheckpointError(
            f"{TOKENIZER}: cannot be read ({error}); wanted what transformers' save_pretrained wrote"
        ) from (error)
    largest = max(reader.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocabulary:
        raise CheckpointError(
            f"{TOKENIZER}: has a token {largest}, and {what} a vocabulary of {vocabulary}; they are not of one model"
        )
    reader.no_padding()
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


def read_tokenizer(folder: Folder, name: str | None = None) -> bytes | None:
    """Contents of a folder's ``tokenizer.json``; None without one.

    Args:
        name: of the model that it is of. It is then looked for in the folder of that name within the policy's, in the
            policy's folder, and among what the Hub's cache has of that name; nothing is fetched.

    Raises:
        CheckpointError: it cannot be read, or is longer than any tokenizer; or one that is named is nowhere.
    """
    path: Any = folder / TOKENIZER
    if name is not None:
        within = folder / f"{name}/{TOKENIZER}"
        cached = find_in_cache(name, TOKENIZER)
        path = next((found for found in (within, path, cached) if found is not None and found.exists()), None)
        if path is None:
            raise CheckpointError(
                f"{folder.name}: no {TOKENIZER} of {name!r}, which instructions are read with: neither in the policy's "
                "folder nor in the Hub's cache, and nothing is fetched while a policy is loaded. Copy it to "
                f"{name}/{TOKENIZER} in the folder, or run: hf download {name} {TOKENIZER}"
            )
    if not path.exists():
        return None
    try:
        with open_source(path) as file:
            raw = file.read(0, LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{TOKENIZER}: cannot be read ({error.strerror})") from error
    check_lfs_pointer(TOKENIZER, raw)
    if len(raw) > LIMIT:
        raise CheckpointError(f"{TOKENIZER}: longer than {LIMIT} bytes; wanted a tokenizer's description")
    return raw

"""Search, verification and bounded use of ``tokenizer.json`` files with the package tokenizers.

A hostile file may multiply a text or run a slow regular expression on it. This module does not import JAX, so that a
process with little memory can verify a file before an engine opens it.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxmodels.cache_dirs import hub_cache
from jaxmodels.checkpoints.files import read_bounded
from jaxmodels.checkpoints.folder import TOKENIZER_BYTES, Folder, PolicyFolder, Source
from jaxmodels.errors import CheckpointError, ConfigError, ObservationError

TOKENIZER = "tokenizer.json"
# A prompt of 4096 tokens, the longest that a policy reads, has about 16,000 characters.
PROMPT_CHARACTERS = 1 << 15
# A text may become this many normalized characters and tokens per byte, and a number more, e.g. special tokens.
GROWTH, EXTRA = 4, 256
# CPU seconds for opening a file of the largest size, and for encoding all probes of a length (5 ms each).
OPEN_SECONDS, PROBE_SECONDS = 20.0, 3.0
PROBE_LENGTHS = (1, 64, 512, 4096)
PROBES = ("a", "E", "1", " ", ".", "\n", "pick up the red cube ", "0 255 17 ", "!?.,;:-_'\"()", "é中", "a" * 63 + "!")
# Texts that a normalizer may replace; tokenizers of language models replace one or two.
MAX_REPLACED = 64
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def find_cached_tokenizer(model: str) -> Path | None:
    """Return the ``tokenizer.json`` of a model's newest commit in the Hub's cache; None if it is not there."""
    if not _MODEL.fullmatch(model) or ".." in model:
        return None
    repo = hub_cache() / f"models--{model.replace('/', '--')}"
    with suppress(OSError, ValueError):
        commit = (repo / "refs" / "main").read_text()
        path = repo / "snapshots" / commit / TOKENIZER
        return path if re.fullmatch("[0-9a-f]{40}", commit) and path.is_file() else None
    return None


def read_tokenizer(folder: Folder, model: str | None = None) -> bytes | None:
    """Return the content of a policy's ``tokenizer.json``; None without such a file.

    Args:
        model: name of the model that the tokenizer belongs to. The file is then looked for in the folder of that name
            within the policy's folder, in the policy's folder, and in the Hub's cache. Nothing is downloaded.

    Raises:
        CheckpointError: the file cannot be read or is too long, or the file of a named model is missing.
    """
    path: Any = folder / TOKENIZER
    if model is not None:
        within = folder / f"{model}/{TOKENIZER}"
        places = (within, path, find_cached_tokenizer(model))
        path = next((found for found in places if found is not None and found.exists()), None)
        if path is None:
            raise CheckpointError(
                f"{folder.name}: no {TOKENIZER} of {model!r} for instructions, neither in the policy's folder nor in "
                "the Hub's cache, and loading a policy fetches nothing. Copy it to "
                f"{model}/{TOKENIZER} in the folder, or run: hf download {model} {TOKENIZER}"
            )
    return read_bounded(path, TOKENIZER, TOKENIZER_BYTES) if path.exists() else None


class LocalTokenizer:
    """Tokenizer of a ``tokenizer.json``, in this process.

    Attributes:
        largest: its largest token.

    Raises:
        CheckpointError: the file is malformed.
        ConfigError: the package tokenizers is not installed.
    """

    def __init__(self, file: bytes):
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError as error:
            raise ConfigError(
                f"this policy reads {TOKENIZER} with the package tokenizers, which is not installed; "
                "pip install -e '.[language]'"
            ) from error
        try:
            self._reader: Any = Reader.from_str(file.decode())
        except Exception as error:  # The package has no exception class of its own.
            raise CheckpointError(
                f"{TOKENIZER}: cannot be read ({str(error)[:400]}); wanted what transformers' save_pretrained wrote"
            ) from error
        self._reader.no_padding()
        self._lock = threading.Lock()
        self.largest = max(self._reader.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, length: int | None = None) -> list[int]:
        """Return the tokens of a text; tokens that begin or end every text stay when it is cut.

        Args:
            length: number of tokens at which the text is cut; None for no cut.

        Raises:
            ObservationError: the text is too long, or the tokenizer multiplies it or cannot encode it.
        """
        if len(text) > PROMPT_CHARACTERS:
            raise ObservationError(f"a prompt has {len(text)} characters; wanted at most {PROMPT_CHARACTERS}")
        raw = text.encode("utf-8", "replace")  # The package, which is written in Rust, takes no lone surrogates.
        text, most = raw.decode(), GROWTH * len(raw) + EXTRA
        reader = self._reader
        try:
            with self._lock:
                reader.no_truncation() if length is None else reader.enable_truncation(length)
                normal = text if reader.normalizer is None else reader.normalizer.normalize_str(text)
                tokens = reader.encode(text).ids if len(normal) <= most else []
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # The package raises Exception, and BaseException for a panic of its Rust code.
            raise ObservationError(f"the tokenizer cannot encode {text[:20]!r} ({str(error)[:200]})") from error
        for count, what in ((len(normal), "normalized characters"), (len(tokens), "tokens")):
            if count > most:
                raise ObservationError(
                    f"the tokenizer makes {count} {what} of {text[:20]!r} ({len(text)} characters); at most {most} are "
                    "accepted"
                )
        return list(tokens)

    def list_replaced(self) -> list[str]:
        """Return the texts that the normalizer replaces with others."""
        if self._reader.normalizer is None:
            return []
        found: dict[str, None] = {}

        def search(value: Any) -> None:
            if isinstance(value, dict):
                text = value.get("String")
                if isinstance(text, str) and text:
                    found[text] = None
                for inner in value.values():
                    search(inner)
            elif isinstance(value, list):
                for inner in value:
                    search(inner)

        search(json.loads(self._reader.normalizer.__getstate__()))
        return list(found)


def verify_tokenizers(
    folder: Folder, models: Mapping[str, None], begin_step: Callable[[str, float], None] = lambda what, seconds: None
) -> None:
    """Open each tokenizer that a policy may use, and encode texts of growing length with it.

    Nothing is verified if the package tokenizers is not installed, because the policy cannot use the files either.

    Args:
        models: names of models whose tokenizers are taken from the Hub's cache.
        begin_step: called before each step with a description, and with the CPU seconds that the step may take.

    Raises:
        CheckpointError: a file is malformed or multiplies its input.
    """
    files: dict[str, Source] = {}
    for model in models:
        if (path := find_cached_tokenizer(model)) is not None:
            files[f"{model}/{TOKENIZER} in the Hub's cache"] = path
    names = folder.files if isinstance(folder, PolicyFolder) else (TOKENIZER,)
    files |= {name: folder / name for name in names if name.rpartition("/")[2] == TOKENIZER}
    for name, source in files.items():
        if source.exists():
            _verify(source, name[:300], begin_step)


def _verify(source: Source, name: str, begin_step: Callable[[str, float], None]) -> None:
    begin_step(f"{name}: opening it", OPEN_SECONDS)
    try:
        tokenizer = LocalTokenizer(read_bounded(source, TOKENIZER, TOKENIZER_BYTES))
    except ConfigError:
        return
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {str(error).removeprefix(f'{TOKENIZER}: ')}") from error
    replaced = tokenizer.list_replaced()
    if len(replaced) > MAX_REPLACED:
        raise CheckpointError(f"{name}: its normalizer replaces {len(replaced)} texts; wanted at most {MAX_REPLACED}")
    for length in PROBE_LENGTHS:
        begin_step(f"{name}: encoding texts of {length} characters", PROBE_SECONDS)
        texts = [(probe * length)[:length] for probe in PROBES]
        texts += [(text * (length // len(text) + 1))[:PROMPT_CHARACTERS] for text in replaced]
        for text in texts:
            try:
                tokenizer.encode(text)
            except ObservationError as error:
                raise CheckpointError(f"{name}: {error}") from error


__all__ = [
    "TOKENIZER",
    "LocalTokenizer",
    "find_cached_tokenizer",
    "read_tokenizer",
    "verify_tokenizers",
]

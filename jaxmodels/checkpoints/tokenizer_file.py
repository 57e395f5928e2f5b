"""The file ``tokenizer.json`` beside a model's weights, as bytes: who reads a text with it, reads the file."""

from pathlib import Path

from jaxmodels.errors import CheckpointError

TOKENIZER = "tokenizer.json"
LIMIT = 32 << 20  # bytes; CLIP's has two million


def read_tokenizer(folder: Path) -> bytes | None:
    """The file's content; None when there is none.

    Raises:
        CheckpointError: it cannot be read, or is longer than any tokenizer.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{TOKENIZER}: cannot be read ({error.strerror})") from error
    if len(raw) > LIMIT:
        raise CheckpointError(f"{TOKENIZER}: longer than {LIMIT} bytes; wanted a tokenizer's description")
    return raw

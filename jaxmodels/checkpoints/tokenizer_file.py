"""The file ``tokenizer.json`` beside a model's weights, as bytes: who reads a text with it, reads the file."""

from jaxmodels.checkpoints.folder import TOKENIZER_BYTES as LIMIT
from jaxmodels.checkpoints.folder import Folder, opened
from jaxmodels.errors import CheckpointError

TOKENIZER = "tokenizer.json"


def read_tokenizer(folder: Folder) -> bytes | None:
    """The file's content; None when there is none.

    Raises:
        CheckpointError: it cannot be read, or is longer than any tokenizer.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return None
    try:
        with opened(path) as file:
            raw = file.read(0, LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{TOKENIZER}: cannot be read ({error.strerror})") from error
    if len(raw) > LIMIT:
        raise CheckpointError(f"{TOKENIZER}: longer than {LIMIT} bytes; wanted a tokenizer's description")
    return raw

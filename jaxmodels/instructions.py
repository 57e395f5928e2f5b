"""Instructions as a policy reads them: each text is encoded once, in a small program of its own, and kept."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxmodels.errors import ObservationError
from jaxmodels.placement import Placement
from jaxmodels.text import Tokenizer
from jaxmodels.types import TASK, Language

Key = TypeVar("Key")
Value = TypeVar("Value")

# Texts, and batches of them, that are kept; those that were longest unused go first. A long CLIP text is 0.2 MB.
TEXTS_KEPT = 64
BATCHES_KEPT = 32


def texts_of(observation: Mapping[str, Any], batch: int) -> tuple[str, ...]:
    """What each member of a batch is told to do.

    Raises:
        ObservationError: it is missing, says nothing, or is not one text for each member.
    """
    wanted = f"wanted {batch} text{'s' if batch > 1 else ''}, e.g. {TASK!r}: {['pick up the cube'] * min(batch, 2)}"
    if TASK not in observation:
        raise ObservationError(f"{TASK} is missing: this policy is told what to do; {wanted}")
    found = observation[TASK]
    if isinstance(found, str):
        raise ObservationError(f"{TASK} is one text without a batch axis; {wanted}")
    texts = found.tolist() if isinstance(found, np.ndarray) and found.ndim == 1 else found
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ObservationError(f"{TASK} is {type(found).__name__}{list(np.shape(found))}; {wanted}")
    if len(texts) != batch:
        raise ObservationError(f"{TASK} has {len(texts)} texts and the other features {batch} members; {wanted}")
    for member, text in enumerate(texts):
        if not text.strip():
            raise ObservationError(f"{TASK} is blank for member {member}; this policy is told what to do, in words")
    return tuple(texts)


class Instructions:
    """Texts in, what their encoder makes of them out. May be used from several threads.

    Args:
        tokenizer: of the policy's folder.
        encode: tokens (1, n) and their mask to `Language`, in a compiled program.
        place: where the policy runs.
    """

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[np.ndarray, np.ndarray], Language], place: Placement):
        self._tokenizer = tokenizer
        self._encode = encode
        self._place = place
        self._texts: OrderedDict[str, Language] = OrderedDict()
        self._batches: OrderedDict[tuple[str, ...], Language] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, texts: tuple[str, ...]) -> Language:
        """(b, n, d) where the policy runs, for one text per member.

        Raises:
            ObservationError: a text cannot be read.
        """
        found = self._kept(self._batches, texts)
        if found is not None:
            return found
        members = [self._read(text) for text in texts]
        together = Language(*(np.concatenate(parts) for parts in zip(*members, strict=True)))
        placed = self._place.put(together, self._place.whole)
        self._keep(self._batches, texts, placed, BATCHES_KEPT)
        return placed

    def _read(self, text: str) -> Language:
        found = self._kept(self._texts, text)
        if found is None:
            found = Language(*map(np.asarray, self._encode(*self._tokenizer([text]))))
            self._keep(self._texts, text, found, TEXTS_KEPT)
        return found

    def _kept(self, kept: "OrderedDict[Key, Value]", key: Key) -> Value | None:
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
            return kept.get(key)

    def _keep(self, kept: "OrderedDict[Key, Value]", key: Key, value: Value, most: int) -> None:
        with self._lock:
            kept[key] = value
            if len(kept) > most:
                kept.popitem(last=False)

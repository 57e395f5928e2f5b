"""JSON objects in which each name stands once: of two values for one name, nobody can know which was meant."""

from collections.abc import Sequence
from typing import Any


class Repeated(ValueError):
    """A name stands twice in one object."""


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for ``json.loads(..., object_pairs_hook=once)``; Python alone takes the last value.

    Raises:
        Repeated: a name stands there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Repeated("a name stands twice in one object")
    return found

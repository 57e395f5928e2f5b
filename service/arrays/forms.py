"""The forms in which arrays come and go, by content type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from service.arrays import npz, packed, text
from service.arrays.limits import ArrayLimits
from service.errors import NotAcceptable, UnknownForm

Decode = Callable[[bytes, ArrayLimits, Mapping[str, str]], dict[str, np.ndarray]]
Encode = Callable[[Mapping[str, np.ndarray], Mapping[str, float]], Sequence[bytes | memoryview]]


@dataclass(frozen=True)
class Form:
    """One of them.

    Attributes:
        content_type: what it is called.
        aliases: what others call it.
        decode: a body, its limits and the usual dtypes by name to arrays by name.
        encode: arrays and milliseconds by stage to a body in pieces.
        most_numbers: in an answer; None leaves it to the limits.
        is_small: whether bodies are held to the limit of other requests: it is slow to read, and holds up the rest.
    """

    content_type: str
    aliases: tuple[str, ...]
    decode: Decode
    encode: Encode
    most_numbers: int | None = None
    is_small: bool = False


FORMS = (
    Form("application/json", (), text.decode, text.encode, most_numbers=1 << 18, is_small=True),
    Form("application/x-npz", ("application/npz",), npz.decode, npz.encode),
    Form("application/msgpack", ("application/x-msgpack", "application/vnd.msgpack"), packed.decode, packed.encode),
)
_BY_TYPE = {kind: form for form in FORMS for kind in (form.content_type, *form.aliases)}
_KNOWN = ", ".join(form.content_type for form in FORMS)


def form_of_body(content_type: str | None) -> Form:
    """The form that a Content-Type names.

    Raises:
        UnknownForm: there is none, or another.
    """
    form = _BY_TYPE.get(_plain(content_type or ""))
    if form is None:
        raise UnknownForm(f"Content-Type should be one of {_KNOWN}")
    return form


def form_of_answer(accept: str | None, usual: Form) -> Form:
    """The form that an Accept asks for most; that of the request when it takes any.

    Raises:
        NotAcceptable: it asks for others only.
    """
    wanted = [(_quality(part), _plain(part)) for part in (accept or "*/*").split(",")]
    for quality, kind in sorted(wanted, key=lambda entry: -entry[0]):
        if quality > 0 and kind in ("*/*", "application/*", ""):
            return usual
        if quality > 0 and kind in _BY_TYPE:
            return _BY_TYPE[kind]
    raise NotAcceptable(f"Accept should allow one of {_KNOWN}")


def _plain(header: str) -> str:
    return header.partition(";")[0].strip().lower()


def _quality(part: str) -> float:
    for parameter in part.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0

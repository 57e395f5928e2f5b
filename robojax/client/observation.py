"""What a robot sees and where it is, as the doors without rooms take it."""

from collections.abc import Mapping
from typing import Any

from robojax.client.arrays import numbers, picture

Image = Any  # uint8 (h, w, 3) in RGB, or the bytes of a JPEG or PNG file


def observation(
    images: Mapping[str, Image] | None = None,
    state: Any = None,
    *,
    prompt: str | None = None,
    number: int | None = None,
    is_compressed: bool = False,
    **more: object,
) -> dict[str, object]:
    """An observation as msgpack takes it; what is None is left out.

    Args:
        images: camera name to uint8 (h, w, 3) in RGB, or to the bytes of a JPEG or PNG file.
        state: joint positions, in the order of the session's joints or by name.
        prompt: what is to be done, in words, from now on.
        is_compressed: whether arrays are sent as JPEG: a tenth of the bytes, some milliseconds at each end.

    Raises:
        Unusable: it cannot be sent; says what is wrong.
    """
    found: dict[str, object] = {}
    if images:
        found["images"] = {name: picture(name, image, is_compressed) for name, image in images.items()}
    if state is not None:
        found["state"] = numbers("state", state)
    found |= {"prompt": prompt, "number": number} | more
    return {name: value for name, value in found.items() if value is not None}

"""Encoding of arrays, pictures and observations for the wire."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

from robojax.client.errors import InvalidArgument, ProtocolError

if TYPE_CHECKING:
    import numpy as np

DTYPES = frozenset({"uint8", "int32", "int64", "float16", "float32", "float64", "bool"})
MAX_ARRAY_BYTES = 64 << 20  # largest array in a response
JPEG_QUALITY = 90
# uint8 (h, w, 3) in RGB, or the bytes of a JPEG or PNG file; for several observations (o, h, w, 3) or a list.
Image: TypeAlias = "np.ndarray | bytes | Sequence[np.ndarray | bytes]"
_Joints: TypeAlias = "np.ndarray | Sequence[SupportsFloat] | Mapping[str, SupportsFloat]"
# Joint positions in the order of the session's joints, or by name; for several observations (o, a) or a list.
State: TypeAlias = "_Joints | Sequence[_Joints]"


def pack_array(array: "np.ndarray") -> dict[str, object]:
    """Encode an array as a map for msgpack; its bytes are little endian and in C order."""
    import numpy as np

    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": little.tobytes()}


def unpack_array(packed: object) -> "np.ndarray":
    """Decode an array from a map or nested lists; raise ``ProtocolError`` for anything else."""
    import numpy as np

    if isinstance(packed, list):
        try:
            return np.asarray(packed, np.float32)
        except (ValueError, TypeError) as error:
            raise ProtocolError("the server sent lists that do not form an array") from error
    if not isinstance(packed, Mapping):
        raise ProtocolError(f"the server sent a {type(packed).__name__} instead of an array")
    dtype, shape, data = packed.get("dtype"), packed.get("shape"), packed.get("data")
    if dtype not in DTYPES or not isinstance(data, bytes) or len(data) > MAX_ARRAY_BYTES or not isinstance(shape, list):
        raise ProtocolError("the server sent a map that is not an array")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ProtocolError("the server sent an array without a valid shape")
    kind = np.dtype(dtype).newbyteorder("<")
    if math.prod(shape) * kind.itemsize != len(data):
        raise ProtocolError(f"the server sent {len(data)} bytes for an array of {shape} {dtype}")
    return np.frombuffer(data, kind).reshape(shape)


def pack_picture(name: str, image: Any, is_compressed: bool) -> object:
    """Encode a picture for msgpack.

    Args:
        image: uint8 (h, w, 3), RGB; or the bytes of a JPEG or PNG file. For several observations: (o, h, w, 3), or a
            list.
        is_compressed: whether an array is sent as JPEG.

    Raises:
        InvalidArgument: the value is not a picture.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    has_time = getattr(image, "ndim", 0) == 4
    if isinstance(image, list | tuple) or (has_time and is_compressed):
        return [pack_picture(name, one, is_compressed) for one in image]
    if getattr(image, "dtype", None) != "uint8" or getattr(image, "ndim", 0) not in (3, 4) or image.shape[-1] != 3:
        actual = f"{getattr(image, 'dtype', type(image).__name__)} {getattr(image, 'shape', '')}".rstrip()
        raise InvalidArgument(
            f"picture {name!r} is {actual}; expected uint8 (height, width, 3) in RGB, or the bytes of a JPEG"
        )
    return encode_jpeg(image) if is_compressed else pack_array(image)


def encode_jpeg(image: "np.ndarray") -> bytes:
    """Encode a picture as JPEG."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def pack_numbers(what: str, values: Any) -> object:
    """Encode a state for msgpack: an array, a map by name, or a list; for several observations a list of these.

    Raises:
        InvalidArgument: a value is not a finite number.
    """
    if isinstance(values, Mapping):
        return {str(name): _finite(f"{what} {name!r}", value) for name, value in values.items()}
    if hasattr(values, "dtype"):
        import numpy as np

        if values.dtype.name not in DTYPES or not np.isfinite(values).all():
            raise InvalidArgument(f"{what} has values that are not finite numbers; nothing was sent")
        return pack_array(values)
    return [
        pack_numbers(f"{what} {index}", value)
        if isinstance(value, Mapping | list | tuple) or getattr(value, "ndim", 0)
        else _finite(f"{what} {index}", value)
        for index, value in enumerate(values)
    ]


def _finite(what: str, value: Any) -> float:
    if isinstance(value, bool) or (not isinstance(value, int | float) and not hasattr(value, "__float__")):
        raise InvalidArgument(f"{what} is {value!r}, which is not a number; nothing was sent")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidArgument(f"{what} is {number}; nothing was sent")
    return number


def pack_observation(
    images: Mapping[str, Image] | None = None,
    state: "State | None" = None,
    *,
    is_compressed: bool = False,
    **fields: object,
) -> dict[str, object]:
    """Encode an observation for msgpack; fields that are None are omitted.

    Args:
        images: camera name to picture.
        state: joint positions.
        is_compressed: whether arrays are sent as JPEG.
        fields: other fields of the message, as in ``robojax.client.fields``.

    Raises:
        InvalidArgument: the observation cannot be sent; the text says why.
    """
    observation: dict[str, object] = {}
    if images:
        observation["images"] = {name: pack_picture(name, image, is_compressed) for name, image in images.items()}
    if state is not None:
        observation["state"] = pack_numbers("state", state)
    return observation | {name: value for name, value in fields.items() if value is not None}

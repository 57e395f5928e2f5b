"""Frames that a dataset keeps as PNG or JPEG beside its numbers."""

import io

import numpy as np
from PIL import Image

from jaxmodels.errors import DatasetError


def decode_still(data: bytes | None, size: tuple[int, int], where: str) -> np.ndarray:
    """uint8 (h, w, 3) of one.

    Raises:
        DatasetError: it is empty, no PNG or JPEG, or of another height and width.
    """
    try:
        with Image.open(io.BytesIO(data or b""), formats=("PNG", "JPEG")) as image:
            # Before anything is decoded: a few bytes can claim any size.
            if (image.height, image.width) != size:
                raise DatasetError(f"{where} is {image.height}x{image.width}; wanted {size[0]}x{size[1]}")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{where} cannot be decoded as PNG or JPEG ({type(error).__name__})") from error

"""Sinusoidal positions, as constants that the compiler may fold.

Computed in NumPy in the precision LeRobot uses, since a checkpoint holds the result of the first one.
Source: lerobot/policies/act/modeling_act.py, create_sinusoidal_pos_embedding and ACTSinusoidalPositionEmbedding2d.
"""

import numpy as np
from jaxtyping import Float

TEMPERATURE = 10000
EPSILON = 1e-6


def sinusoidal(count: int, width: int) -> Float[np.ndarray, "n d"]:
    """Positions 0..count-1 in `width` channels: sine in the even ones, cosine in the odd ones."""
    frequency = np.power(TEMPERATURE, 2 * (np.arange(width) // 2) / width)
    table = np.arange(count)[:, None] / frequency
    table[:, 0::2] = np.sin(table[:, 0::2])
    table[:, 1::2] = np.cos(table[:, 1::2])
    return table.astype(np.float32)


def sinusoidal_2d(height: int, width: int, channels: int) -> Float[np.ndarray, "h w d"]:
    """Positions of a feature map: the first half of the channels tells the row, the second the column.

    Rows and columns count from 1 and are scaled so that the last is 2 pi.
    """

    def axis(count: int) -> Float[np.ndarray, "n d2"]:
        steps = np.arange(1, count + 1, dtype=np.float32)
        angle = steps / (steps[-1] + np.float32(EPSILON)) * np.float32(2 * np.pi)
        half = channels // 2
        exponent = np.float32(2) * (np.arange(half) // 2).astype(np.float32) / np.float32(half)
        angles = angle[:, None] / np.power(np.float32(TEMPERATURE), exponent)
        return np.stack((np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])), axis=-1).reshape(count, half)

    rows = np.broadcast_to(axis(height)[:, None], (height, width, channels // 2))
    columns = np.broadcast_to(axis(width)[None], (height, width, channels // 2))
    return np.concatenate((rows, columns), axis=-1)

"""Sinusoidal embeddings of positions and timesteps, computed in NumPy in the precision of their sources."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

TEMPERATURE = 10000
EPSILON = 1e-6


def sinusoidal(count: int, width: int) -> Float[np.ndarray, "n d"]:
    """Embed positions 0 to count - 1: sine in even channels, cosine in odd ones (LeRobot's ACT)."""
    frequency = np.power(TEMPERATURE, 2 * (np.arange(width) // 2) / width)
    table = np.arange(count)[:, None] / frequency
    table[:, 0::2] = np.sin(table[:, 0::2])
    table[:, 1::2] = np.cos(table[:, 1::2])
    return table.astype(np.float32)


def sinusoidal_2d(height: int, width: int, channels: int) -> Float[np.ndarray, "h w d"]:
    """Embed the pixels of a feature map, rows first; rows and columns count from 1 and end at 2 pi.

    Source: lerobot/policies/act/modeling_act.py, ACTSinusoidalPositionEmbedding2d.
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


def time_sinusoid(time: Float[Array, "..."], width: int, shift: int) -> Float[Array, "... d"]:
    """Embeddings of diffusion timesteps: cosines in the first half of the channels, sines in the second.

    Args:
        shift: frequencies fall from 1 to ``1 / 10000`` over ``width / 2 - shift`` channels; 1 for DiT, 0 for PixArt.

    Source: diffusers/models/embeddings.py, get_timestep_embedding with flip_sin_to_cos.
    """
    frequency = time_frequencies(width, shift)
    angle = time[..., None] * frequency
    return jnp.concatenate((jnp.cos(angle), jnp.sin(angle)), axis=-1)


# Places where PyTorch's exponential rounds in the other direction: (width, shift) to place to direction.
_OTHER_WAY: Mapping[tuple[int, int], Mapping[int, float]] = {
    (256, 0): {12: np.inf, 106: np.inf},
    (256, 1): {4: -np.inf},
}


def time_frequencies(width: int, shift: int) -> Float[np.ndarray, " d2"]:
    """Return the frequencies of `time_sinusoid` as PyTorch computes them."""
    half = width // 2
    exponent = np.float32(-np.log(TEMPERATURE)) * np.arange(half, dtype=np.float32) / np.float32(half - shift)
    frequency = np.exp(exponent.astype(np.float64)).astype(np.float32)
    for index, towards in _OTHER_WAY.get((width, shift), {}).items():
        frequency[index] = np.nextafter(frequency[index], np.float32(towards))
    return frequency


def flow_time_sinusoid(
    times: Float[np.ndarray, " n"], width: int, min_period: float, max_period: float
) -> Float[np.ndarray, "n {width}"]:
    """Embed times in [0, 1] in float64: sines first, then cosines.

    Source: lerobot/policies/common/vla_utils.py, create_sinusoidal_pos_embedding; openpi's posemb_sincos.
    """
    period = min_period * (max_period / min_period) ** np.linspace(0.0, 1.0, width // 2)
    angle = times[:, None].astype(np.float64) * (1.0 / period * 2 * np.pi)
    return np.concatenate((np.sin(angle), np.cos(angle)), axis=-1).astype(np.float32)


def patch_positions(rows: int, columns: int, base: int, scale: float, width: int) -> Float[Array, "n d"]:
    """Embed a grid of patches, row by row: channels are the column's sines and cosines, then the row's.

    Args:
        base: side of the grid of the training; another grid is stretched to it, per axis.
        scale: divisor of the positions.

    Source: diffusers/models/embeddings.py, get_2d_sincos_pos_embed.
    """

    def axis(count: int) -> Float[np.ndarray, "n d2"]:
        steps = np.arange(count, dtype=np.float32) / np.float32(count / base) / np.float32(scale)
        frequency = 1.0 / TEMPERATURE ** (np.arange(width // 4, dtype=np.float64) / (width / 4))
        angle = steps[:, None].astype(np.float64) * frequency
        return np.concatenate((np.sin(angle), np.cos(angle)), axis=-1).astype(np.float32)

    # Broadcast in the program, because the table of a large image would be a large constant.
    shape = (rows, columns, width // 2)
    by_column = jnp.broadcast_to(jnp.asarray(axis(columns))[None], shape)
    by_row = jnp.broadcast_to(jnp.asarray(axis(rows))[:, None], shape)
    return jnp.concatenate((by_column, by_row), axis=-1).reshape(rows * columns, width)

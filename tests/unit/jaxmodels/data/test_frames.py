import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.data import resize_frames


@pytest.mark.parametrize("size", [(24, 24), (48, 64), (17, 90), (96, 128)])
def test_frames_are_resized_like_in_the_serving_program(size):
    frames = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), np.uint8)
    served = jax.image.resize(jnp.asarray(frames, jnp.float32), (2, *size, 3), "linear")
    found = resize_frames(frames, size)
    assert (found.shape, found.dtype) == ((2, *size, 3), np.uint8)
    # Rounding to pixels gives half a level, and float32 the last bits.
    assert np.abs(found.astype(np.float32) - np.asarray(served)).max() < 0.501


def test_frames_of_the_right_size_are_unchanged():
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), np.uint8)
    assert resize_frames(frames, (5, 7)) is frames

"""Augmentation of pictures compared with torchvision (tests/golden/image_transforms), and its random choice."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.errors import ConfigError
from jaxmodels.training import ImageTransforms, Transform, augmentation, parse_transforms
from jaxmodels.training.augmentation import augment

GOLDEN = Path(__file__).parents[3] / "golden" / "image_transforms" / "cases.npz"


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue", "sharpness"])
def test_colours_and_sharpness_change_like_in_torchvision(name: str, recorded: dict[str, np.ndarray]) -> None:
    found = jax.jit(getattr(augmentation, name))(recorded["pictures"], recorded[f"{name}.numbers"])
    np.testing.assert_allclose(found, recorded[name], atol=2e-6)


def test_pictures_rotate_and_shift_like_in_torchvision(recorded: dict[str, np.ndarray]) -> None:
    numbers = (recorded[f"affine.{name}"] for name in ("degrees", "across", "down"))
    found = jax.jit(augmentation.affine)(recorded["pictures"], *numbers)
    same = np.isclose(found, recorded["affine"], atol=1e-6).all(axis=-1).mean()
    assert same > 0.98, "only the few pixels at equal distances may differ"


def test_each_picture_gets_its_own_draw_of_the_requested_changes() -> None:
    frames = jnp.full((64, 4, 4, 3), 100, jnp.uint8)
    assert augment(frames, ImageTransforms(), jax.random.key(0)) is frames
    config = ImageTransforms(True, 1, (Transform("brightness", 1.5, 1.5), Transform("contrast", 0.0, 0.0, weight=0.0)))
    assert (np.asarray(augment(frames, config, jax.random.key(0))) == 150).all(), "a weight of 0 is never chosen"
    either = ImageTransforms(True, 1, (Transform("brightness", 1.5, 1.5), Transform("contrast", 1.0, 1.0)))
    found = np.asarray(augment(frames, either, jax.random.key(0)))[:, 0, 0, 0]
    assert 10 < (found == 150).sum() < 54, "half of the pictures should change"


def test_noise_is_added_to_each_picture() -> None:
    frames = jnp.full((8, 32, 32, 3), 128, jnp.uint8)
    found = np.asarray(augment(frames, ImageTransforms(noise=0.02), jax.random.key(0))).astype(float)
    assert found.std() == pytest.approx(0.02 * 255, rel=0.05)


def test_transforms_in_the_format_of_lerobot_are_read() -> None:
    values = {
        "brightness": {"weight": 2.0, "type": "ColorJitter", "kwargs": {"brightness": [0.8, 1.2]}},
        "soft": {"type": "SharpnessJitter", "kwargs": {"sharpness": 0.5}},
        "affine": {"type": "RandomAffine", "kwargs": {"degrees": [-5.0, 5.0], "translate": [0.05, 0.05]}},
    }
    assert parse_transforms(values) == (
        Transform("brightness", 0.8, 1.2, 2.0),
        Transform("sharpness", 0.5, 1.5),
        Transform("affine", -5.0, 5.0, translate=(0.05, 0.05)),
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"x": {"type": "RandomErasing", "kwargs": {"p": 1}}}, "RandomErasing"),
        ({"x": {"type": "ColorJitter", "kwargs": {"hue": [-0.9, 0.1]}}}, "hue: from"),
        (["hue"], "wanted an object"),
    ],
)
def test_unknown_transforms_are_refused(values: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_transforms(values)

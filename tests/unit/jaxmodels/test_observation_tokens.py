"""Observation tokens of policies on the 2D transformer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.errors import InputError
from jaxmodels.policies.diffusion2d.policy import Diffusion2dConfig
from jaxmodels.policies.transformer2d_policy import ObservationTokens
from jaxmodels.text import TextConfig
from jaxmodels.types import Feature, Language, Observation
from jaxmodels.weights import blueprint

CAMERAS = tuple(Feature(f"observation.images.{name}", "VISUAL", (3, 32, 48)) for name in ("front", "wrist"))
STATE = Feature("observation.state", "STATE", (4,))
CONFIG = Diffusion2dConfig(
    input_features=(STATE, Feature("observation.environment_state", "ENV", (2,)), *CAMERAS),
    output_features=(Feature("action", "ACTION", (3,)),),
    dim_model=16,
    n_heads=2,
    n_encoder_layers=1,
    n_layers=1,
    text_encoder=dataclasses.replace(TextConfig(), length=5, width=12, n_heads=2, n_layers=1),
)
PIXELS, LETTERS = 2 * 3, 5  # Size of a 32x48 frame's feature map, and of an instruction.


def numbers(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32))


def language(seed: int = 0) -> Language:
    """Return instructions whose last two letters are masked."""
    return Language(numbers(seed, LETTERS, 12), jnp.arange(LETTERS)[None] < jnp.full((2, 1), 3))


def seen(seed: int = 0, **others: Any) -> Observation:
    images = numbers(seed + 10, 32, 48, 3), numbers(seed + 20, 32, 48, 3)
    return Observation(images, numbers(seed + 30, 4), numbers(seed + 40, 2), None, language(seed))._replace(**others)


def looking(config: Diffusion2dConfig) -> Callable[[Observation], Any]:
    draw = np.random.default_rng(0)
    plan = blueprint(lambda rngs: ObservationTokens(config, rngs=rngs))
    weights = {name: np.float32(draw.normal(size=shape.shape) * 0.3) for name, shape in plan.shapes.items()}
    tokens = plan.assemble(jax.device_put(weights))
    return jax.jit(lambda observation: tokens(observation))


@pytest.fixture(scope="module")
def look() -> Callable[[Observation], Any]:
    return looking(CONFIG)


def test_tokens_include_all_features_and_the_instruction(look) -> None:
    tokens, mask = look(seen())
    assert tokens.shape == (2, 1 + 1 + 2 * PIXELS + LETTERS, 16)
    assert mask.tolist() == [[True] * (2 + 2 * PIXELS) + [True] * 3 + [False] * 2] * 2


def test_masked_values_do_not_change_other_tokens(look) -> None:
    observation = seen()
    words = language()
    other = words._replace(tokens=jnp.where(words.mask[..., None], words.tokens, 9.0))
    tokens, mask = look(observation)
    again, _ = look(observation._replace(language=other))
    np.testing.assert_allclose(again[mask], tokens[mask], atol=1e-5)
    assert np.abs(again - tokens).max() > 0.1


def test_tokens_without_language_and_without_encoder_layers() -> None:
    config = dataclasses.replace(CONFIG, text_encoder=None, n_encoder_layers=0)
    tokens = looking(config)
    plain, mask = tokens(seen(language=None))
    assert mask is None
    moved, _ = tokens(seen(language=None, state=jnp.ones((2, 4))))
    np.testing.assert_array_equal(moved[:, 1:], plain[:, 1:])
    assert np.abs(moved[:, 0] - plain[:, 0]).max() > 0.1


def test_observation_without_an_instruction_is_refused(look) -> None:
    with pytest.raises(InputError, match="no language"):
        look(seen(language=None))

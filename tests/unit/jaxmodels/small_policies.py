"""Small policies of each type for inference, for random batches, and for training on a toy task in seconds."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmodels.normalization import build_normalization
from jaxmodels.policies import get_policy_type, trained_types
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.diffusion2d.policy import Diffusion2dConfig
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar, model_blueprint
from jaxmodels.policies.tokens2d.policy import Tokens2dConfig
from jaxmodels.text import TextConfig
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, Feature, Observation
from jaxmodels.weights import blueprint_of
from tests.testing.models import lively_weights, random_stats, small_config

WITH_PREFIX = tuple(kind for kind in trained_types() if get_policy_type(kind).takes_prefix)
WITH_TEXT = tuple(kind for kind in trained_types() if get_policy_type(kind).read is not None)
CHUNK, ACTION = 8, 3  # Sizes of the policies for inference.
LOW, HIGH = np.array([-50, 7, 0], np.float32), np.array([50, 7, 100], np.float32)  # The second joint never moves.
CAMERA = Feature("observation.images.front", "VISUAL", (3, 32, 32))
ENVIRONMENT = Feature("observation.environment_state", "ENV", (2,))
FEATURES: dict[str, Any] = {
    "input_features": (Feature("observation.state", "STATE", (4,)),),
    "output_features": (Feature("action", "ACTION", (ACTION,)),),
    "chunk_size": CHUNK,
    "n_action_steps": 4,
}
SIZES: dict[str, Any] = {"dim_model": 16, "n_heads": 2, "n_encoder_layers": 0, "n_layers": 1}
CONFIGS: dict[str, Any] = {
    "act": small_config(**FEATURES | {"input_features": (*FEATURES["input_features"], ENVIRONMENT)}),
    "diffusion2d": Diffusion2dConfig(**FEATURES, **SIZES, num_inference_steps=5),
    "tokens2d": Tokens2dConfig(**FEATURES, **SIZES, bins=32, neighbours=2, num_inference_steps=5),
}

TOY_CHUNK, TOY_ACTION = 4, 2
TOY: dict[str, Any] = {
    "input_features": (Feature("observation.state", "STATE", (1,)),),
    "output_features": (Feature("action", "ACTION", (TOY_ACTION,)),),
    "chunk_size": TOY_CHUNK,
    "n_action_steps": 2,
    "dim_model": 32,
    "n_heads": 2,
    "n_encoder_layers": 0,
}
TOYS: dict[str, Any] = {
    "diffusion2d": Diffusion2dConfig(**TOY, n_layers=2, trained_prefix=2),
    "tokens2d": Tokens2dConfig(**TOY, n_layers=1, bins=32, neighbours=4, num_inference_steps=4),
}
_ALL_INPUTS = (*TOY["input_features"], ENVIRONMENT, CAMERA)
_TEXT = dataclasses.replace(TextConfig(), length=6, width=8, n_heads=2, n_layers=1, hidden=16)
_WHOLE: dict[str, Any] = {"input_features": _ALL_INPUTS, "n_encoder_layers": 1}
# Policies with all inputs that their type can read.
WHOLES: dict[str, Any] = {
    "act": small_config(**{**TOY, **_WHOLE, "dim_model": 16}, use_vae=True),
    "diffusion2d": dataclasses.replace(TOYS["diffusion2d"], **_WHOLE, dim_model=16, n_layers=1, text_encoder=_TEXT),
    "tokens2d": dataclasses.replace(TOYS["tokens2d"], **_WHOLE, text_encoder=_TEXT),
}
RIGHT = 0.7  # Share of the toy's demonstrations that go right.


def random_weights(config: Any, spread: float = 0.2, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights without zeros."""
    if isinstance(config, ActConfig):
        return lively_weights(config, seed)
    draw = np.random.default_rng(seed)
    shapes = model_blueprint(config).shapes
    return {name: (draw.normal(size=wanted.shape) * spread).astype(np.float32) for name, wanted in shapes.items()}


def random_model(config: Any, seed: int = 0) -> Any:
    """Return a model without zero weights."""
    weights = random_weights(config, seed=seed)
    return blueprint_of(get_policy_type(config.type).model, config).assemble(jax.device_put(dict(weights)))


def make_checkpoint(config: Any, seed: int = 0) -> Checkpoint:
    """Return a policy whose actions are spread over the range of its data."""
    numbers = random_stats((*config.input_features, *config.output_features))
    unit = {"min": -2, "max": 2, "mean": 0, "std": 1}
    numbers["observation.state"] = {name: np.full(4, value, np.float32) for name, value in unit.items()}
    numbers["action"] = {"min": LOW, "max": HIGH, "q01": LOW, "q99": HIGH}
    numbers["action"] |= {"mean": (LOW + HIGH) / 2, "std": np.full(ACTION, 50, np.float32)}
    for camera in config.cameras:
        ones = np.ones((3, 1, 1), np.float32)
        numbers[camera.name] = {"mean": ones / 2, "std": ones}
    features = config.input_features, config.output_features
    spread = 0.3 if config.type == "tokens2d" else 0.15
    return Checkpoint(
        config,
        random_weights(config, spread, seed),
        build_normalization(*features, config.normalization_mapping, numbers),
        Sidecar(rate=20.0),
    )


def observe(config: Any, batch: int = 3, seed: int = 1) -> dict[str, np.ndarray]:
    """Return a robot's observation without pictures."""
    draw = np.random.default_rng(seed)
    return {
        feature.name: draw.uniform(-2, 2, (batch, *feature.shape)).astype(np.float32)
        for feature in config.input_features
        if feature.type != "VISUAL"
    }


def plan(delay: list[int], length: list[int], seed: int = 2) -> dict[str, np.ndarray]:
    """Return a plan as sessions send it: in units of the robot, padded with zeros."""
    actions = np.random.default_rng(seed).uniform(LOW, HIGH, (len(delay), CHUNK, ACTION))
    actions[np.arange(CHUNK)[None] >= np.array(length)[:, None]] = 0
    return {
        PREFIX_ACTIONS: actions.astype(np.float32),
        PREFIX_DELAY: np.array(delay, np.int32),
        PREFIX_LENGTH: np.array(length, np.int32),
    }


def random_batch(config: Any, size: int, seed: int = 0) -> tuple[Observation, jax.Array, jax.Array]:
    """Return normalised observations, actions, and a mask of padded actions, from none to all but one."""
    draw = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jax.device_put(draw.uniform(-1.1, 1.1, (size, *shape)).astype(np.float32))

    observation = Observation(
        tuple(array(*camera.shape[1:], 3) for camera in config.cameras),
        array(1),
        array(2) if config.environment_state else None,
    )
    is_pad = np.arange(TOY_CHUNK)[None] >= TOY_CHUNK - (np.arange(size) % TOY_CHUNK)[:, None]
    return observation, array(TOY_CHUNK, TOY_ACTION), jnp.asarray(is_pad)


def _demonstrations(key: jax.Array, size: int) -> tuple[Observation, jax.Array]:
    """Return chunks that go left or right, never between; their second joint repeats the state."""
    where, way = jax.random.split(key)
    state = jax.random.uniform(where, (size, 1), minval=-1, maxval=1)
    side = jnp.where(jax.random.bernoulli(way, RIGHT, (size, 1, 1)), 0.8, -0.8)
    first = jnp.broadcast_to(side, (size, TOY_CHUNK, 1))
    return Observation(state=state), jnp.concatenate((first, jnp.broadcast_to(state[:, None], first.shape)), -1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def train_toy(config: Any, steps: int, rate: float) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the weights after some seconds of training, and the losses."""
    model = get_policy_type(config.type).model
    shapes = model_blueprint(config).shapes
    graph, first = nnx.split(model(config, rngs=nnx.Rngs(0)))
    rule = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def loss(weights, key):
        observation, actions = _demonstrations(key, 64)
        rngs = nnx.Rngs(noise=jax.random.fold_in(key, 1))
        return nnx.merge(graph, weights).loss(observation, actions, jnp.zeros((64, TOY_CHUNK), bool), rngs)[0]

    def step(carry, key):
        weights, memory = carry
        value, gradient = jax.value_and_grad(loss)(weights, key)
        updates, memory = rule.update(gradient, memory, weights)
        return (optax.apply_updates(weights, updates), memory), value

    keys = jax.random.split(jax.random.key(1), steps)
    (weights, _), losses = jax.lax.scan(step, (first, rule.init(first)), keys)
    return dict(zip(shapes, jax.tree.leaves(weights), strict=True)), losses


def side_plan() -> np.ndarray:
    """Return toy chunks that go right, left, right, left."""
    actions = np.full((4, TOY_CHUNK, TOY_ACTION), 0.3, np.float32)
    actions[..., 0] = np.array([0.8, -0.8, 0.8, -0.8], np.float32)[:, None]
    return actions

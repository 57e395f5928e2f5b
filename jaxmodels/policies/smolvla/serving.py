"""SmolVLA for serving: what is seen and said once per chunk, then a velocity for each step of the flow."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies import Stage
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.policies.smolvla.model import Encoded, SmolVlaModel
from jaxmodels.samplers import begin_with, continuing, flow_euler
from jaxmodels.samplers.sampling import draw_for_each
from jaxmodels.types import Observation
from jaxmodels.vlm.smolvlm import Tokens
from jaxmodels.weights import blueprint_of


def act(config: SmolVlaConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """A normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    model = assemble(config, weights)
    encoded = encode(model, observation)
    schedule, steps, action = config.schedule, config.num_steps, config.action.shape[0]
    key, noise = jax.random.key(config.noise_seed), make_noise(config, observation)
    predict, plan = Partial(denoise, model, encoded), observation.prefix
    if plan is not None:
        actions = plan.actions
        inside = plan._replace(actions=write_aloha_actions(actions) if config.adapt_to_pi_aloha else actions)
        predict = continuing(predict, inside, schedule, bound=config.prefix_bound)
    extras = model.prepare_steps(schedule.euler_rows(steps).sigma)
    chunk = flow_euler(predict, noise.shape, key, schedule, steps=steps, extras=extras, start=noise)[..., :action]
    if config.adapt_to_pi_aloha:
        chunk = read_aloha_actions(chunk)
    return chunk if plan is None else begin_with(plan, chunk)


def assemble(config: SmolVlaConfig, weights: Mapping[str, Array]) -> SmolVlaModel:
    """The network over serving weights."""
    return blueprint_of(SmolVlaModel, config).assemble(weights)


def make_noise(config: SmolVlaConfig, observation: Observation) -> Float[Array, "b t a"]:
    """What a chunk is made of: what is given, or the policy's own, the same for each member."""
    if observation.noise is not None:
        return observation.noise
    return draw_for_each(jax.random.key(config.noise_seed), config.noise, observation.state.shape[0])


def encode(model: SmolVlaModel, observation: Observation, images: Sequence[Tokens] | None = None) -> Encoded:
    """What the action expert looks at: once per chunk."""
    if model.config.adapt_to_pi_aloha:
        observation = observation._replace(state=read_aloha_state(observation.state))
    return model.encode(observation, images)


def denoise(
    model: SmolVlaModel, encoded: Encoded, x: Float[Array, "b t a"], t: Any, step: Float[Array, " d"]
) -> Float[Array, "b t a"]:
    """The velocity of a noisy chunk at one step."""
    del t  # is in step
    return model.denoise(encoded, x, step)


def _look(config: SmolVlaConfig, weights: Mapping[str, Array], observation: Observation, given: None) -> list[Tokens]:
    return assemble(config, weights).embed_images(observation)


def _read(
    config: SmolVlaConfig, weights: Mapping[str, Array], observation: Observation, given: Sequence[Tokens]
) -> Encoded:
    return encode(assemble(config, weights), observation, given)


def _denoise(
    config: SmolVlaConfig, weights: Mapping[str, Array], observation: Observation, given: Encoded
) -> Float[Array, "b t a"]:
    model = assemble(config, weights)
    step = model.prepare_steps(config.schedule.euler_rows(config.num_steps).sigma[:1])[0]
    return denoise(model, given, make_noise(config, observation), None, step)


STAGES = (
    Stage("vision", _look),
    Stage("prefix", _read),
    Stage("denoise", _denoise, count=lambda config: config.num_steps),
)


# ALOHA's joints, as LeRobot's policy sees them (`adapt_to_pi_aloha`): some are turned round, and grippers are angles
# instead of how far they are open. Constants: lerobot/policies/smolvla/modeling_smolvla.py.
FLIPPED, GRIPPERS = (1, 2, 8, 9), (6, 13)
_OPENING = (0.01844, 0.058)
_ANGLE = (0.4, 1.5)
_JOINT = (-0.6213, 1.4910)
_ARM, _HORN = 0.036, 0.022  # of the gripper's linkage


def _flip(width: int) -> Float[np.ndarray, " {width}"]:
    return np.where(np.isin(np.arange(width), FLIPPED), np.float32(-1), np.float32(1))


def _is_gripper(width: int) -> np.ndarray:
    return np.isin(np.arange(width), GRIPPERS)


def read_aloha_state(state: Float[Array, "b s"]) -> Float[Array, "b s"]:
    """A state as the network wants it."""
    flipped = state * _flip(state.shape[-1])
    opening = flipped * (_OPENING[1] - _OPENING[0]) + _OPENING[0]
    opening = jnp.where(_is_gripper(state.shape[-1]), opening, _OPENING[1])  # of the others there is no angle
    angle = jnp.arcsin(jnp.clip((_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening), -1, 1))
    return jnp.where(_is_gripper(state.shape[-1]), (angle - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0]), flipped)


def read_aloha_actions(actions: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
    """Actions of the network as ALOHA's."""
    flipped = actions * _flip(actions.shape[-1])
    angle = flipped * (_ANGLE[1] - _ANGLE[0]) + _ANGLE[0]
    return jnp.where(_is_gripper(actions.shape[-1]), (angle - _JOINT[0]) / (_JOINT[1] - _JOINT[0]), flipped)


def write_aloha_actions(actions: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
    """Actions of ALOHA as the network's: the way back."""
    joint = actions * (_JOINT[1] - _JOINT[0]) + _JOINT[0]
    angle = (joint - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0])
    return jnp.where(_is_gripper(actions.shape[-1]), angle, actions) * _flip(actions.shape[-1])

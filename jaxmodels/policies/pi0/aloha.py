"""Joints of ALOHA as openpi turns them into those that pi0 was trained with, and back.

Some joints turn the other way there. And grippers: ALOHA measures how far their fingers are apart, pi0 the angle of
their motor from closed (0) to open (1); commanded they are in radians by a scale of their own.

Source: openpi/policies/aloha_policy.py (https://github.com/Physical-Intelligence/openpi).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmodels.types import Observation

FLIPS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float32)
IS_GRIPPER = np.array([*[False] * 6, True] * 2)
LINEAR = (0.01844, 0.05800)  # metres of ALOHA's measured fingers, closed and open
ARM, HORN = 0.036, 0.022  # metres of the linkage that moves them
ANGLES = (0.5476, 1.6296)  # radians of pi0's 0 and 1
COMMANDS = (-0.6213, 1.4910)  # radians of ALOHA's commanded 0 and 1


class AlohaJoints:
    """Functions from the robot's joints to the policy's, and back; arrays of NumPy's or JAX's."""

    @staticmethod
    def read(observation: Observation) -> Observation:
        """State and plan of an observation, in the policy's joints."""
        prefix = observation.prefix
        if prefix is not None:
            prefix = prefix._replace(actions=AlohaJoints.read_actions(prefix.actions))
        return observation._replace(state=AlohaJoints.read_state(observation.state), prefix=prefix)

    @staticmethod
    def read_state(state: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
        """A measured state in the policy's joints."""
        module: Any = jnp if isinstance(state, jax.Array) else np
        fingers = state * (LINEAR[1] - LINEAR[0]) + LINEAR[0]
        # Of joints that are no grippers nothing is kept: 1 stands for what may not be divided by.
        fingers = module.where(IS_GRIPPER, fingers, 1.0)
        sine = (HORN**2 + fingers**2 - ARM**2) / (2 * HORN * fingers)
        angle = module.arcsin(module.clip(sine, -1.0, 1.0))
        grippers = (angle - ANGLES[0]) / (ANGLES[1] - ANGLES[0])
        return module.where(IS_GRIPPER, grippers, state * FLIPS).astype(state.dtype)

    @staticmethod
    def write_actions(actions: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
        """Actions of the policy as ALOHA is commanded."""
        module: Any = jnp if isinstance(actions, jax.Array) else np
        grippers = (actions + ANGLES[0] - COMMANDS[0]) / (COMMANDS[1] - COMMANDS[0])
        return module.where(IS_GRIPPER, grippers, actions * FLIPS).astype(actions.dtype)

    @staticmethod
    def read_actions(actions: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
        """Commands of ALOHA as actions of the policy."""
        module: Any = jnp if isinstance(actions, jax.Array) else np
        grippers = actions * (COMMANDS[1] - COMMANDS[0]) + COMMANDS[0] - ANGLES[0]
        return module.where(IS_GRIPPER, grippers, actions * FLIPS).astype(actions.dtype)

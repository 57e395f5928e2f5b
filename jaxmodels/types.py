"""What a policy needs and gives: the contract with whoever runs one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# What an observation may hold besides features, for policies that continue a plan (`Requirements.takes_prefix`): the
# rest of the plan that is being executed, un-normalised and aligned with the observation (b, t, a); how many of its
# actions will have been executed when the answer comes (b,) int32, which the new chunk must begin with; and how many of
# them there are (b,) int32, 0 for none: the answer is then that of a policy which was never given a plan.
PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH = "prefix.actions", "prefix.delay", "prefix.length"
# And for policies that read language (`Requirements.language`): what to do, in words, one text for each member of the
# batch. LeRobot's name.
TASK = "task"


class Prefix(NamedTuple):
    """A plan that is being executed, which a new chunk continues; `PREFIX_ACTIONS` and the others, as a tree of arrays.

    Attributes:
        actions: (b, t, a), aligned with the new chunk. What lies beyond `length` is not read.
        delay: (b,) int32, how many of its actions will have been executed when the new chunk is there.
        length: (b,) int32, how many there are; 0 for none.
    """

    actions: Any
    delay: Any
    length: Any


class Language(NamedTuple):
    """What a text encoder made of an instruction.

    Attributes:
        tokens: (b, n, d).
        mask: (b, n) bool, which tokens belong to the text; the others are not to be looked at.
    """

    tokens: Any
    mask: Any


class Observation(NamedTuple):
    """What a policy sees, in the order of its config; a NamedTuple, so JAX knows it as a tree of arrays.

    Attributes:
        images: one array (b, h, w, 3) per camera. uint8 pixels outside a program; inside, floats.
        state: (b, s), or None when the policy reads no state.
        environment_state: (b, e), or None.
        prefix: the plan to continue; None for a policy that continues none.
        language: what it is told to do; None for a policy that reads no language.

    No jaxtyping here: JAX also builds trees of shapes and of gradients with this class.
    """

    images: tuple[Any, ...] = ()
    state: Any = None
    environment_state: Any = None
    prefix: Prefix | None = None
    language: Language | None = None


@dataclass(frozen=True)
class Requirements:
    """What a policy needs from a robot, and the shape of what it gives back.

    Attributes:
        policy_type: the registry name, e.g. ``"act"``.
        cameras: camera name (``"front"`` for the feature ``observation.images.front``) to
            (height, width) in pixels; frames of other sizes are resized inside the program.
        state: width of ``observation.state``, or None when the policy reads no state.
        environment_state: width of ``observation.environment_state``, or None.
        action: width of one action.
        chunk: steps in one action chunk.
        action_steps: how many of them are meant to be executed before the next inference.
        joint_names: names of the action's (and state's) joints in order, when the checkpoint says.
        rate: actions per second the policy was trained at, when the checkpoint says.
        temporal_ensemble_coeff: LeRobot's exponential weight of older predictions; None is off.
        takes_prefix: whether an observation may hold the rest of the plan that is being executed (`PREFIX_ACTIONS`),
            which the new chunk then continues: real-time chunking.
        language: whether an observation must say what to do, in words (`TASK`).
        action_range: smallest and largest value of each joint in the actions that the policy was trained on, when the
            checkpoint has such statistics. What it learned, not what it needs: two policies may differ in it.
    """

    policy_type: str
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    state: int | None = None
    environment_state: int | None = None
    action: int = 0
    chunk: int = 1
    action_steps: int = 1
    joint_names: tuple[str, ...] | None = None
    rate: float | None = None
    temporal_ensemble_coeff: float | None = None
    takes_prefix: bool = False
    language: bool = False
    action_range: tuple[tuple[float, ...], tuple[float, ...]] | None = field(default=None, compare=False)

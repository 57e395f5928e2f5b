"""What a robot may do, and what holds or stops it."""

from typing import Literal

from pydantic import Field, FiniteFloat

from service.setting_groups.group import Group
from service.setting_groups.values import Seconds, Steps


class SafetySettings(Group):
    """Safety"""

    safety: Literal["clamp", "refuse"] = Field(
        default="clamp",
        description="What happens to an action chunk that leaves the limits: it is brought inside, or refused whole.",
    )
    max_relative_target: Steps = Field(
        default=None,
        description="Largest step of a joint from one tick to the next, in its unit: one for all, or a table of name "
        "and step. A request may ask for less, never for more.",
    )
    limits: str | None = Field(
        default=None,
        description="TOML file or URDF with limits of joints: low, high, step, velocity, acceleration, jerk.",
    )
    on_hold: Literal["hold", "ramp"] = Field(
        default="hold",
        description="How a moving robot is held: at its measured pose at once, or after slowing down.",
    )
    degraded_after: Seconds = Field(
        default=3.0,
        description="Seconds that a robot is held because it cannot be seen or reached, until its session is degraded.",
    )
    stop_after: Seconds = Field(
        default=30.0, description="Such seconds until it is stopped and latched: nobody expects a motion any more."
    )
    frozen_after: Seconds = Field(
        default=2.0, description="Seconds with the same picture after which a camera is said to be frozen."
    )
    frozen_stops: bool = Field(default=False, description="Stop and latch a robot whose camera is frozen.")
    bad_inputs: int = Field(
        default=20, ge=0, description="Bad joint values within a second that stop and latch a robot; 0 for never."
    )
    action_age_limit: Seconds | None = Field(
        default=None,
        description="Seconds after its frame until an action is not done any more; default: as long as a chunk lasts.",
    )
    slow_inference: FiniteFloat = Field(
        default=2.0,
        gt=0,
        description="How many times the seconds that its actions take an inference may take before the robot is held.",
    )

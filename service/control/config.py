"""ControlConfig: rate, chunking, hold and safety settings of a session."""

from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from service.control.aggregation import REPLACE, Aggregation
from service.setting_types import Common, Group, Private, Ranges, Seconds, Steps, conflict

Mode = Literal["clamp", "refuse"]  # Treatment of a chunk outside the limits.
Frozen = Literal["warn", "hold", "stop"]  # Treatment of a robot with a frozen camera or frozen joints.


class SafetySettings(Group):
    """Safety."""

    safety: Common[Mode] = Field(
        default="clamp",
        description="What happens to an action chunk that leaves the limits: it is brought inside, or refused whole.",
    )
    max_relative_target: Common[Steps] = Field(
        default=None,
        description="Largest step of a joint from one tick to the next, in its unit: one for all, or a table of name "
        "and step. A request may ask for less, never for more.",
    )
    limits: Common[Private[str | None]] = Field(
        default=None,
        description="TOML file or URDF with limits of joints: low, high, step, velocity, acceleration, jerk.",
    )
    on_hold: Common[Literal["hold", "ramp"]] = Field(
        default="hold",
        description="How a moving robot is held: at its measured pose at once, or after slowing down.",
    )
    degraded_after: Seconds = Field(
        default=3.0,
        description="Seconds that a robot is held because it cannot be seen or reached, until its session is degraded.",
    )
    stop_after: Seconds = Field(
        default=30.0, description="Such seconds until it is stopped and latched: by then, people expect no motion."
    )
    frozen_after: Seconds = Field(
        default=2.0,
        description="Seconds with identical pictures, or with identical joints while commands move them, after which "
        "a camera or the joints count as frozen.",
    )
    frozen: Common[Frozen] = Field(
        default="hold",
        description="What happens to a moving robot whose camera or joints are frozen: a warning, a hold until they "
        "change, or an emergency stop.",
    )
    bad_inputs: int = Field(
        default=20, ge=0, description="Bad joint values within a second that stop and latch a robot; 0 for never."
    )
    action_age_limit: Seconds | None = Field(
        default=None,
        description="Seconds after its frame until an action is outdated; default: the duration of a chunk.",
    )
    slow_inference: FiniteFloat = Field(
        default=2.0,
        gt=0,
        description="How many times the seconds that its actions take an inference may take before the robot is held.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.degraded_after >= self.stop_after:
            values = {"degraded_after": self.degraded_after, "stop_after": self.stop_after}
            raise conflict(values, "degraded_after < stop_after")
        return self


class ControlSettings(Group):
    """Control loop."""

    rate: Common[FiniteFloat] = Field(
        default=20.0, gt=0, le=1000, description="Ticks per second when neither the request nor the policy says."
    )
    max_rate: FiniteFloat = Field(
        default=200.0, gt=0, le=1000, description="The highest rate that a request may ask for."
    )
    frame_age_limit: Seconds = Field(
        default=0.3, description="Seconds after which a frame is stale and the robot is held."
    )
    starved_after: Seconds = Field(default=0.3, description="Seconds without an action after which the robot is held.")
    hold_repeats: int = Field(default=4, ge=1, le=100, description="How often a hold sends the measured pose.")
    failures_allowed: int = Field(
        default=3, ge=1, description="Failed inferences in a row that end a session in an error."
    )
    input_timeout: Seconds = Field(default=600.0, description="Seconds without any frame or joints that end a session.")
    joint_ranges: Common[Ranges] = Field(
        default={},
        description="Ranges of joints that are not an SO-100's: a table of name and (low, high).",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rate > self.max_rate:
            raise conflict({"rate": self.rate, "max_rate": self.max_rate}, "rate <= max_rate")
        return self


@dataclass(frozen=True)
class ControlConfig:
    """Control configuration of one session.

    Attributes:
        rate: ticks per second.
        action_rate: actions per second of the policy's chunks.
        action_steps: actions of a chunk to execute before the next one takes over.
        chunk: actions of one chunk.
        width: values of one action.
        overlap: how a new chunk joins the rest of the plan.
        ask_ahead: seconds between the request of a chunk and the need for it; None for the measured latency.
        samples: number of newest samples for percentiles.
    """

    rate: float
    action_rate: float
    action_steps: int
    chunk: int
    width: int
    overlap: Aggregation = REPLACE
    ask_ahead: float | None = None
    samples: int = 2048
    control: ControlSettings = field(default_factory=ControlSettings)
    safety: SafetySettings = field(default_factory=SafetySettings)

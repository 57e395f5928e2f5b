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
        description="Treatment of an action chunk outside the limits: clamp its actions, or refuse the whole chunk",
    )
    max_relative_target: Common[Steps] = Field(
        default=None,
        description="Largest step of a joint from one tick to the next, in its unit: a number for all joints, or a "
        "table of joint and step. A request may ask for less, never for more.",
    )
    limits: Common[Private[str | None]] = Field(
        default=None,
        description="TOML file or URDF with limits of joints: low, high, step, velocity, acceleration, jerk",
    )
    on_hold: Common[Literal["hold", "ramp"]] = Field(
        default="hold",
        description="Start of a hold: at the measured pose at once (hold), or after slowing down (ramp)",
    )
    degraded_after: Seconds = Field(
        default=3.0,
        description="Seconds of a hold because a robot cannot be seen or reached, before its session is degraded",
    )
    stop_after: Seconds = Field(
        default=30.0, description="Seconds of such a hold before the robot is stopped and latched"
    )
    frozen_after: Seconds = Field(
        default=2.0,
        description="Seconds with identical pictures, or with identical joints while commands move them, before a "
        "camera or the joints count as frozen",
    )
    frozen: Common[Frozen] = Field(
        default="hold",
        description="Reaction when a camera or the joints of a moving robot are frozen: a warning, a hold until "
        "they change, or an emergency stop",
    )
    bad_inputs: int = Field(
        default=20, ge=0, description="Invalid joint values within a second that stop and latch a robot; 0 for never"
    )
    action_age_limit: Seconds | None = Field(
        default=None,
        description="Largest age of an action, in seconds since its frame; default: the duration of a chunk",
    )
    slow_inference: FiniteFloat = Field(
        default=2.0,
        gt=0,
        description="Longest inference before the robot is held, as a multiple of the duration of its actions",
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
        default=20.0, gt=0, le=1000, description="Ticks per second, if neither the request nor the policy sets a rate"
    )
    max_rate: FiniteFloat = Field(
        default=200.0, gt=0, le=1000, description="Largest rate that a request may ask for, in ticks per second"
    )
    frame_age_limit: Seconds = Field(
        default=0.3, description="Largest age of a frame before the robot is held, in seconds"
    )
    starved_after: Seconds = Field(default=0.3, description="Seconds without an action before the robot is held")
    hold_repeats: int = Field(default=4, ge=1, le=100, description="Times that a hold sends the measured pose")
    failures_allowed: int = Field(
        default=3, ge=1, description="Failed inferences in a row that end a session with an error"
    )
    input_timeout: Seconds = Field(default=600.0, description="Seconds without frames and joints before a session ends")
    joint_ranges: Common[Ranges] = Field(
        default={},
        description="Ranges of joints that differ from an SO-100's: a table of joint and (low, high)",
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

"""The control loop: how often it ticks, and what it waits for."""

from pydantic import Field, FiniteFloat

from service.setting_groups.group import Group
from service.setting_groups.values import Ranges, Seconds


class ControlSettings(Group):
    """Control loop"""

    rate: FiniteFloat = Field(
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
    joint_ranges: Ranges = Field(
        default={},
        description="Ranges of joints that are not an SO-100's: a table of name and (low, high).",
    )

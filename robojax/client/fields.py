"""Keyword arguments of the client's calls; a test compares them with the fields that the server accepts."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

Overlap = Literal[
    "replace", "weighted_average", "latest_only", "average", "conservative", "ensemble", "crossfade", "rtc"
]


class SessionChanges(TypedDict, total=False):
    """Fields of a session that may change while it runs; docs/reference/session_fields.md describes them."""

    overlap: Overlap | None
    temporal_ensemble_coeff: float | None
    ask_ahead: float | None  # seconds
    action_steps: int | None
    language_instruction: str | None
    accept_units: bool


class SessionFields(SessionChanges, total=False):
    """Optional fields of a new session; None means the server's default."""

    camera_names: Sequence[str] | None
    workspace_id: str | None
    policy_type: str | None
    rate: float | None  # Hz
    revision: str | None
    auto_update: Literal["off", "stage", "swap"] | None
    joint_names: Sequence[str] | None
    dry_run: bool | None
    shadow_policy_path: str | None
    shadow_revision: str | None
    max_relative_target: float | Mapping[str, float] | None  # unit of the joints
    degrade: bool | None
    record: bool | None
    rename: Mapping[str, str] | None
    prompt_cut: Literal["task", "lerobot"] | None


class ObservationFields(TypedDict, total=False):
    """Optional fields of an observation; fields that are None are omitted.

    Attributes:
        prompt: instruction for the policy from now on.
        number: number that the response repeats.
        timestamp: time of the observation in seconds of the client's clock.
        extra: "ignore" allows names in the state that are not joints of the session (``shoulder_pan.vel``), which
            LeRobot's robots give. Defaults to "refuse".
        is_compressed: whether arrays are sent as JPEG: a tenth of the bytes, some milliseconds at each end.
    """

    prompt: str | None
    number: int | None
    timestamp: float | None
    extra: Literal["refuse", "ignore"] | None
    is_compressed: bool


class StreamedFields(ObservationFields, total=False):
    """Optional fields of an observation for the session's control loop.

    Attributes:
        age_ms: age of the observation in milliseconds when it is sent, from 0 to 10000.
    """

    age_ms: float | None


class ActFields(ObservationFields, total=False):
    """Optional fields of an observation that the server answers with actions.

    Attributes:
        executed: number of actions of the last chunk that will have been executed when the new chunk arrives.
        reset: whether the session forgets its plan and moves again after a stop.
    """

    executed: int | None
    reset: bool | None

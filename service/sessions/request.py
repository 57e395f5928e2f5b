"""What a new session asks for, and whether that is allowed."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from service.control.limits import Asked
from service.control.watchdog import WatchdogTimeouts
from service.errors import InvalidRequest
from service.inference.policy_sources import PolicyPlaces
from service.transport.address import Destinations
from service.transport.protocol import rooms_of

# Seconds; no chunk covers more.
LONGEST_AHEAD = 10.0
# In place of a transport server's URL: no rooms, the robot's client comes to a door of this server.
DIRECT = "direct"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class NewSession:
    """A session to be made.

    Attributes:
        rate: control ticks per second; the policy's own rate when None, else the default of the settings.
        revision: branch, tag, commit or pattern of tags (``deploy-*``) of a policy from the Hub.
        joint_names: names of the policy's joints in order, for checkpoints that do not say.
        auto_update: what a push to ``revision`` does: nothing, another policy is made ready, or it takes over.
        dry_run: everything but sending commands.
        shadow_policy_path, shadow_revision: a second policy that computes on the same observations and moves nothing.
        max_relative_target: the largest step of a joint per tick (LeRobot's name), for all joints or by wire name.
        overlap: how a new chunk joins what is left of the plan, one of ``service.control.aggregation.OVERLAPS``; None
            leaves it to the checkpoint, else to the default.
        temporal_ensemble_coeff: of the overlap ``ensemble`` (LeRobot's name); the checkpoint's, else ACT's, when None.
        ask_ahead: seconds before it is needed that the next chunk is asked for; as long as answers take when None.
        action_steps: actions of a chunk to do before the next one takes over; the policy's own number when None.
        degrade: whether it may be inferred for less often than it asks for when the devices have no time for that.
        record: whether everything that happens is recorded from the first start on.
        owner: who made it, as its key is called; None where there are no keys.
    """

    session_id: str
    policy_path: str
    transport_server_url: str
    camera_names: tuple[str, ...] = ("front",)
    workspace_id: str | None = None
    policy_type: str = "act"
    language_instruction: str | None = None
    rate: float | None = None
    revision: str | None = None
    joint_names: tuple[str, ...] | None = None
    auto_update: Literal["off", "stage", "swap"] = "off"
    dry_run: bool = False
    shadow_policy_path: str | None = None
    shadow_revision: str | None = None
    max_relative_target: float | Mapping[str, float] | None = None
    overlap: str | None = None
    temporal_ensemble_coeff: float | None = None
    ask_ahead: float | None = None
    action_steps: int | None = None
    degrade: bool = False
    record: bool = False
    owner: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether it has no rooms, and its robot's client comes to a door of this server."""
        return self.transport_server_url == DIRECT


@dataclass(frozen=True)
class SessionSettings:
    """Limits and patience of all sessions; times in seconds.

    Attributes:
        failed_kept: failed sessions that stay listed; the oldest go first.
        rate: control ticks per second when neither request nor policy says.
        frame_age_limit: a frame older than this holds the robot.
        starved_after: waiting for an action longer than this in the middle of a motion holds the robot.
        hold_repeats: how often a hold sends the measured pose, one per tick.
        failures_allowed: failed inferences in a row that end the session in an error.
        input_timeout: without any frame or joints for this long, a session times out.
        close_within: what the rooms get to be left in; a link that hangs longer is abandoned.
        joint_ranges: ranges by name of joints that are not an SO-100's.
        samples: how many of the newest samples percentiles are taken of.
        motion: what the settings say of how robots may move; ``max_relative_target`` of a request joins it.
        on_hold: whether a moving robot is held at once, or slowed down before.
        patience: of the watchdogs; ``frame_age_limit`` stands in for its ``frame_age``.
    """

    max_sessions: int = 64
    max_cameras: int = 8
    failed_kept: int = 16
    rate: float = 20.0
    max_rate: float = 200.0
    frame_age_limit: float = 0.3
    max_frame_pixels: int = 1920 * 1200
    starved_after: float = 0.3
    hold_repeats: int = 4
    failures_allowed: int = 3
    input_timeout: float = 600.0
    close_within: float = 3.0
    joint_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    samples: int = 2048
    motion: Asked = field(default_factory=Asked)
    on_hold: Literal["hold", "ramp"] = "hold"
    patience: WatchdogTimeouts = field(default_factory=WatchdogTimeouts)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= self.max_rate <= 1000:
            raise ValueError(f"rate {self.rate:g} and max_rate {self.max_rate:g}: wanted 0 < rate <= max_rate <= 1000")
        if min(self.frame_age_limit, self.starved_after, self.input_timeout, self.close_within) <= 0:
            raise ValueError("frame_age_limit, starved_after, input_timeout and close_within must be above 0")
        if min(self.hold_repeats, self.failures_allowed, self.max_sessions, self.max_cameras, self.samples) < 1:
            raise ValueError("hold_repeats, failures_allowed, max_sessions, max_cameras and samples must be at least 1")

    def check(self, new: NewSession) -> None:
        """Refuse what can be refused without loading anything.

        Raises:
            InvalidRequest: with the place in the request's body.
        """
        _check_name(new.session_id, "session_id")
        if new.workspace_id is not None:
            _check_name(new.workspace_id, "workspace_id")
        if not new.policy_path.strip():
            raise InvalidRequest("policy_path is empty; send a folder or a Hub repo id", ("body", "policy_path"))
        if new.auto_update != "off" and new.revision is not None and _COMMIT.fullmatch(new.revision):
            raise InvalidRequest(
                f"auto_update is {new.auto_update!r}, but the revision is a commit, which never moves; "
                "name a branch or a tag, or leave revision out",
                ("body", "auto_update"),
            )
        cameras = ("body", "camera_names")
        if len(new.camera_names) > self.max_cameras:
            raise InvalidRequest(f"{len(new.camera_names)} cameras; at most {self.max_cameras} are taken", cameras)
        for position, name in enumerate(new.camera_names):
            _check_name(name, "camera_names", position)
        if len(set(new.camera_names)) != len(new.camera_names):
            raise InvalidRequest(f"camera_names {list(new.camera_names)} name a camera twice", cameras)
        # Whether the rooms' names would collide is the transport's own rule.
        rooms_of(new.session_id, new.camera_names, new.workspace_id)
        ahead = new.ask_ahead
        if ahead is not None and not 0 <= ahead <= LONGEST_AHEAD:
            raise InvalidRequest(f"ask_ahead is {ahead}; wanted 0 to {LONGEST_AHEAD:g} seconds", ("body", "ask_ahead"))
        if new.rate is not None and not (math.isfinite(new.rate) and 0 < new.rate <= self.max_rate):
            raise InvalidRequest(
                f"rate is {new.rate}; wanted more than 0 and at most {self.max_rate:g} per second", ("body", "rate")
            )


def _check_name(name: str, what: str, *place: int) -> None:
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise InvalidRequest(
            f"{what} {name[:80]!r}: wanted 1 to 64 letters, digits, '_', '.' or '-' (not only dots)",
            ("body", what, *place),
        )


Admit = Callable[[NewSession], Awaitable[None]]


class Allowance:
    """The places that a request names, asked for at once and not only when they are come to.

    Args:
        destinations: None where links do not leave this process.
    """

    def __init__(self, places: PolicyPlaces, destinations: Destinations | None = None):
        self.places = places
        self._destinations = destinations

    async def check(self, new: NewSession) -> None:
        """
        Raises:
            InvalidRequest: a place is not allowed; says which setting allows it.
            TransportError: nobody knows the transport server's host.
        """
        await asyncio.to_thread(self.places.check, new.policy_path, revision=new.revision)
        if new.shadow_policy_path is not None:
            shadow, revision = new.shadow_policy_path, new.shadow_revision
            await asyncio.to_thread(self.places.check, shadow, "shadow_policy_path", revision)
        if self._destinations is not None and not new.is_direct:
            await self._destinations.addresses(new.transport_server_url)

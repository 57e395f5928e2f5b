"""Robot's side of a session's rooms."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from service.errors import TransportError
from service.transport.address import Address, Kind
from service.transport.client.camera_rooms import CameraSender
from service.transport.client.connection import RoomConnection, RoomListener
from service.transport.client.rest import RedirectRefused, RoomsApi, TransportTimeouts, http_session
from service.transport.client.room_keys import auth_headers
from service.transport.client.rooms_link import run_beside
from service.transport.link import EmergencyStop, Rooms
from service.transport.protocol import (
    EmergencyStopMessage,
    JointUpdate,
    Message,
    ParticipantRole,
    WireError,
    is_finite,
    session_of,
)
from service.transport.webrtc.encoding import VideoCamera

log = logging.getLogger(__name__)

# Seconds between two polls of a latch; the shorter interval applies after a refused command.
LATCH_POLL_INTERVAL, MIN_LATCH_POLL_INTERVAL = 0.5, 0.05
# Seconds after which the robot reports a stop to a session that does not know of it.
STOP_REPORT_DELAY = 2.0
# Largest age in seconds, and largest distance, of a reported pose that a command counts as a hold at.
POSE_MAX_AGE, POSE_TOLERANCE = 1.0, 1e-3
OnCommand = Callable[[Mapping[str, float], float], None]
OnStop = Callable[[EmergencyStop], None]


@asynccontextmanager
async def connect_robot(
    url: str,
    rooms: Rooms,
    *,
    on_command: OnCommand,
    on_emergency_stop: OnStop | None = None,
    name: str = "robot",
    rate: float = 30.0,
    pace: TransportTimeouts | None = None,
    ice_servers: Sequence[str] = (),
    key: str | None = None,
    sessions: str | None = None,
) -> AsyncIterator["Robot"]:
    """Join a session's rooms as its robot: producer of the cameras and of joint-input, consumer of joint-output.

    Lost connections are restored until the context ends. After any emergency stop, ``on_command`` gets only commands
    that hold the robot at its reported pose, until the stop is reset at the session's server or by ``unlatch``.

    Args:
        url: the transport server, as in ``transport_server_url``.
        rooms: rooms from the answer to the session's creation.
        on_command: takes (wire name to target, monotonic receive time) on the event loop. Unchanged joints are not
            included. Hold the robot when commands stop arriving, as ``robojax.robot.arm_thread.JointTracker`` does.
        on_emergency_stop: called for each emergency stop of another participant in any room.
        name: prefix of the robot's participant ids.
        rate: largest number of pictures per second and camera.
        key: key or token of an operator, the session's owner; sent to ``url`` and ``sessions`` only.
        sessions: URL of the session's server. Defaults to ``url``.

    Raises:
        InvalidRequest: the URL or the key is invalid.
        TransportError: the server cannot be reached, or a room is unknown or has another robot.

    Example:
        >>> import asyncio
        >>> from robojax import AsyncClient, Rooms
        >>> async def run() -> bool:
        ...     async with AsyncClient() as client:
        ...         url = client.url
        ...         await client.create("arm", "robojax/sim/policy", transport_server_url=url, workspace_id="lab")
        ...         rooms = Rooms("lab", {"front": "arm-front"}, "arm-joint-input", "arm-joint-output")
        ...         async with connect_robot(url, rooms, on_command=lambda joints, at: None) as robot:
        ...             return robot.send_joints({"Elbow": 20.0})
        >>> asyncio.run(run())
        True
    """
    address = Address.parse(url)
    async with http_session(headers=auth_headers(key)) as session:
        api = RoomsApi(session, address, pace)
        latch = SessionLatch(api, Address.parse(sessions or url), session_of(rooms.joint_output))
        robot = Robot(api, rooms, name, rate, ice_servers, on_command, latch)
        robot.on_emergency_stop = on_emergency_stop
        try:
            await robot.open()
            async with run_beside(*robot.tasks()):
                yield robot
        finally:
            await robot.close()


class Robot:
    """A robot in its rooms; ``connect_robot`` creates it.

    Attributes:
        on_emergency_stop: called for each emergency stop of another participant; may be set at any time.
        commands: number of joint updates passed to ``on_command``.
        refused: number of joint updates dropped because of an emergency stop.
        latch: reason of an emergency stop that is not reset, or None.
    """

    def __init__(
        self,
        api: RoomsApi,
        rooms: Rooms,
        name: str,
        rate: float,
        ice_servers: Sequence[str],
        on_command: OnCommand,
        session_latch: "SessionLatch",
    ):
        self.rooms = rooms
        self.on_emergency_stop: OnStop | None = None
        self.commands = self.refused = 0
        self.latch: str | None = None
        self._session_latch = session_latch
        self._leave_timeout = api.timeouts.leave
        self._latched_at = 0.0
        self._is_confirmed = False  # Whether the session's server reported this latch.
        self._is_refusing = False
        self._poll_now = asyncio.Event()
        self._past_poses: deque[tuple[float, dict[str, float]]] = deque(maxlen=256)
        self._on_command = on_command
        self._pose: dict[str, float] = {}
        self._cameras = {camera: VideoCamera(rate) for camera in rooms.cameras}
        self._senders = {
            camera: CameraSender(self._cameras[camera], room, api, ice_servers, self._on_stop)
            for camera, room in rooms.cameras.items()
        }
        self._input_listener = JointRoomListener(self._report_pose, self._on_stop)
        self._output_listener = JointRoomListener(self._poll_now.set, self._on_stop, self._take_command)

        def room(kind: Kind, room: str, suffix: str, role: ParticipantRole, listener: RoomListener) -> RoomConnection:
            return RoomConnection(
                api,
                kind,
                rooms.workspace_id,
                room,
                id_prefix=f"{name}-{suffix}",
                role=role,
                listener=listener,
            )

        self._input = room(
            Kind.ROBOTICS, rooms.joint_input, "joint-input", ParticipantRole.PRODUCER, self._input_listener
        )
        self._output = room(
            Kind.ROBOTICS, rooms.joint_output, "joint-output", ParticipantRole.CONSUMER, self._output_listener
        )
        self._input_listener.connection, self._output_listener.connection = self._input, self._output
        self._videos = {
            camera: room(Kind.VIDEO, rooms.cameras[camera], camera, ParticipantRole.PRODUCER, sender)
            for camera, sender in self._senders.items()
        }

    @property
    def is_connected(self) -> bool:
        """Whether every room is joined now."""
        return all(connection.participant_id is not None for connection in self._connections())

    def send_joints(self, values: Mapping[str, float]) -> bool:
        """Report all or some joints (wire name to value) without waiting; False if the report was refused.

        The newest value of every joint is sent again after each reconnection.

        Raises:
            WireError: a value is not finite.
        """
        bad = {name: value for name, value in values.items() if not is_finite(value)}
        if bad:
            raise WireError(f"joints {sorted(bad)} are not finite numbers; nothing was sent", JointUpdate.type)
        if self._pose:
            self._past_poses.append((time.monotonic(), dict(self._pose)))
        self._pose.update(values)
        return self._input.send(_build_update(values))

    def show(self, camera: str, image: np.ndarray) -> None:
        """Send a copy of this picture, uint8 (h, w, 3) RGB, unless a newer picture replaces it first.

        Raises:
            KeyError: the robot has no such camera.
            ValueError: the picture has another type or shape.
        """
        if camera not in self._cameras:
            raise KeyError(f"no camera {camera!r}; this robot has {sorted(self._cameras)}")
        self._cameras[camera].show(image)

    def emergency_stop(self, reason: str) -> bool:
        """Send an emergency stop to both joint rooms; False if one room gets it only at the next join."""
        self._latch_stop(reason)
        return all([room.send_stop(reason) for room in (self._input_listener, self._output_listener)])

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready figures by room id."""
        cameras = {
            self.rooms.cameras[camera]: {**connection.health(), "video": self._senders[camera].health()}
            for camera, connection in self._videos.items()
        }
        joints = {connection.room: dict(connection.health()) for connection in (self._input, self._output)}
        return {"rooms": joints | cameras, "commands": self.commands, "refused": self.refused, "latch": self.latch}

    def unlatch(self) -> None:
        """Obey commands again after an emergency stop; call it only for a person who has checked the robot."""
        if self.latch is not None:
            log.warning("the emergency stop is reset; commands are obeyed again (%d were refused)", self.refused)
        self.latch = None
        self._is_confirmed = self._is_refusing = False

    async def open(self) -> None:
        """Join every room; raises TransportError if one cannot be joined."""
        await self._poll_latch()
        for connection in self._connections():
            await connection.open()

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """Return the coroutines to run while the robot is connected."""
        return [
            self._follow_latch(),
            *(connection.run() for connection in self._connections()),
            *(sender.run(self._videos[camera]) for camera, sender in self._senders.items()),
        ]

    async def close(self) -> None:
        """Leave every room."""
        await asyncio.gather(*(connection.close() for connection in self._connections()))

    def _connections(self) -> list[RoomConnection]:
        return [self._output, self._input, *self._videos.values()]

    def _report_pose(self) -> None:
        # A recreated room has no joints, and a resting robot reports none.
        if self._pose:
            self._input.send(_build_update(self._pose))

    def _take_command(self, values: Mapping[str, float], received_at: float) -> None:
        if self.latch is not None and not self._is_hold(values):
            self.refused += 1
            self._poll_now.set()
            if not self._is_refusing:
                self._is_refusing = True
                log.warning("a command is refused: an emergency stop is latched (%s)", self.latch)
                if not self._is_confirmed:
                    log.warning(
                        "%s has not confirmed the stop; if it is not the session's server, give connect_robot that URL "
                        "as sessions, or call unlatch() when the robot is safe",
                        self._session_latch.url,
                    )
            return
        self.commands += 1
        self._on_command(values, received_at)

    def _is_hold(self, values: Mapping[str, float]) -> bool:
        """Whether a command holds the robot at a pose that it reported lately."""
        oldest = time.monotonic() - POSE_MAX_AGE
        poses = [self._pose, *(pose for until, pose in self._past_poses if until >= oldest)]
        return any(
            all(name in pose and abs(value - pose[name]) <= POSE_TOLERANCE for name, value in values.items())
            for pose in poses
        )

    def _latch_stop(self, reason: str) -> None:
        if self.latch is None:
            self.latch, self._is_confirmed = reason, False
            self._latched_at = time.monotonic()
        self._poll_now.set()

    async def _follow_latch(self) -> None:
        """Poll the session's latch at each join of the command room, and while a stop is latched."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self.latch is None else LATCH_POLL_INTERVAL):
                    await self._poll_now.wait()
            self._poll_now.clear()
            if self._output.participant_id is not None:  # Without this room, no command arrives.
                await self._poll_latch_to_end()
            await asyncio.sleep(MIN_LATCH_POLL_INTERVAL)

    async def _poll_latch_to_end(self) -> None:
        """Poll the latch; a robot that leaves still waits for the answer to its request."""
        poll = asyncio.create_task(self._poll_latch())
        try:
            await asyncio.shield(poll)
        finally:
            await asyncio.wait({poll}, timeout=self._leave_timeout)
            poll.cancel()

    async def _poll_latch(self) -> None:
        """Apply the latch that the session's server reports; without an answer, nothing changes."""
        before = self.latch
        state = await self._session_latch.fetch()
        if state is None or self.latch != before:
            return
        if state.reason is not None:
            if self.latch is None:
                self._on_stop(EmergencyStopMessage(state.reason, self._session_latch.session_id))
            self._is_confirmed = True
        elif self.latch is not None and self._is_confirmed:
            self.unlatch()
        elif self.latch is not None and time.monotonic() - self._latched_at > STOP_REPORT_DELAY:
            # The session may not know of the stop, and continue without a reset.
            await self._session_latch.report_stop(self.latch)

    def _on_stop(self, message: EmergencyStopMessage) -> None:
        self._latch_stop(message.reason or "no reason given")
        if self.on_emergency_stop is not None:
            self.on_emergency_stop(EmergencyStop(message.reason or "no reason given", message.source or "unknown"))


@dataclass(frozen=True)
class LatchState:
    """Reason of the latched emergency stop that a session's server reports, or None."""

    reason: str | None


class SessionLatch:
    """Client for the emergency stop of one session on its server; ``session_id`` is None without a session."""

    def __init__(self, api: RoomsApi, address: Address, session_id: str | None):
        self.session_id = session_id
        self._api = api
        self.url = f"{address.base}/sessions/{session_id}"
        self._list = f"{address.base}/sessions"

    async def fetch(self) -> LatchState | None:
        """Fetch the latch; None if the server does not answer or does not have the session."""
        if self.session_id is None:
            return None
        with contextlib.suppress(TransportError):
            try:
                status = await self._api.request_json("GET", self.url)
            except RedirectRefused:
                # Another server that shares the database has the session. The key is not sent to that server.
                listed = await self._api.request_json("GET", self._list, expected_type=list)
                mine = (one for one in listed if isinstance(one, dict) and one.get("session_id") == self.session_id)
                status = next(mine, {})
            stats = status.get("stats")
            if isinstance(stats, dict) and "emergency_stop" in stats:
                reason = stats["emergency_stop"]
                return LatchState(None if reason is None else str(reason))
        return None

    async def report_stop(self, reason: str) -> None:
        """Report a stop to the session's server; the robot repeats a report that fails."""
        with contextlib.suppress(TransportError):
            await self._api.request_json("POST", f"{self.url}/emergency_stop", {"reason": reason})


class JointRoomListener(RoomListener):
    """Listener of one joint room, which sends pending stops and ignores the old commands of ``state_sync``."""

    def __init__(
        self,
        on_joined: Callable[[], None],
        on_stop: Callable[[EmergencyStopMessage], None],
        on_command: OnCommand | None = None,
    ):
        self.connection: RoomConnection | None = None
        self._on_joined = on_joined
        self._on_stop = on_stop
        self._on_command = on_command
        self._pending_stop: str | None = None
        self._own_ids: set[str] = set()

    def send_stop(self, reason: str) -> bool:
        """Send an emergency stop, now or at the next join."""
        is_sent = self.connection is not None and self.connection.send(EmergencyStopMessage(reason=reason))
        self._pending_stop = None if is_sent else reason
        return is_sent

    def on_joined(self, participant_id: str) -> None:
        """Send a pending stop."""
        self._own_ids.add(participant_id)
        if self._pending_stop is not None:
            self.send_stop(self._pending_stop)
        self._on_joined()

    def on_message(self, message: Message, received_at: float) -> None:
        """Pass on commands and stops; the echo of this robot's own stop is dropped."""
        if isinstance(message, EmergencyStopMessage):
            if message.source not in self._own_ids:
                self._on_stop(message)
        elif isinstance(message, JointUpdate) and self._on_command is not None and message.data:
            self._on_command(message.values, received_at)


def _build_update(values: Mapping[str, float]) -> JointUpdate:
    return JointUpdate(tuple({"name": name, "value": float(value)} for name, value in values.items()))

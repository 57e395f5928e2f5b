"""The robot's side of a session's rooms: it sends pictures and joints, and obeys commands."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from service.transport.address import Address, Kind
from service.transport.base import EmergencyStop, Rooms
from service.transport.camera import Camera
from service.transport.client import running
from service.transport.connection import RoomConnection
from service.transport.credentials import headers_of
from service.transport.messages import EmergencyStop as StopMessage
from service.transport.messages import JointUpdate, Message, Role
from service.transport.pace import Pace
from service.transport.rest import RoomsApi, http_session
from service.transport.sender import CameraSender
from service.transport.wire import WireError, is_finite

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
    pace: Pace | None = None,
    ice_servers: Sequence[str] = (),
    key: str | None = None,
) -> AsyncIterator["Robot"]:
    """Join a session's rooms as its robot: producer of the cameras and of joint-input, consumer of joint-output.

    It joins again by itself whenever a connection is lost, sends its pose again and offers its cameras again,
    until the context ends. The rooms are the session's: they are neither made nor removed here.

    Args:
        url: the transport server, as in ``transport_server_url``.
        rooms: as the session's creation answered them.
        on_command: takes (wire name to target, monotonic time it was read), on the event loop. The server forwards
            only joints whose target changed, so merge by name and hold the others. Nothing is said when commands stay
            away (a server that is blocked): hold the robot then, as ``robojax.robot.follower.Follower`` does.
        on_emergency_stop: told of every emergency stop of somebody else in any of the rooms.
        name: what the robot's participant ids begin with.
        rate: the most pictures a second that each camera sends.
        key: an operator's key or token, of the session's owner, where the server wants one. It goes to ``url`` alone.

    Raises:
        InvalidRequest: the URL or the key cannot be used.
        TransportError: the server cannot be reached, or a room is unknown or has another robot in it.
    """
    pace = pace or Pace()
    address = Address.parse(url)
    async with http_session(headers=headers_of(key)) as session:
        robot = Robot(RoomsApi(session, address, pace.request), rooms, name, rate, pace, ice_servers, on_command)
        robot.on_emergency_stop = on_emergency_stop
        try:
            await robot.open()
            async with running(*robot.tasks()):
                yield robot
        finally:
            await robot.close()


class Robot:
    """A robot in its rooms; ``connect_robot`` makes one.

    Attributes:
        on_emergency_stop: told of every emergency stop of somebody else; may be set at any time.
        commands: joint updates handed to ``on_command``.
    """

    def __init__(
        self,
        api: RoomsApi,
        rooms: Rooms,
        name: str,
        rate: float,
        pace: Pace,
        ice_servers: Sequence[str],
        on_command: OnCommand,
    ):
        self.rooms = rooms
        self.on_emergency_stop: OnStop | None = None
        self.commands = 0
        self._on_command = on_command
        self._pose: dict[str, float] = {}
        self._cameras = {camera: Camera(rate) for camera in rooms.cameras}
        self._senders = {
            camera: CameraSender(self._cameras[camera], room, api, pace, ice_servers, self._stopped)
            for camera, room in rooms.cameras.items()
        }
        self._reports = JointRoom(self._report_pose, self._stopped)
        self._orders = JointRoom(lambda: None, self._stopped, self._obey)
        self._input = RoomConnection(
            api,
            Kind.ROBOTICS,
            rooms.workspace_id,
            rooms.joint_input,
            who=f"{name}-joint-input",
            role=Role.PRODUCER,
            listener=self._reports,
            pace=pace,
        )
        self._output = RoomConnection(
            api,
            Kind.ROBOTICS,
            rooms.workspace_id,
            rooms.joint_output,
            who=f"{name}-joint-output",
            role=Role.CONSUMER,
            listener=self._orders,
            pace=pace,
        )
        self._reports.connection, self._orders.connection = self._input, self._output
        self._videos = {
            camera: RoomConnection(
                api,
                Kind.VIDEO,
                rooms.workspace_id,
                rooms.cameras[camera],
                who=f"{name}-{camera}",
                role=Role.PRODUCER,
                listener=sender,
                pace=pace,
                present=sender.present,
            )
            for camera, sender in self._senders.items()
        }

    @property
    def is_connected(self) -> bool:
        """Whether every room is joined now."""
        return all(connection.participant_id is not None for connection in self._connections())

    def send_joints(self, values: Mapping[str, float]) -> bool:
        """Report joints (wire name to value, all or some) without waiting; False when they were not taken.

        The whole pose as last given here is sent again after each reconnection.

        Raises:
            WireError: a value is not finite.
        """
        bad = {name: value for name, value in values.items() if not is_finite(value)}
        if bad:
            raise WireError(f"joints {sorted(bad)} are not finite numbers; nothing was sent", JointUpdate.type)
        self._pose.update(values)
        return self._input.send(_update(values))

    def show(self, camera: str, image: np.ndarray) -> None:
        """Send this picture, uint8 (h, w, 3) RGB. It is copied; the newest one goes out, once, at most at ``rate``.

        Raises:
            KeyError: there is no such camera.
            ValueError: the picture has another type or shape.
        """
        if camera not in self._cameras:
            raise KeyError(f"no camera {camera!r}; this robot has {sorted(self._cameras)}")
        self._cameras[camera].show(image)

    def restart_camera(self, camera: str) -> None:
        """Start a camera's stream anew, as a browser does when its camera is switched: everybody gets a new offer."""
        self._senders[camera].restart()

    def emergency_stop(self, reason: str) -> bool:
        """Ask everybody in both joint rooms to stop.

        Returns False when a room is down; the stop is then sent there as soon as it is joined again.
        """
        return all([room.stop(reason) for room in (self._reports, self._orders)])

    def health(self) -> Mapping[str, object]:
        """Plain figures by room id."""
        cameras = {
            self.rooms.cameras[camera]: {**connection.health(), "video": self._senders[camera].health()}
            for camera, connection in self._videos.items()
        }
        joints = {connection.room: dict(connection.health()) for connection in (self._input, self._output)}
        return {"rooms": joints | cameras, "commands": self.commands}

    async def open(self) -> None:
        """Join every room.

        Raises:
            TransportError: one could not be joined.
        """
        for connection in self._connections():
            await connection.open()

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """What must run while the robot is connected."""
        return [
            *(connection.run() for connection in self._connections()),
            *(sender.run(self._videos[camera]) for camera, sender in self._senders.items()),
        ]

    async def close(self) -> None:
        """Leave every room."""
        await asyncio.gather(*(connection.close() for connection in self._connections()))

    def _connections(self) -> list[RoomConnection]:
        return [self._output, self._input, *self._videos.values()]

    def _report_pose(self) -> None:
        # A room that was made anew knows nothing, and a robot that stands still sends nothing.
        if self._pose:
            self._input.send(_update(self._pose))

    def _obey(self, values: Mapping[str, float], seen_at: float) -> None:
        self.commands += 1
        self._on_command(values, seen_at)

    def _stopped(self, message: StopMessage) -> None:
        if self.on_emergency_stop is not None:
            self.on_emergency_stop(EmergencyStop(message.reason or "no reason given", message.source or "unknown"))


class JointRoom:
    """What the robot hears in one joint room, and the stops it still owes it.

    ``state_sync`` is not obeyed: it holds commands of unknown age, perhaps of a session that is long over.
    """

    def __init__(
        self,
        joined: Callable[[], None],
        stopped: Callable[[StopMessage], None],
        moved: OnCommand | None = None,
    ):
        self.connection: RoomConnection | None = None
        self._joined = joined
        self._stopped = stopped
        self._moved = moved
        self._owed: str | None = None
        self._ids: set[str] = set()

    def stop(self, reason: str) -> bool:
        """Send an emergency stop, now or at the next join."""
        taken = self.connection is not None and self.connection.send(StopMessage(reason=reason))
        self._owed = None if taken else reason
        return taken

    def joined(self, participant_id: str) -> None:
        """Pay what is owed."""
        self._ids.add(participant_id)
        if self._owed is not None:
            self.stop(self._owed)
        self._joined()

    def received(self, message: Message, seen_at: float) -> None:
        """Commands go to the robot; stops of others go to the robot; the echo of our own does not."""
        if isinstance(message, StopMessage):
            if message.source not in self._ids:
                self._stopped(message)
        elif isinstance(message, JointUpdate) and self._moved is not None and message.data:
            self._moved(message.values, seen_at)

    def lost(self, reason: str) -> None:
        """Nothing to do: the connection joins again."""


def _update(values: Mapping[str, float]) -> JointUpdate:
    return JointUpdate(tuple({"name": name, "value": float(value)} for name, value in values.items()))

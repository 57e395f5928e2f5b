"""A session's rooms on a transport server: made, joined, kept, and removed again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from service.errors import TransportError
from service.transport.address import Address, Kind
from service.transport.base import Inbox, JointValue, Rooms
from service.transport.connection import Listener, RoomConnection
from service.transport.joint_rooms import JointInput, JointOutput
from service.transport.messages import JointUpdate, Role
from service.transport.names import rooms_of
from service.transport.pace import Pace
from service.transport.receiver import CameraReceiver
from service.transport.rest import Presence, RoomsApi, http_session

log = logging.getLogger(__name__)


class RoomsTransport:
    """The ``Transport`` that speaks the RobotHub wire.

    Args:
        pace: how long things may take.
        ice_servers: STUN and TURN URLs. Empty by default: on a local network they are not needed, and without a
            way to the internet each peer connection would wait five seconds for them.
    """

    def __init__(self, *, pace: Pace | None = None, ice_servers: Sequence[str] = ()):
        self._pace = pace or Pace()
        self._ice_servers = tuple(ice_servers)

    @asynccontextmanager
    async def connect(
        self,
        url: str,
        *,
        session_id: str,
        cameras: Sequence[str],
        workspace_id: str | None,
        inbox: Inbox,
    ) -> AsyncIterator["RoomsLink"]:
        """Make the rooms, join them, deliver to ``inbox`` until the context ends; then leave.

        A room of one of our names that exists already (left by a crash, or made by the robot's side) is joined as
        it is: making it again would cut off everybody in it without a word. Only rooms that this link made are
        removed at its end.

        Raises:
            InvalidRequest: the URL or a name cannot be used.
            TransportError: the server could not be reached, refused, or does not speak this wire.
        """
        rooms = rooms_of(session_id, cameras, workspace_id)
        address = Address.parse(url)
        async with http_session() as session:
            api = RoomsApi(session, address, self._pace.request)
            link = RoomsLink(rooms, session_id, api, inbox, self._pace, self._ice_servers)
            try:
                await link.open()
                async with running(*link.tasks()):
                    yield link
            finally:
                await link.close()


class RoomsLink:
    """The ``Link`` of one session."""

    def __init__(
        self,
        rooms: Rooms,
        session_id: str,
        api: RoomsApi,
        inbox: Inbox,
        pace: Pace,
        ice_servers: Sequence[str],
    ):
        self.rooms = rooms
        self._api = api
        self._pace = pace
        self._made: dict[str, Kind] = {}
        self._input = JointInput(rooms, api, inbox)
        self._receivers = {
            room: CameraReceiver(camera, room, api, inbox, pace, ice_servers) for camera, room in rooms.cameras.items()
        }

        def connection(
            kind: Kind,
            room: str,
            name: str,
            role: Role,
            listener: Listener,
            present: Callable[[Presence], Awaitable[None]] | None = None,
        ) -> RoomConnection:
            return RoomConnection(
                api,
                kind,
                rooms.workspace_id,
                room,
                who=f"{session_id}-{name}",
                role=role,
                listener=listener,
                pace=pace,
                make=lambda: self._make(kind, room),
                present=present,
            )

        self._output = connection(
            Kind.ROBOTICS, rooms.joint_output, "joint-output", Role.PRODUCER, JointOutput(rooms.joint_output, inbox)
        )
        self._connections = {
            rooms.joint_output: self._output,
            rooms.joint_input: connection(
                Kind.ROBOTICS, rooms.joint_input, "joint-input", Role.CONSUMER, self._input, self._input.present
            ),
            **{
                room: connection(Kind.VIDEO, room, receiver.camera, Role.CONSUMER, receiver)
                for room, receiver in self._receivers.items()
            },
        }

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Put one joint_update on the wire of the output room without waiting; False when it was not taken."""
        data = tuple(
            {"name": joint.name, "value": joint.value}
            if joint.index is None
            else {"name": joint.name, "value": joint.value, "index": joint.index}
            for joint in joints
        )
        return self._output.send(JointUpdate(data))

    def health(self) -> Mapping[str, object]:
        """Plain figures by room id: the connection, and for a camera its video."""
        return {
            "rooms": {
                room: {
                    **connection.health(),
                    **({"video": self._receivers[room].health()} if room in self._receivers else {}),
                }
                for room, connection in self._connections.items()
            },
            "joints_received": self._input.updates,
        }

    async def open(self) -> None:
        """Make every room that is not there and join all.

        Raises:
            TransportError: something failed; ``close`` removes what was made.
        """
        for room, connection in self._connections.items():
            await self._make(connection.kind, room)
        for connection in self._connections.values():
            await connection.open()

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """What must run while the link is open."""
        return [
            *(connection.run() for connection in self._connections.values()),
            *(receiver.run(self._connections[room]) for room, receiver in self._receivers.items()),
        ]

    async def close(self) -> None:
        """Leave every room and remove those this link made; what cannot be removed is named in the log."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        made = list(self._made.items())
        try:
            async with asyncio.timeout(self._pace.leave):
                gone = await asyncio.gather(*(self._remove(room, kind) for room, kind in made), return_exceptions=True)
        except TimeoutError:
            gone = [TransportError("no answer in time")] * len(made)
        for (room, _), outcome in zip(made, gone, strict=True):
            if isinstance(outcome, BaseException):
                log.warning("room %s/%s could not be removed: %s", self.rooms.workspace_id, room, outcome)

    async def _make(self, kind: Kind, room: str) -> None:
        if await self._api.look(kind, self.rooms.workspace_id, room) is None:
            self._made[room] = kind  # before asking: an answer that times out may still have made it
            await self._api.create(kind, self.rooms.workspace_id, room)

    async def _remove(self, room: str, kind: Kind) -> None:
        await self._api.delete(kind, self.rooms.workspace_id, room)


@asynccontextmanager
async def running(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run beside the body and be cancelled at its end; when one fails, so does the body."""
    failed: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        except Exception as error:  # raised again below: inside the group it would be wrapped in an ExceptionGroup
            failed = error
        finally:
            for task in tasks:
                task.cancel()
    if failed is not None:
        raise failed

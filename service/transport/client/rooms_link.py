"""Link of a session, which creates, joins and removes its rooms."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from service.errors import RobotTaken, TransportError
from service.transport.address import Address, Destinations, Kind
from service.transport.client.camera_rooms import CameraReceiver
from service.transport.client.connection import JoinRefused, RoomConnection, RoomListener
from service.transport.client.joint_rooms import JointInputListener, JointOutputListener
from service.transport.client.rest import RoomsApi, TransportTimeouts, http_session
from service.transport.client.room_keys import CLAIM_HEADER, RoomKeys
from service.transport.link import JointValue, LinkRequest, Orphan
from service.transport.protocol import JointUpdate, ParticipantRole, rooms_of

log = logging.getLogger(__name__)

# Seconds after which an unwritten command is dropped: this process was paused, and the command is outdated.
COMMAND_LIFETIME = 0.1


class RoomsTransport:
    """The ``Transport`` over rooms of a transport server (the RobotHub wire).

    Args:
        ice_servers: STUN and TURN URLs. Without internet, each connection waits five seconds for them.
        destinations: allowed servers; None if URLs are trusted.
        keys: keys by server; None sends no key.
    """

    def __init__(
        self,
        *,
        timeouts: TransportTimeouts | None = None,
        ice_servers: Sequence[str] = (),
        destinations: Destinations | None = None,
        keys: RoomKeys | None = None,
    ):
        self._timeouts = timeouts
        self._ice_servers = tuple(ice_servers)
        self._destinations = destinations
        self._keys = keys

    @asynccontextmanager
    async def _open_api(self, url: str, owner: str | None, claim: str | None) -> AsyncIterator[RoomsApi]:
        """Open the REST calls of a server with its keys; raises InvalidRequest or TransportError."""
        address, headers = Address.parse(url), dict[str, str]()
        if self._keys is not None:
            address, headers = self._keys.for_address(address, owner)
        if claim is not None:
            headers[CLAIM_HEADER] = claim
        connector = None if self._destinations is None else await self._destinations.create_connector(url)
        async with http_session(connector, headers) as session:
            yield RoomsApi(session, address, self._timeouts)

    @asynccontextmanager
    async def connect(self, request: LinkRequest) -> AsyncIterator["RoomsLink"]:
        """Create and join the rooms, deliver to the inbox until the context ends, then leave.

        At the end, only rooms of this link and ``created_rooms`` (rooms from before a restart) are removed.

        Raises:
            InvalidRequest: the URL or a name is invalid, or the URL is not allowed.
            TransportError: the server cannot be reached, refused, or is not a RobotHub server.
        """
        async with self._open_api(request.url, request.owner, request.claim) as api:
            link = RoomsLink(request, api, self._ice_servers)
            try:
                await link.open()
                async with run_beside(*link.tasks()):
                    yield link
            finally:
                await link.close()

    async def remove_empty_rooms(self, orphan: Orphan) -> Sequence[str]:
        """Remove empty rooms; returns the occupied rooms. Raises as ``connect``."""
        left = []
        async with self._open_api(orphan.url, None, orphan.claim) as api:
            for room in orphan.rooms:
                kind = Kind.VIDEO if room in orphan.cameras else Kind.ROBOTICS
                presence = await api.get_presence(kind, orphan.workspace_id, room)
                if presence is None:
                    continue
                if presence.producer is not None or presence.consumers:
                    left.append(room)
                else:
                    await api.delete_room(kind, orphan.workspace_id, room)
        return left


class RoomsLink:
    """The ``Link`` of one session over its rooms."""

    def __init__(self, request: LinkRequest, api: RoomsApi, ice_servers: Sequence[str]):
        rooms = self.rooms = rooms_of(request.session_id, request.cameras, request.workspace_id)
        inbox = request.inbox
        self._api = api
        self._rooms_to_remove: dict[str, Kind] = {}
        self._created_rooms = request.created_rooms
        self._input_listener = JointInputListener(rooms, api, inbox)
        self._receivers = {
            room: CameraReceiver(camera, room, api, inbox, ice_servers) for camera, room in rooms.cameras.items()
        }

        def connection(
            kind: Kind, room: str, name: str, role: ParticipantRole, listener: RoomListener
        ) -> RoomConnection:
            return RoomConnection(
                api,
                kind,
                rooms.workspace_id,
                room,
                id_prefix=f"{request.session_id}-{name}",
                role=role,
                listener=listener,
                create_room=lambda: self._ensure_room(kind, room),
            )

        output_room, input_room = rooms.joint_output, rooms.joint_input
        self._output_listener = JointOutputListener(output_room, inbox, lambda message: self._output.send(message))
        self._output = connection(
            Kind.ROBOTICS, output_room, "joint-output", ParticipantRole.PRODUCER, self._output_listener
        )
        self._connections = {
            output_room: self._output,
            input_room: connection(
                Kind.ROBOTICS, input_room, "joint-input", ParticipantRole.CONSUMER, self._input_listener
            ),
            **{
                room: connection(Kind.VIDEO, room, receiver.camera, ParticipantRole.CONSUMER, receiver)
                for room, receiver in self._receivers.items()
            },
        }

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Send one joint_update to the output room without waiting; False if it was refused."""
        data = tuple(
            {"name": joint.name, "value": joint.value, **({} if joint.index is None else {"index": joint.index})}
            for joint in joints
        )
        return self._output.send(JointUpdate(data), COMMAND_LIFETIME)

    def latch(self, reason: str | None) -> None:
        """Announce a latched emergency stop, or None for a reset, to the robot's room and later participants."""
        self._output_listener.announce_latch(reason)

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready figures by room id: the connection, and for a camera its video."""
        return {
            "rooms": {
                room: {
                    **connection.health(),
                    **({"video": self._receivers[room].health()} if room in self._receivers else {}),
                }
                for room, connection in self._connections.items()
            },
            "joints_received": self._input_listener.updates,
        }

    async def open(self) -> None:
        """Create every room that does not exist, and join all.

        Raises:
            TransportError: a room cannot be created or joined; ``close`` removes the created rooms.
            RobotTaken: another participant commands this robot.
        """
        for room, connection in self._connections.items():
            await self._ensure_room(connection.kind, room)
        await self._take_robot()
        for connection in self._connections.values():
            if connection is not self._output:
                await connection.open()

    async def _take_robot(self) -> None:
        """Become the producer of the output room, which alone commands the robot."""
        try:
            await self._output.open()
        except JoinRefused as refused:
            room, workspace = self._output.room, self.rooms.workspace_id
            presence = await self._api.get_presence(Kind.ROBOTICS, workspace, room)
            if presence is None or presence.producer is None:
                raise
            raise RobotTaken(
                f"the robot of room {room!r} in workspace {workspace!r} is commanded by participant "
                f"{presence.producer!r} already; stop that controller first (another server's session, or a program "
                "of its own), or use another workspace"
            ) from refused

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """Return the coroutines that must run while the link is open."""
        return [
            *(connection.run() for connection in self._connections.values()),
            *(receiver.run(self._connections[room]) for room, receiver in self._receivers.items()),
        ]

    async def close(self) -> None:
        """Leave every room and remove the rooms that this link created; log rooms that cannot be removed."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        # Keep rooms that belong to another server by now.
        created = [
            (room, kind)
            for room, kind in self._rooms_to_remove.items()
            if self._created_rooms is None or room in self._created_rooms
        ]
        try:
            async with asyncio.timeout(self._api.timeouts.leave):
                deletions = (self._api.delete_room(kind, self.rooms.workspace_id, room) for room, kind in created)
                gone = await asyncio.gather(*deletions, return_exceptions=True)
        except TimeoutError:
            gone = [TransportError("no answer in time")] * len(created)
        for (room, _), outcome in zip(created, gone, strict=True):
            if isinstance(outcome, BaseException):
                log.warning("room %s/%s could not be removed: %s", self.rooms.workspace_id, room, outcome)

    async def _ensure_room(self, kind: Kind, room: str) -> None:
        if await self._api.get_presence(kind, self.rooms.workspace_id, room) is None:
            if self._created_rooms is not None:
                await self._created_rooms.add(room)
            self._rooms_to_remove[room] = kind  # A request that times out may still create the room.
            await self._api.create_room(kind, self.rooms.workspace_id, room)
        elif self._created_rooms is not None and room in self._created_rooms:
            self._rooms_to_remove[room] = kind


@asynccontextmanager
async def run_beside(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines in parallel with the body, and cancel them at its end; a failed coroutine ends the body."""
    failed: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in coroutines]
        try:
            yield
        except Exception as error:  # Raised below, because the group would wrap it in an ExceptionGroup.
            failed = error
        finally:
            for task in tasks:
                task.cancel()
    if failed is not None:
        raise failed

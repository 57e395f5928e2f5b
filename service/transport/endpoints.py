"""The REST calls of the transport server: read the request, ask the room table, answer in the wire's own forms."""

import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

from sanic import HTTPResponse, Request

from service.auth.caller import caller_of
from service.auth.roles import Role as KeyRole
from service.errors import Forbidden
from service.transport import conversation, signalling, views, wire
from service.transport.address import Kind
from service.transport.bodies import (
    Command,
    NewRoboticsRoom,
    NewRoom,
    NewVideoRoom,
    Signal,
    Unprocessable,
    read_body,
    read_optional_body,
    read_workspace,
)
from service.transport.cleanup import Cleanup
from service.transport.credentials import CLAIM
from service.transport.outbox import WriteQueue
from service.transport.rooms import CommandRefused, Place, Room, RoomTable, RoomTaken, TooManyRooms, UnknownRoom
from service.transport.sockets import perform, timestamp

Handler = Callable[..., views.Answer]
# Method, path under the service, what answers, and the least role of a key (None: everybody's).
Route = tuple[str, str, Handler, KeyRole | None]
ROOM = "/workspaces/<workspace:str>/rooms/<room:str>"


class BadSignal(Exception):
    """A signal that cannot be relayed, with the status the wire has for it; these two answers give no reason."""

    def __init__(self, status: int):
        super().__init__(f"signal answered with {status}")
        self.status = status


def answer(status: int, body: object) -> HTTPResponse:
    """A JSON answer; never with a number that JSON does not have."""
    return HTTPResponse(wire.encode(body), status=status, content_type="application/json")


def endpoint(handle: Handler, queue: WriteQueue) -> Callable[..., Coroutine[Any, Any, HTTPResponse]]:
    """A handler as a Sanic route: path parts are unquoted, refusals become the wire's error forms."""

    async def route(request: Request, **parts: str) -> HTTPResponse:
        try:
            found = handle(request, **{name: unquote(part) for name, part in parts.items()})
            await queue.turn()  # a call that is followed by a message to many is answered when they have it
            return answer(200, found)
        except Unprocessable as error:
            return answer(422, {"detail": error.detail})
        except UnknownRoom:
            return answer(404, {"detail": "Room not found"})
        except CommandRefused as error:
            return answer(409, {"detail": str(error), "code": error.code})
        except RoomTaken as error:
            return answer(409, {"detail": str(error)})
        except Forbidden as error:
            return answer(403, {"detail": str(error)})
        except TooManyRooms as error:
            return answer(429, {"detail": str(error)})
        except BadSignal as error:
            return answer(error.status, {"detail": ""})

    return route


class RoomEndpoints:
    """What both services have, told apart by ``kind``."""

    def __init__(self, kind: Kind, table: RoomTable, cleanup: Cleanup):
        self.kind = kind
        self.table = table
        self.cleanup = cleanup

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            ("GET", "/workspaces/<workspace:str>/rooms", self.index, KeyRole.VIEWER),
            ("POST", "/workspaces/<workspace:str>/rooms", self.create, KeyRole.OPERATOR),
            ("GET", ROOM, self.get, KeyRole.VIEWER),
            ("DELETE", ROOM, self.delete, KeyRole.OPERATOR),
            ("GET", f"{ROOM}/state", self.state, KeyRole.VIEWER),
            ("GET", "/status", self.status, KeyRole.VIEWER),
            ("GET", "/health", self.health, None),
            ("GET", "/cleanup/status", self.cleanup_status, KeyRole.ADMIN),
            ("POST", "/cleanup/manual", self.clean, KeyRole.ADMIN),
        ]

    def index(self, request: Request, workspace: str) -> views.Answer:
        """The rooms of a workspace."""
        return views.listing(self.table, self.kind, workspace, lambda room: caller_of(request).sees(room.owner))

    def create(self, request: Request, workspace: str) -> views.Answer:
        """Make a room, with an id of the caller's or of ours."""
        read_workspace(workspace)
        new = read_optional_body(NEW_ROOM[self.kind], request.body)
        place = Place(self.kind, workspace, (new and new.room_id) or str(uuid.uuid4()))
        caller, there = caller_of(request), self.table.rooms.get(place)
        if there is not None and not caller.sees(there.owner):
            raise RoomTaken(f"room {place.room} of workspace {workspace} is somebody else's; choose another id")
        self.table.create(
            place,
            time.monotonic(),
            config=new.config if isinstance(new, NewVideoRoom) else None,
            consumer_limit=new.consumer_limit if new else None,
            # One that is made anew stays whose it was.
            owner=caller.owner if there is None else there.owner,
            claim=claim_of(request),
        )
        return views.created(place)

    def get(self, request: Request, workspace: str, room: str) -> views.Answer:
        """One room."""
        return views.found(room_of(self.table, request, Place(self.kind, workspace, room)))

    def delete(self, request: Request, workspace: str, room: str) -> views.Answer:
        """Remove a room."""
        place = Place(self.kind, workspace, room)
        room_of(self.table, request, place)
        perform(self.table.delete(place, claim_of(request)))
        return views.deleted(place)

    def state(self, request: Request, workspace: str, room: str) -> views.Answer:
        """One room and what passed through it."""
        return views.state(room_of(self.table, request, Place(self.kind, workspace, room)), timestamp())

    def status(self, request: Request) -> views.Answer:
        """Counts of the service."""
        return views.status(self.table, self.kind, self.cleanup.figures)

    def health(self, request: Request) -> views.Answer:
        """That the service answers."""
        return {"status": "healthy", "service": str(self.kind)}

    def cleanup_status(self, request: Request) -> views.Answer:
        """How old every room is."""
        status = views.cleanup_status(self.table, self.kind, self.cleanup.figures, time.monotonic(), timestamp())
        return {"success": True, "cleanup_status": status}

    def clean(self, request: Request) -> views.Answer:
        """Remove idle rooms now."""
        before = sum(place.kind is self.kind for place in self.table.rooms)
        return views.cleaned(before, len(self.cleanup.clean(self.kind)), timestamp())


class CommandEndpoint:
    """Joints set over REST, which only the robotics service has."""

    def __init__(self, table: RoomTable):
        self.table = table

    def routes(self) -> list[Route]:
        """The one."""
        return [("POST", f"{ROOM}/command", self.command, KeyRole.OPERATOR)]

    def command(self, request: Request, workspace: str, room: str) -> views.Answer:
        """Set joints; consumers hear of those that changed."""
        body = read_body(Command, request.body)
        place = Place(Kind.ROBOTICS, workspace, room)
        room_of(self.table, request, place)
        try:
            joints = tuple(joint.model_dump() for joint in body.joints)
            count, effects = conversation.command(self.table, place, joints, time.monotonic(), claim_of(request))
        except wire.WireError as error:
            raise Unprocessable([{"type": "too_long", "loc": ["body", "joints"], "msg": str(error)}]) from error
        perform(effects)
        return views.commanded(place, count)


class SignalEndpoint:
    """WebRTC signals, which only the video service relays."""

    def __init__(self, table: RoomTable):
        self.table = table

    def routes(self) -> list[Route]:
        """The signal and the service's banner."""
        return [
            ("POST", f"{ROOM}/webrtc/signal", self.signal, KeyRole.VIEWER),
            ("GET", "/", self.banner, None),
        ]

    def signal(self, request: Request, workspace: str, room: str) -> views.Answer:
        """Pass one signal on to the other peer."""
        body = read_body(Signal, request.body)
        place = Place(Kind.VIDEO, workspace, room)
        self._check_claim(request, place, body.client_id)
        try:
            reply, effects = signalling.relay(self.table, place, body.client_id, body.message)
        except UnknownRoom as error:
            raise BadSignal(400) from error
        except signalling.BrokenSignal as error:
            raise BadSignal(500) from error
        perform(effects)
        return views.signalled(place, reply)

    def _check_claim(self, request: Request, place: Place, client_id: str) -> None:
        """Signals are posted beside the socket: only the key that joined may speak for a participant."""
        caller = caller_of(request)
        room = self.table.rooms.get(place)
        if room is not None and not caller.sees(room.owner):
            raise BadSignal(400)  # as for a room that is not there
        seat = self.table.claimed(place, client_id)
        if seat is not None and seat.by not in (None, caller.name) and caller.role < KeyRole.ADMIN:
            raise Forbidden(f"participant {client_id} came with another key")

    def banner(self, request: Request) -> views.Answer:
        """What there is."""
        return views.BANNER


def claim_of(request: Request) -> str | None:
    """The secret of the session that sends this, if one does."""
    return request.headers.get(CLAIM)


def room_of(table: RoomTable, request: Request, place: Place) -> Room:
    """The room there.

    Raises:
        UnknownRoom: there is none, or it is somebody else's: which of the two is not told.
    """
    room = table.get(place)
    if not caller_of(request).sees(room.owner):
        raise UnknownRoom(f"no {place.kind} room {place.room!r} in workspace {place.workspace!r}")
    return room


NEW_ROOM: dict[Kind, type[NewRoom]] = {Kind.ROBOTICS: NewRoboticsRoom, Kind.VIDEO: NewVideoRoom}

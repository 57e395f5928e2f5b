"""The REST calls of the transport server: read the request, ask the room table, answer in the wire's own forms."""

import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

from sanic import HTTPResponse, Request

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
from service.transport.rooms import Place, RoomTable, TooManyRooms, UnknownRoom
from service.transport.sockets import perform, timestamp

Handler = Callable[..., views.Answer]
Route = tuple[str, str, Handler]  # method, path under the service, what answers
ROOM = "/workspaces/<workspace:str>/rooms/<room:str>"


class BadSignal(Exception):
    """A signal that cannot be relayed, with the status the wire has for it; these two answers give no reason."""

    def __init__(self, status: int):
        super().__init__(f"signal answered with {status}")
        self.status = status


def answer(status: int, body: object) -> HTTPResponse:
    """A JSON answer; never with a number that JSON does not have."""
    return HTTPResponse(wire.encode(body), status=status, content_type="application/json")


def endpoint(handle: Handler) -> Callable[..., Coroutine[Any, Any, HTTPResponse]]:
    """A handler as a Sanic route: path parts are unquoted, refusals become the wire's error forms."""

    async def route(request: Request, **parts: str) -> HTTPResponse:
        try:
            return answer(200, handle(request, **{name: unquote(part) for name, part in parts.items()}))
        except Unprocessable as error:
            return answer(422, {"detail": error.detail})
        except UnknownRoom:
            return answer(404, {"detail": "Room not found"})
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
            ("GET", "/workspaces/<workspace:str>/rooms", self.index),
            ("POST", "/workspaces/<workspace:str>/rooms", self.create),
            ("GET", ROOM, self.get),
            ("DELETE", ROOM, self.delete),
            ("GET", f"{ROOM}/state", self.state),
            ("GET", "/status", self.status),
            ("GET", "/health", self.health),
            ("GET", "/cleanup/status", self.cleanup_status),
            ("POST", "/cleanup/manual", self.clean),
        ]

    def index(self, request: Request, workspace: str) -> views.Answer:
        """The rooms of a workspace."""
        return views.listing(self.table, self.kind, workspace)

    def create(self, request: Request, workspace: str) -> views.Answer:
        """Make a room, with an id of the caller's or of ours."""
        read_workspace(workspace)
        new = read_optional_body(NEW_ROOM[self.kind], request.body)
        place = Place(self.kind, workspace, (new and new.room_id) or str(uuid.uuid4()))
        self.table.create(
            place,
            time.monotonic(),
            config=new.config if isinstance(new, NewVideoRoom) else None,
            consumer_limit=new.consumer_limit if new else None,
        )
        return views.created(place)

    def get(self, request: Request, workspace: str, room: str) -> views.Answer:
        """One room."""
        return views.found(self.table.get(Place(self.kind, workspace, room)))

    def delete(self, request: Request, workspace: str, room: str) -> views.Answer:
        """Remove a room."""
        place = Place(self.kind, workspace, room)
        perform(self.table.delete(place))
        return views.deleted(place)

    def state(self, request: Request, workspace: str, room: str) -> views.Answer:
        """One room and what passed through it."""
        return views.state(self.table.get(Place(self.kind, workspace, room)), timestamp())

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
        return [("POST", f"{ROOM}/command", self.command)]

    def command(self, request: Request, workspace: str, room: str) -> views.Answer:
        """Set joints; consumers hear of those that changed."""
        body = read_body(Command, request.body)
        place = Place(Kind.ROBOTICS, workspace, room)
        try:
            count, effects = conversation.command(
                self.table, place, tuple(joint.model_dump() for joint in body.joints), time.monotonic()
            )
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
        return [("POST", f"{ROOM}/webrtc/signal", self.signal), ("GET", "/", self.banner)]

    def signal(self, request: Request, workspace: str, room: str) -> views.Answer:
        """Pass one signal on to the other peer."""
        body = read_body(Signal, request.body)
        place = Place(Kind.VIDEO, workspace, room)
        try:
            reply, effects = signalling.relay(self.table, place, body.client_id, body.message)
        except UnknownRoom as error:
            raise BadSignal(400) from error
        except signalling.BrokenSignal as error:
            raise BadSignal(500) from error
        perform(effects)
        return views.signalled(place, reply)

    def banner(self, request: Request) -> views.Answer:
        """What there is."""
        return views.BANNER


NEW_ROOM: dict[Kind, type[NewRoom]] = {Kind.ROBOTICS: NewRoboticsRoom, Kind.VIDEO: NewVideoRoom}

"""REST endpoints of rooms, and their JSON answers."""

import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

from sanic import HTTPResponse, Request

from service.auth.caller import Role as KeyRole
from service.auth.caller import caller_of
from service.errors import Forbidden
from service.transport import protocol
from service.transport.address import Kind
from service.transport.client.rest import CLAIM
from service.transport.protocol import Role
from service.transport.server import websocket
from service.transport.server.bodies import (
    Command,
    NewRoboticsRoom,
    NewRoom,
    NewVideoRoom,
    RecoveryPolicy,
    RobotType,
    Signal,
    Unprocessable,
    VideoEncoding,
    read_body,
    read_optional_body,
    read_workspace,
)
from service.transport.server.rooms import (
    Cleanup,
    CommandRefused,
    Place,
    Room,
    RoomTable,
    RoomTaken,
    TooManyRooms,
    UnknownRoom,
)
from service.transport.server.websocket import WriteQueue, perform, timestamp

VERSION = "2.0.0"
Answer = dict[str, Any]
Handler = Callable[..., Answer]
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
    return HTTPResponse(protocol.encode(body), status=status, content_type="application/json")


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


class Endpoints:
    """The calls of one service, told apart by ``kind``: rooms in both, commands in one, signals in the other."""

    def __init__(self, kind: Kind, table: RoomTable, cleanup: Cleanup):
        self.kind = kind
        self.table = table
        self.cleanup = cleanup

    def routes(self) -> list[Route]:
        """All of them."""
        own: list[Route] = [
            ("POST", f"{ROOM}/webrtc/signal", self.signal, KeyRole.VIEWER),
            ("GET", "/", self.banner, None),
        ]
        if self.kind is Kind.ROBOTICS:
            own = [("POST", f"{ROOM}/command", self.command, KeyRole.OPERATOR)]
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
            *own,
        ]

    def index(self, request: Request, workspace: str) -> Answer:
        """The rooms of a workspace that the caller may see; of one that nobody knows, none."""
        caller = caller_of(request)
        found = [room for room in self._rooms() if room.place.workspace == workspace and caller.sees(room.owner)]
        return {**_head(workspace), "rooms": [_row(room) for room in found], "total": len(found)}

    def create(self, request: Request, workspace: str) -> Answer:
        """Make a room, with an id of the caller's or of ours, or find it there already."""
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
        what = "Video room" if self.kind is Kind.VIDEO else "Room"
        message = f"{what} {place.room} created successfully in workspace {workspace}"
        return {**_head(workspace), "room_id": place.room, "message": message}

    def get(self, request: Request, workspace: str, room: str) -> Answer:
        """One room."""
        found = self._room(request, workspace, room)
        shown = {**_row(found), **_presence(found)}
        if self.kind is Kind.VIDEO:
            shown["config"] = _config(found)
        return {**self._head(workspace), "room": shown}

    def delete(self, request: Request, workspace: str, room: str) -> Answer:
        """Remove a room."""
        found = self._room(request, workspace, room)
        perform(self.table.delete(found.place, claim_of(request)))
        return {**self._head(workspace), "message": f"Room {room} deleted successfully from workspace {workspace}"}

    def state(self, request: Request, workspace: str, room: str) -> Answer:
        """One room and what passed through it; no frame ever passes a relay, so video has none to show."""
        found = self._room(request, workspace, room)
        shown: Answer = {"room_id": room, "workspace_id": workspace}
        if self.kind is Kind.ROBOTICS:
            shown |= {"joints": found.joints, "participants": _participants(found)}
        else:
            shown |= {"participants": _participants(found), "frame_count": 0, "last_frame_time": None}
            shown |= {"current_config": _config(found)}
        return {**self._head(workspace), "state": {**shown, "timestamp": timestamp()}}

    def status(self, request: Request) -> Answer:
        """Counts of the service."""
        rooms = self._rooms()
        head = {
            "service": str(self.kind),
            "status": "active",
            "workspaces_count": len({room.place.workspace for room in rooms}),
            "rooms_count": len(rooms),
        }
        counted = {"connections_count": self.table.connections(self.kind)}
        known = {"supported_robot_types": [str(robot) for robot in RobotType]}
        if self.kind is Kind.VIDEO:
            counted = {
                "webrtc_connections_count": 0,
                "websocket_connections_count": self.table.connections(self.kind),
            }
            known = {
                "supported_encodings": [str(encoding) for encoding in VideoEncoding],
                "recovery_policies": [str(policy) for policy in RecoveryPolicy],
            }
        cleanup = {
            "enabled": self.cleanup.is_running,
            "inactivity_timeout_hours": self.cleanup.idle / 3600,
            "cleanup_interval_minutes": self.cleanup.interval / 60,
        }
        roles = {"version": VERSION, "supported_roles": [str(role) for role in Role]}
        return {**head, **counted, **roles, **known, "cleanup": cleanup}

    def health(self, request: Request) -> Answer:
        """That the service answers."""
        return {"status": "healthy", "service": str(self.kind)}

    def cleanup_status(self, request: Request) -> Answer:
        """How old every room is."""
        now, idle, rows = time.monotonic(), self.cleanup.idle, []
        for room in self._rooms():
            is_occupied = self.table.is_occupied(room.place)
            rows.append(
                {
                    "workspace_id": room.place.workspace,
                    "room_id": room.place.room,
                    "age_minutes": (now - room.made_at) / 60,
                    "inactivity_minutes": (now - room.touched_at) / 60,
                    "has_connections": is_occupied,
                    "will_be_cleaned": not is_occupied and now - room.touched_at > idle,
                }
            )
        status = {
            "service": str(self.kind),
            "cleanup_enabled": self.cleanup.is_running,
            "inactivity_timeout_minutes": idle / 60,
            "cleanup_interval_minutes": self.cleanup.interval / 60,
            "total_rooms": len(rows),
            "rooms": rows,
            "timestamp": timestamp(),
        }
        return {"success": True, "cleanup_status": status}

    def clean(self, request: Request) -> Answer:
        """Remove idle rooms now."""
        before = len(self._rooms())
        removed = len(self.cleanup.clean(self.kind))
        result = {
            "cleanup_triggered": True,
            "rooms_before": before,
            "rooms_after": before - removed,
            "rooms_removed": removed,
            "timestamp": timestamp(),
        }
        return {"success": True, "cleanup_result": result}

    def command(self, request: Request, workspace: str, room: str) -> Answer:
        """Set joints; consumers hear of those that changed."""
        body = read_body(Command, request.body)
        place = self._room(request, workspace, room).place
        try:
            joints = tuple(joint.model_dump() for joint in body.joints)
            count, effects = websocket.publish_command(self.table, place, joints, time.monotonic(), claim_of(request))
        except protocol.WireError as error:
            raise Unprocessable([{"type": "too_long", "loc": ["body", "joints"], "msg": str(error)}]) from error
        perform(effects)
        done = {"joints_updated": count, "message": "Commands sent successfully"}
        return {**_head(workspace), "room_id": room, **done}

    def signal(self, request: Request, workspace: str, room: str) -> Answer:
        """Pass one WebRTC signal on to the other peer."""
        body = read_body(Signal, request.body)
        place = Place(self.kind, workspace, room)
        self._check_claim(request, place, body.client_id)
        try:
            reply, effects = websocket.relay_signal(self.table, place, body.client_id, body.message)
        except UnknownRoom as error:
            raise BadSignal(400) from error
        except websocket.BrokenSignal as error:
            raise BadSignal(500) from error
        perform(effects)
        if reply is None:  # it went nowhere
            return {**_head(workspace), "message": "Signal processed"}
        return {**_head(workspace), "response": {"success": True, "message": reply}}

    def banner(self, request: Request) -> Answer:
        """What there is."""
        return BANNER

    def _check_claim(self, request: Request, place: Place, client_id: str) -> None:
        """Signals are posted beside the socket: only the key that joined may speak for a participant."""
        caller = caller_of(request)
        room = self.table.rooms.get(place)
        if room is not None and not caller.sees(room.owner):
            raise BadSignal(400)  # as for a room that is not there
        seat = self.table.claimed(place, client_id)
        if seat is not None and seat.by not in (None, caller.name) and caller.role < KeyRole.ADMIN:
            raise Forbidden(f"participant {client_id} came with another key")

    def _rooms(self) -> list[Room]:
        return [room for place, room in self.table.rooms.items() if place.kind is self.kind]

    def _room(self, request: Request, workspace: str, room: str) -> Room:
        """The room there.

        Raises:
            UnknownRoom: there is none, or it is somebody else's: which of the two is not told.
        """
        found = self.table.get(Place(self.kind, workspace, room))
        if not caller_of(request).sees(found.owner):
            raise UnknownRoom(f"no {self.kind} room {room!r} in workspace {workspace!r}")
        return found

    def _head(self, workspace: str) -> Answer:
        # Only the video service repeats the workspace beside a room.
        return _head(workspace) if self.kind is Kind.VIDEO else {"success": True}


def claim_of(request: Request) -> str | None:
    """The secret of the session that sends this, if one does."""
    return request.headers.get(CLAIM)


NEW_ROOM: dict[Kind, type[NewRoom]] = {Kind.ROBOTICS: NewRoboticsRoom, Kind.VIDEO: NewVideoRoom}
BANNER: Answer = {
    "status": "active",
    "service": "video",
    "message": "Video service running with workspace-scoped room-based WebRTC streaming",
    "version": VERSION,
    "architecture": "workspace/producer/consumer rooms",
    "endpoints": [
        "/video/workspaces/{workspace_id}/rooms - List all video rooms in workspace",
        "/video/workspaces/{workspace_id}/rooms/{room_id} - Get room details",
        "/video/workspaces/{workspace_id}/rooms/{room_id}/webrtc/signal - WebRTC signaling",
        "/video/workspaces/{workspace_id}/rooms/{room_id}/ws - WebSocket connection",
        "/video/status - Service status",
        "/video/cleanup/status - Cleanup system status",
        "/video/cleanup/manual - Manual cleanup trigger",
    ],
}


def _head(workspace: str) -> Answer:
    return {"success": True, "workspace_id": workspace}


def _row(room: Room) -> Answer:
    row: Answer = {
        "id": room.place.room,
        "workspace_id": room.place.workspace,
        "participants": _participants(room),
    }
    if room.place.kind is Kind.ROBOTICS:
        return {**row, "joints_count": len(room.joints)}
    config = _config(room)
    del config["encoding"]
    return {**row, "frame_count": 0, "config": config, **_presence(room)}


def _participants(room: Room) -> Answer:
    total = len(room.consumers) + (room.producer is not None)
    return {"producer": room.producer, "consumers": list(room.consumers), "total": total}


def _presence(room: Room) -> Answer:
    return {"has_producer": room.producer is not None, "active_consumers": len(room.consumers)}


def _config(room: Room) -> Answer:
    config = room.config
    return {
        "resolution": config.resolution and dict(config.resolution),
        "framerate": config.framerate,
        "encoding": str(config.encoding or VideoEncoding.VP8),
        "bitrate": config.bitrate,
        "quality": config.quality,
    }

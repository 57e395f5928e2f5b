"""REST endpoints of rooms."""

import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

from sanic import HTTPResponse, Request

from service.auth.caller import Role, caller_of
from service.errors import Forbidden
from service.http.bodies import json_response
from service.transport import protocol
from service.transport.address import Kind
from service.transport.client.room_keys import CLAIM_HEADER
from service.transport.protocol import ParticipantRole
from service.transport.server import websocket
from service.transport.server.bodies import (
    CommandBody,
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
    Room,
    RoomPath,
    RoomTable,
    RoomTaken,
    TooManyRooms,
    UnknownRoom,
)
from service.transport.server.websocket import WriteQueue, perform_effects, timestamp

VERSION = "2.0.0"
JsonObject = dict[str, Any]
Handler = Callable[..., JsonObject]
# Method, path under the service, handler, and lowest role of a key (None: public).
Route = tuple[str, str, Handler, Role | None]
ROOM = "/workspaces/<workspace:str>/rooms/<room:str>"


class SignalRefused(Exception):
    """A signal that cannot be relayed; the answer has this status and no reason."""

    def __init__(self, status: int):
        super().__init__(f"signal answered with {status}")
        self.status = status


def create_route_handler(handler: Handler, queue: WriteQueue) -> Callable[..., Coroutine[Any, Any, HTTPResponse]]:
    """Create the Sanic handler of an endpoint, which unquotes path parts and converts refusals to error responses."""

    async def route(request: Request, **parts: str) -> HTTPResponse:
        try:
            answer = handler(request, **{name: unquote(part) for name, part in parts.items()})
            await queue.wait_written()  # Answer after the messages that the call caused are written.
            return json_response(answer)
        except Unprocessable as error:
            return json_response({"detail": error.detail}, 422)
        except UnknownRoom:
            return json_response({"detail": "Room not found"}, 404)
        except CommandRefused as error:
            return json_response({"detail": str(error), "code": error.code}, 409)
        except (RoomTaken, TooManyRooms, Forbidden) as error:
            return json_response({"detail": str(error)}, error.status)
        except SignalRefused as error:
            return json_response({"detail": ""}, error.status)

    return route


class RoomEndpoints:
    """REST endpoints of one service: rooms, and by ``kind`` commands or signals."""

    def __init__(self, kind: Kind, table: RoomTable, cleanup: Cleanup):
        self.kind = kind
        self.table = table
        self.cleanup = cleanup

    def routes(self) -> list[Route]:
        """Return the routes of this service."""
        own: list[Route] = [
            ("POST", f"{ROOM}/webrtc/signal", self.signal, Role.VIEWER),
            ("GET", "/", self.banner, None),
        ]
        if self.kind is Kind.ROBOTICS:
            own = [("POST", f"{ROOM}/command", self.command, Role.OPERATOR)]
        return [
            ("GET", "/workspaces/<workspace:str>/rooms", self.index, Role.VIEWER),
            ("POST", "/workspaces/<workspace:str>/rooms", self.create, Role.OPERATOR),
            ("GET", ROOM, self.get, Role.VIEWER),
            ("DELETE", ROOM, self.delete, Role.OPERATOR),
            ("GET", f"{ROOM}/state", self.state, Role.VIEWER),
            ("GET", "/status", self.status, Role.VIEWER),
            ("GET", "/health", self.health, None),
            *own,
        ]

    def index(self, request: Request, workspace: str) -> JsonObject:
        """List the visible rooms of a workspace; an unknown workspace has none."""
        caller = caller_of(request)
        rooms = [room for room in self._list_rooms() if room.path.workspace == workspace and caller.sees(room.owner)]
        return {**_workspace_head(workspace), "rooms": [_summarize_room(room) for room in rooms], "total": len(rooms)}

    def create(self, request: Request, workspace: str) -> JsonObject:
        """Create a room, with a new id if the caller gives none, or return the existing room."""
        read_workspace(workspace)
        new = read_optional_body(NEW_ROOM[self.kind], request.body)
        path = RoomPath(self.kind, workspace, (new and new.room_id) or str(uuid.uuid4()))
        caller, existing = caller_of(request), self.table.rooms.get(path)
        if existing is not None and not caller.sees(existing.owner):
            raise RoomTaken(f"room {path.room} of workspace {workspace} has another owner; choose another id")
        self.table.create(
            path,
            time.monotonic(),
            config=new.config if isinstance(new, NewVideoRoom) else None,
            consumer_limit=new.consumer_limit if new else None,
            # A recreated room keeps its owner.
            owner=caller.owner if existing is None else existing.owner,
            claim=claim_of(request),
        )
        what = "Video room" if self.kind is Kind.VIDEO else "Room"
        message = f"{what} {path.room} created successfully in workspace {workspace}"
        return {**_workspace_head(workspace), "room_id": path.room, "message": message}

    def get(self, request: Request, workspace: str, room: str) -> JsonObject:
        """Describe one room."""
        target = self._find_room(request, workspace, room)
        body = {**_summarize_room(target), **_describe_presence(target)}
        if self.kind is Kind.VIDEO:
            body["config"] = _describe_config(target)
        return {**self._head(workspace), "room": body}

    def delete(self, request: Request, workspace: str, room: str) -> JsonObject:
        """Delete a room."""
        target = self._find_room(request, workspace, room)
        perform_effects(self.table.delete(target.path, claim_of(request)))
        return {**self._head(workspace), "message": f"Room {room} deleted successfully from workspace {workspace}"}

    def state(self, request: Request, workspace: str, room: str) -> JsonObject:
        """Describe one room and its joints; a relay sees no video frames."""
        target = self._find_room(request, workspace, room)
        body: JsonObject = {"room_id": room, "workspace_id": workspace}
        if self.kind is Kind.ROBOTICS:
            body |= {"joints": target.joints, "participants": _describe_participants(target)}
        else:
            body |= {"participants": _describe_participants(target), "frame_count": 0, "last_frame_time": None}
            body |= {"current_config": _describe_config(target)}
        return {**self._head(workspace), "state": {**body, "timestamp": timestamp()}}

    def status(self, request: Request) -> JsonObject:
        """Return counts of rooms and connections, and the settings of the service."""
        rooms = self._list_rooms()
        head = {
            "service": str(self.kind),
            "status": "active",
            "workspaces_count": len({room.path.workspace for room in rooms}),
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
        roles = {"version": VERSION, "supported_roles": [str(role) for role in ParticipantRole]}
        return {**head, **counted, **roles, **known, "cleanup": cleanup}

    def health(self, request: Request) -> JsonObject:
        """Report that the service is running."""
        return {"status": "healthy", "service": str(self.kind)}

    def command(self, request: Request, workspace: str, room: str) -> JsonObject:
        """Set joints; consumers receive the changed joints."""
        body = read_body(CommandBody, request.body)
        target = self._find_room(request, workspace, room)
        target.touched_at = time.monotonic()
        try:
            joints = tuple(joint.model_dump() for joint in body.joints)
            count, effects = websocket.publish_joints(self.table, target, joints, "api", claim_of(request))
        except protocol.WireError as error:
            raise Unprocessable([{"type": "too_long", "loc": ["body", "joints"], "msg": str(error)}]) from error
        perform_effects(effects)
        result = {"joints_updated": count, "message": "Commands sent successfully"}
        return {**_workspace_head(workspace), "room_id": room, **result}

    def signal(self, request: Request, workspace: str, room: str) -> JsonObject:
        """Relay one WebRTC signal to the other peer."""
        body = read_body(Signal, request.body)
        path = RoomPath(self.kind, workspace, room)
        self._check_sender(request, path, body.client_id)
        try:
            reply, effects = websocket.relay_signal(self.table, path, body.client_id, body.message)
        except UnknownRoom as error:
            raise SignalRefused(400) from error
        except websocket.InvalidSignal as error:
            raise SignalRefused(500) from error
        perform_effects(effects)
        if reply is None:
            return {**_workspace_head(workspace), "message": "Signal processed"}
        return {**_workspace_head(workspace), "response": {"success": True, "message": reply}}

    def banner(self, request: Request) -> JsonObject:
        """Describe the service."""
        return BANNER

    def _check_sender(self, request: Request, path: RoomPath, client_id: str) -> None:
        """Refuse a signal with another key than the participant's socket."""
        caller = caller_of(request)
        room = self.table.rooms.get(path)
        if room is not None and not caller.sees(room.owner):
            raise SignalRefused(400)  # The same answer as for an unknown room.
        participant = self.table.find_sender(path, client_id)
        if participant is not None and participant.key_name not in (None, caller.name) and caller.role < Role.ADMIN:
            raise Forbidden(f"participant {client_id} came with another key")

    def _list_rooms(self) -> list[Room]:
        return [room for path, room in self.table.rooms.items() if path.kind is self.kind]

    def _find_room(self, request: Request, workspace: str, room: str) -> Room:
        """Return a room; raises UnknownRoom if it does not exist or the caller may not see it."""
        target = self.table.get(RoomPath(self.kind, workspace, room))
        if not caller_of(request).sees(target.owner):
            raise UnknownRoom(f"no {self.kind} room {room!r} in workspace {workspace!r}")
        return target

    def _head(self, workspace: str) -> JsonObject:
        # Only the video service repeats the workspace next to a room.
        return _workspace_head(workspace) if self.kind is Kind.VIDEO else {"success": True}


def claim_of(request: Request) -> str | None:
    """Return the secret of the session that sends this request, None without one."""
    return request.headers.get(CLAIM_HEADER)


NEW_ROOM: dict[Kind, type[NewRoom]] = {Kind.ROBOTICS: NewRoboticsRoom, Kind.VIDEO: NewVideoRoom}
BANNER: JsonObject = {
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
    ],
}


def _workspace_head(workspace: str) -> JsonObject:
    return {"success": True, "workspace_id": workspace}


def _summarize_room(room: Room) -> JsonObject:
    row: JsonObject = {
        "id": room.path.room,
        "workspace_id": room.path.workspace,
        "participants": _describe_participants(room),
    }
    if room.path.kind is Kind.ROBOTICS:
        return {**row, "joints_count": len(room.joints)}
    config = _describe_config(room)
    del config["encoding"]
    return {**row, "frame_count": 0, "config": config, **_describe_presence(room)}


def _describe_participants(room: Room) -> JsonObject:
    total = len(room.consumers) + (room.producer is not None)
    return {"producer": room.producer, "consumers": list(room.consumers), "total": total}


def _describe_presence(room: Room) -> JsonObject:
    return {"has_producer": room.producer is not None, "active_consumers": len(room.consumers)}


def _describe_config(room: Room) -> JsonObject:
    config = room.config
    return {
        "resolution": config.resolution and dict(config.resolution),
        "framerate": config.framerate,
        "encoding": str(config.encoding or VideoEncoding.VP8),
        "bitrate": config.bitrate,
        "quality": config.quality,
    }

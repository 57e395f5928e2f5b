"""What the REST calls of each service answer with, as the JSON it becomes."""

from collections.abc import Callable, Mapping
from typing import Any

from service.transport.address import Kind
from service.transport.bodies import RecoveryPolicy, RobotType, VideoEncoding
from service.transport.messages import Role
from service.transport.rooms import Place, Room, RoomTable

VERSION = "2.0.0"
Answer = dict[str, Any]


def listing(table: RoomTable, kind: Kind, workspace: str, is_shown: Callable[[Room], bool]) -> Answer:
    """All rooms of a workspace that are shown; of one that nobody knows, none."""
    rooms = [room for place, room in table.rooms.items() if place[:2] == (kind, workspace) and is_shown(room)]
    rows = [_row(room) for room in rooms]
    return {"success": True, "workspace_id": workspace, "rooms": rows, "total": len(rows)}


def created(place: Place) -> Answer:
    """A room was made, or was there already."""
    what = "Video room" if place.kind is Kind.VIDEO else "Room"
    return {
        "success": True,
        "workspace_id": place.workspace,
        "room_id": place.room,
        "message": f"{what} {place.room} created successfully in workspace {place.workspace}",
    }


def found(room: Room) -> Answer:
    """One room."""
    shown = {**_row(room), **_presence(room)}
    if room.place.kind is Kind.VIDEO:
        shown["config"] = _config(room)
    return {**_head(room.place), "room": shown}


def deleted(place: Place) -> Answer:
    """A room was removed."""
    return {**_head(place), "message": f"Room {place.room} deleted successfully from workspace {place.workspace}"}


def state(room: Room, timestamp: str) -> Answer:
    """One room and what passed through it; no frame ever passes a relay, so video has none to show."""
    shown: Answer = {"room_id": room.place.room, "workspace_id": room.place.workspace}
    if room.place.kind is Kind.ROBOTICS:
        shown |= {"joints": room.joints, "participants": _participants(room)}
    else:
        shown |= {"participants": _participants(room), "frame_count": 0, "last_frame_time": None}
        shown |= {"current_config": _config(room)}
    return {**_head(room.place), "state": {**shown, "timestamp": timestamp}}


def commanded(place: Place, count: int) -> Answer:
    """Joints were set; ``count`` of them differed from before."""
    return {
        "success": True,
        "workspace_id": place.workspace,
        "room_id": place.room,
        "joints_updated": count,
        "message": "Commands sent successfully",
    }


def signalled(place: Place, reply: str | None) -> Answer:
    """A signal was taken; ``reply`` says where it went, None that it went nowhere."""
    head = {"success": True, "workspace_id": place.workspace}
    if reply is None:
        return {**head, "message": "Signal processed"}
    return {**head, "response": {"success": True, "message": reply}}


def status(table: RoomTable, kind: Kind, cleanup: Mapping[str, float | bool]) -> Answer:
    """One service as a whole. ``cleanup``: see ``cleanup_status``."""
    places = [place for place in table.rooms if place.kind is kind]
    head = {
        "service": str(kind),
        "status": "active",
        "workspaces_count": len({place.workspace for place in places}),
        "rooms_count": len(places),
    }
    roles = {"version": VERSION, "supported_roles": [str(role) for role in Role]}
    tail = {
        "cleanup": {
            "enabled": cleanup["enabled"],
            "inactivity_timeout_hours": cleanup["idle"] / 3600,
            "cleanup_interval_minutes": cleanup["interval"] / 60,
        }
    }
    if kind is Kind.ROBOTICS:
        return {
            **head,
            "connections_count": table.connections(kind),
            **roles,
            "supported_robot_types": [str(robot) for robot in RobotType],
            **tail,
        }
    return {
        **head,
        "webrtc_connections_count": 0,
        "websocket_connections_count": table.connections(kind),
        **roles,
        "supported_encodings": [str(encoding) for encoding in VideoEncoding],
        "recovery_policies": [str(policy) for policy in RecoveryPolicy],
        **tail,
    }


def cleanup_status(
    table: RoomTable, kind: Kind, cleanup: Mapping[str, float | bool], now: float, timestamp: str
) -> Answer:
    """How old every room is. ``cleanup``: ``enabled``, and the seconds ``idle`` and ``interval``."""
    rows = []
    for place, room in table.rooms.items():
        if place.kind is not kind:
            continue
        is_occupied = table.is_occupied(place)
        rows.append(
            {
                "workspace_id": place.workspace,
                "room_id": place.room,
                "age_minutes": (now - room.made_at) / 60,
                "inactivity_minutes": (now - room.touched_at) / 60,
                "has_connections": is_occupied,
                "will_be_cleaned": not is_occupied and now - room.touched_at > cleanup["idle"],
            }
        )
    return {
        "service": str(kind),
        "cleanup_enabled": cleanup["enabled"],
        "inactivity_timeout_minutes": cleanup["idle"] / 60,
        "cleanup_interval_minutes": cleanup["interval"] / 60,
        "total_rooms": len(rows),
        "rooms": rows,
        "timestamp": timestamp,
    }


def cleaned(before: int, removed: int, timestamp: str) -> Answer:
    """Idle rooms were removed."""
    result = {
        "cleanup_triggered": True,
        "rooms_before": before,
        "rooms_after": before - removed,
        "rooms_removed": removed,
        "timestamp": timestamp,
    }
    return {"success": True, "cleanup_result": result}


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


def _head(place: Place) -> Answer:
    # Only the video service repeats the workspace beside what it answers.
    return {"success": True, "workspace_id": place.workspace} if place.kind is Kind.VIDEO else {"success": True}


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

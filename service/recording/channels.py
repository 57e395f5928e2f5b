"""The channels of a recording: topic, schema and the JSON of each message.

Pictures and events have the schemas that Foxglove knows (https://docs.foxglove.dev/docs/sdk/schemas); everything else
is flat enough to be plotted by its path, e.g. ``/joints.position.Rotation``.
"""

import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

IMAGE, LOG = "foxglove.CompressedImage", "foxglove.Log"
JOINTS, COMMANDS, TICKS, CHUNKS, EVENTS = "/joints", "/commands", "/ticks", "/chunks", "/events"
CAMERAS = "/cameras/"
INFO, WARNING, ERROR = 2, 3, 4
# The event that says what is to be done from here on, in words.
TASK = "task"

Json = dict[str, Any]

_TIME: Json = {
    "type": "object",
    "title": "time",
    "properties": {
        "sec": {"type": "integer", "minimum": 0},
        "nsec": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    },
}
_POSITION: Json = {"type": "object", "additionalProperties": {"type": "number"}}


def _schema(title: str, **properties: Json) -> Json:
    return {"title": title, "type": "object", "properties": {"timestamp": _TIME, **properties}}


# topic (or beginning of one) -> schema
SCHEMAS: Mapping[str, Json] = {
    CAMERAS: _schema(
        IMAGE,
        frame_id={"type": "string"},
        data={"type": "string", "contentEncoding": "base64"},
        format={"type": "string"},
    ),
    JOINTS: _schema("robojax.Joints", position=_POSITION),
    COMMANDS: _schema("robojax.Command", position=_POSITION, is_sent={"type": "boolean"}),
    TICKS: _schema(
        "robojax.Tick",
        since_last_ms={"type": "number", "description": "Since the tick before; 0 for the first."},
        hold={"type": "string", "description": "Why the robot is held; empty while it may move."},
    ),
    CHUNKS: _schema(
        "robojax.Chunk",
        seen_at=_TIME,
        age_ms={"type": "number", "description": "From the frames it belongs to until it was taken."},
        actions={"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    ),
    EVENTS: _schema(
        LOG,
        level={"type": "integer"},
        message={"type": "string"},
        name={"type": "string"},
        file={"type": "string"},
        line={"type": "integer"},
    ),
}


def camera_topic(camera: str) -> str:
    """Where the pictures of this camera are."""
    return f"{CAMERAS}{camera}"


def camera_of(topic: str) -> str | None:
    """The inverse; None for the topic of something else."""
    return topic.removeprefix(CAMERAS) if topic.startswith(CAMERAS) else None


def picture(at: int, camera: str, jpeg: bytes) -> bytes:
    """One frame; ``at`` is nanoseconds since 1970, here and below."""
    # Written by hand: encoding its text character by character would take longer than the picture itself.
    head = json.dumps({"timestamp": _time(at), "frame_id": camera, "format": "jpeg"}, separators=(",", ":"))
    return b"".join((head[:-1].encode(), b',"data":"', binascii.b2a_base64(jpeg, newline=False), b'"}'))


def position(at: int, names: Sequence[str], values: Sequence[float], **more: object) -> bytes:
    """Where joints are, or are sent."""
    return _json(at, position=dict(zip(names, values, strict=True)), **more)


def tick(at: int, since_last: float, hold: str | None) -> bytes:
    """That there was a tick."""
    return _json(at, since_last_ms=round(since_last * 1e3, 3), hold=hold or "")


def chunk(at: int, seen_at: int, actions: Sequence[Sequence[float]]) -> bytes:
    """A chunk that was taken."""
    return _json(at, seen_at=_time(seen_at), age_ms=round((at - seen_at) / 1e6, 3), actions=actions)


def event(at: int, level: int, code: str, text: str) -> bytes:
    """Something that happened: a stable code, and a text for people."""
    return _json(at, level=level, message=text, name=code, file="", line=0)


def _json(at: int, **fields: object) -> bytes:
    return json.dumps({"timestamp": _time(at), **fields}, separators=(",", ":"), allow_nan=False).encode()


def _time(at: int) -> dict[str, int]:
    return {"sec": at // 1_000_000_000, "nsec": at % 1_000_000_000}

"""Every call of the API as a value: what is sent, and how its answer is read. Nothing here opens a connection."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from robojax.client.address import session_path
from robojax.client.answers import (
    Action,
    Chunk,
    SessionStatus,
    read_action,
    read_chunk,
    read_status,
    read_statuses,
)
from robojax.client.errors import Garbled, Refused

T = TypeVar("T")
JSON, MSGPACK = "application/json", "application/msgpack"
# Seconds that loading and compiling a policy may take; the server gives a stalled download up before.
LOADED = 1800.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request.

    Attributes:
        read: makes the result of the answer's body.
        patience: seconds for the whole answer; the client's own when None.
        is_safe: whether it may be sent twice: it only tells something, or stops a robot. What moves one is never sent
            again.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience: float | None = None
    is_safe: bool = False


def plain(method: str, path: str, body: object = None, patience: float | None = None) -> Call[Any]:
    """A call with JSON in and out."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": JSON, "accept": JSON}
    return Call(method, path, lambda found: found, data, headers, patience, is_safe=method == "GET")


def sessions() -> Call[list[SessionStatus]]:
    """All sessions."""
    return Call("GET", "/sessions", read_statuses, is_safe=True)


def status(session_id: str) -> Call[SessionStatus]:
    """One session."""
    return Call("GET", session_path(session_id), read_status, is_safe=True)


def create(session_id: str, policy_path: str, transport_server_url: str, fields: Mapping[str, object]) -> Call[Any]:
    """A new session; the answer comes when its policy is loaded, or cannot be."""
    asked = {"session_id": session_id, "policy_path": policy_path, "transport_server_url": transport_server_url}
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    body = asked | {name: value for name, value in said.items() if value is not None}
    call = plain("POST", "/sessions", body, LOADED)
    # For a proxy in front of several servers, which cannot look into the body (deploy/proxy).
    return replace(call, headers={**call.headers, "x-robojax-session": quote(session_id, safe="")})


def move(session_id: str, what: str) -> Call[Any]:
    """start, stop or restart."""
    return plain("POST", session_path(session_id, f"/{what}"), patience=LOADED if what == "restart" else None)


def delete(session_id: str) -> Call[Any]:
    """Remove a session."""
    return plain("DELETE", session_path(session_id))


def emergency_stop(session_id: str | None, reason: str) -> Call[Any]:
    """Latch one session, or all of them."""
    path = "/debug/emergency_stop" if session_id is None else session_path(session_id, "/emergency_stop")
    return replace(plain("POST", path, {"reason": reason}), is_safe=True)


def reset(session_id: str) -> Call[Any]:
    """Take the latch off."""
    return plain("POST", session_path(session_id, "/reset", "/debug"))


def patch(session_id: str, changes: Mapping[str, object]) -> Call[Any]:
    """Change a session while it is there. Unlike elsewhere, None is sent: it means the default."""
    return plain("PATCH", session_path(session_id), dict(changes))


def act(session_id: str, seen: Mapping[str, object]) -> Call[Chunk]:
    """A chunk for an observation."""
    return _act(session_id, seen, "chunk", read_chunk)


def next_action(session_id: str, seen: Mapping[str, object]) -> Call[Action]:
    """The next action for an observation."""
    return _act(session_id, seen, "action", read_action)


def _act(session_id: str, seen: Mapping[str, object], want: str, read: Callable[[Any], T]) -> Call[T]:
    import msgpack

    body = msgpack.packb(dict(seen) | {"want": want})
    assert body is not None, "packb gives bytes"
    headers = {"content-type": MSGPACK, "accept": MSGPACK}
    return Call("POST", session_path(session_id, "/act"), read, body, headers)


def result(call: Call[T], status: int, headers: Mapping[str, str], body: bytes) -> T:
    """What the answer says.

    Raises:
        Refused: no.
        Garbled: nothing that can be read.
    """
    if not 200 <= status < 300:
        raise refusal(status, headers, body)
    return call.read(_decoded(headers.get("content-type", ""), body))


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """An answer that says no."""
    try:
        found = _decoded(headers.get("content-type", ""), body)
    except Garbled:
        found = None
    said = found if isinstance(found, dict) else {}
    detail, code = said.get("detail"), said.get("code")
    if isinstance(detail, list):
        code = code or "invalid"
        detail = "; ".join(_misfit(each) for each in detail)
    if not isinstance(detail, str) or not detail:
        detail = "it points elsewhere; give its final address" if 300 <= status < 400 else f"status {status}"
    try:
        wait = float(headers["retry-after"])
    except (KeyError, ValueError):
        wait = None
    return Refused(status, code if isinstance(code, str) else "", detail, wait)


def _misfit(one: Any) -> str:
    if not isinstance(one, dict):
        return str(one)
    place = ".".join(str(each) for each in one.get("loc", ()) if each != "body")
    return f"{place}: {one.get('msg')}" if place else str(one.get("msg"))


def _decoded(content_type: str, body: bytes) -> Any:
    if content_type.split(";")[0].strip().lower() == MSGPACK:
        import msgpack

        try:
            return msgpack.unpackb(body)
        except (ValueError, msgpack.exceptions.ExtraData, msgpack.exceptions.UnpackException) as error:
            raise Garbled("the server answered msgpack that cannot be read") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbled("the server answered no JSON; is this a robojax server?") from error

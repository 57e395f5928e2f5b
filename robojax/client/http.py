"""HTTP calls as values, and connections that send them.

Nobody is followed but a server of several that share a database, to the one of them that a session is on.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote, unquote, urlsplit

from robojax.client.answers import (
    Action,
    Chunk,
    SessionStatus,
    read_action,
    read_chunk,
    read_status,
    read_statuses,
)
from robojax.client.errors import Garbled, Refused, Unreachable, Unusable

USUAL = "http://127.0.0.1:8001"


def server_url(url: str | None) -> str:
    """The server's URL without a slash at its end; one on this machine when None.

    Raises:
        Unusable: it is no URL of a server.
    """
    url = (url or USUAL).rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Unusable(f"{url!r} is no URL ({error}); try {USUAL}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise Unusable(f"{url!r} is no URL of a server: it has to begin with http:// or https://; try {USUAL}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise Unusable(f"the URL of {parts.hostname} holds more than an address; give a key as key, or as ROBOJAX_KEY")
    return url


def credentials(key: str | None) -> dict[str, str]:
    """The header of a key or token, as given or as ROBOJAX_KEY says; empty without one.

    Raises:
        Unusable: it has characters that no key has.
    """
    sent = (key or os.environ.get("ROBOJAX_KEY") or "").strip()
    if not sent:
        return {}
    if not sent.isascii() or not sent.isprintable() or " " in sent:
        raise Unusable("the key has characters that no key has")
    # Bearer takes both keys and tokens.
    return {"authorization": f"Bearer {sent}"}


def session_path(session_id: str, rest: str = "", before: str = "") -> str:
    """The path of a session, or of something of it."""
    return f"{before}/sessions/{quote(session_id, safe='')}{rest}"


def socket_url(base: str, path: str, ticket: str | None = None) -> str:
    """The WebSocket's URL beside an http(s) one."""
    scheme, rest = base.split("://", 1)
    asked = "" if ticket is None else f"?ticket={quote(ticket, safe='')}"
    return f"{'wss' if scheme == 'https' else 'ws'}://{rest}{path}{asked}"


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


PATIENCE = 10.0
# Seconds before each further try of what may be sent twice. tenacity would be five lines less, for 30 ms at import and
# 6 us a call (this: 0.06); most other backoffs of robojax are states that outlive a call, for which it has nothing.
AGAIN = (0.1, 0.4)
# A connection that was idle for so long is not used again: the server may be closing it just now, and then nobody could
# say whether what was sent on it arrived.
IDLE = 4.0
# How a server says that a session is another one's (``service.api.redirects``).
MOVED = "on_another_server"


@dataclass(frozen=True)
class Answer:
    """What came back, whatever it says."""

    status: int
    headers: Mapping[str, str]
    body: bytes


# Where to send which call; what comes back goes in, or the Unreachable.
Steps: TypeAlias = Generator[tuple[str, Call[Any]], Answer, Answer]


class SessionServers:
    """Which of several servers each session is on. Sends nothing itself.

    A key is only sent to an address that the server which was named lists among those of its database, and that is of
    the same scheme: https is never left, and its certificates are looked at where it was asked for.

    Args:
        base: of the server that was named.
    """

    def __init__(self, base: str):
        self.base = base
        self._there: dict[str, str] = {}

    def of(self, session_id: str) -> str:
        """The URL to ask for a session."""
        return self._there.get(session_id, self.base)

    def ask(self, call: Call[Any]) -> Steps:
        """Send a call to where its session is."""
        named = re.match(r"(?:/debug)?/sessions/([^/?]+)", call.path)
        session_id = unquote(named[1]) if named else ""
        at = self.of(session_id)
        try:
            answer = yield at, call
        except Unreachable as error:
            if self._there.pop(session_id, None) is None or error.may_have_arrived:
                raise
            return (yield from self.ask(call))
        if at != self.base and (answer.status == 404 or _is_moved(answer)):
            del self._there[session_id]  # it is another one's meanwhile; nothing was done
            return (yield from self.ask(call))
        if session_id and _is_moved(answer) and (there := (yield from self._place(answer, call))) is not None:
            self._there[session_id] = there
            return (yield there, call)
        return answer

    def _place(self, answer: Answer, call: Call[Any]) -> Generator[tuple[str, Call[Any]], Answer, str | None]:
        """Where the answer points to, when that may be followed."""
        location = answer.headers.get("location", "")
        there = location.removesuffix(call.path)
        if there == location or urlsplit(there).scheme != urlsplit(self.base).scheme:
            return None
        told = yield self.base, plain("GET", "/cluster")
        try:
            front = json.loads(told.body)["front"]
            servers = [one["url"] for one in (front, *front["others"])]  # behind a proxy it may be any that answers
        except (ValueError, TypeError, KeyError):
            return None
        return there if there in [url + urlsplit(self.base).path for url in servers] else None


def _is_moved(answer: Answer) -> bool:
    if answer.status != 307:
        return False
    try:
        return json.loads(answer.body)["code"] == MOVED
    except (ValueError, TypeError, KeyError):
        return False


class Http:
    """Connections to a server, and to others that share its database."""

    def __init__(self, base: str, headers: dict[str, str], patience: float):
        # Imported here: `import robojax.client` is quick, and command lines are only as slow as what they do.
        import httpx2

        self.servers = SessionServers(base)
        self._patience, self._errors = patience, httpx2
        self._client = httpx2.Client(**options(httpx2, base, headers))

    def do(self, call: Call[T]) -> T:
        """The call's result."""
        for pause in AGAIN if call.is_safe else ():
            try:
                return self._once(call)
            except Unreachable:
                time.sleep(pause)
        return self._once(call)

    def close(self) -> None:
        """Close it."""
        self._client.close()

    def _once(self, call: Call[T]) -> T:
        steps = self.servers.ask(call)
        try:
            base, part = next(steps)
            while True:
                try:
                    answer = self._send(base, part)
                except Unreachable as error:
                    base, part = steps.throw(error)
                else:
                    base, part = steps.send(answer)
        except StopIteration as found:
            answer = found.value
        return result(call, answer.status, answer.headers, answer.body)

    def _send(self, base: str, call: Call[Any]) -> Answer:
        try:
            answer = self._client.request(
                call.method,
                base + call.path,
                content=call.body,
                headers=dict(call.headers),
                timeout=call.patience or self._patience,
            )
        except (self._errors.TransportError, self._errors.InvalidURL) as error:
            raise unreachable(self._errors, error, base, call) from error
        return Answer(answer.status_code, answer.headers, answer.content)


class AsyncHttp:
    """The same on an event loop."""

    def __init__(self, base: str, headers: dict[str, str], patience: float):
        import httpx2

        self.servers = SessionServers(base)
        self._patience, self._errors = patience, httpx2
        self._client = httpx2.AsyncClient(**options(httpx2, base, headers))

    async def do(self, call: Call[T]) -> T:
        """The call's result."""
        for pause in AGAIN if call.is_safe else ():
            try:
                return await self._once(call)
            except Unreachable:
                await asyncio.sleep(pause)
        return await self._once(call)

    async def close(self) -> None:
        """Close it."""
        await self._client.aclose()

    async def _once(self, call: Call[T]) -> T:
        steps = self.servers.ask(call)
        try:
            base, part = next(steps)
            while True:
                try:
                    answer = await self._send(base, part)
                except Unreachable as error:
                    base, part = steps.throw(error)
                else:
                    base, part = steps.send(answer)
        except StopIteration as found:
            answer = found.value
        return result(call, answer.status, answer.headers, answer.body)

    async def _send(self, base: str, call: Call[Any]) -> Answer:
        try:
            answer = await self._client.request(
                call.method,
                base + call.path,
                content=call.body,
                headers=dict(call.headers),
                timeout=call.patience or self._patience,
            )
        except (self._errors.TransportError, self._errors.InvalidURL) as error:
            raise unreachable(self._errors, error, base, call) from error
        return Answer(answer.status_code, answer.headers, answer.content)


def options(httpx2: Any, base: str, headers: dict[str, str]) -> dict[str, Any]:
    """What both clients are made with."""
    return {
        # Reading the certificates of the world takes 60 ms. Without https none is looked at.
        "verify": base.startswith("https://"),
        "headers": headers,
        # A robot's server is on this machine or network: a proxy from the environment has no business in between.
        "trust_env": False,
        # The key is for the server that was named and those that `SessionServers` finds, not for any other one.
        "follow_redirects": False,
        "limits": httpx2.Limits(keepalive_expiry=IDLE),
    }


def unreachable(httpx2: Any, error: Exception, base: str, call: Call[Any]) -> Unreachable:
    """A failure of the connection in words."""
    never = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout | httpx2.InvalidURL)
    why = "no answer in time" if isinstance(error, httpx2.TimeoutException) else str(error) or type(error).__name__
    if never:
        then = "start one with `robojax serve`, or give its URL"
        return Unreachable(f"no robojax server answers at {base}: {why}; {then}", why, may_have_arrived=False)
    doubt = "" if call.is_safe else "; it may have been done all the same, so look before you ask again"
    return Unreachable(f"{call.method} {call.path} at {base}: {why}{doubt}", why, may_have_arrived=True)

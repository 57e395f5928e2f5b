"""HTTP requests as values, and connections that send them.

A redirect is followed only between servers that share a database, to the server that a session is on.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote, urlsplit

from robojax.client.blocking import finish
from robojax.client.errors import InvalidArgument, ProtocolError, RequestRefused, ServerUnreachable
from robojax.client.fields import SessionFields

SERVER_VARIABLE, PORT_VARIABLE = "ROBOJAX_SERVER", "ROBOJAX_PORT"
USUAL = "http://127.0.0.1:8001"


def server_url(url: str | None) -> str:
    """Return the URL of the server without a slash at its end.

    Args:
        url: the server's URL. None: ROBOJAX_SERVER, else this machine at ROBOJAX_PORT, else at port 8001.

    Raises:
        InvalidArgument: the value is not the URL of a server.
    """
    url = (url or _default_url()).rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"{url!r} is not a URL ({error}); try {USUAL}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # urlsplit takes the host of "gpu-box:8001" for a scheme.
        suggestion = USUAL if "://" in url else f"http://{url}"
        raise InvalidArgument(
            f"{url!r} is not the URL of a server: it must begin with http:// or https://; try {suggestion}"
        )
    if port == 0:
        raise InvalidArgument(f"{url!r} has port 0, which means any free port; use the address that the server printed")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InvalidArgument(
            f"the URL of {parts.hostname} has more than an address; pass a key as key=..., or set ROBOJAX_KEY"
        )
    return url


def _default_url() -> str:
    if url := os.environ.get(SERVER_VARIABLE):
        return url
    if not (port := os.environ.get(PORT_VARIABLE)):
        return USUAL
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidArgument(
            f"{PORT_VARIABLE} is {port!r}, not a port; set a number from 1 to 65535, or {SERVER_VARIABLE}"
        )
    return f"http://127.0.0.1:{port}"


def credentials(key: str | None) -> dict[str, str]:
    """Return the Authorization header of a key or ROBOJAX_KEY, if any; raises InvalidArgument for bad characters."""
    sent = (key or os.environ.get("ROBOJAX_KEY") or "").strip()
    if not sent:
        return {}
    if not sent.isascii() or not sent.isprintable() or " " in sent:
        raise InvalidArgument("the key has invalid characters; a key has only visible ASCII characters without spaces")
    # Bearer takes both keys and tokens.
    return {"authorization": f"Bearer {sent}"}


def session_path(session_id: str, rest: str = "", before: str = "") -> str:
    """Return the path of a session, or of a resource of the session."""
    return f"{before}/sessions/{quote(session_id, safe='')}{rest}"


def socket_url(base: str, path: str, ticket: str | None = None) -> str:
    """Return the WebSocket URL of a path on an http(s) server."""
    scheme, rest = base.split("://", 1)
    query = "" if ticket is None else f"?ticket={quote(ticket, safe='')}"
    return f"{'wss' if scheme == 'https' else 'ws'}://{rest}{path}{query}"


T = TypeVar("T")
JSON, MSGPACK = "application/json", "application/msgpack"
# Seconds that loading and compiling a policy may take; the server aborts a stalled download earlier.
LOADED = 1800.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """Request and the reader of its response.

    Attributes:
        read: converts the decoded body of the response to the result.
        timeout: seconds for the whole response; None means the client's timeout.
        is_safe: whether the request may be sent twice, because it only reads or stops a robot. Requests that move a
            robot are sent once.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    is_safe: bool = False


def build_call(method: str, path: str, body: object = None, timeout: float | None = None) -> Call[Any]:
    """Return a request with a JSON body and a JSON response."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": JSON, "accept": JSON}
    return Call(method, path, lambda answer: answer, data, headers, timeout, is_safe=method == "GET")


def create(session_id: str, policy_path: str, transport_server_url: str, fields: Mapping[str, object]) -> Call[Any]:
    """Return the request for a new session, answered when its policy is ready; raises InvalidArgument."""
    for name in fields:
        if name not in SessionFields.__annotations__:
            from difflib import get_close_matches

            known = tuple(SessionFields.__annotations__)
            near = get_close_matches(name.lower().replace("-", "_"), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"a session has {', '.join(known)}."
            raise InvalidArgument(f"unknown field {name!r}; {hint} Nothing was sent.")
    required = {"session_id": session_id, "policy_path": policy_path, "transport_server_url": transport_server_url}
    body = required | {name: value for name, value in fields.items() if value is not None}
    call = build_call("POST", "/sessions", body, LOADED)
    # A proxy in front of several servers reads this header, because it does not read the body (deploy/proxy).
    return replace(call, headers={**call.headers, "x-robojax-session": quote(session_id, safe="")})


def emergency_stop(path: str, reason: str) -> Call[Any]:
    """Return the request to stop and latch one session or all sessions."""
    return replace(build_call("POST", path, {"reason": reason}), is_safe=True)


def act(session_id: str, observation: Mapping[str, object], want: str, read: Callable[[Any], T]) -> Call[T]:
    """Return the request for a chunk or for an action, with an observation."""
    import msgpack

    body = msgpack.packb(dict(observation) | {"want": want})
    assert body is not None, "packb gives bytes"
    headers = {"content-type": MSGPACK, "accept": MSGPACK}
    return Call("POST", session_path(session_id, "/act"), read, body, headers)


def read_result(call: Call[T], status: int, headers: Mapping[str, str], body: bytes) -> T:
    """Return the result of a response; raises RequestRefused for an error, ProtocolError for an unreadable response."""
    if not 200 <= status < 300:
        raise build_refusal(status, headers, body)
    return call.read(_decode_body(headers.get("content-type", ""), body))


def build_refusal(status: int, headers: Mapping[str, str], body: bytes) -> RequestRefused:
    """Return the exception of a response with an error status."""
    try:
        answer = _decode_body(headers.get("content-type", ""), body)
    except ProtocolError:
        answer = None
    problem = answer if isinstance(answer, dict) else {}
    detail, code = problem.get("detail"), problem.get("code")
    if isinstance(detail, list):
        code = code or "invalid"
        detail = "; ".join(_describe_field_error(error) for error in detail)
    if not isinstance(detail, str) or not detail:
        detail = "the server redirects; give its final address" if 300 <= status < 400 else f"status {status}"
    try:
        wait = float(headers["retry-after"])
    except (KeyError, ValueError):
        wait = None
    return RequestRefused(status, code if isinstance(code, str) else "", detail, wait)


def _describe_field_error(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    field = ".".join(str(part) for part in error.get("loc", ()) if part != "body")
    return f"{field}: {error.get('msg')}" if field else str(error.get("msg"))


def _decode_body(content_type: str, body: bytes) -> Any:
    if content_type.split(";")[0].strip().lower() == MSGPACK:
        import msgpack

        try:
            return msgpack.unpackb(body)
        except (ValueError, msgpack.exceptions.ExtraData, msgpack.exceptions.UnpackException) as error:
            raise ProtocolError("the response is not valid msgpack") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the response is not JSON; is this a robojax server?") from error


DEFAULT_TIMEOUT = 10.0
# Seconds before each further attempt of a request that may be sent twice.
RETRY_WAITS = (0.1, 0.4)
# Seconds after which an idle connection is not reused, because the server may close it while a request is sent.
IDLE = 4.0
# Error code of a response that redirects to the server of the session (``service.api.redirects``).
MOVED = "on_another_server"


class HttpConnections:
    """Connections to the named server (``base``), and to other servers that share its database.

    The key is sent only to addresses that the named server lists, and only with its scheme: a client that began with
    https never uses http, and verifies certificates. ``timeout`` is in seconds. If not ``is_async``, all calls block,
    and their coroutines never suspend.
    """

    def __init__(self, base: str, headers: dict[str, str], timeout: float, *, is_async: bool):
        # Imported here, because `import robojax.client` must be quick.
        import httpx2

        self.base = base
        self._urls: dict[str, str] = {}  # session id to the URL of its server
        self._timeout, self._errors, self._is_async = timeout, httpx2, is_async
        self._client: Any = (httpx2.AsyncClient if is_async else httpx2.Client)(
            **build_client_options(httpx2, base, headers)
        )

    async def close(self) -> None:
        """Close the connections."""
        await finish(self._client.aclose() if self._is_async else self._client.close())

    def get_url(self, session_id: str) -> str:
        """Return the URL of the server that a session is on."""
        return self._urls.get(session_id, self.base)

    async def send_call(self, call: Call[T]) -> T:
        """Send a request, repeated after failures if that is safe; return its result."""
        pauses = iter(RETRY_WAITS if call.is_safe else ())
        while True:
            try:
                answer = await self._ask(call)
            except ServerUnreachable:
                if (pause := next(pauses, None)) is None:
                    raise
                await finish((asyncio if self._is_async else time).sleep(pause))
            else:
                return read_result(call, answer.status_code, answer.headers, answer.content)

    async def _ask(self, call: Call[Any]) -> Any:
        """Send a request to the server of its session; return the response."""
        named = re.match(r"(?:/debug)?/sessions/([^/?]+)", call.path)
        session_id = unquote(named[1]) if named else ""
        at = self.get_url(session_id)
        try:
            answer = await self._send(at, call)
        except ServerUnreachable as error:
            if self._urls.pop(session_id, None) is None or error.may_have_arrived:
                raise
            return await self._ask(call)
        if at != self.base and (answer.status_code == 404 or _is_moved(answer)):
            self._urls.pop(session_id, None)  # The session is on another server now, and nothing was executed.
            return await self._ask(call)
        if session_id and _is_moved(answer) and (target := await self._find_redirect(answer, call)) is not None:
            self._urls[session_id] = target
            return await self._send(target, call)
        return answer

    async def _find_redirect(self, answer: Any, call: Call[Any]) -> str | None:
        """Return the URL of the server that the response redirects to, or None if the client must not follow it."""
        location = answer.headers.get("location", "")
        target = location.removesuffix(call.path)
        if target == location or urlsplit(target).scheme != urlsplit(self.base).scheme:
            return None
        cluster = await self._send(self.base, build_call("GET", "/cluster"))
        try:
            front = json.loads(cluster.content)["front"]
            # Behind a proxy, any of the servers may respond.
            servers = [server["url"] for server in (front, *front["others"])]
        except (ValueError, TypeError, KeyError):
            return None
        return target if target in [url + urlsplit(self.base).path for url in servers] else None

    async def _send(self, base: str, call: Call[Any]) -> Any:
        timeout = call.timeout or self._timeout
        try:
            response = self._client.request(
                call.method, base + call.path, content=call.body, headers=dict(call.headers), timeout=timeout
            )
            return await finish(response)
        except (self._errors.TransportError, self._errors.InvalidURL) as error:
            raise build_unreachable(self._errors, error, base, call) from error


def _is_moved(answer: Any) -> bool:
    if answer.status_code != 307:
        return False
    try:
        return json.loads(answer.content)["code"] == MOVED
    except (ValueError, TypeError, KeyError):
        return False


def build_client_options(httpx2: Any, base: str, headers: dict[str, str]) -> dict[str, Any]:
    """Return the options of both httpx clients."""
    return {
        # Loading the CA certificates takes 60 ms, and only https needs them.
        "verify": base.startswith("https://"),
        "headers": headers,
        # A robot's server is on this machine or network, so a proxy from the environment is not used.
        "trust_env": False,
        # Only the named server and servers that share its database may receive the key (`_find_redirect`).
        "follow_redirects": False,
        "limits": httpx2.Limits(keepalive_expiry=IDLE),
    }


def build_unreachable(httpx2: Any, error: Exception, base: str, call: Call[Any]) -> ServerUnreachable:
    """Return the exception of a failed connection."""
    is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout | httpx2.InvalidURL)
    why = "no response in time" if isinstance(error, httpx2.TimeoutException) else str(error) or type(error).__name__
    if is_unsent:
        start = f"start one with `robojax serve`, or set {SERVER_VARIABLE} to its URL"
        return ServerUnreachable(f"no robojax server answers at {base}: {why}; {start}", why, may_have_arrived=False)
    advice = "" if call.is_safe else "; the server may have executed the request, so check before you repeat it"
    return ServerUnreachable(f"{call.method} {call.path} at {base}: {why}{advice}", why, may_have_arrived=True)

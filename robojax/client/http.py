"""Calls over HTTP: connections that are kept, no proxies, nothing sent twice that moves a robot.

Nobody is followed but a server of several that share a database, to the one of them that a session is on.
"""

import asyncio
import json
import re
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from robojax.client.calls import Call, plain, result
from robojax.client.errors import Unreachable

T = TypeVar("T")
PATIENCE = 10.0
# Seconds before each further try of what may be sent twice. tenacity would be five lines less, for 30 ms at import and
# 6 us a call (this: 0.06); most other backoffs of robojax are states that outlive a call, for which it has nothing.
AGAIN = (0.1, 0.4)
# A connection that was idle for so long is not used again: the server may be closing it just now, and then nobody could
# say whether what was sent on it arrived.
IDLE = 4.0
# How a server says that a session is another one's (``service.cluster.redirects``).
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

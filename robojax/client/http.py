"""Calls over HTTP: one connection that is kept, no proxies, no redirects, nothing sent twice that moves a robot."""

import asyncio
import time
from typing import Any, TypeVar

from robojax.client.calls import Call, result
from robojax.client.errors import Unreachable

T = TypeVar("T")
PATIENCE = 10.0
# Seconds before each further try of what may be sent twice. tenacity would be five lines less, for 30 ms at import and
# 6 us a call (this: 0.06); most other backoffs of robojax are states that outlive a call, for which it has nothing.
AGAIN = (0.1, 0.4)
# A connection that was idle for so long is not used again: the server may be closing it just now, and then nobody could
# say whether what was sent on it arrived.
IDLE = 4.0


class Http:
    """A connection to one server."""

    def __init__(self, base: str, headers: dict[str, str], patience: float):
        # Imported here: `import robojax.client` is quick, and command lines are only as slow as what they do.
        import httpx2

        self._base, self._patience, self._errors = base, patience, httpx2
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
        try:
            answer = self._client.request(
                call.method,
                self._base + call.path,
                content=call.body,
                headers=dict(call.headers),
                timeout=call.patience or self._patience,
            )
        except (self._errors.TransportError, self._errors.InvalidURL) as error:
            raise unreachable(self._errors, error, self._base, call) from error
        return result(call, answer.status_code, answer.headers, answer.content)


class AsyncHttp:
    """The same on an event loop."""

    def __init__(self, base: str, headers: dict[str, str], patience: float):
        import httpx2

        self._base, self._patience, self._errors = base, patience, httpx2
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
        try:
            answer = await self._client.request(
                call.method,
                self._base + call.path,
                content=call.body,
                headers=dict(call.headers),
                timeout=call.patience or self._patience,
            )
        except (self._errors.TransportError, self._errors.InvalidURL) as error:
            raise unreachable(self._errors, error, self._base, call) from error
        return result(call, answer.status_code, answer.headers, answer.content)


def options(httpx2: Any, base: str, headers: dict[str, str]) -> dict[str, Any]:
    """What both clients are made with."""
    return {
        # Reading the certificates of the world takes 60 ms. Without https, and without redirects, none is looked at.
        "verify": base.startswith("https://"),
        "headers": headers,
        # A robot's server is on this machine or network: a proxy from the environment has no business in between.
        "trust_env": False,
        # The key is for the server that was named, not for whatever that one points to.
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

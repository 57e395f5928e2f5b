"""Posts one event to one URL: signed, to a checked address, without redirects, in bounded time."""

import asyncio
import socket
import time
from collections.abc import Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from hooks.errors import UnsafeTarget
from hooks.limits import begin
from hooks.sending.outcome import MAX_READ, Destination, Outcome, Parcel, excerpt
from hooks.sending.schedule import retry_after
from hooks.sending.targets import Resolve, TargetRules
from hooks.signatures import sign_standard

RESOLVE_WITHIN = 5.0


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host.

    The thread is a daemon, as an unanswered question to a name server can take half a minute, and a server that ends
    would wait for the threads of the loop's own pool.

    Raises:
        OSError: there is no such host, or nobody said so in time (``TimeoutError``).
    """
    try:
        async with asyncio.timeout(RESOLVE_WITHIN):
            found = await asyncio.wrap_future(begin(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    except UnicodeError:
        raise OSError(f"{host!r} is no name of a host") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class PinnedResolver(AbstractResolver):
    """Knows one host, by addresses that were checked; a connection goes to them and nowhere else."""

    def __init__(self, host: str, addresses: Sequence[str]):
        self._host = host
        self._addresses = tuple(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The pinned addresses."""
        if host.rstrip(".") != self._host.rstrip("."):
            raise OSError(f"asked for {host!r}, pinned to {self._host!r}")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing is open."""


TIMEOUT = 12.0
# The status is the answer; what else the target has to say is only for the log.
BODY_PATIENCE = 2.0


class PostCourier:
    """Delivers by HTTP POST.

    Attributes:
        timeout: seconds for one attempt, with the name looked up and the connection made.
    """

    def __init__(self, rules: TargetRules, *, timeout: float = TIMEOUT, resolve: Resolve = resolve):
        self.timeout = timeout
        self._rules = rules
        self._resolve = resolve

    async def deliver(self, destination: Destination, parcel: Parcel, now: float) -> Outcome:
        """Post it; what goes wrong is in the outcome."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout):
                status, asked, kept = await self._post(destination, parcel, now)
        except TimeoutError:
            return Outcome(error=f"no answer within {self.timeout:g} s", seconds=time.monotonic() - began)
        except UnsafeTarget as error:
            return Outcome(error=str(error), seconds=time.monotonic() - began)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Outcome(error=_reason(error), seconds=time.monotonic() - began)
        return Outcome(
            status=status,
            excerpt=excerpt(kept, (destination.secret,)),
            asked=retry_after(asked, now),
            seconds=time.monotonic() - began,
        )

    async def _post(self, destination: Destination, parcel: Parcel, now: float) -> tuple[int, str | None, bytes]:
        assert destination.url is not None
        target = self._rules.parse(destination.url)
        addresses = await self._rules.resolve(target, self._resolve)
        # A connection of its own, and none kept: the next attempt looks the name up again and is checked again.
        connector = aiohttp.TCPConnector(
            resolver=PinnedResolver(target.host, addresses), use_dns_cache=False, force_close=True
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            session.post(
                target.url, data=parcel.body, headers=headers(destination, parcel, now), allow_redirects=False
            ) as answer,
        ):
            kept = b""
            try:
                async with asyncio.timeout(BODY_PATIENCE):
                    while len(kept) < MAX_READ and (more := await answer.content.read(MAX_READ - len(kept))):
                        kept += more
            except (TimeoutError, aiohttp.ClientError):
                pass  # it answered; see BODY_PATIENCE
            return answer.status, answer.headers.get("Retry-After"), kept


def headers(destination: Destination, parcel: Parcel, now: float) -> dict[str, str]:
    """What goes with a body: the Hub's ``X-Webhook-Secret``, and a signature of Standard Webhooks.

    Args:
        now: seconds since 1970; each attempt is signed anew, as receivers refuse old ones.
    """
    given = {
        "Content-Type": "application/json",
        "User-Agent": "robojax-webhooks",
        "Webhook-Id": parcel.id,
        "Webhook-Timestamp": str(int(now)),
    }
    if destination.secret:
        given["Webhook-Signature"] = sign_standard(destination.secret, parcel.id, int(now), parcel.body)
        given["X-Webhook-Secret"] = destination.secret
    return given


def _reason(error: BaseException) -> str:
    """In words that name neither a file nor a piece of code."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "the target's certificate cannot be verified"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the target closed the connection without an answer"
    if isinstance(error, OSError):
        return f"no connection: {error.strerror or type(error).__name__}"
    return f"no HTTP answer ({type(error).__name__})"

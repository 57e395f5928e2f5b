"""Names to addresses, in a thread that nobody has to wait for."""

import asyncio
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

from hooks.limits import begin

PATIENCE = 5.0


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host.

    The thread is a daemon, as an unanswered question to a name server can take half a minute, and a server that ends
    would wait for the threads of the loop's own pool.

    Raises:
        OSError: there is no such host, or nobody said so in time (``TimeoutError``).
    """
    try:
        async with asyncio.timeout(PATIENCE):
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

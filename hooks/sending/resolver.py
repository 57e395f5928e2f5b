"""Names to addresses, in a thread that nobody has to wait for."""

import asyncio
import socket
import threading
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

PATIENCE = 5.0


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host.

    The thread is a daemon, as an unanswered question to a name server can take half a minute, and a server that ends
    would wait for the threads of the loop's own pool.

    Raises:
        OSError: there is no such host, or nobody said so in time (``TimeoutError``).
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[str] | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: list[str] | OSError
        try:
            told = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(address[0]) for *_, address in told))
        except UnicodeError:
            found = OSError(f"{host!r} is no name of a host")
        except OSError as error:
            found = error
        try:
            loop.call_soon_threadsafe(tell, found)
        except RuntimeError:
            # The loop has ended, and whoever waited with it.
            if not loop.is_closed():
                raise

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    async with asyncio.timeout(PATIENCE):
        return await answer


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

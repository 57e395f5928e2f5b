"""Public address of a local server, through an installed tunnel program."""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from hooks.errors import TunnelFailed

logger = logging.getLogger(__name__)

COMMAND = "ROBOJAX_WEBHOOKS_TUNNEL"
# Command lines with {url}, {host} and {port} of the local server, in the order of preference.
KNOWN_COMMANDS = (
    ("cloudflared", "tunnel", "--no-autoupdate", "--url", "{url}"),
    ("ngrok", "http", "{url}", "--log", "stdout", "--log-format", "logfmt"),
)
# The address in the output of a program: the first group, or the whole match. Tunnel services greet with links to their
# own pages; only the address of a tunnel has a name of its own in front.
PATTERNS = {
    "cloudflared": r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com",
    "ngrok": r"\burl=(https://[^\s\"]+)",
    "ssh": r"https://[\w-]+\.(?:lhr\.life|lhr\.rocks|serveo\.net|serveousercontent\.com|[\w.-]*pinggy\.\w+)",
}
ANY_ADDRESS = r"https?://[^\s\"'<>]+"
ADDRESS_TIMEOUT = 30.0  # seconds in which the program has to print an address
END_TIMEOUT = 5.0  # seconds between the request to end and the kill
LINES = 20  # lines of the output in an error's text


def choose_command(
    command: str | Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Choose the command of a tunnel, with ``{url}``, ``{host}`` and ``{port}`` of the local server.

    Args:
        command: command in place of ``cloudflared`` or ``ngrok``, e.g.
            ``ssh -o ExitOnForwardFailure=yes -R 80:{host}:{port} nokey@localhost.run``; ``ROBOJAX_WEBHOOKS_TUNNEL``
            does the same.

    Raises:
        TunnelFailed: no tunnel program is installed, or the command cannot be used.
    """
    command = command or environment.get(COMMAND)
    if not command:
        for known in KNOWN_COMMANDS:
            if shutil.which(known[0], path=environment.get("PATH")):
                return known
        raise TunnelFailed(
            "share=True wants a program that makes a public address, and neither cloudflared nor ngrok is installed; "
            f"install one, or set {COMMAND} to a command, e.g. "
            "'ssh -o ExitOnForwardFailure=yes -R 80:{host}:{port} nokey@localhost.run'"
        )
    try:
        arguments = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise TunnelFailed(f"the tunnel's command cannot be read: {error}") from None
    if not arguments or shutil.which(arguments[0], path=environment.get("PATH")) is None:
        raise TunnelFailed(f"the tunnel's program {arguments[:1]} is not installed; install it or name another one")
    return arguments


@asynccontextmanager
async def open_tunnel(
    command: Sequence[str],
    url: str,
    *,
    timeout: float = ADDRESS_TIMEOUT,
    on_end: Callable[[str], object] = logger.warning,
) -> AsyncIterator[str]:
    """Open a public address for ``url`` within this context.

    Args:
        timeout: seconds in which the program has to print an address.
        on_end: called with a text when the program ends by itself, because then the address is gone.

    Raises:
        TunnelFailed: the program printed no address; the text has the end of its output.
    """
    parts = urlsplit(url)
    values = {"{url}": url, "{host}": parts.hostname or "", "{port}": str(parts.port or "")}
    arguments = [re.sub(r"\{(?:url|host|port)\}", lambda found: values[found[0]], part) for part in command]
    name = Path(arguments[0]).name
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Ctrl-C in the terminal is for the server, which then ends the program.
        start_new_session=True,
    )
    output: deque[str] = deque(maxlen=LINES)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read_output(process, re.compile(PATTERNS.get(name, ANY_ADDRESS)), output, address))
    watching: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({address, reading}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            how = f"ended with {await process.wait()}" if reading.done() else f"printed no address within {timeout:g} s"
            last = "".join(f"\n    {line}" for line in output) or " nothing"
            raise TunnelFailed(f"{name} {how}; it said:{last}")
        watching = asyncio.create_task(_watch_process(process, name, address.result(), on_end))
        yield address.result()
    finally:
        if watching is not None:
            watching.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def _read_output(
    process: asyncio.subprocess.Process, pattern: re.Pattern[str], output: deque[str], address: asyncio.Future[str]
) -> None:
    """Read the program's output to its end, because a program with a full pipe would block."""
    assert process.stdout is not None
    rest = ""
    while part := await process.stdout.read(4096):
        *lines, rest = (rest + part.decode(errors="replace")).split("\n")
        for line in lines:
            output.append(line.strip()[:500])
            match = pattern.search(line)
            if match and not address.done():
                address.set_result((match[1] if match.groups() else match[0]).rstrip("/.,"))
        rest = rest[-4096:]


async def _watch_process(
    process: asyncio.subprocess.Process, name: str, address: str, on_end: Callable[[str], object]
) -> None:
    status = await process.wait()
    on_end(f"{name} ended with {status}: {address} does not lead here now. Start the server again for a new address.")

"""Public address of a local server, through an installed tunnel program."""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from hooks.errors import HooksError

logger = logging.getLogger(__name__)

COMMAND = "ROBOJAX_WEBHOOKS_TUNNEL"
# Command lines with {url}, {host} and {port} of the local server, in the order of preference.
KNOWN_COMMANDS = (
    ("cloudflared", "tunnel", "--no-autoupdate", "--url", "{url}"),
    ("ngrok", "http", "{url}", "--log", "stdout", "--log-format", "logfmt"),
)
# Tunnel programs also print links to the pages of their vendor, so each pattern matches only addresses of tunnels.
PATTERNS = {
    "cloudflared": r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com",
    "ngrok": r"(?<=\burl=)https://[^\s\"]+",
    "ssh": r"https://[\w-]+\.(?:lhr\.life|lhr\.rocks|serveo\.net|serveousercontent\.com|[\w.-]*pinggy\.\w+)",
}
ANY_ADDRESS = r"https?://[^\s\"'<>]+"
ADDRESS_TIMEOUT = 30.0  # seconds in which the program has to print an address
END_TIMEOUT = 5.0  # seconds between the request to end and the kill
LINES = 20  # lines of the output in an error's text


class TunnelFailed(HooksError):
    """The tunnel program did not give a public address."""


def choose_command(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Choose the command of the environment, or an installed program; raise ``TunnelFailed`` if none."""
    command = environment.get(COMMAND)
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
        arguments = tuple(shlex.split(command))
    except ValueError as error:
        raise TunnelFailed(f"the tunnel's command cannot be read: {error}") from None
    if not arguments or shutil.which(arguments[0], path=environment.get("PATH")) is None:
        raise TunnelFailed(f"the tunnel's program {arguments[:1]} is not installed; install it or name another one")
    return arguments


@asynccontextmanager
async def open_tunnel(command: Sequence[str], url: str, *, timeout: float = ADDRESS_TIMEOUT) -> AsyncIterator[str]:
    """Open a public address for ``url`` within this context; raise ``TunnelFailed`` without one in ``timeout`` s."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", str(parts.port or "")
    arguments = [part.replace("{url}", url).replace("{host}", host).replace("{port}", port) for part in command]
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
    try:
        await asyncio.wait({address, reading}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            how = f"ended with {await process.wait()}" if reading.done() else f"printed no address within {timeout:g} s"
            last = "".join(f"\n    {line}" for line in output) or " nothing"
            raise TunnelFailed(f"{name} {how}; it said:{last}")
        yield address.result()
    finally:
        reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()


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
            if not address.done() and (match := pattern.search(line)):
                address.set_result(match[0].rstrip("/.,"))
        rest = rest[-4096:]
    if address.done():
        logger.warning("the tunnel has ended: %s does not lead here now; start the server again", address.result())

"""Public address of a local server, through an installed tunnel program."""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hooks.errors import TunnelFailed

logger = logging.getLogger(__name__)

COMMAND, PATTERN = "ROBOJAX_WEBHOOKS_TUNNEL", "ROBOJAX_WEBHOOKS_TUNNEL_PATTERN"
WATCHER = Path(__file__).with_name("tunnel_watch.py")
ADDRESS_TIMEOUT = 8.0  # seconds in which the program may end by itself; longer than tunnel_watch takes to kill it
LINES = 20  # of its output, for an error's text


@dataclass(frozen=True)
class Program:
    """Tunnel program: its command line, and the pattern of the address in its output.

    Attributes:
        arguments: with ``{url}``, ``{host}`` and ``{port}`` of the local server.
        pattern: of a line of its output; the address is its first group, or all of it.
    """

    arguments: tuple[str, ...]
    pattern: str


CLOUDFLARED = Program(
    ("cloudflared", "tunnel", "--no-autoupdate", "--url", "{url}"), r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com"
)
NGROK = Program(("ngrok", "http", "{url}", "--log", "stdout", "--log-format", "logfmt"), r"\burl=(https://[^\s\"]+)")
# Such services greet with links to their own pages; an address of a tunnel has a name of its own in front.
SSH_PATTERN = r"https://[\w-]+\.(?:lhr\.life|lhr\.rocks|serveo\.net|serveousercontent\.com|[\w.-]*pinggy\.\w+)"
ANY_PATTERN = r"https?://[^\s\"'<>]+"


def choose_program(command: str | Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> Program:
    """Choose the tunnel program.

    Args:
        command: one to run instead of ``cloudflared`` or ``ngrok``, e.g.
            ``ssh -o ExitOnForwardFailure=yes -R 80:{host}:{port} nokey@localhost.run``; ``ROBOJAX_WEBHOOKS_TUNNEL``
            does the same, and ``ROBOJAX_WEBHOOKS_TUNNEL_PATTERN`` tells which part of its output is the address.

    Raises:
        TunnelFailed: nothing of that is installed, or the command or the pattern cannot be used.
    """
    command = command or environment.get(COMMAND)
    pattern = environment.get(PATTERN)
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise TunnelFailed(f"{PATTERN} is no regular expression: {error}") from None
    if command:
        try:
            arguments = tuple(shlex.split(command) if isinstance(command, str) else command)
        except ValueError as error:
            raise TunnelFailed(f"the tunnel's command cannot be read: {error}") from None
        if not arguments or shutil.which(arguments[0], path=environment.get("PATH")) is None:
            raise TunnelFailed(f"the tunnel's program {arguments[:1]} is not installed; install it or name another one")
        known = {"cloudflared": CLOUDFLARED.pattern, "ngrok": NGROK.pattern, "ssh": SSH_PATTERN}
        return Program(arguments, pattern or known.get(Path(arguments[0]).name, ANY_PATTERN))
    for program in (CLOUDFLARED, NGROK):
        if shutil.which(program.arguments[0], path=environment.get("PATH")):
            return Program(program.arguments, pattern or program.pattern)
    raise TunnelFailed(
        "share=True wants a program that makes a public address, and neither cloudflared nor ngrok is installed; "
        f"install one, or set {COMMAND} to a command, e.g. "
        "'ssh -o ExitOnForwardFailure=yes -R 80:{host}:{port} nokey@localhost.run'"
    )


@asynccontextmanager
async def open_tunnel(
    program: Program, url: str, *, timeout: float = 30.0, on_end: Callable[[str], object] = logger.warning
) -> AsyncIterator[str]:
    """Open a public address for ``url`` within this context.

    Args:
        timeout: seconds in which the program has to tell an address.
        on_end: told when the program ends before its time: the address is gone then.

    Raises:
        TunnelFailed: it told none; the text has the end of what it said.
    """
    parts = urlsplit(url)
    filled_arguments = {"{url}": url, "{host}": parts.hostname or "", "{port}": str(parts.port or "")}
    arguments = [
        re.sub(r"\{(?:url|host|port)\}", lambda found: filled_arguments[found[0]], part) for part in program.arguments
    ]
    name = Path(arguments[0]).name
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(WATCHER), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Ctrl-C in the terminal is for the server, which then ends the program.
        start_new_session=True,
    )
    output: deque[str] = deque(maxlen=LINES)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read_output(process, re.compile(program.pattern), output, address))
    watching: asyncio.Task[None] | None = None
    try:
        try:
            await asyncio.wait({address, reading}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                how = (
                    f"ended with {await process.wait()}"
                    if reading.done()
                    else f"printed no address within {timeout:g} s"
                )
                last = "".join(f"\n    {line}" for line in output) or " nothing"
                raise TunnelFailed(f"{name} {how}; it said:{last}")
            watching = asyncio.create_task(_watch_process(process, name, address.result(), on_end))
            yield address.result()
        finally:
            if watching is not None:
                watching.cancel()
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), ADDRESS_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def _read_output(
    process: asyncio.subprocess.Process, pattern: re.Pattern[str], output: deque[str], address: asyncio.Future[str]
) -> None:
    """Read the program's output to its end: a program whose pipe is full would block."""
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
    on_end(
        f"{name} ended with {status}: {address} does not lead here any more. Start the server again for a new address."
    )

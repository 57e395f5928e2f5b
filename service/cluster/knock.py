"""Whether a front that is silent in the cluster has ended: it may only have lost the cluster, and move its robots."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Literal

import aiohttp
from yarl import URL

from service.cluster.directory import Front

# On every answer of a front, so that one that has its address now is not taken for one that ended.
NAME = "x-robojax-front-name"
# Seconds that it gets to answer.
PATIENCE = 2.0

# ended: nothing listens there, or another front. answers: it lives. silent: whatever is there does not answer.
# unreachable: nothing is known. elsewhere: its address leads nowhere from this machine.
Found = Literal["ended", "answers", "silent", "unreachable", "elsewhere"]


async def knock(front: Front, machine: str) -> Found:
    """Ask a front's address whether it is there.

    Args:
        machine: `machine_of_loopback` of this process.
    """
    if _is_loopback(front.url) and front.machine != machine:
        return "elsewhere"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as client,
            client.get(f"{front.url}/health", allow_redirects=False) as answer,
        ):
            name = answer.headers.get(NAME)
            if name == front.name:
                return "answers"
            return "silent" if name is None else "ended"
    except aiohttp.ClientConnectorError as error:
        # Refused: its machine is there, and it is not.
        return "ended" if isinstance(error.os_error, ConnectionRefusedError) else "unreachable"
    except (aiohttp.ClientError, TimeoutError):
        return "silent"


def machine_of_loopback() -> str:
    """Tells apart what 127.0.0.1 is: one for each machine, and for each container with a network of its own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no /proc on this system
        return socket.gethostname()


def _is_loopback(url: str) -> bool:
    host = URL(url).host or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

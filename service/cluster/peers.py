"""What a server asks another one directly: whether it has ended, and that its robots stop."""

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
from yarl import URL

from service.cluster.session_table import Front
from service.errors import ServiceError

logger = logging.getLogger(__name__)

# On every answer of a server that shares its sessions, so that one that has its address now is not taken for one that
# ended.
NAME = "x-robojax-front-name"
# Who passed a stop on: it is not passed on again.
PASSED = "x-robojax-front"
# Seconds that one gets to say that it is there, and to stop.
PATIENCE = 2.0
STOPPING = 2.0

# ended: nothing listens there, or another server. answers: it lives. silent: whatever is there does not answer.
# unreachable: nothing is known. elsewhere: its address leads nowhere from this machine.
Found = Literal["ended", "answers", "silent", "unreachable", "elsewhere"]


class FrontLost(ServiceError):
    """The server that a session is on does not answer."""

    status = 502
    code = "front_lost"


async def probe(front: Front, machine: str) -> Found:
    """Ask a server's address whether it is there: one without a heartbeat may only have lost the database.

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


async def stop_session(front: Front, session_id: str, headers: Mapping[str, str], reason: str) -> tuple[int, Any]:
    """Have another server stop one robot of its own, in an emergency.

    Returns:
        Status and body of its answer.

    Raises:
        FrontLost: it does not answer, so it is not known whether the robot was stopped.
    """
    try:
        async with aiohttp.ClientSession() as client:
            return await _post(client, f"{front.url}/sessions/{session_id}/emergency_stop", headers, reason)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise FrontLost(
            f"the front {front.name}, on which this session is, does not answer ({type(error).__name__}): its robot is "
            "not known to be stopped; stop it beside it, or try again"
        ) from error


async def stop_all(fronts: Sequence[Front], headers: Mapping[str, str], reason: str) -> dict[str, Any]:
    """Have other servers stop all of their robots: which they stopped, and which servers are not known to have."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        answers = await asyncio.gather(
            *(_stop_all(client, front, headers, reason) for front in fronts), return_exceptions=True
        )
    told = [found for found in answers if not isinstance(found, BaseException)]
    failed = {
        front.name: str(found) or type(found).__name__
        for front, found in zip(fronts, answers, strict=True)
        if isinstance(found, BaseException)
    }
    for name, why in failed.items():
        logger.error("the robots of the front %s are not known to be stopped: %s", name, why)
    return {
        "stopped": [one for stopped, _ in told for one in stopped],
        "count": sum(count for _, count in told),
        "fronts_not_reached": failed,
    }


async def _stop_all(
    client: aiohttp.ClientSession, front: Front, headers: Mapping[str, str], reason: str
) -> tuple[list[str], int]:
    status, told = await _post(client, f"{front.url}/debug/emergency_stop", headers, reason)
    if status != 200:
        raise FrontLost(f"{status}: {told.get('detail')}")
    return list(told["stopped"]), int(told["count"])


async def _post(client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], reason: str) -> tuple[int, Any]:
    async with client.post(
        URL(url),
        json={"reason": reason},
        headers=headers,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=STOPPING),
    ) as found:
        return found.status, await found.json()


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

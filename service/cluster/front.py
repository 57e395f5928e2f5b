"""This front among the others of its cluster: what it tells the directory, and what it asks of it."""

import asyncio
import ipaddress
import json
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from yarl import URL

from service.auth.caller import Caller
from service.cluster.directory import Entry, Front, Told
from service.cluster.directory_actor import find_directory
from service.cluster.messages import Refused
from service.errors import MoveRefused, NotKept, ServiceError, SessionExists, UnknownSession
from service.sessions.request import NewSession
from service.sessions.session_record import SessionRecord, from_json
from service.sessions.sessions import Listed, Sessions

logger = logging.getLogger(__name__)

# Seconds between words to the directory; that it may take to answer; and sessions whose figures are told each time,
# besides those that changed.
PERIOD = 0.5
ANSWER = 3.0
TOLD = 8
# Seconds that a front which is said to be dead gets to prove the contrary.
KNOCK = 2.0


class Unreachable(ServiceError):
    """The directory of the cluster does not answer."""

    status = 503
    code = "no_directory"


class FrontLost(ServiceError):
    """The front that a session is on does not answer."""

    status = 502
    code = "front_lost"


class FrontOfCluster:
    """One front; there from the server's start to its stop.

    Args:
        name: tells fronts apart, and is the same after a restart.
        url: where the other fronts reach this one.
    """

    def __init__(self, name: str, url: str, sessions: Sessions):
        self.name, self.url = name, url
        self._sessions = sessions
        self._directory: Any = None
        self._heard = Told()
        self._machine = machine_of_loopback()
        self._told: dict[str, Entry] = {}
        self._spoken_of: set[str] = set()
        self._turn = 0
        self._life: asyncio.Task[None] | None = None
        self._beating = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self.trouble: str | None = None

    async def open(self) -> None:
        """Find the directory, and tell it what this front has; ends when it knows.

        What another front adopted while this one was away is not this one's any more.
        """
        self._directory = await asyncio.to_thread(find_directory)
        # Of this very front, whose own records of it are gone.
        for entry in await self._directory.of.remote(self.name):
            await self._take_in(entry)
        await self._beat()
        await asyncio.gather(*self._leaving)
        self._life = asyncio.create_task(self._run(), name="front")

    async def close(self) -> None:
        """Nothing more is told."""
        if self._life is not None:
            self._life.cancel()

    @property
    def others(self) -> Sequence[Front]:
        """Fronts that live, but for this one."""
        return [front for front in self._heard.fronts if front.name != self.name]

    @property
    def silent(self) -> Sequence[Front]:
        """Fronts that are not heard of in the cluster, and whose robots may move all the same."""
        return [front for front in self._heard.silent if front.name != self.name]

    # What it tells.

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self._beat()
            except (RayError, TimeoutError) as error:
                if self.trouble is None:
                    logger.warning("the directory of the cluster does not answer (%s)", type(error).__name__)
                self.trouble = "the directory of the cluster does not answer"
            except Exception:
                logger.exception("telling the directory failed")
            else:
                self.trouble = None

    async def tell(self) -> None:
        """Tell the directory now what changed: whoever is answered after this finds it there, if it answers at all."""
        try:
            await self._beat()
        except (RayError, TimeoutError) as error:
            logger.warning("the directory of the cluster was not told of a change (%s)", type(error).__name__)

    async def _beat(self) -> None:
        async with self._beating:
            listed = self._sessions.list()
            news = await self._news(listed)
            held = [session.id for session in listed]
            gone = sorted(self._spoken_of.difference(held))
            # Also where no answer comes: the directory may have heard of them.
            self._spoken_of.update(held)
            self._heard = await asyncio.wait_for(
                self._directory.beat.remote(self.name, self.url, held, news, gone, self._machine), ANSWER
            )
            self._spoken_of = set(held)
            self._told = {id: entry for id, entry in self._told.items() if id in held}
            self._told |= {entry.id: entry for entry in news}
            for session_id, front in self._heard.lost:
                logger.error("session %s was adopted by the front %s; it is given up here", session_id, front)
                # All robots are held at once, and no beat waits until one has left its rooms.
                task = asyncio.create_task(self._sessions.give_up(session_id), name=f"give up {session_id}")
                self._leaving.add(task)
                task.add_done_callback(self._has_left)
            for entry in self._heard.left:
                await self._take_in(entry)

    async def _take_in(self, entry: Entry) -> None:
        if not entry.record or any(session.id == entry.id for session in self._sessions.list()):
            return
        try:
            await self._sessions.take_in(from_json(entry.record), entry.latch)
        except SessionExists:
            pass  # its end is not over; it is looked at again
        except ValueError as error:
            logger.error("session %s of this front is %s", entry.id, error)
            self._spoken_of.add(entry.id)  # so that the directory forgets it, too

    def _has_left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def _news(self, listed: Sequence[Listed]) -> Sequence[Entry]:
        first, self._turn = self._turn, (self._turn + TOLD) % max(len(listed), 1)
        due = {(first + step) % len(listed) for step in range(TOLD)} if listed else set()
        news = []
        for number, session in enumerate(listed):
            entry, before = self._entry(session), self._told.get(session.id)
            if before is None or number in due or _standing(before) != _standing(entry):
                news.append(entry)
            await asyncio.sleep(0)  # ticks go first
        return news

    def _entry(self, session: Listed) -> Entry:
        record = self._sessions.record_of(session.id)
        status = vars(session.status())
        return Entry(
            id=session.id,
            front=self.name,
            owner=session.new.owner,
            record="" if record is None else record.as_json(),
            status=json.loads(json.dumps(status)),
            latch=session.latch,
        )

    # What it asks.

    async def claim(self, new: NewSession) -> None:
        """Take an id before a session of it is made.

        Raises:
            SessionExists: another front has one.
            NotKept: the directory does not answer.
        """
        try:
            found = await asyncio.wait_for(self._directory.claim.remote(self.name, new.session_id, new.owner), ANSWER)
        except (RayError, TimeoutError) as error:
            raise NotKept(
                "the directory of the cluster does not answer, so another front may have a session of this id; "
                "try again when it does"
            ) from error
        if isinstance(found, Refused):
            raise SessionExists(found.text)

    async def list(self, caller: Caller) -> list[dict[str, Any]]:
        """Status of the sessions of all other fronts that this caller may see, each with its front."""
        found: Sequence[Entry] = await self._ask("list")
        mine = {session.id for session in self._sessions.list()}
        return [
            status_of(entry)
            for entry in found
            if entry.front != self.name and entry.id not in mine and caller.sees(entry.owner)
        ]

    async def find(self, session_id: str) -> tuple[Entry, str | None] | None:
        """A session of another front, and where that is; None for where when it died."""
        found = await self._ask("find", session_id)
        return None if found is None or found[0].front == self.name else found

    async def adopt(self, session_id: str, caller: Caller, *, force: bool) -> Listed:
        """Take over a session whose front died; it is interrupted here, and moves nothing before it is restarted.

        Args:
            force: somebody has seen that the front's machine is off, where this cannot be found out from here.

        Raises:
            UnknownSession: there is none, for this caller.
            MoveRefused: its front lives, or may live.
            Unreachable: the directory does not answer.
        """
        found = await self._ask("find", session_id)
        if found is None or not caller.sees(found[0].owner):
            raise UnknownSession(f"Session {session_id} not found")
        entry, url = found
        is_own = entry.front == self.name  # as when the answer to an adoption was lost
        if is_own and any(session.id == session_id for session in self._sessions.list()):
            raise MoveRefused(f"session {session_id!r} is on this front already")
        if url is not None and not is_own:
            raise MoveRefused(f"session {session_id!r} is on the front {entry.front}, which lives")
        if not (force or is_own):
            await self._check_dead(entry.front)
        if entry.record:
            _read(entry)  # before anything is changed
        adopted = await self._ask("adopt", self.name, session_id)
        if isinstance(adopted, Refused):
            raise UnknownSession(adopted.text) if adopted.kind == "unknown" else MoveRefused(adopted.text)
        logger.warning("session %s of the front %s is adopted by %s", session_id, entry.front, caller.name)
        return await self._sessions.take_in(_read(adopted), adopted.latch)

    async def _check_dead(self, front: str) -> None:
        """A front that only lost its cluster still commands its robots, and two controllers never may."""
        known: Front | None = await self._ask("front", front)
        assert known is not None, "a front whose sessions are there is not forgotten"
        url, why = known.url, "answers"
        if _is_loopback(url) and known.machine != self._machine:
            raise MoveRefused(
                f"the front {front} is silent in the cluster, and its url {url} leads nowhere from this machine (set "
                'front_url there); look after it. When you have seen that it is off, adopt with {"force": true}'
            )
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=KNOCK)) as client,
                client.get(f"{url}/health", allow_redirects=False) as answer,
            ):
                found = answer.headers.get("x-robojax-front-name")
                if found is not None and found != front:
                    return  # another front has this address now
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                return  # its machine is there, and it is not
            why = "cannot be reached, which says nothing of whether it moves its robots"
        except (aiohttp.ClientError, TimeoutError):
            why = "does not answer, but its machine does or may"
        raise MoveRefused(
            f"the front {front} ({url}) is silent in the cluster, but it {why}; look after it. When you have seen that "
            'it is off, adopt with {"force": true}'
        )

    async def forget(self, session_id: str) -> None:
        """Delete a session whose front died.

        Raises:
            MoveRefused: its front lives.
        """
        refused = await self._ask("forget", session_id)
        if isinstance(refused, Refused):
            raise UnknownSession(refused.text) if refused.kind == "unknown" else MoveRefused(refused.text)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await asyncio.wait_for(getattr(self._directory, method).remote(*arguments), ANSWER)
        except (RayError, TimeoutError) as error:
            raise Unreachable("the directory of the cluster does not answer; try again when it does") from error

    def facts(self) -> dict[str, object]:
        """For the API; JSON-ready."""
        return {
            "name": self.name,
            "url": self.url,
            "others": [{"name": front.name, "url": front.url} for front in self.others],
            "silent": [{"name": front.name, "url": front.url} for front in self.silent],
            "trouble": self.trouble,
        }


def _read(entry: Entry) -> SessionRecord:
    try:
        return from_json(entry.record)
    except ValueError as error:
        raise MoveRefused(f"session {entry.id!r} is {error}; delete it") from error


def _standing(entry: Entry) -> tuple[object, ...]:
    return entry.record, entry.latch, entry.status.get("status"), entry.status.get("error_message")


def status_of(entry: Entry) -> dict[str, Any]:
    status = dict(entry.status)
    status["stats"] = {**status.get("stats", {}), "front": entry.front}
    return status


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

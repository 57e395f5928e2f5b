"""This front among the others of its cluster: what it tells the directory, and what it asks of it."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from service.auth.caller import Caller
from service.cluster.connection import NoAnswer, ask
from service.cluster.directory import LEASE, Entry, Front, Told
from service.cluster.directory_actor import find_directory
from service.cluster.knock import knock, machine_of_loopback
from service.cluster.messages import Refused
from service.engine.worker import call_in_thread
from service.errors import MoveRefused, NotKept, ServiceError, SessionExists, UnknownSession
from service.sessions.request import NewSession
from service.sessions.session_record import SessionRecord, from_json
from service.sessions.sessions import Listed, Sessions

logger = logging.getLogger(__name__)

# Seconds between words to the directory; that it may take to answer, and to begin; and sessions whose figures are told
# each time, besides those that changed; and that the end of a server waits for it.
PERIOD = 0.5
ANSWER = 3.0
FINDING = 60.0
TOLD = 8
LEAVING = 1.0


class Unreachable(ServiceError):
    """The directory of the cluster does not answer."""

    status = 503
    code = "no_directory"


class FrontLost(ServiceError):
    """The front that a session is on does not answer."""

    status = 502
    code = "front_lost"


class NameTaken(ServiceError):
    """Another server of the cluster has the name of this front."""

    status = 503
    code = "front_name_taken"


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
        self._process = uuid4().hex
        self._told: dict[str, Entry] = {}
        self._spoken_of: set[str] = set()
        self._turn = 0
        self._life: asyncio.Task[None] | None = None
        self._beating = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self.trouble: str | None = None

    async def open(self) -> None:
        """Find the directory, and tell it what this front has; ends when it knows.

        What another front adopted while this one was away is not this one's any more; what this one had, and has no
        record of, it takes in.

        Raises:
            NameTaken: another server has the name of this front, and lives.
        """
        self._directory = await call_in_thread(find_directory, "directory")
        await self._enter()
        if self._heard.left:
            await self._beat()  # of what it took in just now
        await asyncio.gather(*self._leaving)
        self._life = asyncio.create_task(self._run(), name="front")

    async def _enter(self) -> None:
        known: Front | None = await ask(self._directory, FINDING, "front", self.name)
        # Whatever listens at this front's own address is this process.
        if known is not None and known.url != self.url and await knock(known, self._machine) == "answers":
            raise NameTaken(
                f"another server has the name {self.name}, and answers at {known.url}; give each its own (--front-name)"
            )
        # One that was killed has its name for as long as the directory takes it to live.
        until = asyncio.get_running_loop().time() + LEASE + 2 * PERIOD
        while True:
            try:
                return await self._beat()
            except NameTaken:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(PERIOD)

    async def close(self) -> None:
        """Nothing more is told, and the name is free; the robots are held before."""
        if self._life is None:
            return
        self._life.cancel()
        try:
            await ask(self._directory, LEAVING, "leave", self.name, self._process)
        except NoAnswer as error:
            logger.warning("the directory of the cluster was not told of this front's end (%s)", error)

    def lost(self) -> None:
        """See `Connected.lost`."""
        self._directory = None

    async def found(self) -> None:
        """See `Connected.found`; the directory may be another one, which knows none of these sessions."""
        self._told = {}
        self._directory = await call_in_thread(find_directory, "directory")

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
            except NoAnswer as error:
                if self.trouble is None:
                    logger.warning("the directory of the cluster does not answer (%s)", error)
                self.trouble = "the directory of the cluster does not answer"
            except NameTaken as error:
                self._stand_back(str(error))
            except Exception:
                logger.exception("telling the directory failed")
            else:
                self.trouble = None

    async def tell(self) -> None:
        """Tell the directory now what changed: whoever is answered after this finds it there, if it answers at all."""
        try:
            await self._beat()
        except NoAnswer as error:
            logger.warning("the directory of the cluster was not told of a change (%s)", error)
        except NameTaken as error:
            self._stand_back(str(error))

    async def _beat(self) -> None:
        async with self._beating:
            listed = self._sessions.list()
            news = await self._news(listed)
            held = [session.id for session in listed]
            latches = {id: self._sessions.latch_of(id) for id in sorted(self._spoken_of.difference(held))}
            gone = {id: None if latch is None else latch.reason for id, latch in latches.items()}
            # Also where no answer comes: the directory may have heard of them.
            self._spoken_of.update(held)
            said = Front(self.name, self.url, machine=self._machine, life=self._process)
            heard = await ask(self._directory, ANSWER, "beat", said, held, news, gone)
            if isinstance(heard, Refused):
                raise NameTaken(heard.text)
            self._heard = heard
            self._spoken_of = set(held)
            self._told = {id: entry for id, entry in self._told.items() if id in held}
            self._told |= {entry.id: entry for entry in news}
            for session_id, front in self._heard.lost:
                logger.error("session %s was adopted by the front %s; it is given up here", session_id, front)
                self._give_up(session_id)
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

    def _stand_back(self, why: str) -> None:
        """While this front was silent another server took its name, and with it the sessions that it had told of."""
        if self.trouble != why:
            logger.error("%s; this one gives up its sessions", why)
        self.trouble, self._heard = why, Told()
        for session in self._sessions.list():
            self._give_up(session.id)
        self._told, self._spoken_of = {}, set()

    def _give_up(self, session_id: str) -> None:
        # All robots are held at once, and no beat waits until one has left its rooms.
        task = asyncio.create_task(self._sessions.give_up(session_id), name=f"give up {session_id}")
        self._leaving.add(task)
        task.add_done_callback(self._has_left)

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
        """Take an id before a session of it is made, and the emergency stop that was latched on it elsewhere.

        Raises:
            SessionExists: another front has one.
            NameTaken: another server has this front's name.
            NotKept: the directory does not answer.
        """
        try:
            found = await ask(self._directory, ANSWER, "claim", self.name, self._process, new.session_id, new.owner)
        except NoAnswer as error:
            raise NotKept(
                "the directory of the cluster does not answer, so another front may have a session of this id; "
                "try again when it does"
            ) from error
        if isinstance(found, Refused):
            raise NameTaken(found.text) if found.kind == "named" else SessionExists(found.text)
        if found is not None:
            self._sessions.take_latch(new.session_id, found)

    async def forget_latch(self, session_id: str, caller: Caller) -> bool:
        """Reset the emergency stop of an id whose session is gone, whichever front it was on.

        Returns:
            Whether there was one, for this caller.

        Raises:
            Unreachable: the directory does not answer.
        """
        return await self._ask("unlatch", session_id, None if caller.sees_all else (caller.owner,))

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
            NameTaken: another server has this front's name.
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
        async with self._beating:
            # One of this id that was deleted here is not told of after this: it is not the one that is adopted.
            self._spoken_of.discard(session_id)
            adopted = await self._ask("adopt", self.name, self._process, session_id)
        if isinstance(adopted, Refused):
            raise _REFUSALS.get(adopted.kind, MoveRefused)(adopted.text)
        logger.warning("session %s of the front %s is adopted by %s", session_id, entry.front, caller.name)
        return await self._sessions.take_in(_read(adopted), adopted.latch)

    async def _check_dead(self, front: str) -> None:
        """A front that only lost its cluster still commands its robots, and two controllers never may."""
        known: Front | None = await self._ask("front", front)
        assert known is not None, "a front whose sessions are there is not forgotten"
        found = await knock(known, self._machine)
        if found == "ended":
            return
        if found == "elsewhere":
            raise MoveRefused(
                f"the front {front} is silent in the cluster, and its url {known.url} leads nowhere from this machine "
                '(set front_url there); look after it. When you have seen that it is off, adopt with {"force": true}'
            )
        raise MoveRefused(
            f"the front {front} ({known.url}) is silent in the cluster, but it {_DOUBTS[found]}; look after it. When "
            'you have seen that it is off, adopt with {"force": true}'
        )

    async def forget(self, session_id: str) -> None:
        """Delete a session whose front died.

        Raises:
            MoveRefused: its front lives.
        """
        refused = await self._ask("forget", session_id)
        if isinstance(refused, Refused):
            raise _REFUSALS.get(refused.kind, MoveRefused)(refused.text)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await ask(self._directory, ANSWER, method, *arguments)
        except NoAnswer as error:
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


_DOUBTS = {
    "answers": "answers",
    "silent": "does not answer as a front, but its machine does or may",
    "unreachable": "cannot be reached, which says nothing of whether it moves its robots",
}
_REFUSALS: dict[str, type[ServiceError]] = {"unknown": UnknownSession, "named": NameTaken}


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

"""Peers: the servers that share a database of sessions; heartbeats, claims, liveness and adoption."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple
from urllib.parse import quote
from uuid import uuid4

import aiohttp
from yarl import URL

from service.auth.caller import Caller
from service.distributed import session_table
from service.distributed.postgres import DatabaseUnavailable, DatabaseUnusable, Postgres, Sql
from service.distributed.session_table import HEARTBEAT_TIMEOUT, BeatAnswer, Entry, Peer
from service.errors import (
    MoveRefused,
    NoDatabase,
    NotKept,
    ServerNameTaken,
    ServiceError,
    SessionExists,
    UnknownSession,
)
from service.http.origins import is_loopback
from service.sessions.records import Latch, SessionRecord, from_json
from service.sessions.request import NewSession
from service.sessions.store import AnySession, Sessions, held_rooms

logger = logging.getLogger(__name__)

# Sent with every response, so that a server that reuses the address of a stopped server is not mistaken for it.
SERVER_NAME_HEADER = "x-robojax-front-name"
# Name of the server that forwarded a stop, which is not forwarded again.
FORWARDED_HEADER = "x-robojax-front"
# Seconds in which a server has to answer a probe, and a stop.
PROBE_TIMEOUT = 2.0
STOP_TIMEOUT = 2.0

# ended: nothing listens at the address, or another server does. answers: the server lives. silent: a program that
# listens does not answer. unreachable: the state is unknown. elsewhere: the address is a loopback address of another
# machine.
Liveness = Literal["ended", "answers", "silent", "unreachable", "elsewhere"]


class PeerLost(ServiceError, status=502, code="front_lost"):
    """The server that a session is on does not answer."""


async def probe_liveness(peer: Peer, machine: str) -> Liveness:
    """Probe whether a server is alive: without a heartbeat it may only have lost the database.

    Args:
        machine: `machine_of_loopback` of this process.
    """
    if is_loopback(URL(peer.url).host or "") and peer.machine != machine:
        return "elsewhere"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT)) as client,
            client.get(f"{peer.url}/health", allow_redirects=False) as answer,
        ):
            name = answer.headers.get(SERVER_NAME_HEADER)
            if name == peer.name:
                return "answers"
            return "silent" if name is None else "ended"
    except aiohttp.ClientConnectorError as error:
        # Connection refused: the machine is up, but the server is not running.
        return "ended" if isinstance(error.os_error, ConnectionRefusedError) else "unreachable"
    except (aiohttp.ClientError, TimeoutError):
        return "silent"


async def stop_session(
    peer: Peer, session_id: str, move: str, headers: Mapping[str, str], reason: str
) -> tuple[int, Any]:
    """Ask another server to stop a session.

    Args:
        move: `emergency_stop` or `stop`.

    Returns:
        Status and body of the answer.

    Raises:
        PeerLost: the server does not answer, so that it is unknown whether the robot was stopped.
    """
    try:
        async with aiohttp.ClientSession() as client:
            return await _post(client, f"{peer.url}/sessions/{quote(session_id, safe='')}/{move}", headers, reason)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise PeerLost(
            f"the server {peer.name}, on which this session is, does not answer ({type(error).__name__}): its robot is "
            "not known to be stopped; stop it at the robot, or try again"
        ) from error


async def stop_all(servers: Sequence[Peer], headers: Mapping[str, str], reason: str) -> dict[str, Any]:
    """Ask other servers to stop all their sessions; return the stopped sessions, and the servers without an answer."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        answers = await asyncio.gather(
            *(_stop_all(client, peer, headers, reason) for peer in servers), return_exceptions=True
        )
    reports = [answer for answer in answers if not isinstance(answer, BaseException)]
    failed = {
        peer.name: str(answer) or type(answer).__name__
        for peer, answer in zip(servers, answers, strict=True)
        if isinstance(answer, BaseException)
    }
    for name, why in failed.items():
        logger.error("the robots of the server %s are not known to be stopped: %s", name, why)
    return {
        "stopped": [one for stopped, _ in reports for one in stopped],
        "count": sum(count for _, count in reports),
        "fronts_not_reached": failed,
    }


async def _stop_all(
    client: aiohttp.ClientSession, peer: Peer, headers: Mapping[str, str], reason: str
) -> tuple[list[str], int]:
    status, report = await _post(client, f"{peer.url}/debug/emergency_stop", headers, reason)
    if status != 200:
        raise PeerLost(f"{status}: {report.get('detail')}")
    return list(report["stopped"]), int(report["count"])


async def _post(client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], reason: str) -> tuple[int, Any]:
    async with client.post(
        URL(url),
        json={"reason": reason},
        headers=headers,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=STOP_TIMEOUT),
    ) as answer:
        return answer.status, await answer.json()


def machine_of_loopback() -> str:
    """Return an id of what 127.0.0.1 is: one for each machine, and for each container with a network of its own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no /proc on this system
        return socket.gethostname()


Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

# Seconds between heartbeats, seconds that the database may take to answer, seconds that it may be away at a start, and
# seconds that the end of a server waits for it. Each beat publishes changed sessions and the figures of a few others.
BEAT_PERIOD = 0.5
QUERY_TIMEOUT = 2.5
START_TIMEOUT = 60.0
LEAVE_TIMEOUT = 1.0
FIGURES_PER_BEAT = 8

NO_DATABASE = "the database of all servers' sessions does not answer"


class PeerSessions:
    """Publishes this server's sessions to its peers and finds the sessions of peers.

    Args:
        name: unique name of this server, the same after a restart.
        url: URL at which other servers, and redirected clients, reach this server.
        database: connection for heartbeats and changes.
        lookups: another connection, for lookups of clients, so that heartbeats do not wait for them.

    Attributes:
        trouble: why nothing can be published to the others now, or None.
    """

    def __init__(self, name: str, url: str, sessions: Sessions, database: Postgres, lookups: Postgres):
        self.name, self.url = name, url
        self._sessions = sessions
        self._database, self._lookups = database, lookups
        self._last_answer = BeatAnswer()
        self._machine = machine_of_loopback()
        self._process = uuid4().hex
        self._published: dict[str, Entry] = {}
        self._unreadable: dict[str, Latch | None] = {}
        self._turn = 0
        self._beats = self._published_beat = 0  # how many were begun, and the last that was published
        self._task: asyncio.Task[None] | None = None
        self._beat_lock = asyncio.Lock()
        self._hand_overs: set[asyncio.Task[None]] = set()
        self.trouble: str | None = None

    async def open(self) -> None:
        """Publish this server's sessions; return when the other servers know them.

        Sessions that another server adopted are given up. Sessions without a record here are restored from the
        database.

        Raises:
            ServerNameTaken: another server has the name of this one, and lives.
            DatabaseUnavailable: the database has not answered for a minute.
            DatabaseUnusable: the database can never be used.
        """
        known = await self._retry(lambda: self._database.run(QUERY_TIMEOUT, session_table.find_server, self.name))
        # At this server's own address, this process itself would answer.
        is_other = known is not None and not known.has_ended and known.url != self.url
        if known is not None and is_other and await probe_liveness(known, self._machine) == "answers":
            raise ServerNameTaken(
                f"another server has the name {self.name}, and answers at {known.url}; give each its own (--front-name)"
            )
        await self._retry(self._beat)
        await asyncio.gather(*self._hand_overs)
        self._sessions.share(self.publish, lambda: self.trouble)
        self._task = asyncio.create_task(self._run(), name="peers")

    async def _retry(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Call `ask` until it succeeds: the database may be away, or a killed server may still hold the name."""
        time, reported = asyncio.get_running_loop().time, ""
        start = time()
        while True:
            try:
                return await ask()
            except DatabaseUnusable:
                raise
            except DatabaseUnavailable as error:
                if time() > start + START_TIMEOUT:
                    raise
                if (why := str(error)) != reported:
                    logger.warning("waiting for the database, for %g s at most: %s", START_TIMEOUT, why)
                reported = why
            except ServerNameTaken:
                if time() > start + HEARTBEAT_TIMEOUT + 2 * BEAT_PERIOD:
                    raise
            await asyncio.sleep(BEAT_PERIOD)

    async def close(self) -> None:
        """Stop publishing and release the name; the robots are held before."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, *self._hand_overs, return_exceptions=True)
        latches = {id: self._sessions.get_latch(id) for id, entry in self._published.items() if entry.latch is None}
        changes = {id: latch for id, latch in latches.items() if latch is not None}
        try:
            await self._database.run(LEAVE_TIMEOUT, session_table.leave, self.name, self._process, changes)
        except DatabaseUnavailable as error:
            logger.warning("the end of this server is not published to the others (%s)", error)

    @property
    def others(self) -> Sequence[Peer]:
        """The other servers that are alive."""
        return [peer for peer in self._last_answer.servers if peer.name != self.name and peer.is_alive]

    @property
    def stoppable(self) -> Sequence[Peer]:
        """The other servers, as last known, whose robots may move."""
        return [*self.others, *self.silent]

    @property
    def silent(self) -> Sequence[Peer]:
        """Other servers without a heartbeat, whose robots may still move."""
        return [peer for peer in self._last_answer.silent if peer.name != self.name]

    # Publishing.

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_PERIOD)
            await self._try_beat()

    async def publish(self, timeout: float | None = None) -> None:
        """Publish all changes within ``timeout`` seconds; without an answer of the database, set ``trouble``."""
        if self.trouble is not None:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._try_beat(self._beats)
        except TimeoutError:
            self._note_no_database(f"no answer for {timeout:g} s")

    async def _try_beat(self, after: int | None = None) -> None:
        try:
            await self._beat(after)
        except DatabaseUnavailable as error:
            self._note_no_database(str(error))
        except ServerNameTaken as error:
            self._give_up_all(str(error))
        except Exception:
            logger.exception("publishing the sessions to other servers failed")
            self.trouble = "it cannot be published to the other servers; the server's log says why"
        else:
            if self.trouble is not None:
                logger.warning("the database of all servers' sessions knows of all that happened here")
            self.trouble = None

    def _note_no_database(self, why: str) -> None:
        if self.trouble is None:
            logger.warning("%s (%s); changes are published when it does", NO_DATABASE, why)
        self.trouble = self.trouble or NO_DATABASE

    async def _beat(self, after: int | None = None) -> None:
        """Send a heartbeat with all changes.

        Args:
            after: number of beats when the caller's change was made. No beat is sent if a later one has published it.
        """
        async with self._beat_lock:
            if self._sessions.is_closing or (after is not None and self._published_beat > after):
                return
            if after is not None and self.trouble is not None:
                raise DatabaseUnavailable(self.trouble)  # a call that waited longer has this error
            self._beats += 1
            number = self._beats
            # A call that waits for the answer does not wait for figures.
            changes = await self._list_changes(self._sessions.list(), FIGURES_PER_BEAT if after is None else 0)
            # Listed again, because sessions were created and deleted during the steps above.
            held = [session.id for session in self._sessions.list()]
            changes = [entry for entry in changes if entry.id in held]
            ended = {**self._unreadable, **self._sessions.list_ended()}
            ended = {id: latch for id, latch in ended.items() if id not in held}
            own_peer = Peer(self.name, self.url, self._machine, self._process)
            self._last_answer = answered = await self._database.run(
                QUERY_TIMEOUT, session_table.beat, own_peer, held, changes, ended
            )
            self._sessions.forget_ends(ended)
            self._unreadable, self._published_beat = {}, number
            self._published = {id: entry for id, entry in self._published.items() if id in held}
            self._published |= {entry.id: entry for entry in changes}
            for session_id, server in answered.lost:
                logger.error("session %s was adopted by the server %s; it is given up here", session_id, server)
                self._give_up(session_id)
        for entry in answered.left:
            await self._take_back(entry)

    async def _take_back(self, entry: Entry) -> None:
        if any(session.id == entry.id for session in self._sessions.list()):
            return
        try:
            await self._sessions.adopt(from_json(entry.record), entry.latch)
        except SessionExists:
            pass  # The session is still ending; the next beat tries again.
        except ValueError as error:
            logger.error("session %s of this server is %s; it is forgotten", entry.id, error)
            self._unreadable[entry.id] = None if entry.latch is None else Latch(entry.latch, entry.owner)

    def _give_up_all(self, why: str) -> None:
        """Hand over all sessions: another server took the name of this one, and its sessions, while it was silent."""
        if self.trouble != why:
            logger.error("%s; this one gives up its sessions", why)
        self.trouble, self._last_answer = why, BeatAnswer()
        for session in self._sessions.list():
            self._give_up(session.id)
        self._published = {}

    def _give_up(self, session_id: str) -> None:
        # All robots are held at once, and no beat waits until one has left its rooms.
        task = asyncio.create_task(self._sessions.hand_over(session_id), name=f"give up {session_id}")
        self._hand_overs.add(task)
        task.add_done_callback(self._has_left)

    def _has_left(self, task: asyncio.Task[None]) -> None:
        self._hand_overs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def _list_changes(self, listed: Sequence[AnySession], figures: int) -> Sequence[Entry]:
        first, self._turn = self._turn, (self._turn + figures) % max(len(listed), 1)
        due = {(first + step) % len(listed) for step in range(figures)} if listed else set()
        changes = []
        for number, session in enumerate(listed):
            entry, before = self._entry(session), self._published.get(session.id)
            if before is None or number in due or _visible_state(before) != _visible_state(entry):
                changes.append(entry)
            await asyncio.sleep(0)  # ticks go first
        return changes

    def _entry(self, session: AnySession) -> Entry:
        record = self._sessions.get_record(session.id)
        status = vars(session.status())
        return Entry(
            id=session.id,
            server=self.name,
            owner=session.new.owner,
            record="" if record is None else record.as_json(),
            status=json.loads(json.dumps(status)),
            latch=session.latch,
            rooms=sorted(held_rooms(session)),
        )

    # Lookups and changes of other servers' sessions.

    async def claim(self, new: NewSession) -> None:
        """Claim an id before a session of it is made, and take over an emergency stop latched on it elsewhere.

        Raises:
            SessionExists: another server has a session of this id.
            RoomsTaken: another session uses a room of this one.
            ServerNameTaken: another server has the name of this server.
            NotKept: the database does not answer.
        """
        try:
            await self._beat()  # an older session of this id ends first
            latch = await self._database.run(QUERY_TIMEOUT, session_table.claim, self.name, self._process, new)
        except DatabaseUnavailable as error:
            raise NotKept(
                f"{NO_DATABASE}, so another server may have a session of this id; try again when it does"
            ) from error
        self._sessions.sync_latch(new.session_id, latch)

    async def forget_latch(self, session_id: str, caller: Caller) -> bool:
        """Reset the emergency stop of an id whose session is gone, on any server.

        Returns:
            Whether there was an emergency stop that this caller may reset.

        Raises:
            NoDatabase: the database does not answer.
        """
        return await self._query(
            self._database, session_table.unlatch, session_id, None if caller.sees_all else (caller.owner,)
        )

    async def list(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the status of the sessions of all other servers that this caller may see, each with its server.

        Raises:
            NoDatabase: the database does not answer.
        """
        entries = await self._query(self._lookups, session_table.list_sessions)
        mine = {session.id for session in self._sessions.list()}
        return [
            make_status(entry)
            for entry in entries
            if entry.server != self.name and entry.id not in mine and caller.sees(entry.owner)
        ]

    async def find(self, session_id: str) -> tuple[Entry, Peer | None] | None:
        """Return a session of another server, and that server; None when there is none.

        Raises:
            NoDatabase: the database does not answer.
        """
        found_session = await self._query(self._lookups, session_table.find, session_id)
        if found_session is None or found_session[0].server == self.name:
            return None
        if (owning := found_session[1]) is not None:
            # A redirected client looks for it among the others, and the last beat may be older than that server.
            others = (one for one in self._last_answer.servers if one.name != owning.name)
            self._last_answer = replace(self._last_answer, servers=(*others, owning))
        return found_session

    async def adopt(self, session_id: str, caller: Caller, *, force: bool) -> AnySession:
        """Take over a session whose server died; it is interrupted here, and moves nothing before a restart.

        Args:
            force: a person has checked that the server's machine is off, which this server cannot find out.

        Raises:
            UnknownSession: there is none, for this caller.
            MoveRefused: its server lives, or may live.
            ServerNameTaken: another server has this one's name.
            NoDatabase: the database does not answer.
        """
        found_session = await self._query(self._database, session_table.find, session_id)
        if found_session is None or not caller.sees(found_session[0].owner):
            raise UnknownSession(f"Session {session_id} not found")
        entry, owning = found_session
        is_own = entry.server == self.name  # The answer to an earlier adoption was lost.
        if is_own and any(session.id == session_id for session in self._sessions.list()):
            raise MoveRefused(f"session {session_id!r} is on this server already")
        if owning is not None and not is_own:
            if owning.is_alive:
                raise MoveRefused(f"session {session_id!r} is on the server {entry.server}, which lives")
            if not force:
                await self._check_dead(owning)
        if entry.record:
            _read_record(entry)  # before anything is changed
        adopted = await self._query(self._database, session_table.adopt, self.name, self._process, session_id, owning)
        logger.warning("session %s of the server %s is adopted by %s", session_id, entry.server, caller.name)
        return await self._sessions.adopt(_read_record(adopted), adopted.latch)

    async def _check_dead(self, peer: Peer) -> None:
        """Refuse unless a server has ended: a server that only lost the database still commands its robots."""
        if peer.has_ended:
            return
        liveness = await probe_liveness(peer, self._machine)
        if liveness == "ended":
            return
        if liveness == "elsewhere":
            raise MoveRefused(
                f"the server {peer.name} sends no heartbeat, and its url {peer.url} leads nowhere from this machine "
                '(set front_url there); check it. When you have seen that it is off, adopt with {"force": true}'
            )
        raise MoveRefused(
            f"the server {peer.name} ({peer.url}) sends no heartbeat, but it {_LIVENESS_TEXTS[liveness]}; check it. "
            'When you have seen that it is off, adopt with {"force": true}'
        )

    async def forget(self, session_id: str) -> None:
        """Delete a session whose server died.

        Raises:
            UnknownSession: there is none.
            MoveRefused: its server lives.
            NoDatabase: the database does not answer.
        """
        await self._query(self._database, session_table.forget, session_id)

    async def _query(
        self, database: Postgres, transaction: Callable[[Sql, *Arguments], Awaitable[Result]], *arguments: *Arguments
    ) -> Result:
        """Run a transaction for a client.

        Raises:
            NoDatabase: the database does not answer.
        """
        try:
            return await database.run(QUERY_TIMEOUT, transaction, *arguments)
        except DatabaseUnavailable as error:
            raise NoDatabase(f"{NO_DATABASE}; try again when it does") from error

    def facts(self) -> dict[str, object]:
        """Return this server and its peers for the API; JSON-ready."""
        return {
            "name": self.name,
            "url": self.url,
            "others": [{"name": peer.name, "url": peer.url} for peer in self.others],
            "silent": [{"name": peer.name, "url": peer.url} for peer in self.silent],
            "trouble": self.trouble,
        }


_LIVENESS_TEXTS = {
    "answers": "answers",
    "silent": "does not answer as a server of this database, but its machine does or may",
    "unreachable": "cannot be reached, which says nothing of whether it moves its robots",
}


def _read_record(entry: Entry) -> SessionRecord:
    try:
        return from_json(entry.record)
    except ValueError as error:
        raise MoveRefused(f"session {entry.id!r} is {error}; delete it") from error


def _visible_state(entry: Entry) -> tuple[object, ...]:
    return entry.record, entry.latch, entry.status.get("status"), entry.status.get("error_message")


def make_status(entry: Entry) -> dict[str, Any]:
    """Return the status of another server's session, with that server's name in its stats."""
    status = dict(entry.status)
    status["stats"] = {**status.get("stats", {}), "front": entry.server}
    return status

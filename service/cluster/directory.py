"""All sessions of all fronts of a cluster: whose each id is, how it stands, and what became of those whose front died.

Each front is the one source of what its living sessions do, and tells the directory again and again; only which ids
are taken, and by whom, is decided here.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from service.sessions.latch import LATCHES, Latch

# Seconds without a word from a front after which its sessions are interrupted; after which an id that was claimed, and
# of which its front does not speak, is free again; after which a front that left no session is forgotten.
LEASE = 3.0
CLAIMED = 10.0
FORGOTTEN = 3600.0

logger = logging.getLogger(__name__)


class DirectoryRefused(Exception):
    """What was asked cannot be; the text is for clients.

    Attributes:
        kind: taken, named, unknown, alive or unready.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Entry:
    """One session.

    Attributes:
        front: the name of the front that it is on.
        owner: whose it is; None where no key is wanted.
        record: as its front wrote it down last (`SessionRecord.as_json`); nothing until it is ready.
        status: what its front said of it last, the fields of SessionStatusResponse.
        latch: the text of an emergency stop that nobody has reset.
    """

    id: str
    front: str
    owner: str | None = None
    record: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)
    latch: str | None = None


@dataclass(frozen=True)
class Front:
    """One front server.

    Attributes:
        url: where other fronts reach it.
        seen_at: when it last said something, on the directory's clock.
        machine: whose loopback address its own is.
        life: of all processes that ever run under this name, which one it is.
    """

    name: str
    url: str
    seen_at: float = 0.0
    machine: str = ""
    life: str = ""


@dataclass(frozen=True)
class Told:
    """What a front is told when it has said something.

    Attributes:
        lost: ids that it holds and that are another front's, with its name: they were adopted while it was silent.
        left: what is written down as its own and it does not hold, as where an answer to it was lost: it takes them in.
        fronts: those that live.
        silent: those that do not, and whose sessions nobody has adopted: their robots may still move.
    """

    lost: Sequence[tuple[str, str]] = ()
    left: Sequence[Entry] = ()
    fronts: Sequence[Front] = ()
    silent: Sequence[Front] = ()


class Store(Protocol):
    """Keeps texts by key; they outlive the actor."""

    def put(self, key: str, text: str) -> None: ...
    def drop(self, key: str) -> None: ...
    def all(self) -> Mapping[str, str]: ...


class Directory:
    """Reads no clock and waits for nothing but its store.

    Args:
        store: what a directory before this one knew is read from it.
        now: the fronts of before get one lease from here.
    """

    def __init__(self, store: Store, now: float):
        self._store = store
        self._entries: dict[str, Entry] = {}
        self._fronts: dict[str, Front] = {}
        self._claimed: dict[str, float] = {}
        self._latches: dict[str, Latch] = {}
        for key, text in store.all().items():
            kind, _, name = key.partition("/")
            told = json.loads(text)
            if kind == "session":
                self._entries[name] = Entry(**told)
                self._claimed[name] = now
            elif kind == "front":
                self._fronts[name] = Front(**(told | {"seen_at": now}))
            elif kind == "latch":
                self._latches[name] = Latch(**told)

    def claim(self, front: str, life: str, session_id: str, owner: str | None, now: float) -> Latch | None:
        """A session of this id is about to be made there.

        Returns:
            The emergency stop of one of this id that is gone, whichever front it was on: the new one begins with it.

        Raises:
            DirectoryRefused: another front has one, living or interrupted; or the name of this front is another's.
        """
        self._check_name(front, life, now)
        there = self._entries.get(session_id)
        if there is not None and not (there.record or there.status or self._lives(there.front, now)):
            # Its front ended before it spoke of it once, so nobody was told that it is there.
            there = there if now - self._claimed.get(session_id, -CLAIMED) < CLAIMED else None
        if there is not None and (there.front != front or (there.record and there.owner != owner)):
            state = "is there" if self._lives(there.front, now) else "was there when that ended; adopt or delete it"
            raise DirectoryRefused(
                "taken",
                f"session {session_id!r} exists already: it {state}, on the front {there.front}"
                if there.owner == owner
                else f"the session id {session_id!r} is taken; choose another",
            )
        if there is None or not there.record:
            self._keep(Entry(session_id, front, owner))
        self._claimed[session_id] = now
        return self._latches.get(session_id)

    def beat(
        self,
        said: Front,
        held: Sequence[str],
        news: Sequence[Entry],
        now: float,
        *,
        gone: Mapping[str, str | None] | None = None,
    ) -> Told:
        """A front lives.

        Args:
            held: ids of all of its sessions.
            news: those of them that changed since its last beat that was answered.
            gone: ids that it spoke of before and holds no more, with the text of an emergency stop that nobody has
                reset. What was ever ready goes only by this: a front that lost its memory has not deleted its sessions.

        Raises:
            DirectoryRefused: another process lives under this name; nothing is changed.
        """
        front = said.name
        self._check_name(front, said.life, now)
        known = self._fronts.get(front)
        heard = replace(said, seen_at=now)
        if known is None or known != replace(said, seen_at=known.seen_at):
            self._store.put(f"front/{front}", json.dumps(asdict(heard)))
        self._fronts[front] = heard
        for entry in news:
            there = self._entries.get(entry.id)
            if (there is None or there.front == front) and entry != there:
                self._keep(replace(entry, front=front))
                if entry.latch is None and entry.status:
                    self._unlatch(entry.id)  # its session was made with it, and it was reset there
        for session_id, latch in (gone or {}).items():
            there = self._entries.get(session_id)
            if session_id not in held and there is not None and there.front == front:
                self._end(there if latch is None else replace(there, latch=latch))
        lost = []
        for session_id in held:
            there = self._entries.get(session_id)
            if there is not None and there.front != front:
                lost.append((session_id, there.front))
            elif there is not None:
                self._claimed.pop(session_id, None)
        left = []
        for entry in self.of(front):
            is_pending = now - self._claimed.get(entry.id, -CLAIMED) < CLAIMED
            if entry.id in held or is_pending:
                continue
            if entry.record:
                left.append(entry)
            else:
                self._end(entry)
        self._forget_fronts(now)
        return Told(tuple(lost), tuple(left), self.fronts(now), self._silent(now))

    def leave(self, front: str, life: str) -> None:
        """A front ends in order, with all robots held: its name is free, and its sessions are interrupted."""
        known = self._fronts.get(front)
        if known is not None and known.life == life:
            self._fronts[front] = replace(known, seen_at=-math.inf)

    def unlatch(self, session_id: str, owners: Sequence[str | None] | None) -> bool:
        """Reset the emergency stop of an id whose session is gone.

        Args:
            owners: whose may be reset; None: everybody's.

        Returns:
            Whether there was one.
        """
        latch = self._latches.get(session_id)
        if latch is None or session_id in self._entries or (owners is not None and latch.owner not in owners):
            return False
        self._unlatch(session_id)
        return True

    def list(self, now: float) -> Sequence[Entry]:
        """All sessions; those of fronts that died are interrupted."""
        return [self._as_it_is(entry, now) for entry in self._entries.values() if entry.status]

    def of(self, front: str) -> Sequence[Entry]:
        """All sessions of one front, as it told of them last."""
        return [entry for entry in self._entries.values() if entry.front == front]

    def find(self, session_id: str, now: float) -> tuple[Entry, str | None] | None:
        """A session and the address of its front, None when that does not live; None when there is no such session."""
        entry = self._entries.get(session_id)
        if entry is None:
            return None
        url = self._fronts[entry.front].url if self._lives(entry.front, now) else None
        return self._as_it_is(entry, now), url

    def fronts(self, now: float) -> Sequence[Front]:
        """Those that live."""
        return tuple(front for front in self._fronts.values() if self._lives(front.name, now))

    def front(self, name: str) -> Front | None:
        """What a front said of itself last, living or not."""
        return self._fronts.get(name)

    def adopt(self, front: str, life: str, session_id: str, now: float) -> Entry:
        """A session of a front that died is this front's from now on.

        Raises:
            DirectoryRefused: there is none, or its front lives; or the name of this front is another's.
        """
        self._check_name(front, life, now)
        entry = self._entries.get(session_id)
        if entry is None or not (entry.record or entry.status):
            raise DirectoryRefused("unknown", f"Session {session_id} not found")
        if entry.front != front and self._lives(entry.front, now):
            raise DirectoryRefused("alive", f"session {session_id!r} is on the front {entry.front}, which lives")
        if not entry.record:
            raise DirectoryRefused(
                "unready", f"session {session_id!r} was never ready, nothing of it is left; delete it"
            )
        # Pending: its new front tells of it with its next beat.
        self._claimed[session_id] = now
        self._keep(adopted := replace(self._as_it_is(entry, now), front=front))
        return adopted

    def forget(self, session_id: str, now: float) -> None:
        """Delete a session of a front that died.

        Raises:
            DirectoryRefused: there is none, or its front lives.
        """
        entry = self._entries.get(session_id)
        if entry is None:
            raise DirectoryRefused("unknown", f"Session {session_id} not found")
        if self._lives(entry.front, now):
            raise DirectoryRefused("alive", f"session {session_id!r} is on the front {entry.front}, which lives")
        self._end(entry)

    def _check_name(self, front: str, life: str, now: float) -> None:
        known = self._fronts.get(front)
        if known is not None and known.life != life and self._lives(front, now):
            raise DirectoryRefused(
                "named",
                f"another server has the name {front} in this cluster, at {known.url}, and lives; give each its own "
                "(--front-name)",
            )

    def _silent(self, now: float) -> Sequence[Front]:
        owning = {entry.front for entry in self._entries.values() if entry.status}
        return tuple(one for one in self._fronts.values() if one.name in owning and not self._lives(one.name, now))

    def _forget_fronts(self, now: float) -> None:
        old = [front for front in self._fronts.values() if now - front.seen_at > FORGOTTEN]
        if not old:
            return
        owning = {entry.front for entry in self._entries.values()}
        for front in old:
            if front.name not in owning:
                self._store.drop(f"front/{front.name}")
                del self._fronts[front.name]

    def _lives(self, front: str, now: float) -> bool:
        known = self._fronts.get(front)
        return known is not None and now - known.seen_at < LEASE

    def _as_it_is(self, entry: Entry, now: float) -> Entry:
        if self._lives(entry.front, now) or not entry.status:
            return entry
        was = entry.status.get("status")
        if was == "interrupted":
            return entry
        why = f"the front {entry.front} has not been heard of since; it was {was}"
        return replace(entry, status={**entry.status, "status": "interrupted", "error_message": why})

    def _keep(self, entry: Entry) -> None:
        before = self._entries.get(entry.id)
        # Figures change all the time and are worth nothing later; what is kept is what an adoption needs. First in the
        # store: what that refuses is not said to be kept, and is tried again.
        if before is None or _lasting(before) != _lasting(entry):
            self._store.put(f"session/{entry.id}", json.dumps(asdict(entry)))
        self._entries[entry.id] = entry

    def _end(self, entry: Entry) -> None:
        """The session goes; an emergency stop stays with the id."""
        if entry.latch is not None:
            latch = Latch(entry.latch, entry.owner)
            self._store.put(f"latch/{entry.id}", json.dumps(asdict(latch)))
            self._latches[entry.id] = latch
            if len(self._latches) > LATCHES:
                oldest = next(iter(self._latches))
                logger.error("the emergency stop of session %s is forgotten: more than %d are latched", oldest, LATCHES)
                self._unlatch(oldest)
        self._drop(entry.id)

    def _unlatch(self, session_id: str) -> None:
        if session_id in self._latches:
            self._store.drop(f"latch/{session_id}")
            del self._latches[session_id]

    def _drop(self, session_id: str) -> None:
        self._store.drop(f"session/{session_id}")
        del self._entries[session_id]
        self._claimed.pop(session_id, None)


def _lasting(entry: Entry) -> tuple[Any, ...]:
    return entry.front, entry.owner, entry.record, entry.latch, entry.status.get("status"), bool(entry.status)


class MemoryStore:
    """A `Store` that outlives nothing."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Keep it."""
        self.texts[key] = text

    def drop(self, key: str) -> None:
        """Forget it."""
        self.texts.pop(key, None)

    def all(self) -> Mapping[str, str]:
        """What is kept."""
        return dict(self.texts)

"""Table of all servers' sessions in PostgreSQL: owner, heartbeat, latch, and the data for an adoption.

Each server keeps its sessions on its own disk and publishes them here; this table only decides who owns an id. Every
function is one transaction. Servers are locked before sessions, so that there are no deadlocks.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from service.distributed.postgres import Sql
from service.errors import MoveRefused, RoomsTaken, ServerNameTaken, SessionExists, UnknownSession
from service.sessions.records import MAX_LATCHES, Latch
from service.sessions.request import NewSession, describe_shared_room

logger = logging.getLogger(__name__)

# Seconds, on the database's clock, without a heartbeat until a server's sessions are interrupted; until a claimed but
# unpublished id is free again; until a server without sessions is forgotten.
HEARTBEAT_TIMEOUT = 3.0
CLAIM_TIMEOUT = 10.0
FORGET_AFTER = 3600.0

PREFIX = "robojax_"
# Columns that are not searched hold JSON, because PostgreSQL keeps no NUL.
SCHEMA = (
    """
CREATE TABLE robojax_fronts (
    name text PRIMARY KEY,
    url text NOT NULL,
    machine text NOT NULL,
    life text NOT NULL,
    heartbeat timestamptz NOT NULL,
    has_ended boolean NOT NULL
);
CREATE TABLE robojax_sessions (
    id text PRIMARY KEY,
    front text NOT NULL,
    owner text NOT NULL,
    record text NOT NULL,
    status text NOT NULL,
    claimed_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX robojax_sessions_of_front ON robojax_sessions (front);
CREATE TABLE robojax_latches (
    id text PRIMARY KEY,
    latch text NOT NULL,
    latched_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
""",
    "ALTER TABLE robojax_sessions ADD COLUMN rooms text[] NOT NULL DEFAULT '{}'",
)


@dataclass(frozen=True)
class Peer:
    """One server of the database.

    Attributes:
        url: address for other servers, and for redirected clients.
        machine: id of the machine of its loopback address.
        life: id of its process.
        has_ended: whether it ended in order, with all robots held.
    """

    name: str
    url: str
    machine: str = ""
    life: str = ""
    is_alive: bool = False
    has_ended: bool = False


@dataclass(frozen=True)
class Entry:
    """One session of the table.

    Attributes:
        server: name of its server.
        owner: None where no key is required.
        record: its newest `SessionRecord.as_json`; empty until it is ready.
        status: its newest published status, the fields of SessionStatusResponse.
        latch: the reason of an emergency stop that has not been reset.
        rooms: workspace and id of each room that the session is in, or returns to.
    """

    id: str
    server: str
    owner: str | None = None
    record: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)
    latch: str | None = None
    rooms: Sequence[str] = ()


@dataclass(frozen=True)
class BeatAnswer:
    """What the database answers to a heartbeat.

    Attributes:
        lost: ids of sessions that another server adopted while this one was silent, each with that server's name.
        left: sessions that the table lists for this server and that it does not hold, because its disk was replaced or
            an answer was lost; it restores them.
        servers: all servers.
        silent: servers without a heartbeat that did not end in order and still own sessions; their robots may still
            move.
    """

    lost: Sequence[tuple[str, str]] = ()
    left: Sequence[Entry] = ()
    servers: Sequence[Peer] = ()
    silent: Sequence[Peer] = ()


_BEATS = f"robojax_fronts.heartbeat > clock_timestamp() - interval '{HEARTBEAT_TIMEOUT} seconds'"
_ALIVE = f"(NOT robojax_fronts.has_ended AND {_BEATS})"
_SELECT_SERVERS = f"SELECT name, url, machine, life, has_ended, {_ALIVE} AS is_alive FROM robojax_fronts"
_SELECT_SESSIONS = """SELECT s.id, s.front, s.owner, s.record, s.status, l.latch
FROM robojax_sessions s LEFT JOIN robojax_latches l ON l.id = s.id"""
_IS_PENDING = f"(claimed_at IS NOT NULL AND claimed_at > clock_timestamp() - interval '{CLAIM_TIMEOUT} seconds')"
_UPSERT_SESSION = """INSERT INTO robojax_sessions (id, front, owner, record, status, rooms)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO UPDATE SET
owner = excluded.owner, record = excluded.record, status = excluded.status, rooms = excluded.rooms,
claimed_at = NULL WHERE robojax_sessions.front = excluded.front"""
_IS_OWN = "EXISTS (SELECT FROM robojax_sessions WHERE id = $1::text AND front = $2::text)"
_UPSERT_LATCH = """INSERT INTO robojax_latches (id, latch) SELECT $1::text, $3::text WHERE {condition}
ON CONFLICT (id) DO UPDATE SET latch = excluded.latch"""
_UPSERT_SERVER = f"""INSERT INTO robojax_fronts (name, url, machine, life, heartbeat, has_ended)
VALUES ($1, $2, $3, $4, clock_timestamp(), false)
ON CONFLICT (name) DO UPDATE SET url = excluded.url, machine = excluded.machine, life = excluded.life,
heartbeat = excluded.heartbeat, has_ended = false
WHERE robojax_fronts.life = excluded.life OR NOT {_ALIVE}
RETURNING name"""


async def beat(
    sql: Sql, peer: Peer, held: Sequence[str], changes: Sequence[Entry], ended: Mapping[str, Latch | None]
) -> BeatAnswer:
    """Record that a server is alive, with its changed and ended sessions.

    Args:
        held: ids of all sessions of the server.
        changes: sessions that changed since its last answered beat.
        ended: ids of deleted sessions, each with an emergency stop that has not been reset. A session that was ready is
            deleted only by this, because a server that lost its disk has not deleted its sessions.

    Raises:
        ServerNameTaken: another process lives under this name; nothing is changed.
    """
    if await sql.fetchval(_UPSERT_SERVER, peer.name, peer.url, peer.machine, peer.life) is None:
        raise await _name_taken(sql, peer.name)
    for one in sorted(changes, key=lambda one: one.id):
        owner, status = json.dumps(one.owner), json.dumps(one.status)
        await sql.execute(_UPSERT_SESSION, one.id, peer.name, owner, one.record, status, list(one.rooms))
        if one.latch is not None:
            await sql.execute(
                _UPSERT_LATCH.format(condition=_IS_OWN), one.id, peer.name, _format_latch(Latch(one.latch, one.owner))
            )
        elif one.status:
            # The session had the emergency stop, and was reset on its server.
            await sql.execute(f"DELETE FROM robojax_latches WHERE id = $1 AND {_IS_OWN}", one.id, peer.name)
    for session_id, latch in sorted(ended.items(), key=lambda one: one[0]):
        await _end_session(sql, session_id, peer.name, latch)
    lost = await sql.fetch(
        "SELECT id, front FROM robojax_sessions WHERE id = ANY($1::text[]) AND front <> $2", list(held), peer.name
    )
    left = await sql.fetch(
        f"{_SELECT_SESSIONS} WHERE s.front = $1 AND NOT s.id = ANY($2::text[]) AND NOT {_IS_PENDING}",
        peer.name,
        list(held),
    )
    for row in left:
        if not row["record"]:
            await sql.execute("DELETE FROM robojax_sessions WHERE id = $1 AND front = $2", row["id"], peer.name)
    servers = [_parse_server(row) for row in await sql.fetch(_SELECT_SERVERS)]
    owning = {
        row["front"] for row in await sql.fetch("SELECT DISTINCT front FROM robojax_sessions WHERE status <> '{}'")
    }
    await sql.execute(
        f"DELETE FROM robojax_fronts WHERE heartbeat < clock_timestamp() - interval '{FORGET_AFTER} seconds' "
        "AND NOT EXISTS (SELECT FROM robojax_sessions WHERE front = name)"
    )
    return BeatAnswer(
        lost=tuple((row["id"], row["front"]) for row in lost),
        left=tuple(_parse_entry(row) for row in left if row["record"]),
        servers=tuple(servers),
        silent=tuple(one for one in servers if one.name in owning and not one.is_alive and not one.has_ended),
    )


async def leave(sql: Sql, server: str, life: str, latches: Mapping[str, Latch]) -> None:
    """Record that a server ended in order, with all robots held: its name is free, and its sessions are interrupted.

    Args:
        latches: emergency stops that it has not published before.
    """
    known = await sql.fetchval(
        "UPDATE robojax_fronts SET has_ended = true WHERE name = $1 AND life = $2 RETURNING name", server, life
    )
    if known is not None:
        for session_id, latch in sorted(latches.items()):
            await sql.execute(_UPSERT_LATCH.format(condition=_IS_OWN), session_id, server, _format_latch(latch))


async def claim(sql: Sql, server: str, life: str, new: NewSession) -> Latch | None:
    """Claim a session's id and its rooms for this server, before the session is made.

    Returns:
        The emergency stop of a deleted session of this id, on any server: the new session begins with it.

    Raises:
        SessionExists: another server has a session of this id, running or interrupted.
        RoomsTaken: another session uses a room of this one.
        ServerNameTaken: another server has the name of this one.
    """
    await _check_name(sql, server, life)
    session_id, owner_text, rooms = new.session_id, json.dumps(new.owner), sorted(new.room_paths())
    if rooms:
        # One claim at a time: of two at once, the second finds the rooms of the first.
        await sql.execute("SELECT pg_advisory_xact_lock(hashtext('robojax_rooms'))")
        other = await sql.fetchrow(
            f"""SELECT id, owner, rooms FROM robojax_sessions WHERE id <> $1 AND rooms && $2::text[]
            AND (record <> '' OR status <> '{{}}' OR {_IS_PENDING}) ORDER BY created_at LIMIT 1""",
            session_id,
            rooms,
        )
        if other is not None:
            shared = min({*rooms}.intersection(other["rooms"]))
            raise RoomsTaken(describe_shared_room(new, shared, other["id"], json.loads(other["owner"])))
    is_new = await sql.fetchval(
        """INSERT INTO robojax_sessions (id, front, owner, record, status, claimed_at, rooms)
        VALUES ($1, $2, $3, '', '{}', clock_timestamp(), $4) ON CONFLICT (id) DO NOTHING RETURNING id""",
        session_id,
        server,
        owner_text,
        rooms,
    )
    if is_new is None:
        existing = await sql.fetchrow(
            f"SELECT *, {_IS_PENDING} AS is_pending FROM robojax_sessions WHERE id = $1 FOR UPDATE", session_id
        )
        if existing is None:
            raise SessionExists(f"session {session_id!r} is being deleted; try again when it is gone")
        owning = await find_server(sql, existing["front"])
        is_alive = owning is not None and owning.is_alive
        # The server ended before it published the session, so no client knows of it.
        is_nothing = (
            not existing["record"] and existing["status"] == "{}" and not is_alive and not existing["is_pending"]
        )
        is_own = existing["front"] == server and (not existing["record"] or existing["owner"] == owner_text)
        if not (is_nothing or is_own):
            state = "is there" if is_alive else "was there when that ended; adopt or delete it"
            raise SessionExists(
                f"session {session_id!r} exists already: it {state}, on the server {existing['front']}"
                if existing["owner"] == owner_text
                else f"the session id {session_id!r} is taken; choose another",
            )
        await sql.execute(
            """UPDATE robojax_sessions SET front = $2, claimed_at = clock_timestamp(), rooms = $4,
            owner = CASE WHEN record = '' THEN $3 ELSE owner END WHERE id = $1""",
            session_id,
            server,
            owner_text,
            rooms,
        )
    return _parse_latch(await sql.fetchval("SELECT latch FROM robojax_latches WHERE id = $1", session_id))


async def unlatch(sql: Sql, session_id: str, owners: Sequence[str | None] | None) -> bool:
    """Reset the emergency stop of an id whose session is gone.

    Args:
        owners: owners whose emergency stops may be reset; None for all.

    Returns:
        Whether there was an emergency stop to reset.
    """
    latch = _parse_latch(
        await sql.fetchval(
            """SELECT latch FROM robojax_latches l WHERE id = $1
            AND NOT EXISTS (SELECT FROM robojax_sessions s WHERE s.id = l.id) FOR UPDATE""",
            session_id,
        )
    )
    if latch is None or (owners is not None and latch.owner not in owners):
        return False
    await sql.execute("DELETE FROM robojax_latches WHERE id = $1", session_id)
    return True


async def find(sql: Sql, session_id: str) -> tuple[Entry, Peer | None] | None:
    """Return a session and its server; None when there is no such session."""
    row = await sql.fetchrow(f"{_SELECT_SESSIONS} WHERE s.id = $1", session_id)
    if row is None:
        return None
    entry = _parse_entry(row)
    owning = await find_server(sql, entry.server)
    return mark_interrupted(entry, owning), owning


async def list_sessions(sql: Sql) -> Sequence[Entry]:
    """Return all sessions, oldest first; sessions of servers that died are interrupted."""
    servers = {row["name"]: _parse_server(row) for row in await sql.fetch(_SELECT_SERVERS)}
    rows = await sql.fetch(f"{_SELECT_SESSIONS} WHERE s.status <> '{{}}' ORDER BY s.created_at")
    return [mark_interrupted(entry, servers.get(entry.server)) for entry in map(_parse_entry, rows)]


async def adopt(sql: Sql, server: str, life: str, session_id: str, owning: Peer | None) -> Entry:
    """Move a session of a server that died to this one, and its emergency stop with it.

    Args:
        owning: the session's server as it was when the caller found that it has ended.

    Raises:
        UnknownSession: there is none.
        MoveRefused: its server lives, or it was never ready.
        ServerNameTaken: another server has the name of this one.
    """
    await _check_name(sql, server, life)
    known = None if owning is None else await find_server(sql, owning.name, "FOR UPDATE")
    row = await sql.fetchrow(f"{_SELECT_SESSIONS} WHERE s.id = $1 FOR UPDATE OF s", session_id)
    if row is None or not (row["record"] or row["status"] != "{}"):
        raise UnknownSession(f"Session {session_id} not found")
    entry = _parse_entry(row)
    if entry.server != server:
        if owning is not None and entry.server != owning.name:
            raise MoveRefused(f"session {session_id!r} is on the server {entry.server} since a moment ago")
        if known is not None and owning is not None and (known.is_alive or known.life != owning.life):
            raise MoveRefused(f"session {session_id!r} is on the server {entry.server}, which lives")
    if not entry.record:
        raise MoveRefused(f"session {session_id!r} was never ready, nothing of it is left; delete it")
    adopted = replace(mark_interrupted(entry, known), server=server)
    # Pending: its new server publishes it with its next beat.
    await sql.execute(
        "UPDATE robojax_sessions SET front = $2, status = $3, claimed_at = clock_timestamp() WHERE id = $1",
        session_id,
        server,
        json.dumps(adopted.status),
    )
    return adopted


async def forget(sql: Sql, session_id: str) -> None:
    """Delete a session of a server that died; an emergency stop stays with the id.

    Raises:
        UnknownSession: there is none.
        MoveRefused: its server lives.
    """
    name = await sql.fetchval("SELECT front FROM robojax_sessions WHERE id = $1", session_id)
    owning = None if name is None else await find_server(sql, name, "FOR UPDATE")
    exists = await sql.fetchval(
        "SELECT id FROM robojax_sessions WHERE id = $1 AND front = $2 FOR UPDATE", session_id, name
    )
    if exists is None:
        raise UnknownSession(f"Session {session_id} not found")
    if owning is not None and owning.is_alive:
        raise MoveRefused(f"session {session_id!r} is on the server {name}, which lives")
    await sql.execute("DELETE FROM robojax_sessions WHERE id = $1", session_id)
    await _forget_latches(sql)


def mark_interrupted(entry: Entry, owning: Peer | None) -> Entry:
    """Return an entry as interrupted if its server is not alive, else as it is."""
    was = entry.status.get("status")
    if (owning is not None and owning.is_alive) or not entry.status or was == "interrupted":
        return entry
    how = "ended in order" if owning is not None and owning.has_ended else "has sent no heartbeat since"
    why = f"the server {entry.server} {how}; it was {was}"
    return replace(entry, status={**entry.status, "status": "interrupted", "error_message": why})


async def _check_name(sql: Sql, name: str, life: str) -> None:
    known = await find_server(sql, name, "FOR SHARE")
    if known is None or known.life != life:
        raise await _name_taken(sql, name)


async def _name_taken(sql: Sql, name: str) -> ServerNameTaken:
    known = await find_server(sql, name)
    at = "" if known is None else f", at {known.url}, and lives"
    return ServerNameTaken(f"another server has the name {name} in this database{at}; give each its own (--front-name)")


async def find_server(sql: Sql, name: str, lock: str = "") -> Peer | None:
    """Return the server of this name, alive or not; None when there is none.

    Args:
        lock: SQL that locks the server's row until the transaction ends, such as ``FOR SHARE``.
    """
    row = await sql.fetchrow(f"{_SELECT_SERVERS} WHERE name = $1 {lock}", name)
    return None if row is None else _parse_server(row)


async def _end_session(sql: Sql, session_id: str, server: str, latch: Latch | None) -> None:
    is_own = await sql.fetchval(
        "DELETE FROM robojax_sessions WHERE id = $1 AND front = $2 RETURNING id", session_id, server
    )
    is_nobodys = "NOT EXISTS (SELECT FROM robojax_sessions WHERE id = $1)"
    if latch is not None:
        condition = f"$2::text IS NOT NULL AND {is_nobodys}"
        await sql.execute(_UPSERT_LATCH.format(condition=condition), session_id, server, _format_latch(latch))
        await _forget_latches(sql)
    elif is_own is not None:
        # Only the session's last server knows that its stop was reset; another server may own the id by now.
        await sql.execute(f"DELETE FROM robojax_latches WHERE id = $1 AND {is_nobodys}", session_id)


async def _forget_latches(sql: Sql) -> None:
    """Delete the oldest emergency stops of ids that are gone, where there are too many."""
    forgotten = await sql.fetch(
        """DELETE FROM robojax_latches WHERE id IN (
            SELECT id FROM robojax_latches l WHERE NOT EXISTS (SELECT FROM robojax_sessions s WHERE s.id = l.id)
            ORDER BY latched_at DESC OFFSET $1
        ) RETURNING id""",
        MAX_LATCHES,
    )
    for row in forgotten:
        logger.error("the emergency stop of session %s is forgotten: more than %d are latched", row["id"], MAX_LATCHES)


def _parse_server(row: Any) -> Peer:
    return Peer(row["name"], row["url"], row["machine"], row["life"], row["is_alive"], row["has_ended"])


def _parse_entry(row: Any) -> Entry:
    latch = _parse_latch(row["latch"])
    return Entry(
        id=row["id"],
        server=row["front"],
        owner=json.loads(row["owner"]),
        record=row["record"],
        status=json.loads(row["status"]),
        latch=None if latch is None else latch.reason,
    )


def _format_latch(latch: Latch) -> str:
    return json.dumps({"reason": latch.reason, "owner": latch.owner})


def _parse_latch(text: str | None) -> Latch | None:
    return None if text is None else Latch(**json.loads(text))

"""Which rooms of a session this server made, and which of those are to go when the session is gone or replaced."""

from dataclasses import replace
from uuid import uuid4

from service.sessions.records import Orphan
from service.sessions.session_record import SessionRecord


def rooms_in(record: SessionRecord) -> tuple[str, ...]:
    """The ids of all its rooms, whoever made them."""
    rooms = record.rooms()
    return tuple(filter(None, (*rooms.cameras.values(), rooms.joint_input, rooms.joint_output)))


def made_before(before: SessionRecord, now: SessionRecord) -> tuple[str, ...]:
    """Rooms of the session now that were made by this server for the one before it."""
    old, new = before.new, now.new
    if (old.transport_server_url, old.workspace_id) != (new.transport_server_url, new.workspace_id):
        return ()
    return tuple(room for room in rooms_in(now) if room in before.made)


def orphan_of(record: SessionRecord) -> Orphan | None:
    """The rooms that this server made for a session, which are to go; None when it made none."""
    if not record.made:
        return None
    cameras = set(record.rooms().cameras.values())
    return Orphan(
        id=uuid4().hex,
        url=record.new.transport_server_url,
        workspace_id=record.rooms().workspace_id,
        rooms=record.made,
        cameras=tuple(room for room in record.made if room in cameras),
        claim=record.claim,
    )


def orphan_between(before: SessionRecord, now: SessionRecord) -> Orphan | None:
    """Likewise, of a session that is replaced: those that the new one does not use."""
    used = made_before(before, now)
    return orphan_of(replace(before, made=tuple(room for room in before.made if room not in used)))

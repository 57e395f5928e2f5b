"""Move of a session to another server: it is held here, interrupted there, and keeps its rooms."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from service.errors import MoveRefused, SessionExists
from service.inference.engine import Engine
from service.sessions.records import SessionRecord, SessionRecords, from_json
from service.sessions.store import NewSession, Sessions
from tests.testing.doubles import MemoryTransport, ScriptedLoader

pytestmark = pytest.mark.timed

NEW = NewSession("arm", "policy", "memory://", owner="alice")


class Servers:
    """Two servers with the same rooms."""

    def __init__(self) -> None:
        self.transport = MemoryTransport()
        self.here, self.there = (
            Sessions(
                transport=self.transport,
                load=ScriptedLoader(),
                engine=Engine(),
                records=SessionRecords(),
            )
            for _ in range(2)
        )


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    for sessions in (servers.here, servers.there):
        await sessions.close()


async def record_of_a_session(servers: Servers) -> SessionRecord:
    """Create a session on the first server and return its record."""
    await servers.here.create(NEW)
    return servers.here.get_record("arm")


async def test_only_a_created_session_has_a_record_and_its_id_is_unique(servers: Servers) -> None:
    assert servers.here.get_record("arm") is None
    record = await record_of_a_session(servers)
    assert record.is_ready
    assert from_json(record.as_json()) == record
    await servers.there.create(replace(NEW, owner="bob"))
    with pytest.raises(SessionExists):
        await servers.there.adopt(record, None)


async def test_a_session_that_is_handed_over_is_held_and_keeps_its_rooms(servers: Servers) -> None:
    await servers.here.create(NEW)
    await servers.here.start("arm")
    rooms = set(servers.transport.existing)
    await servers.here.hand_over("arm")
    assert servers.here.list() == []
    assert servers.transport.links[0].is_closed
    assert servers.transport.existing == rooms != set()
    assert servers.here.get_record("arm") is None
    await servers.here.hand_over("arm")
    await servers.there.adopt(await record_of_a_session(servers), None)
    await servers.there.hand_over("arm")
    assert servers.there.list() == []
    assert servers.transport.existing != set()


async def test_an_adopted_session_is_interrupted_and_keeps_its_rooms(servers: Servers) -> None:
    record = await record_of_a_session(servers)
    await servers.here.hand_over("arm")
    session = await servers.there.adopt(record, None)
    assert (str(session.stage), session.new.owner) == ("interrupted", "alice")
    with pytest.raises(MoveRefused):
        await servers.there.start("arm")
    await servers.there.restart("arm")
    assert [session.id for session in servers.there.list()] == ["arm"]
    await servers.there.delete("arm")
    assert servers.transport.existing == set(), "the rooms belong to the new server"


async def test_the_latch_of_an_emergency_stop_moves_with_the_session(servers: Servers) -> None:
    await servers.here.create(NEW)
    await servers.here.emergency_stop("smoke")
    record = servers.here.get_record("arm")
    await servers.here.hand_over("arm")
    session = await servers.there.adopt(record, "smoke")
    assert session.latch == "smoke"
    with pytest.raises(MoveRefused):
        await servers.there.restart("arm")
    await servers.there.reset("arm")
    await servers.there.restart("arm")
    # The first server has no part of the session.
    await servers.there.delete("arm")
    await servers.here.create(NEW)
    await servers.here.start("arm")

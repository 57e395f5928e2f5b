"""Sessions that a server finds after the previous server was killed or shut down."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.crash_recovery import FAULTS, campaign
from hooks.database import Database
from hooks.errors import StoreError
from service.app import session_settings
from service.errors import MoveRefused, RoomsTaken, SessionExists, TransportError, UnknownSession
from service.inference.engine import Engine
from service.sessions.records import SCHEMA, SessionRecords
from service.sessions.store import NewSession, Sessions
from service.settings import Settings
from tests.testing.doubles import MemoryTransport, ScriptedLoader
from tests.testing.waiting import until

NEW = NewSession("arm", "policy", "memory://", workspace_id="home", max_relative_target={"Jaw": 2.0})


def records_in(folder: Path) -> SessionRecords:
    return SessionRecords(Database(folder / "sessions.sqlite3", SCHEMA), StoreError)


class Server:
    """Sessions with a state folder, and rooms that outlive the server."""

    def __init__(self, folder: Path, transport: MemoryTransport | None = None, **more):
        self.folder = folder
        self.transport = transport or MemoryTransport()
        self.load = ScriptedLoader()
        self.sessions = Sessions(
            transport=self.transport,
            load=self.load,
            engine=Engine(),
            settings=session_settings(Settings.from_values(**more)),
            records=records_in(folder),
        )

    def stages(self) -> dict[str, str]:
        return {session.id: str(session.stage) for session in self.sessions.list()}

    def reason(self, session_id: str = "arm") -> str:
        return str(self.sessions.get(session_id).status().error_message)


@asynccontextmanager
async def serving(folder: Path, transport: MemoryTransport | None = None, **more) -> AsyncIterator[Server]:
    server = Server(folder, transport, **more)
    try:
        yield server
    finally:
        await server.sessions.close()


@asynccontextmanager
async def after_a_kill(server: Server, **more) -> AsyncIterator[Server]:
    """Start a server with only the current state of the disk and of the transport server."""
    folder = server.folder / "killed"
    folder.mkdir()
    for file in server.folder.glob("sessions.sqlite3*"):
        shutil.copy(file, folder)
    transport = MemoryTransport()
    transport.existing = set(server.transport.existing)
    async with serving(folder, transport, **more) as next_server:
        yield next_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as made:
        yield made


async def test_acknowledged_sessions_are_listed_but_not_loaded(server: Server) -> None:
    await server.sessions.create(NEW)
    await server.sessions.create(replace(NEW, session_id="other"))
    await server.sessions.start("arm")
    async with after_a_kill(server) as after:
        assert after.stages() == {"arm": "interrupted", "other": "interrupted"}
        assert after.reason() == "the server ended while it was running"
        assert after.reason("other") == "the server ended while it was ready"
        status = after.sessions.get("arm").status()
        assert status.rooms["joint_output_room_id"] == "arm-joint-output"
        assert (after.sessions.get("arm").new, after.load.loads) == (NEW, [])
        assert after.transport.links == []
        with pytest.raises(MoveRefused, match="interrupted and cannot start; allowed now: restart, reset"):
            await after.sessions.start("arm")


async def test_an_emergency_stop_by_the_robot_is_stored(server: Server) -> None:
    session = await server.sessions.create(NEW)
    server.transport.link.deliver_emergency_stop("robot fault")
    assert session.is_latched
    await server.sessions._journal._records.flush()
    async with after_a_kill(server) as after:
        assert after.sessions.get("arm").latch == session.latch == "robot fault (from robot)"


async def test_a_shutdown_is_stored_as_the_reason_of_the_interruption(tmp_path: Path) -> None:
    async with serving(tmp_path) as first:
        await first.sessions.create(NEW)
        await first.sessions.start("arm")
    async with serving(tmp_path) as second:
        assert second.stages() == {"arm": "interrupted"}
        assert second.reason() == "the server was shut down while it was running"
    async with serving(tmp_path) as third:
        assert third.reason() == "the server was shut down while it was running"


async def test_a_restart_loads_rejoins_the_rooms_and_waits_for_a_start(server: Server) -> None:
    await server.sessions.create(replace(NEW, workspace_id=None))
    rooms = server.sessions.get("arm").status().rooms
    async with after_a_kill(server) as after:
        session = await after.sessions.restart("arm")
        assert str(session.stage) == "ready"
        assert session.status().rooms == rooms
        assert (after.load.loads, after.transport.link.sent) == (["policy"], [])
        await after.sessions.start("arm")
        assert after.stages() == {"arm": "running"}
        await after.sessions.delete("arm")
        assert after.transport.existing == set()


async def test_a_failed_restart_can_be_repeated(server: Server) -> None:
    await server.sessions.create(NEW)
    async with after_a_kill(server) as after:
        after.transport.refuse = TransportError("no server answers")
        with pytest.raises(TransportError):
            await after.sessions.restart("arm")
        assert after.stages() == {"arm": "interrupted"}
        assert after.reason() == (
            "the server ended while it was ready; it could not be brought back: no server answers"
        )
        async with after_a_kill(after) as third:
            assert third.stages() == {"arm": "interrupted"}
        after.transport.refuse = None
        assert str((await after.sessions.restart("arm")).stage) == "ready"


@pytest.mark.parametrize(("how", "count", "refusal"), [("restart", 5, "MoveRefused"), ("create", 50, "SessionExists")])
async def test_one_of_many_requests_restores_an_interrupted_session(server, how, count, refusal) -> None:
    await server.sessions.create(NEW)
    async with after_a_kill(server) as after:
        calls = [
            after.sessions.restart("arm") if how == "restart" else after.sessions.create(NEW) for _ in range(count)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert Counter(type(outcome).__name__ for outcome in outcomes) == {"Session": 1, refusal: count - 1}
        assert after.stages() == {"arm": "ready"}
        assert len(after.transport.links) == 1


async def test_a_new_session_of_the_same_owner_replaces_it(server: Server) -> None:
    await server.sessions.create(replace(NEW, owner="ada"))
    async with after_a_kill(server) as after:
        for other in (None, "bob"):
            with pytest.raises(SessionExists, match=r"^session 'arm' exists already$"):
                await after.sessions.create(replace(NEW, owner=other))
        await after.sessions.create(replace(NEW, owner="ada", policy_path="another", workspace_id="elsewhere"))
        assert after.stages() == {"arm": "ready"}
        await until(lambda: {room.split("/")[0] for room in after.transport.existing} == {"elsewhere"})
        async with after_a_kill(after) as third:
            assert third.sessions.get("arm").new.policy_path == "another"


async def test_a_bounded_number_of_interrupted_sessions_is_kept(tmp_path: Path) -> None:
    for start in range(3):
        async with serving(tmp_path, max_sessions=2) as server:
            for number in range(2):
                await server.sessions.create(replace(NEW, session_id=f"{start}-{number}"))
    async with serving(tmp_path, max_sessions=1) as last:
        assert list(last.stages()) == ["1-0", "1-1", "2-0", "2-1"]


async def test_unknown_fields_of_a_newer_version_are_kept(server: Server) -> None:
    await server.sessions.create(NEW)
    text = server.sessions._journal._writers["arm"].record.as_json().replace('"dry_run"', '"max_torque": 3, "dry_run"')
    server.sessions._journal._records._note("sessions", "arm", (text,))
    await server.sessions._journal._records.flush()
    async with after_a_kill(server) as after:
        assert after.stages() == {"arm": "interrupted"}
        with pytest.raises(MoveRefused, match=r"newer robojax, .*\(max_torque\)"):
            await after.sessions.restart("arm")
        async with after_a_kill(after) as third:
            assert third.sessions.get("arm").record.wishes == {"max_torque": 3}  # type: ignore[union-attr]


async def test_a_latch_survives_the_server_and_the_session_until_reset(server: Server) -> None:
    await server.sessions.create(NEW)
    await server.sessions.emergency_stop("smoke")
    async with after_a_kill(server) as after:
        assert after.reason() == "smoke"
        assert after.sessions.get("arm").status().stats["interrupted"] == "the server ended while it was stopped"
        with pytest.raises(MoveRefused, match=r"latched \(smoke\).*reset, then restart"):
            await after.sessions.restart("arm")
        await after.sessions.delete("arm")
        async with after_a_kill(after) as third:
            assert third.stages() == {}
            await third.sessions.create(NEW)
            assert third.stages() == {"arm": "stopped"}
            with pytest.raises(MoveRefused, match=r"latched \(smoke\)"):
                await third.sessions.start("arm")
            await third.sessions.reset("arm")
            await third.sessions.start("arm")
            async with after_a_kill(third) as fourth:
                assert not fourth.sessions.get("arm").is_latched


async def test_an_emergency_stop_of_all_latches_interrupted_sessions(server: Server) -> None:
    await server.sessions.create(NEW)
    async with after_a_kill(server) as after:
        assert await after.sessions.emergency_stop("fire") == ["arm"]
        assert after.reason() == "fire"
        async with after_a_kill(after) as third:
            assert third.sessions.get("arm").latch == "fire"
            await third.sessions.reset("arm")
            assert third.reason() == "the server ended while it was ready"
            assert str((await third.sessions.restart("arm")).stage) == "ready"


async def test_an_owner_clears_the_latch_of_a_deleted_session(server: Server) -> None:
    await server.sessions.create(replace(NEW, owner="ada"))
    await server.sessions.emergency_stop("smoke")
    assert not await server.sessions.clear_latch("arm", lambda owner: True)
    await server.sessions.delete("arm")
    assert not await server.sessions.clear_latch("arm", lambda owner: owner == "bob")
    assert await server.sessions.clear_latch("arm", lambda owner: owner == "ada")
    async with after_a_kill(server) as after:
        assert (await after.sessions.create(NEW)).latch is None


async def test_the_stop_reason_of_another_owners_session_is_hidden(server: Server) -> None:
    await server.sessions.create(replace(NEW, owner="ada"))
    await server.sessions.emergency_stop("ada's secret")
    await server.sessions.delete("arm")
    session = await server.sessions.create(replace(NEW, owner="bob"))
    assert session.latch == "an emergency stop of a session of this id"


async def test_a_latch_survives_its_session_without_records() -> None:
    sessions = Sessions(transport=MemoryTransport(), load=ScriptedLoader(), engine=Engine())
    await sessions.create(NEW)
    await sessions.emergency_stop("smoke")
    await sessions.delete("arm")
    with pytest.raises(UnknownSession):
        sessions.get("arm")
    assert str((await sessions.create(NEW)).stage) == "stopped"
    await sessions.close()


async def test_an_interrupted_session_keeps_its_room_ids(tmp_path: Path) -> None:
    first = replace(NEW, session_id="arm-left", camera_names=("wrist",), rename={"front": "wrist"})
    second = replace(NEW, session_id="arm", camera_names=("left-wrist",), rename={"front": "left-wrist"})
    async with serving(tmp_path) as server:
        await server.sessions.create(first)
    async with serving(tmp_path) as server:
        with pytest.raises(RoomsTaken, match="'arm-left'"):
            await server.sessions.create(second)
        with pytest.raises(RoomsTaken, match="a session of another key") as refused:
            await server.sessions.create(replace(second, owner="bob"))
        assert "session 'arm-left'" not in str(refused.value)
        await server.sessions.restart("arm-left")
        await server.sessions.delete("arm-left")
        await server.sessions.create(second)


async def test_an_interrupted_deletion_of_rooms_is_completed(server: Server) -> None:
    await server.sessions.create(NEW)
    server.transport.leaving = left = asyncio.Event()
    deleting = asyncio.create_task(server.sessions.delete("arm"))
    await asyncio.sleep(0)
    await server.sessions._journal._records.flush()
    async with after_a_kill(server) as after:
        assert after.stages() == {}
        assert len(after.transport.existing) == 3
        await until(lambda: after.transport.existing == set())
    left.set()
    await deleting


async def test_rooms_of_other_clients_are_not_deleted(server: Server) -> None:
    server.transport.existing.add("home/arm-front")
    await server.sessions.create(NEW)
    async with after_a_kill(server) as after:
        after.transport.occupied.add("home/arm-joint-output")
        await after.sessions.delete("arm")
        await until(lambda: after.transport.existing == {"home/arm-front", "home/arm-joint-output"})
        async with after_a_kill(after) as third:
            # The other client has left the room.
            await until(lambda: third.transport.existing == {"home/arm-front"})
    server.transport.existing.discard("home/arm-front")


# The following test kills servers in separate processes.


async def test_random_kills_lose_no_session_and_move_no_robot(tmp_path: Path) -> None:
    """The benchmark runs the same campaign with 200 kills."""
    found = await campaign(tmp_path, kills=5, seed=11)
    assert {fault: found[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0), found["notes"]
    assert sum(found["acknowledged"].values()) > 5

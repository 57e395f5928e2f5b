"""Stored sessions: the file, its faults, and the answers of the API."""

import asyncio
import sqlite3
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from hooks.errors import StoreError
from service.errors import NotKept
from service.sessions.records import Latch, SessionRecord, from_json
from service.sessions.request import NewSession
from service.state import StateTaken
from tests.testing.pauses import Pauses
from tests.testing.rig import JOINTS, started
from tests.testing.waiting import until
from tests.unit.sessions.test_interrupted import NEW, after_a_kill, records_in
from tests.unit.sessions.test_interrupted import Server as Store


def test_a_record_read_back_equals_the_written_record() -> None:
    newer = {"version": 2, "more": {"cause": "x"}, "wishes": {"max_torque": 3}}
    record = SessionRecord(NEW, stage="running", reason="because", is_ready=True, made=("arm-front",), **newer)
    assert from_json(record.as_json()) == record


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"new": 3}', '{"new": {"session_id": "a"}}', '{"new": null}'])
def test_invalid_text_is_refused_as_a_record(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        from_json(text)


async def test_the_file_is_private_and_has_a_schema_version(tmp_path: Path) -> None:
    records = records_in(tmp_path)
    records.put(SessionRecord(NEW))
    await records.flush()
    file = tmp_path / "sessions.sqlite3"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with sqlite3.connect(file) as reader:
        assert reader.execute("PRAGMA user_version").fetchone() == (2,)
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.close()
    await records.close()


async def test_a_file_of_a_newer_schema_is_not_touched(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as newer:
        newer.execute("PRAGMA user_version=9")
    newer.close()
    with pytest.raises(StoreError, match="version 9, this robojax knows 2; use the robojax that wrote it"):
        records_in(tmp_path)


async def test_an_unreadable_row_is_kept_but_not_listed(tmp_path: Path, caplog) -> None:
    records = records_in(tmp_path)
    records.put(SessionRecord(NEW))
    records._note("sessions", "broken", ("{",))
    await records.flush()
    await records.close()
    again = records_in(tmp_path)
    assert [record.new for record in again.interrupted] == [NEW]
    assert "session broken is not listed" in caplog.text
    await again.close()


async def test_concurrent_writes_share_few_transactions(tmp_path: Path) -> None:
    records = records_in(tmp_path)
    written: list[int] = []
    run = records._database.run  # type: ignore[union-attr]

    async def counted(transaction, batch):
        written.append(len(batch))
        await run(transaction, batch)

    records._database.run = counted  # type: ignore[union-attr, method-assign]

    async def write(number: int) -> None:
        records.put(SessionRecord(NewSession(f"s{number}", "p", "memory://", workspace_id="w")))
        await records.flush()

    await asyncio.gather(*(write(number) for number in range(100)))
    assert sum(written) >= 100
    assert len(written) <= 3
    await records.close()


async def test_jumps_of_the_wall_clock_have_no_effect(tmp_path: Path, monkeypatch) -> None:
    server = Store(tmp_path, input_timeout=30.0)
    true_time = time.time
    for number, offset in enumerate((0, 3600, -3600)):
        monkeypatch.setattr(time, "time", lambda offset=offset: true_time() + offset)
        await server.sessions.create(NewSession(f"s{number}", "p", "memory://"))
        await server.sessions.start(f"s{number}")
    async with after_a_kill(server) as after:
        assert list(after.stages()) == ["s0", "s1", "s2"]
        assert set(after.stages().values()) == {"interrupted"}
    assert set(server.stages().values()) == {"running"}
    assert all(session.status().stats["age_s"] < 60 for session in server.sessions.list())  # type: ignore[operator]
    await server.sessions.close()


# Disks that fail. A database whose file is missing refuses every transaction.


async def test_a_full_disk_delays_no_stop_and_refuses_creation(tmp_path: Path, caplog) -> None:
    server = Store(tmp_path)
    await server.sessions.create(NEW)
    await server.sessions.start("arm")
    file = tmp_path / "sessions.sqlite3"
    file.rename(tmp_path / "away")
    with pytest.raises(NotKept, match=r"cannot write its state folder \(its log says why\); free its disk"):
        await server.sessions.create(NewSession("other", "p", "memory://"))
    assert server.stages() == {"arm": "running"}
    await server.sessions.stop("arm")
    await server.sessions.emergency_stop("smoke")
    assert server.stages() == {"arm": "stopped"}
    assert "lost if the server is killed" in server.sessions.get_warning()["warning"]
    assert caplog.text.count("is not written down") == 1
    # The write is repeated automatically and loses nothing.
    (tmp_path / "away").rename(file)
    server.sessions._journal._records._has_pending.set()
    await server.sessions._journal._records.flush()
    assert server.sessions.get_warning() == {}
    async with after_a_kill(server) as after:
        assert after.stages() == {"arm": "interrupted"}
        assert after.sessions.get("arm").latch == "smoke"
    await server.sessions.close()


async def test_a_hanging_disk_delays_no_stop_and_no_answer(tmp_path: Path, monkeypatch) -> None:
    server = Store(tmp_path)
    await server.sessions.create(NEW)
    await server.sessions.start("arm")
    monkeypatch.setattr("service.sessions.journal.WRITE_TIMEOUT", 0.05)
    answers = asyncio.Event()
    run = server.sessions._journal._records._database.run  # type: ignore[union-attr]

    async def late(*arguments):
        await answers.wait()
        await run(*arguments)

    server.sessions._journal._records._database.run = late  # type: ignore[union-attr, method-assign]
    stopping = asyncio.create_task(server.sessions.stop("arm"))
    await asyncio.sleep(0)
    assert server.stages() == {"arm": "stopped"}
    await stopping
    assert "has not answered for 0.05 s" in server.sessions.get_warning()["warning"]
    answers.set()
    await server.sessions._journal._records.flush()
    assert server.sessions.get_warning() == {}
    await server.sessions.close()


async def test_a_hanging_disk_delays_neither_holds_nor_the_shutdown(tmp_path: Path, pauses: Pauses) -> None:
    server = Store(tmp_path, frame_age_limit=30.0)
    for number in range(4):
        await server.sessions.create(NewSession(f"s{number}", "p", "memory://"))
        server.transport.link.deliver_frame("front", np.zeros((48, 64, 3), np.uint8))
        server.transport.link.deliver_joints(dict.fromkeys(JOINTS, 5.0))
        await server.sessions.start(f"s{number}")
    await until(lambda: all(len(link.sent) > 2 for link in server.transport.links), within=30)
    never = asyncio.Event()
    server.sessions._journal._records._database.run = lambda *arguments: never.wait()  # type: ignore[union-attr, assignment]
    began, held = time.monotonic(), dict.fromkeys(JOINTS, 5.0)
    ending = asyncio.create_task(server.sessions.close())
    await until(lambda: all(link.sent[-1].values == held for link in server.transport.links), within=30)
    assert pauses.running(began) < 0.5
    await ending
    assert pauses.running(began) < 3
    assert all(link.sent[-1].values == held for link in server.transport.links)
    assert server.transport.existing == set()


async def test_the_number_of_stored_latches_is_limited(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("service.sessions.records.MAX_LATCHES", 2)
    records = records_in(tmp_path)
    for id in "abc":
        records.set_latch(id, Latch("x", None))
    assert set(records.latches) == {"b", "c"}
    assert "emergency stop of session a is forgotten" in caplog.text
    await records.close()


async def test_the_api_lists_restarts_and_deletes_interrupted_sessions(tmp_path: Path) -> None:
    async with started(state=str(tmp_path)) as first:
        for name in ("arm", "leg"):
            assert (await first.create(name))[0] == 200
        await first.call("POST", "/sessions/arm/start")
    async with started(state=str(tmp_path)) as second:
        _, listed = await second.call("GET", "/sessions")
        assert {session["session_id"]: session["status"] for session in listed} == dict.fromkeys(
            ("arm", "leg"), "interrupted"
        )
        assert listed[0]["error_message"] == "the server was shut down while it was running"
        _, health = await second.call("GET", "/health")
        assert (health["active_sessions"], health["interrupted_sessions"]) == (0, 2)
        assert health["session_ids"] == ["arm", "leg"]
        assert (await second.call("POST", "/sessions/arm/start"))[0] == 409
        async with second.http.get("/metrics") as metrics:
            assert 'robojax_sessions{stage="interrupted"} 2.0' in await metrics.text()
        status, answer = await second.call("POST", "/sessions/arm/restart")
        assert (status, answer["status"]) == (200, "ready")
        assert (await second.call("POST", "/sessions/arm/start"))[1]["status"] == "running"
        assert (await second.call("DELETE", "/sessions/leg"))[0] == 200
        assert (await second.call("GET", "/sessions/leg"))[0] == 404


async def test_the_api_warns_about_changes_that_are_not_stored(tmp_path: Path) -> None:
    async with started(state=str(tmp_path)) as server:
        await server.create("arm")
        file = tmp_path / "sessions.sqlite3"
        file.rename(tmp_path / "away")
        status, refused = await server.create("other")
        assert (status, refused.get("code")) == (503, "not_kept")
        assert "free its disk" in refused["detail"]
        assert str(tmp_path) not in str(refused)
        for path in ("/sessions/arm/stop", "/debug/emergency_stop", "/debug/sessions/arm/reset"):
            status, answer = await server.call("POST", path)
            assert status == 200
            assert "not written down" in answer["warning"]
            assert str(tmp_path) not in str(answer)
        status, answer = await server.call("DELETE", "/sessions/arm")
        assert status == 200
        assert "not written down" in answer["warning"]
        (tmp_path / "away").rename(file)


async def test_a_second_server_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with started(state=str(tmp_path)):
        with pytest.raises(
            StateTaken, match="another server uses it; end that server, or give this server another folder"
        ):
            async with started(state=str(tmp_path)):
                pass
    async with started(state=str(tmp_path)) as third:
        assert (await third.create())[0] == 200

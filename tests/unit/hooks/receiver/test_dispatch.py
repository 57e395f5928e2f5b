"""Accepted events run: in order within a repo, again when they fail, and on after a stop."""

import asyncio
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import sanic

from hooks.errors import RetryableError, UnknownEvent
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import ReceiverSettings, backoff
from hooks.receiver.inbox import Event, Inbox, Status
from hooks.receiver.receiver import Receiver

QUICK = {"backoff": 0.001, "longest_backoff": 0.002}


def settings(**more) -> ReceiverSettings:
    return ReceiverSettings(**{**QUICK, **more})


async def test_events_of_one_repo_run_in_order_and_those_of_others_beside(serving, make_payload, until) -> None:
    receiver, runs, goes_on = Receiver(settings()), [], asyncio.Event()

    async def note(payload: dict) -> None:
        name, sha = payload["repo"]["name"], payload["repo"]["headSha"]
        if (name, sha) == ("a", "0"):
            await goes_on.wait()
        runs.append((name, sha))
        if name == "b" and len(runs) == 3:
            goes_on.set()

    async with serving(receiver, note, mode="queue") as sender:
        for number in range(3):
            for name in ("a", "b"):
                await sender.post("/webhooks/note", make_payload(name, sha=str(number)))
        await until(receiver)
    assert runs[:3] == [("b", "0"), ("b", "1"), ("b", "2")]
    assert runs[3:] == [("a", "0"), ("a", "1"), ("a", "2")]


@pytest.mark.parametrize("jump", [-3600, 3600])
async def test_a_clock_that_jumps_neither_delays_what_waits_nor_makes_an_equal_body_of_another_hour_a_duplicate(
    serving, make_payload, until, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    receiver, runs = Receiver(settings(same_body_within=60.0)), []
    begun, goes_on = asyncio.Event(), asyncio.Event()
    wall = time.time

    async def note(payload: dict) -> None:
        runs.append(payload["repo"]["headSha"])
        begun.set()
        await goes_on.wait()

    receiver.add(note, mode="queue")
    async with serving(receiver) as sender, asyncio.timeout(20):
        for number in range(2):
            await sender.post("/webhooks/note", make_payload("a", sha=str(number)))
        await begun.wait()
        monkeypatch.setattr(time, "time", lambda: wall() + jump)
        goes_on.set()
        await until(receiver)
        assert runs == ["0", "1"]
        await sender.post("/webhooks/note", make_payload("a", sha="1"))
        await until(receiver)
    assert runs == ["0", "1", "1"]


@pytest.mark.parametrize("limit", ["concurrency", "threads"])
async def test_no_more_run_at_one_time_than_may(serving, make_payload, until, limit: str) -> None:
    receiver = Receiver(
        settings(concurrency=2 if limit == "concurrency" else 9, threads=2 if limit == "threads" else 9)
    )
    running, most, lock = 0, 0, threading.Lock()

    def enter(change: int) -> None:
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    barrier, pair = threading.Barrier(2), asyncio.Barrier(2)

    def sync(payload: dict) -> None:
        enter(1)
        barrier.wait(30)
        enter(-1)

    async def later(payload: dict) -> None:
        enter(1)
        await asyncio.wait_for(pair.wait(), 30)
        enter(-1)

    async with serving(receiver, sync if limit == "threads" else later, "x", mode="queue") as sender:
        await asyncio.gather(*(sender.post("/webhooks/x", make_payload(f"a/{number}")) for number in range(8)))
        await until(receiver)
        assert [event.status for event in await receiver.events()] == [Status.DONE] * 8
    assert most == 2


@pytest.mark.parametrize("is_async", [True, False])
async def test_in_the_background_it_is_tried_again_and_then_is_a_dead_letter(
    serving, make_payload, until, caplog, is_async: bool
) -> None:
    receiver, attempts = Receiver(settings(attempts=3)), []

    def breaks(event: Event) -> None:
        attempts.append(event.attempt)
        raise ValueError("no camera")

    async def breaks_later(event: Event) -> None:
        breaks(event)

    async with serving(receiver, breaks_later if is_async else breaks, "x", mode="queue") as sender:
        told = await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": "1"})
        await until(receiver)
        [dead] = await receiver.events(status="dead")
        assert (dead.id, dead.attempt, dead.error) == (told.json["event_id"], 3, "ValueError: no camera")
        again = await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": "1"})
        assert (again.status, again.json["status"]) == (200, "dead")
        assert attempts == [1, 2, 3]
        # A replay has as many attempts again.
        await receiver.replay(dead.id)
        await until(receiver)
        assert attempts == [1, 2, 3, 4, 5, 6]
    assert "dead letter after 3 attempts" in caplog.text


async def test_a_handler_may_ask_to_be_run_later_and_its_sender_is_told_that_it_is_accepted(
    serving, make_payload, until
) -> None:
    receiver, attempts = Receiver(settings()), []

    def not_yet(event: Event) -> str:
        attempts.append(event.attempt)
        if len(attempts) == 1:
            raise RetryableError("the arm is moving", after=0.001)
        return "well"

    async with serving(receiver, not_yet) as sender:
        told = await sender.post("/webhooks/not_yet", make_payload())
        assert told.status == 202
        await until(receiver, told.json["event_id"])
        assert (await receiver.event(told.json["event_id"])).answer.body == b'"well"'
    assert attempts == [1, 2]


async def test_a_failure_is_not_handed_back_when_a_duplicate_was_told_that_it_is_accepted(
    serving, make_payload, until
) -> None:
    receiver, attempts, began, goes_on = Receiver(settings()), [], asyncio.Event(), asyncio.Event()

    async def breaks(event: Event) -> None:
        attempts.append(event.attempt)
        began.set()
        await goes_on.wait()
        if len(attempts) == 1:
            raise RuntimeError("once")

    async with serving(receiver, breaks) as sender:
        same = {"webhook-id": "1"}
        first = asyncio.create_task(sender.post("/webhooks/breaks", make_payload(), headers=same))
        await began.wait()
        assert (await sender.post("/webhooks/breaks", make_payload(), headers=same)).status == 202
        goes_on.set()
        assert (await first).status == 202
        await until(receiver)
        assert [event.status for event in await receiver.events()] == [Status.DONE]
    assert attempts == [1, 2]


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("this error has no text")


@pytest.mark.parametrize("error", [FileNotFoundError("\udcff.bin"), _Mute()])
async def test_an_error_whose_text_cannot_be_written_is_an_error_like_any_other(
    serving, make_payload, caplog, error: Exception
) -> None:
    caplog.set_level("CRITICAL", "hooks")  # a report with this text in it could not be sent to another process
    receiver = Receiver(settings())

    def fail(event: Event) -> None:
        if event.attempt == 1:
            raise error

    async with serving(receiver, fail) as sender:
        same = {"webhook-id": "1"}
        told = [(await sender.post("/webhooks/fail", make_payload(), headers=same)).status for _ in range(2)]
        (event,) = await receiver.events()
    assert told == [500, 200]
    assert event.status is Status.DONE


async def test_what_did_not_end_before_a_stop_goes_on_at_the_next_start(serving, make_payload, until, tmp_path) -> None:
    runs = []

    def receiver(handler) -> Receiver:
        made = Receiver(settings(database=tmp_path / "e.sqlite3", stop_within=0.02))
        made.add(handler, "x", mode="queue")
        return made

    async def for_ever(event: Event) -> None:
        await asyncio.Event().wait()

    def ends(payload: dict, request: sanic.Request, event: Event) -> None:
        runs.append((payload["repo"]["headSha"], request.json["repo"]["headSha"], request.headers["user-agent"]))

    async with serving(receiver(for_ever)) as sender:
        for number in range(3):
            told = await sender.post("/webhooks/x", make_payload(sha=str(number)), headers={"user-agent": "hub"})
            assert told.status == 202
    second = receiver(ends)
    async with serving(second):
        await until(second)
    assert runs == [(str(number), str(number), "hub") for number in range(3)]


async def test_a_waiting_sender_is_told_accepted_when_the_server_stops(serving, make_payload, tmp_path) -> None:
    receiver, began = Receiver(settings(database=tmp_path / "e.sqlite3", stop_within=0.02)), asyncio.Event()

    async def for_ever(event: Event) -> None:
        began.set()
        await asyncio.Event().wait()

    async with serving(receiver, for_ever) as sender:
        waiting = asyncio.create_task(sender.post("/webhooks/for_ever", make_payload()))
        await began.wait()
        await receiver._running.close()
        assert (await waiting).status == 202
        assert (await sender.post("/webhooks/for_ever", make_payload("a/b"))).status == 503
        receiver._worker = None
    with Inbox(tmp_path / "e.sqlite3") as inbox:
        assert [event.status for event in inbox.list()] == [Status.WAITING]


async def test_another_process_replays_and_the_running_receiver_picks_it_up(serving, make_payload, tmp_path) -> None:
    receiver, attempts, again = Receiver(settings(database=tmp_path / "e.sqlite3")), [], asyncio.Event()

    async def note(event: Event) -> None:
        attempts.append(event.attempt)
        if len(attempts) == 2:
            again.set()

    async with serving(receiver, note) as sender:
        await sender.post("/webhooks/note", make_payload())
        with Inbox(tmp_path / "e.sqlite3") as inbox:
            [event] = inbox.list(status="done")
            assert inbox.replay(event.id).status is Status.WAITING
            await asyncio.wait_for(again.wait(), 30)
            with pytest.raises(UnknownEvent, match="no event 'e9'"):
                inbox.replay("e9")
    assert attempts == [1, 2]


async def test_events_without_a_handler_wait_for_the_next_start(serving, make_payload, tmp_path, until, caplog) -> None:
    path = tmp_path / "e.sqlite3"
    runs = []

    def receiver(name: str) -> Receiver:
        made = Receiver(settings(database=path, stop_within=0.02))
        made.add(lambda event: runs.append(event.path), name)
        return made

    async with serving(receiver("old")) as sender:
        await sender.post("/webhooks/old", make_payload())
    with Inbox(path) as inbox:
        inbox.replay(inbox.list()[0].id)
    async with serving(receiver("new")):
        pass
    assert "1 events wait for /webhooks/old, which has no handler here" in caplog.text
    last = receiver("old")
    async with serving(last):
        await until(last)
    assert runs == ["/webhooks/old"] * 2


def test_backoff_doubles_up_to_its_longest_and_half_is_chance() -> None:
    rule = ReceiverSettings(backoff=1.0, longest_backoff=6.0)
    assert [backoff(failures, rule, lambda: 0.0) for failures in (1, 2, 3, 4, 1000)] == [1.0, 2.0, 4.0, 6.0, 6.0]
    assert [backoff(failures, rule, lambda: 1.0) for failures in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 3.0]


async def test_a_disk_that_is_full_for_a_while_does_not_lose_what_was_accepted(
    serving, make_payload, until, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("hooks.queue.STORE_RETRY_INTERVAL", 0.01)
    receiver, runs, began, goes_on = Receiver(settings(database=tmp_path / "e.sqlite3")), [], asyncio.Event(), None
    goes_on = asyncio.Event()

    async def slow(event: Event) -> str:
        runs.append(event.attempt)
        began.set()
        await goes_on.wait()
        return "x" * 200_000

    async with serving(receiver, slow, mode="queue") as sender:

        async def pages(count: int) -> None:
            def limit(connection: sqlite3.Connection) -> None:
                connection.execute(f"PRAGMA max_page_count={count}").fetchall()

            await receiver._running.inbox.database.run(limit)

        await sender.post("/webhooks/slow", make_payload())
        await began.wait()
        await pages(1)
        goes_on.set()
        await asyncio.sleep(0.05)
        assert [event.status for event in await receiver.events()] == [Status.RUNNING]
        await pages(1_000_000)
        await until(receiver)
        assert [event.status for event in await receiver.events()] == [Status.DONE]
    assert runs == [1]


async def test_a_large_payload_is_read_whole_for_an_async_handler(serving, make_payload) -> None:
    receiver, ran = Receiver(settings()), []
    files = [{"path": f"folder/{number}", "action": "add", "xetHash": "f" * 64} for number in range(4000)]

    async def count(payload: WebhookPayload) -> int:
        ran.append(threading.current_thread() is threading.main_thread())
        return len(payload.updatedFiles or ())

    async with serving(receiver, count) as sender:
        told = await sender.post("/webhooks/count", make_payload(updatedFiles=files))
    assert (told.status, told.json, ran) == (200, 4000, [True])

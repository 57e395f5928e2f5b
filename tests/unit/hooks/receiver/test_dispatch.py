"""Dispatch of accepted events: order within a repo, retries, and continuation after a stop."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sanic

from hooks.errors import RetryableError, UnknownEvent
from hooks.receiver.endpoint import ReceiverSettings, backoff
from hooks.receiver.inbox import Event, EventInbox, EventStatus
from hooks.receiver.receiver import Receiver
from tests.unit.hooks.receiver.conftest import make_payload, serving, until_ended

QUICK = {"backoff": 0.001, "longest_backoff": 0.002}


def settings(**more) -> ReceiverSettings:
    return ReceiverSettings(**{**QUICK, **more})


async def test_events_of_one_repo_run_in_order_and_repos_run_in_parallel() -> None:
    receiver, runs, release = Receiver(settings()), [], asyncio.Event()

    async def note(payload: dict) -> None:
        name, sha = payload["repo"]["name"], payload["repo"]["headSha"]
        if (name, sha) == ("a", "0"):
            await release.wait()
        runs.append((name, sha))
        if name == "b" and len(runs) == 3:
            release.set()

    async with serving(receiver, note, mode="queue") as sender:
        for number in range(3):
            for name in ("a", "b"):
                await sender.post("/webhooks/note", make_payload(name, sha=str(number)))
        await until_ended(receiver)
    assert runs[:3] == [("b", "0"), ("b", "1"), ("b", "2")]
    assert runs[3:] == [("a", "0"), ("a", "1"), ("a", "2")]


@pytest.mark.parametrize("limit", ["concurrency", "threads"])
async def test_handlers_in_parallel_stay_within_the_limit(limit: str) -> None:
    receiver = Receiver(settings(**{"concurrency": 9, "threads": 9, limit: 2}))
    running, most, barrier, pair = set(), [], threading.Barrier(2), asyncio.Barrier(2)

    @contextmanager
    def counted(event: Event) -> Iterator[None]:
        running.add(event.id)
        most.append(len(running))
        yield
        running.discard(event.id)

    def sync(event: Event) -> None:
        with counted(event):
            barrier.wait(30)

    async def later(event: Event) -> None:
        with counted(event):
            await asyncio.wait_for(pair.wait(), 30)

    async with serving(receiver, sync if limit == "threads" else later, "x", mode="queue") as sender:
        await asyncio.gather(*(sender.post("/webhooks/x", make_payload(f"a/{number}")) for number in range(8)))
        await until_ended(receiver)
        assert [event.status for event in await receiver.events()] == [EventStatus.DONE] * 8
    assert max(most) == 2


async def test_a_failing_event_is_retried_and_then_a_dead_letter(caplog) -> None:
    receiver, attempts = Receiver(settings(attempts=3)), []

    def breaks(event: Event) -> None:
        attempts.append(event.attempt)
        raise ValueError("no camera")

    async with serving(receiver, breaks, "x", mode="queue") as sender:
        response = await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": "1"})
        await until_ended(receiver)
        [dead] = await receiver.events(status="dead")
        assert (dead.id, dead.attempt, dead.error) == (response.json["event_id"], 3, "ValueError: no camera")
        again = await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": "1"})
        assert (again.status, again.json["status"]) == (200, "dead")
        assert attempts == [1, 2, 3]
        # A replay has the same number of attempts.
        await receiver.replay(dead.id)
        await until_ended(receiver)
        assert attempts == [1, 2, 3, 4, 5, 6]
    assert "dead letter after 3 attempts" in caplog.text


async def test_retryable_error_answers_202_and_runs_again() -> None:
    receiver, attempts = Receiver(settings()), []

    def not_yet(event: Event) -> str:
        attempts.append(event.attempt)
        if len(attempts) == 1:
            raise RetryableError("the arm is moving", after=0.001)
        return "done"

    async with serving(receiver, not_yet) as sender:
        response = await sender.post("/webhooks/not_yet", make_payload())
        assert response.status == 202
        await until_ended(receiver, response.json["event_id"])
        assert (await receiver.event(response.json["event_id"])).answer.body == b'"done"'
    assert attempts == [1, 2]


async def test_a_failure_after_an_accepted_duplicate_is_retried() -> None:
    receiver, attempts, began, release = Receiver(settings()), [], asyncio.Event(), asyncio.Event()

    async def breaks(event: Event) -> None:
        attempts.append(event.attempt)
        began.set()
        await release.wait()
        if len(attempts) == 1:
            raise RuntimeError("once")

    async with serving(receiver, breaks) as sender:
        same = {"webhook-id": "1"}
        first = asyncio.create_task(sender.post("/webhooks/breaks", make_payload(), headers=same))
        await began.wait()
        assert (await sender.post("/webhooks/breaks", make_payload(), headers=same)).status == 202
        release.set()
        assert (await first).status == 202
        await until_ended(receiver)
        assert [event.status for event in await receiver.events()] == [EventStatus.DONE]
    assert attempts == [1, 2]


async def test_unfinished_events_run_again_at_the_next_start(tmp_path) -> None:
    runs = []

    def receiver(handler) -> Receiver:
        made = Receiver(settings(database=tmp_path / "e.sqlite3", stop_within=0.02))
        made.add(handler, "x", mode="queue")
        return made

    async def never_ends(event: Event) -> None:
        await asyncio.Event().wait()

    def ends(payload: dict, request: sanic.Request, event: Event) -> None:
        runs.append((payload["repo"]["headSha"], request.json["repo"]["headSha"], request.headers["user-agent"]))

    async with serving(receiver(never_ends)) as sender:
        for number in range(3):
            response = await sender.post("/webhooks/x", make_payload(sha=str(number)), headers={"user-agent": "hub"})
            assert response.status == 202
    second = receiver(ends)
    async with serving(second):
        await until_ended(second)
    assert runs == [(str(number), str(number), "hub") for number in range(3)]


async def test_a_waiting_sender_gets_202_when_the_server_stops(tmp_path) -> None:
    receiver, began = Receiver(settings(database=tmp_path / "e.sqlite3", stop_within=0.02)), asyncio.Event()

    async def never_ends(event: Event) -> None:
        began.set()
        await asyncio.Event().wait()

    async with serving(receiver, never_ends) as sender:
        waiting = asyncio.create_task(sender.post("/webhooks/never_ends", make_payload()))
        await began.wait()
        await receiver._running.close()
        assert (await waiting).status == 202
        assert (await sender.post("/webhooks/never_ends", make_payload("a/b"))).status == 503
        receiver._worker = None
    with EventInbox(tmp_path / "e.sqlite3") as inbox:
        assert [event.status for event in inbox.list()] == [EventStatus.WAITING]


async def test_a_running_receiver_runs_a_replay_of_another_process(tmp_path) -> None:
    receiver, attempts, again = Receiver(settings(database=tmp_path / "e.sqlite3")), [], asyncio.Event()

    async def note(event: Event) -> None:
        attempts.append(event.attempt)
        if len(attempts) == 2:
            again.set()

    async with serving(receiver, note) as sender:
        await sender.post("/webhooks/note", make_payload())
        with EventInbox(tmp_path / "e.sqlite3") as inbox:
            [event] = inbox.list(status="done")
            assert inbox.replay(event.id).status is EventStatus.WAITING
            await asyncio.wait_for(again.wait(), 30)
            with pytest.raises(UnknownEvent, match="no event 'e9'"):
                inbox.replay("e9")
    assert attempts == [1, 2]


async def test_events_without_a_handler_wait_for_the_next_start(tmp_path, caplog) -> None:
    path = tmp_path / "e.sqlite3"
    runs = []

    def receiver(name: str) -> Receiver:
        made = Receiver(settings(database=path, stop_within=0.02))
        made.add(lambda event: runs.append(event.path), name)
        return made

    async with serving(receiver("old")) as sender:
        await sender.post("/webhooks/old", make_payload())
    with EventInbox(path) as inbox:
        inbox.replay(inbox.list()[0].id)
    async with serving(receiver("new")):
        pass
    assert "1 events wait for /webhooks/old, which has no handler here" in caplog.text
    last = receiver("old")
    async with serving(last):
        await until_ended(last)
    assert runs == ["/webhooks/old"] * 2


def test_the_backoff_doubles_up_to_its_limit_with_half_jitter() -> None:
    rule = ReceiverSettings(backoff=1.0, longest_backoff=6.0)
    assert [backoff(failures, rule, lambda: 0.0) for failures in (1, 2, 3, 4, 1000)] == [1.0, 2.0, 4.0, 6.0, 6.0]
    assert [backoff(failures, rule, lambda: 1.0) for failures in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 3.0]


async def test_old_events_are_deleted_while_the_receiver_runs() -> None:
    receiver = Receiver(settings(kept=10.0))
    async with serving(receiver, lambda: None, "x") as sender:
        await sender.post("/webhooks/x", make_payload())
        await receiver._running.prune(time.time() + 5)
        assert len(await receiver.events()) == 1
        await receiver._running.prune(time.time() + 15)
        assert await receiver.events() == []

"""A delivery from its POST to the answer: refusals, duplicates and results."""

import asyncio
import io
import json
import logging
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import sanic
from pydantic import BaseModel

from hooks.errors import HooksError, InvalidWebhook
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.inbox import Event, EventStatus
from hooks.receiver.receiver import Receiver
from tests.testing.pauses import Pauses
from tests.testing.waiting import until
from tests.unit.hooks.receiver.conftest import make_payload, serving, until_ended

SECRET = "a-secret-of-sixteen"
SIGNED = {"x-webhook-secret": SECRET}


class Sha(BaseModel):
    sha: str | None


def echo(payload: dict) -> dict:
    return payload


@pytest.mark.parametrize("body", [b"{", b'{"event": 1}', b"", b"\xff" * 100])
async def test_the_secret_is_checked_before_the_body(body: bytes, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(Receiver(ReceiverSettings(secrets=(SECRET,))), lambda payload: None, "x") as sender:
        response = await sender.post("/webhooks/x", data=body)
        assert (response.status, response.json) == (401, {"error": "x-webhook-secret header not set."})
        response = await sender.post("/webhooks/x", data=body, headers={"x-webhook-secret": "guessed-secret"})
        assert (response.status, response.json) == (403, {"error": "Invalid webhook secret."})
        response = await sender.post("/webhooks/x", data=body, headers=SIGNED)
        assert response.status == 422
    assert "guessed-secret" not in caplog.text
    assert SECRET not in caplog.text


async def test_an_invalid_payload_is_reported_by_its_field_names_only() -> None:
    broken = make_payload(event={"scope": 3, "private-value": "x"}, webhook={"id": "private-value"})
    async with serving(Receiver(), lambda payload: None, "x") as sender:
        response = await sender.post("/webhooks/x", broken)
        assert response.status == 422
        assert response.json["fields"] == ["event.action", "event.scope"]
        assert "private" not in json.dumps(response.json)
        assert (await sender.post("/webhooks/x", make_payload(discussion={}, comment=3))).status == 200
        text = {"content-type": "text/plain"}
        response = await sender.post("/webhooks/x", data=json.dumps(make_payload("a/b")), headers=text)
        assert response.status == 200


async def test_two_deliveries_without_a_body_are_two_events() -> None:
    async with serving(Receiver(), lambda: 3, "nothing") as sender:
        for _ in range(2):
            empty = await sender.post("/webhooks/nothing")
            assert (empty.status, empty.json, "x-webhook-duplicate" in empty.headers) == (200, 3, False)


async def test_a_body_of_50_MB_is_413_before_it_is_kept(monkeypatch) -> None:
    # A slow machine may lose the connection before it reads the answer if this timeout is short.
    monkeypatch.setattr("hooks.receiver.receiver.DISCARD_TIMEOUT", 60.0)
    receiver = Receiver(ReceiverSettings(secrets=(SECRET,), max_body=1 << 20))

    async def pieces():
        for _ in range(50):
            yield bytes(1 << 20)

    async with serving(receiver, echo) as sender:
        response = await sender.post("/webhooks/echo", data=io.BytesIO(bytes(50 << 20)), headers=SIGNED)
        assert (response.status, response.json) == (413, {"error": "The body has more than 1048576 bytes."})
        response = await sender.post("/webhooks/echo", data=pieces(), headers=SIGNED)
        assert response.status == 413
        # A client that sends "expect: 100-continue" gets the refusal before it sends the body.
        head = b"POST /webhooks/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 52428800\r\nexpect: 100-continue\r\n\r\n"
        assert b" 413 " in await sender.raw(head)
        assert (await sender.post("/webhooks/echo", {"a": "x" * 900_000}, headers=SIGNED)).status == 200


@pytest.mark.parametrize(
    ("rest", "read_within", "status", "error"),
    [
        (b"content-length: 10\r\n\r\n{", 0.05, b"408", b""),
        (b"transfer-encoding: chunked\r\n\r\nno size\r\n", 60.0, b"400", b'{"error":"The body cannot be read."}'),
    ],
    ids=["too slow", "broken encoding"],
)
async def test_an_unreadable_body_is_refused(rest: bytes, read_within: float, status: bytes, error: bytes) -> None:
    async with serving(Receiver(ReceiverSettings(read_within=read_within)), echo) as sender:
        response = await sender.raw(b"POST /webhooks/echo HTTP/1.1\r\nhost: x\r\n" + rest, whole=True)
        assert response.startswith(b"HTTP/1.1 " + status)
        assert error in response


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("text", "text"),
        ([1, {"a": 2.5}], [1, {"a": 2.5}]),
        (True, True),
        (Sha(sha="x"), {"sha": "x"}),
        (object(), None),
        (float("nan"), None),
    ],
)
async def test_any_return_value_is_sent_as_json(value: object, expected: object) -> None:
    async with serving(Receiver(), lambda: value, "x") as sender:
        answer = await sender.post("/webhooks/x")
        assert (answer.status, answer.json) == (200, expected)


async def test_a_response_object_of_a_handler_is_sent() -> None:
    def own(payload: dict) -> sanic.HTTPResponse:
        foreign = {"Content-Length": "500", "Transfer-Encoding": "chunked"}  # Headers of another server.
        return sanic.HTTPResponse(json.dumps({"made": payload["n"]}), 201, {"x-own": "1"} | foreign, "application/json")

    async with serving(Receiver(), own) as sender:
        for _ in range(2):
            response = await sender.post("/webhooks/own", {"n": 3}, headers={"webhook-id": "1"})
            assert (response.status, response.json, response.headers["x-own"]) == (201, {"made": 3}, "1")
        assert response.headers["x-webhook-duplicate"] == "true"


async def test_deliveries_of_one_event_run_once_across_a_restart(tmp_path) -> None:
    runs = []

    def receiver() -> Receiver:
        made = Receiver(ReceiverSettings(database=tmp_path / "events.sqlite3"))
        made.add(lambda payload: runs.append(payload.repo.name) or len(runs), "x")
        made.add(lambda payload: runs.append("other"), "y")
        return made

    same = {"webhook-id": "delivery-1"}
    async with serving(receiver()) as sender:
        first = await sender.post("/webhooks/x", make_payload(), headers=same)
        second = await sender.post("/webhooks/x", make_payload(), headers=same)
    async with serving(receiver()) as sender:
        third = await sender.post("/webhooks/x", make_payload(), headers=same)
        assert [(reply.status, reply.json) for reply in (first, second, third)] == [(200, 1)] * 3
        assert [reply.headers.get("x-webhook-duplicate") for reply in (first, second, third)] == [None, "true", "true"]
        assert runs == ["robots/act"]
        # Another endpoint, another webhook and another delivery are other events.
        await sender.post("/webhooks/y", make_payload(), headers=same)
        await sender.post("/webhooks/x", make_payload(webhook={"id": "w2", "version": 3}), headers=same)
        await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": "delivery-2"})
    assert len(runs) == 4


async def test_an_equal_body_without_an_id_is_a_duplicate_for_a_time() -> None:
    runs = []

    def note(payload: dict) -> None:
        runs.append(payload["n"])

    for window, count in ((60.0, 2), (0.0, 3)):
        runs.clear()
        async with serving(Receiver(ReceiverSettings(same_body_within=window)), note) as sender:
            for number in (1, 2, 1):
                await sender.post("/webhooks/note", {"n": number})
        assert len(runs) == count


async def test_a_slow_handler_gets_202_and_runs_once(pauses: Pauses) -> None:
    receiver = Receiver(ReceiverSettings(answer_within=0.05))
    release, runs = threading.Event(), []

    def slow(payload: dict) -> str:
        runs.append(payload)
        assert release.wait(60)
        return "done"

    same = {"webhook-id": "1"}
    async with serving(receiver, slow) as sender:
        began = time.monotonic()
        response = await sender.post("/webhooks/slow", make_payload(), headers=same)
        assert pauses.running(began) < 1
        assert response.status == 202
        assert response.json == {"status": "accepted", "event_id": response.json["event_id"]}
        again = await sender.post("/webhooks/slow", make_payload(), headers=same)
        assert (again.status, again.json) == (202, response.json)
        release.set()
        await until_ended(receiver, response.json["event_id"])
        last = await sender.post("/webhooks/slow", make_payload(), headers=same)
        assert (last.status, last.json, last.headers["x-webhook-duplicate"]) == (200, "done", "true")
        assert len(runs) == 1


async def test_a_full_receiver_answers_503_with_retry_after() -> None:
    receiver = Receiver(ReceiverSettings(max_waiting=2))
    release = asyncio.Event()

    async def wait(payload: dict) -> None:
        await release.wait()

    async with serving(receiver, wait, mode="queue") as sender:

        async def send(number: int):
            return await sender.post("/webhooks/wait", make_payload(f"a/{number}"), headers={"webhook-id": str(number)})

        assert [(await send(number)).status for number in range(3)] == [202, 202, 503]
        assert (await send(2)).headers["retry-after"] == "5"
        assert (await send(1)).status == 202, "a duplicate needs no slot"
        release.set()
        await until_ended(receiver)
        assert (await send(2)).status == 202


async def test_a_sender_that_disconnects_does_not_end_its_event() -> None:
    began, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(payload: dict) -> None:
        began.set()
        await release.wait()
        done.set()

    async with serving(Receiver(), slow) as sender:
        task = asyncio.create_task(sender.post("/webhooks/slow", make_payload()))
        await asyncio.wait_for(began.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        release.set()
        await asyncio.wait_for(done.wait(), 30)


async def test_a_handler_error_is_500_without_its_text_and_is_retried(caplog) -> None:
    receiver, attempts = Receiver(), []

    def breaks(payload: dict, event: Event) -> str:
        attempts.append(event.attempt)
        if len(attempts) < 3:
            raise RuntimeError("private detail")
        return "done"

    same = {"webhook-id": "1"}
    async with serving(receiver, breaks) as sender:
        replies = [await sender.post("/webhooks/breaks", make_payload(), headers=same) for _ in range(4)]
        event = await receiver.event(replies[0].json["event_id"])
    assert [reply.status for reply in replies] == [500, 500, 200, 200]
    assert set(replies[0].json) == {"error", "event_id"}
    assert "private" not in json.dumps(replies[0].json)
    assert attempts == [1, 2, 3]
    assert (event.status, event.attempt, event.error) == (EventStatus.DONE, 3, None)
    assert "private detail" in caplog.text


class Panic(BaseException):
    """Exception outside of ``Exception``, as libraries in Rust raise it."""


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), StopIteration(), Panic()], ids=repr
)
async def test_a_handler_cannot_end_the_server(error: BaseException, caplog) -> None:
    receiver = Receiver()

    async def ends() -> None:
        raise error

    def ends_too() -> None:
        raise error

    receiver.add(ends)
    receiver.add(ends_too)
    async with serving(receiver, lambda: 3, "done") as sender:
        assert [(await sender.post(f"/webhooks/{name}")).status for name in ("ends", "ends_too")] == [500, 500]
        assert (await sender.post("/webhooks/done")).json == 3


async def test_headers_of_an_event_have_no_secrets() -> None:
    receiver, events = Receiver(ReceiverSettings(secrets=(SECRET,))), []
    headers = {**SIGNED, "authorization": "Bearer private", "webhook-id": "1", "user-agent": "hub"}
    async with serving(receiver, lambda event: events.append(event), "x") as sender:
        await sender.post("/webhooks/x", make_payload(), headers=headers)
        recent = await receiver.events()
    assert (events[0].headers["user-agent"], events[0].delivery_id, events[0].webhook_id) == ("hub", "1", "webhook-1")
    assert json.loads(events[0].body) == make_payload()
    assert [event.repo for event in recent] == ["robots/act"]
    assert SECRET not in repr(events) + repr(recent)
    assert "private" not in repr(events[0].headers)


TROUBLES = {
    "full": ("PRAGMA max_page_count=1", "PRAGMA max_page_count=1000000"),
    "locked": ("BEGIN IMMEDIATE", "ROLLBACK"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_an_event_that_cannot_be_stored_is_not_acknowledged(
    tmp_path: Path, monkeypatch, caplog, trouble: str
) -> None:
    monkeypatch.setattr("hooks.database.LOCK_TIMEOUT", 0.05)
    receiver, runs = Receiver(ReceiverSettings(database=tmp_path / "e.sqlite3")), []
    begin, end = TROUBLES[trouble]
    async with serving(receiver, lambda payload: runs.append(1), "x") as sender:
        run = receiver._running.inbox.database.run
        other = sqlite3.connect(tmp_path / "e.sqlite3", isolation_level=None)

        async def execute(statement: str) -> None:
            if trouble == "locked":
                other.execute(statement)
            else:
                await run(lambda connection: connection.execute(statement).fetchall())

        await execute(begin)
        same = {"webhook-id": "1"}
        response = await sender.post("/webhooks/x", make_payload(padding="x" * 100_000), headers=same)
        assert (response.status, response.headers["retry-after"]) == (503, "5")
        assert "is not acknowledged" in caplog.text
        assert runs == []
        await execute(end)
        other.close()
        response = await sender.post("/webhooks/x", make_payload(padding="x" * 100_000), headers=same)
        assert (response.status, runs) == (200, [1])


def test_an_invalid_handler_or_path_is_refused() -> None:
    receiver = Receiver()
    receiver.add(echo)
    with pytest.raises(ValueError, match=r"^Webhook /webhooks/echo already exists\.$"):
        receiver.add(echo, "/echo/")
    for options in ({"path": ""}, {"path": "a b"}, {"path": "<id>"}, {"mode": "later"}):
        with pytest.raises(InvalidWebhook):
            receiver.add(lambda: None, **{"path": "x", **options})
    with pytest.raises(InvalidWebhook, match="give a path"):
        receiver.add(lambda: None)
    receiver.blueprint()
    with pytest.raises(HooksError, match="before the server is created"):
        receiver.add(echo, "late")


async def test_simultaneous_deliveries_of_one_event_run_once() -> None:
    receiver, runs, release = Receiver(), [], asyncio.Event()

    async def note(event: Event) -> str:
        runs.append(event.id)
        await release.wait()
        return "noted"

    async with serving(receiver, note) as sender:
        same = {"webhook-id": "1"}
        sent = [asyncio.create_task(sender.post("/webhooks/note", make_payload(), headers=same)) for _ in range(5)]
        await until(lambda: sum(request.done() for request in sent) == 4)
        release.set()
        replies = await asyncio.gather(*sent)
    assert sorted(reply.status for reply in replies) == [200, 202, 202, 202, 202]
    assert len(runs) == 1

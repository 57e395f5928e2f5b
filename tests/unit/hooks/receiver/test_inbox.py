"""Inbox of events: listing, duplicates, crashes, and limits of age and size."""

from pathlib import Path

import pytest

from hooks.errors import UnknownEvent
from hooks.receiver import inbox as ledger
from hooks.receiver.endpoint import DAY
from hooks.receiver.inbox import Acceptance, Answer, Event, EventInbox, IncomingEvent

NOW = 1_700_000_000.0


def arrive(inbox: EventInbox, number: int, *, at: float = NOW, body: bytes = b"{}", **more) -> tuple[Acceptance, Event]:
    parts = {"id": f"e{number}", "path": "/webhooks/x", "body": body, "headers": '{"user-agent": "hub"}'}
    parts |= {"lane": "repo-1", "identity": "", "webhook_id": "w1", "delivery_id": f"d{number}"}
    parts |= {"repo": "a/b", "repo_type": "model", "scope": "repo.content", "action": "update"}
    arrival = IncomingEvent(**{**parts, **more})
    options = {"now": at, "window": 10.0, "max_waiting": 1000, "paths": (arrival.path,)}
    return inbox.database.run_blocking(ledger.accept_event, arrival, **options)


def begin(inbox: EventInbox, event_id: str) -> Event | None:
    rows, *_ = inbox.database.run_blocking(ledger.QUEUE.begin_due_rows, NOW, lambda path: True)
    return next((ledger.read_event(row) for row in rows if row["id"] == event_id), None)


def end(inbox: EventInbox, number: int, *, at: float = NOW) -> None:
    inbox.database.run_blocking(ledger.finish_event, f"e{number}", Answer(200, b"null"), now=at)


@pytest.fixture
def inbox(tmp_path: Path):
    with EventInbox(tmp_path / "events.sqlite3") as opened:
        yield opened


def test_events_are_listed_newest_first_page_by_page(inbox: EventInbox) -> None:
    for number in range(5):
        arrive(inbox, number, path=f"/webhooks/{number % 2}")
    end(inbox, 4)
    assert [event.id for event in inbox.list(limit=2)] == ["e4", "e3"]
    assert [event.id for event in inbox.list(limit=2, before=inbox.list(limit=2)[-1].number)] == ["e2", "e1"]
    assert [event.id for event in inbox.list(path="/webhooks/0", status="waiting")] == ["e2", "e0"]
    assert inbox.list()[0].body == b""
    whole = inbox.get("e4")
    assert (whole.body, whole.headers, whole.size) == (b"{}", {"user-agent": "hub"}, 2)
    with pytest.raises(UnknownEvent):
        inbox.get("e9")


def test_a_duplicate_is_detected_by_its_id_for_any_body(inbox: EventInbox) -> None:
    assert arrive(inbox, 1)[0] is Acceptance.NEW
    verdict, event = arrive(inbox, 2, delivery_id="d1", body=b"[]", at=NOW + 3 * DAY)
    assert (verdict, event.id) == (Acceptance.DUPLICATE, "e1")
    assert arrive(inbox, 3, delivery_id="d1", webhook_id="w2")[0] is Acceptance.NEW
    assert arrive(inbox, 4, delivery_id="d1", path="/webhooks/y")[0] is Acceptance.NEW


def test_an_event_that_crashes_too_often_is_a_dead_letter(inbox: EventInbox) -> None:
    for number in (1, 2):
        arrive(inbox, number)
    for start in range(3):
        assert inbox.database.run_blocking(ledger.resume_events, now=NOW, max_crashes=2) == {"/webhooks/x": 2}
        began = begin(inbox, "e1")
        assert began is not None
        assert began.attempt == start + 1
    assert inbox.database.run_blocking(ledger.resume_events, now=NOW, max_crashes=2) == {"/webhooks/x": 1}
    [dead] = inbox.list(status="dead")
    assert (dead.id, dead.error) == ("e1", "the process ended while it ran")


def test_a_clean_stop_is_not_counted_as_a_crash(inbox: EventInbox) -> None:
    arrive(inbox, 1)
    for _ in range(5):
        assert begin(inbox, "e1")
        assert inbox.database.run_blocking(ledger.QUEUE.release_running) == 1
        assert inbox.database.run_blocking(ledger.resume_events, now=NOW, max_crashes=0)


def test_old_events_are_deleted_but_never_waiting_events(inbox: EventInbox) -> None:
    for number in range(4):
        arrive(inbox, number)
    end(inbox, 0)
    end(inbox, 1, at=NOW + 5)
    assert begin(inbox, "e2")
    inbox.database.run_blocking(ledger.fail_event, "e2", "x", now=NOW, attempts=1, retry_at=None, to_sender=False)
    limits = {"max_age": 10.0, "max_dead_age": 20.0, "max_bytes": 1000}
    for later, left in ((9, ["e3", "e2", "e1", "e0"]), (10, ["e3", "e2", "e1"]), (20, ["e3"]), (1e6, ["e3"])):
        inbox.database.run_blocking(ledger.prune_events, now=NOW + later, **limits)
        assert [event.id for event in inbox.list()] == left


def test_bodies_stay_within_their_size_limit(inbox: EventInbox) -> None:
    for number in range(6):
        arrive(inbox, number, body=bytes(100))
        if number < 5:
            end(inbox, number)
    limits = {"max_age": DAY, "max_dead_age": DAY, "max_bytes": 250}
    assert [inbox.database.run_blocking(ledger.prune_events, now=NOW, **limits) for _ in range(2)] == [3, 0]
    assert [event.id for event in inbox.list()] == ["e5", "e4", "e3"]


def test_the_write_ahead_log_stays_bounded(inbox: EventInbox) -> None:
    assert inbox.path is not None
    log = inbox.path.with_name(inbox.path.name + "-wal")
    with EventInbox(inbox.path) as other:
        for number in range(12):
            arrive(inbox, number, body=bytes(4 << 20))
            other.list()
            assert log.stat().st_size < 24 << 20

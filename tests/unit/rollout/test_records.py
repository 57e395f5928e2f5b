from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hooks.database import Database
from service.rollout.records import SCHEMA, Journal, Record
from tests.unit.rollout.world import REPO


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Callable[[], Journal]]:
    """Return a function that opens the journal as after a restart."""
    with ExitStack() as databases:

        def reopen() -> Journal:
            databases.close()
            database = Database(tmp_path / "d.sqlite", SCHEMA)
            databases.callback(database.close)
            return Journal(database, 3, None)

        yield reopen


async def test_only_the_newest_records_survive_a_restart(journal: Callable[[], Journal]) -> None:
    records = journal()
    made = [Record(REPO, None, "poll", sha=str(number) * 40, at=float(number)) for number in range(5)]
    for record in made:
        record.begin_stage("resolving")
        record.begin_stage("downloading")
        record.end("swapped", text="fine")
        await records.save(record)
    assert records.list() == made[:1:-1]
    again = journal()
    assert again.list() == made[:1:-1]
    assert (again.list()[0].stages[1].name, again.get(made[0].id)) == ("downloading", None)


async def test_a_deployment_of_a_killed_process_is_failed(journal: Callable[[], Journal]) -> None:
    record = Record(REPO, None, "webhook", webhook_id="hook", delivery_ids=["1"])
    record.begin_stage("compiling")
    await journal().save(record)
    for _ in range(2):
        (again,) = journal().list()
        assert (again.id, again.result, again.reason, again.delivery_ids) == (record.id, "failed", "interrupted", ["1"])


@pytest.mark.parametrize(("stage", "is_quarantined"), [("checking", False), ("swapping", True), ("probation", True)])
async def test_a_commit_on_probation_at_a_kill_is_quarantined(journal, stage, is_quarantined) -> None:
    record = Record(REPO, None, "webhook", sha="a" * 40, sessions=["arm"])
    record.begin_stage(stage)
    await journal().save(record)
    quarantine = journal().quarantine
    found = quarantine.get(REPO, "a" * 40)
    assert (found is not None) == is_quarantined
    if found is not None:
        assert (found.reason, found.deployment) == ("interrupted", record.id)
        await quarantine.release("a" * 40)
        assert journal().quarantine.list() == []


def test_a_repeated_stage_is_recorded_once() -> None:
    record = Record(REPO, None, "request")
    for name in ("loading", "loading", "compiling"):
        record.begin_stage(name)
    record.end("rejected", "slow", "p99 80 ms")
    assert [stage.name for stage in record.stages] == ["loading", "compiling"]
    assert all(stage.seconds is not None and stage.seconds >= 0 for stage in record.stages)
    assert "request -> someone/arm@main ?" in record.describe()
    assert "rejected (slow: p99 80 ms)" in record.describe()

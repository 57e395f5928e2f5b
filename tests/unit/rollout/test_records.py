from pathlib import Path

import pytest

from hooks.database import Database
from service.rollout.records import SCHEMA, Journal, Record
from tests.unit.rollout.world import REPO


async def test_records_are_there_after_a_restart_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    records = Journal(database, 3, None)
    made = [Record(REPO, None, "poll", sha=str(number) * 40, at=float(number)) for number in range(5)]
    for record in made:
        record.begin_stage("resolving")
        record.begin_stage("downloading")
        record.end("swapped", text="fine")
        await records.save(record)
    assert records.list() == made[:1:-1]
    database.close()
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    again = Journal(database, 3, None)
    assert again.list() == made[:1:-1]
    assert again.list()[0].stages[1].name == "downloading"
    assert again.get(made[0].id) is None
    database.close()


async def test_what_a_killed_process_was_at_is_said_to_have_failed(tmp_path: Path) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    record = Record(REPO, None, "webhook", webhook_id="hook", delivery_ids=["1"])
    record.begin_stage("compiling")
    await Journal(database, 3, None).save(record)
    database.close()
    for _ in range(2):
        database = Database(tmp_path / "d.sqlite", SCHEMA)
        (again,) = Journal(database, 3, None).list()
        assert (again.id, again.result, again.reason, again.delivery_ids) == (record.id, "failed", "interrupted", ["1"])
        database.close()


@pytest.mark.parametrize(("stage", "is_kept_away"), [("checking", False), ("swapping", True), ("probation", True)])
async def test_what_a_robot_tried_when_its_process_was_killed_is_in_quarantine(
    tmp_path: Path, stage: str, is_kept_away: bool
) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    record = Record(REPO, None, "webhook", sha="a" * 40, sessions=["arm"])
    record.begin_stage(stage)
    await Journal(database, 3, None).save(record)
    database.close()
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    journal = Journal(database, 3, None)
    found = journal.quarantine.get(REPO, "a" * 40)
    assert (found is not None) == is_kept_away
    if found is not None:
        assert (found.reason, found.deployment) == ("interrupted", record.id)
        # Once it is released it stays so.
        await journal.quarantine.release("a" * 40)
        database.close()
        database = Database(tmp_path / "d.sqlite", SCHEMA)
        assert Journal(database, 3, None).quarantine.list() == []
    database.close()


def test_stages_follow_each_other_and_one_that_is_told_twice_is_one() -> None:
    record = Record(REPO, None, "request")
    for name in ("loading", "loading", "compiling"):
        record.begin_stage(name)
    record.end("rejected", "slow", "p99 80 ms")
    assert [stage.name for stage in record.stages] == ["loading", "compiling"]
    assert all(stage.seconds is not None and stage.seconds >= 0 for stage in record.stages)
    assert "request -> someone/arm@main ?" in record.describe()
    assert "rejected (slow: p99 80 ms)" in record.describe()

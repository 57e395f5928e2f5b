"""Servers that share a database are killed, and the database is: the whole programmes have 20 kills and a minute."""

from pathlib import Path

from benchmarks import database_away, database_kills
from benchmarks.postgres import PostgresServer


async def test_after_kills_nothing_is_lost_owned_twice_or_moves(tmp_path: Path, database: PostgresServer) -> None:
    found = await database_kills.campaign(tmp_path, 4, 5, database)
    assert {fault: found[fault] for fault in database_kills.FAULTS} == dict.fromkeys(database_kills.FAULTS, 0), found[
        "notes"
    ]
    assert sum(found["sessions_looked_at"].values()) > 4


async def test_a_database_that_is_away_stops_no_robot_and_loses_nothing(
    tmp_path: Path, database: PostgresServer
) -> None:
    found = await database_away.campaign(tmp_path, 4.0, database)
    assert found["wrong"] == []
    for how in ("killed", "standing_still"):
        assert found[how]["warned"], "what the others do not know is said"
        assert min(found[how]["commands"]) > 20

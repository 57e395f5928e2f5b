"""The server is killed in the middle of its work, in processes of its own; the whole programme has 200 kills."""

from pathlib import Path

from benchmarks.crash_recovery import FAULTS, campaign


async def test_after_kills_at_random_moments_nothing_is_lost_and_nothing_moves(tmp_path: Path) -> None:
    found = await campaign(tmp_path, kills=5, seed=11)
    assert {fault: found[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0), found["notes"]
    assert sum(found["acknowledged"].values()) > 5

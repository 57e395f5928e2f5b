"""Sessions come and go and nothing stays behind; the whole programme has 1,000 cycles and looks at memory, too."""

from pathlib import Path

from benchmarks.session_cycles import COUNTED, measure


async def test_nothing_stays_behind_of_thirty_sessions(tmp_path: Path) -> None:
    found = await measure(tmp_path, cycles=30, look_every=15)
    assert found["errors"] == {}
    grown = {name: found[f"{name}_growth"] for name in COUNTED}
    assert max(grown.values()) <= 0, (grown, found["looks"])
    assert found["looks"][-1]["rooms"] == 0
    assert found["exit_code"] == 0

"""A smoke run: fleets are planned from what was measured of one device."""

import json
from pathlib import Path

import pytest

from benchmarks import fleet_sim


def test_fleets_are_planned_from_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(robots: int, p50: float) -> dict[str, object]:
        late = {"p50": 0.1, "p99": 0.1}
        return {"robots": robots, "answer_ms": {"p50": p50, "p99": 2 * p50}, "late_ms": late, "mean_batch": 1.0}

    sizes = {"1": {"p50": 10.0, "p90": 10.0}, "4": {"p50": 28.0, "p90": 28.0}}
    measured = {
        "batch_ms": {"one at a time": {"1": sizes["1"]}, "batched": sizes},
        "chained_ms": {size: took | {"beside": [1.0] * 14} for size, took in sizes.items()},
        "growing": {side: [row(1, 12.0), row(2, 12.0)] for side in ("one at a time", "batched")},
        "most_robots": {"20 Hz, at every tick": {"one at a time": 5, "batched": 5}},
        "pace": {f"20 Hz, at every tick, {side}": [1.0] for side in ("one at a time", "batched")}
        | {f"growing, {robots}": [1.0] for robots in (1, 2)},
        "seconds": 2.0,
        "most": 64,
    }
    file, output = tmp_path / "measured.json", tmp_path / "found.json"
    file.write_text(json.dumps(measured))
    brief = ["--most", "10", "--seconds", "3", "--link", "1", "2"]
    monkeypatch.setattr("sys.argv", ["fleet_sim", "--measured", str(file), "--output", str(output), *brief])
    fleet_sim.main()
    plans = json.loads(output.read_text())["plans"]
    assert plans["by deadline"]["fleets"][-1]["machines"] <= plans["one at a time"]["fleets"][-1]["machines"]

import json
import os
import subprocess
import sys
from pathlib import Path

from service.recording.mcap_reader import McapSource
from tests.service.recording.disk_full import LARGEST, RATE, SECONDS


def test_a_full_disk_ends_the_recording_and_no_tick_is_missed_for_it(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.service.recording.disk_full", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    full, bare = found["full"], found["bare"]
    assert full["recording"]["state"] == "disk_full"
    assert full["recording"]["reason"] == os.strerror(27)
    assert full["recording"]["bytes"] <= LARGEST
    assert bare["recording"]["state"] == "off"
    # The control goes on as if nothing had happened, and as well as the session beside it on the same loop.
    assert (full["status"], full["hold"]) == ("running", None)
    sent = {name: found[name]["commands_sent"] - found["sent_at_end"][name] for name in ("full", "bare")}
    assert sent["full"] >= 0.8 * sent["bare"] > 0
    assert sent["full"] >= 0.4 * RATE * SECONDS
    # Each has its own grid, so what a busy machine takes from one it does not always take from the other.
    assert full["missed_ticks"] <= 2 * bare["missed_ticks"] + 2
    # What was written until then is there, and whole as far as it goes.
    (listed,) = found["listed"]
    assert (listed["session_id"], listed["dataset"]) == ("full", "none")
    assert len(list(McapSource(tmp_path / f"{listed['name']}.mcap").steps())) > 10

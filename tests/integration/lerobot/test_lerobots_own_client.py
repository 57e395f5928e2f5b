"""LeRobot's own robot client and a server process, with a simulated robot."""

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tests.testing.lerobot_process import ROOT, running
from tests.testing.peers import LEROBOT_PYTHON, require_peers

pytestmark = [pytest.mark.needs_peers, pytest.mark.timed]
require_peers("lerobot")
CLIENT = ROOT / "tests" / "testing" / "lerobot_client.py"


async def test_two_robots_execute_actions_and_keep_their_targets_after_a_stop(tmp_path: Path) -> None:
    serve = (sys.executable, "-m", "robojax.cli", "serve", "--port", "0", "--lerobot-port", "0", "--state", "off")
    async with running(*serve, folder=tmp_path, cwd=ROOT) as server:
        assert server.stdout is not None
        line = (await server.stdout.readline()).decode()
        (url,), (port,) = re.findall(r"serves at (\S+)", line), re.findall(r"LeRobot's robots: port (\d+)", line)
        command = (str(LEROBOT_PYTHON), str(CLIENT), f"127.0.0.1:{port}", "robojax/sim/policy", "30")
        options = {"folder": tmp_path, "cwd": tmp_path}  # The client writes logs into its folder.
        async with running(*command, **options) as first, running(*command, **options) as second:
            for robot in (first, second):
                assert robot.stdout is not None
                assert int(await asyncio.wait_for(robot.stdout.readline(), 120)) >= 30
            async with httpx2.AsyncClient(base_url=url) as http:
                sessions = (await http.get("/sessions")).json()
                assert [session["stats"]["protocol"] for session in sessions] == ["lerobot-grpc"] * 2
                assert (await http.post("/debug/emergency_stop")).status_code == 200
            stopped_at = time.time()
            await asyncio.sleep(2)  # Seconds in which a client could execute a whole chunk of 20 actions.
            for robot in (first, second):
                times, *targets = np.array(json.loads((await robot.communicate(b""))[0])["actions"]).T
                assert len(targets) == 6
                assert np.ptp(targets, axis=1).max() > 1  # Degrees.
                assert times.max() < stopped_at + 0.5

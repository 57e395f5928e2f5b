"""Every command of the guide about recordings runs as it stands, beside a server."""

import asyncio
import inspect
import io
import json
import re
import shlex
import shutil
from asyncio.subprocess import PIPE
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from robojax.cli import sim
from robojax.cli.app import Commands
from service.recording.recorder import Recorder
from tests.testing.models import quick_compilation as quick_compilation
from tests.testing.recordings import RATE, play, subject

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "robots" / "recording.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
USUAL = "http://127.0.0.1:8001"


async def curl(line: str) -> str:
    process = await asyncio.create_subprocess_exec("bash", "-euc", line, stdout=PIPE, stderr=PIPE)
    said, complaints = await process.communicate()
    assert process.returncode == 0, f"{line}\n{said.decode()}\n{complaints.decode()}"
    return said.decode()


def robojax(line: str) -> str:
    """In this process: JAX is imported, and the policy compiled, only once."""
    _, name, *arguments = shlex.split(line)
    said = io.StringIO()
    with redirect_stdout(said):
        code = Commands(name="robojax").get_command(None, name).main(arguments, standalone_mode=False)
    assert not code, f"{line}\n{said.getvalue()}"
    return said.getvalue()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the guide's commands want curl")
@pytest.mark.usefixtures("quick_compilation")
async def test_the_commands_run(serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "recordings"
    recorder = Recorder(folder / "arm.mcap", subject(rate=RATE))
    play(recorder, episodes=2, ticks=10)
    recorder.close()
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/pick").symlink_to(ROOT / "robojax" / "sim" / "policy")
    assert recorder.join(10)
    lines = [re.sub(r"\s+#.*", "", line) for text in BLOCK.findall(GUIDE.read_text()) for line in text.splitlines()]
    lines = [line for line in lines if not line.startswith("pip install")]
    # Simulating takes half a minute: here only that the demo has the options.
    (demo,) = (line for line in lines if line.startswith("robojax demo"))
    assert {"episodes", "record"} <= set(inspect.signature(sim.demo).parameters)
    said = {}
    async with serve(recordings=str(folder), recording_free=0, recording_datasets=False) as server:
        monkeypatch.setenv("ROBOJAX_PORT", str(server.address[1]))
        await server.create("arm")
        server.transport.link.deliver_frame("front", np.zeros((48, 64, 3), np.uint8))
        for line in lines:
            if line.startswith("curl"):
                said[line] = await curl(line.replace(USUAL, server.url))
            elif line != demo:
                said[line] = await asyncio.to_thread(robojax, line)
    on, _, stats, _, off, listed, info, export, table, played = said.values()
    assert json.loads(on)["recording"]["state"] == "on"
    assert json.loads(stats)["stats"]["recording"]["file"].startswith("arm-")
    assert json.loads(off)["recording"]["state"] == "off"
    assert "arm-" in listed
    assert "pick up the cube" in info
    assert "2 episodes, 20 frames" in export
    assert "Wrist_Roll" in table
    assert (tmp_path / "error.png").stat().st_size > 10_000
    found = json.loads(played)
    assert (found["episodes"], found["steps"], found["inferences"]) == (2, 20, 20)
    assert found["joints"][0]["name"] == "shoulder_pan.pos"

"""Each command of the recording guide runs unchanged against a server."""

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
    output, complaints = await process.communicate()
    assert process.returncode == 0, f"{line}\n{output.decode()}\n{complaints.decode()}"
    return output.decode()


def robojax(line: str) -> str:
    """Run the command in this process, so that JAX is imported and the policy compiled only once."""
    _, name, *arguments = shlex.split(line)
    output = io.StringIO()
    with redirect_stdout(output):
        code = Commands(name="robojax").get_command(None, name).main(arguments, standalone_mode=False)
    assert not code, f"{line}\n{output.getvalue()}"
    return output.getvalue()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands of the guide need curl")
@pytest.mark.usefixtures("quick_compilation")
async def test_commands_of_the_guide_run(serve, tmp_path, monkeypatch):
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
    # A simulation takes half a minute, so this only checks that the demo has the options.
    (demo,) = (line for line in lines if line.startswith("robojax demo"))
    assert {"episodes", "record"} <= set(inspect.signature(sim.demo).parameters)
    output = {}
    async with serve(recordings=str(folder), recording_free=0, recording_datasets=False) as server:
        monkeypatch.setenv("ROBOJAX_PORT", str(server.address[1]))
        await server.create("arm")
        server.transport.link.deliver_frame("front", np.zeros((48, 64, 3), np.uint8))
        for line in lines:
            if line.startswith("curl"):
                output[line] = await curl(line.replace(USUAL, server.url))
            elif line != demo:
                output[line] = await asyncio.to_thread(robojax, line)
    on, _, stats, _, off, listed, info, export, table, played = output.values()
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

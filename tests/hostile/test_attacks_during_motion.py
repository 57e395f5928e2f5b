"""Hostile policy files, and hostile robots of LeRobot, while robots move at 50 Hz and STOP is pressed continuously."""

import asyncio
import itertools
import json
import logging
import pickle
import re
import shutil
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import pytest_asyncio

from jaxmodels import load_policy
from jaxmodels.checkpoints import orbax
from service.recording.recorder import Recorder
from tests.faults.fleet import SHIPPED, Fleet, moving_fleet
from tests.faults.processes import ROOT, Process, server
from tests.faults.robot import JOINTS
from tests.hostile.test_floods import flood
from tests.testing.models import edit_json, golden_folder  # noqa: F401 - a fixture
from tests.testing.recordings import play, subject
from tests.testing.waiting import until
from tests.testing.zenoh_robot import free_endpoint
from tests.unit.lerobot.test_hostile_pickles import HEAD, call, text

logger = logging.getLogger(__name__)

# The robots, a server and the attacks need both cores of a small machine.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

ROBOTS = 3
TOKENIZER = Path("vlm", "tokenizer.json")
LANGUAGE = {
    "camera_names": ["front", "wrist"],
    "policy_type": "smolvla",
    "language_instruction": "pick the cube",
    "joint_names": list(JOINTS),
}
CHUNK_BYTES = 1 << 30
RECORDINGS, VIEWERS = 3000, 16
ENDPOINT = free_endpoint()  # Of LeRobot's robots over Zenoh.
ATTACK = 8.0  # Seconds.
GROWTH = 64 << 20  # Bytes of memory that an attack may take.


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    place = tmp_path_factory.mktemp("attacked")
    flags = ("--frozen", "warn", "--creates-per-minute", "1000", "--stuck-after", "1.5", "--lerobot-port", "0")
    flags += ("--lerobot-zenoh", ENDPOINT, "--lerobot-deployment", f"act={SHIPPED}")
    with server(place, *flags, scripted=False, env={"ROBOJAX_UPDATE_QUIET": "0.1"}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(process: Process) -> AsyncIterator[Fleet]:
    async with moving_fleet(process, ROBOTS) as moving:
        yield moving


@pytest.fixture
def language(golden_folder: Callable[[str], Path], tmp_path: Path) -> Path:  # noqa: F811
    """Return the folder of a policy that reads language."""
    return Path(shutil.copytree(golden_folder("smolvla_two_cameras"), tmp_path / "language"))


def double(folder: Path, pattern: str = "String", letter: str = "c") -> None:
    """Make the tokenizer's normalizer double a letter 24 times."""
    step = {"type": "Replace", "pattern": {pattern: letter}, "content": 2 * letter}
    edit_json(folder / TOKENIZER, normalizer={"type": "Sequence", "normalizers": [step] * 24})


def split_slowly(folder: Path) -> None:
    """Make the tokenizer split text by an expression with exponential run time."""
    pattern = {"Regex": "(?:(?:a|b|c| )+)+(?:(?:a|b|c| )+)+(?=x)y"}
    edit_json(
        folder / TOKENIZER, pre_tokenizer={"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    )


def grow(folder: Path) -> None:
    """Give the tokenizer the number of merges that Gemma's tokenizer has."""
    tokenizer = json.loads((folder / TOKENIZER).read_text())
    model, letters = tokenizer["model"], [chr(code) for code in range(0x4E00, 0x4E00 + 512)]
    last = max(model["vocab"].values())
    model["vocab"] |= dict.fromkeys(letters, last)
    for one, other in itertools.islice(itertools.product(letters, letters), 250_000):
        model["vocab"][one + other] = last
        model["merges"].append([one, other])
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False))


def write_tree(folder: Path) -> Path:
    """Write the shipped policy with its weights as an Orbax tree of zarr arrays, and return the tree."""
    shutil.copytree(SHIPPED, folder)
    (folder / "model.safetensors").unlink()
    weights = {name: jnp.asarray(value) for name, value in load_policy(SHIPPED).checkpoint.weights.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder.absolute() / "orbax", orbax._flatten(weights))
    return folder / "orbax"


def inflate_metadata(tree: Path) -> None:
    """Make the metadata of a tree large enough to hold the interpreter for seconds."""
    with (tree / "_METADATA").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b', "x": [' + b"0," * (60 << 20) + b"0]}")


def inflate_chunk(tree: Path) -> None:
    """Replace one chunk of an array by a few kilobytes that inflate to a gigabyte."""
    description = next(
        path for path in sorted(tree.rglob(".zarray")) if len(json.loads(path.read_text())["shape"]) == 1
    )
    compressor = zlib.compressobj(9)
    pieces = [compressor.compress(bytes(1 << 24)) for _ in range(CHUNK_BYTES >> 24)]
    edit_json(description, chunks=[CHUNK_BYTES // 4], compressor={"id": "zlib", "level": 1})
    (description.parent / "0").write_bytes(b"".join([*pieces, compressor.flush()]))


@asynccontextmanager
async def undisturbed(fleet: Fleet) -> AsyncIterator[None]:
    """Wait until the robots move, then assert that an attack delays neither STOP nor a command."""
    await fleet.until_moving(30)
    began = time.monotonic()
    yield
    await asyncio.sleep(0.2)
    fleet.check_stops(began)
    fleet.check_commands(began)


async def create(fleet: Fleet, name: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Create a session while robots move, and delete it."""
    body = {"session_id": name, "transport_server_url": "direct", **body}
    async with undisturbed(fleet), fleet.http.post(f"{fleet.process.url}/sessions", json=body) as answer:
        status, found = answer.status, await answer.json()
    if status == 200:
        await fleet.call("DELETE", f"/sessions/{name}")
    return status, found


def expect_refusal(status: int, found: Any, file: str) -> None:
    (problem,) = found["detail"]
    assert (status, problem["type"], problem["loc"]) == (422, "policy", ["body", "policy_path"])
    assert file in problem["msg"]


@pytest.mark.parametrize("spoil", [double, split_slowly])
async def test_tokenizer_bomb_is_refused_by_name_during_motion(fleet: Fleet, language: Path, spoil: Any) -> None:
    spoil(language)
    status, found = await create(fleet, "bomb", {"policy_path": str(language), **LANGUAGE})
    expect_refusal(status, found, "vlm/tokenizer.json")


async def test_large_valid_tokenizer_is_loaded_during_motion(fleet: Fleet, language: Path) -> None:
    grow(language)
    status, found = await create(fleet, "large", {"policy_path": str(language), **LANGUAGE})
    assert status == 200, found


@pytest.mark.parametrize("spoil", [inflate_metadata, inflate_chunk])
async def test_orbax_bomb_is_refused_by_name_during_motion(fleet: Fleet, tmp_path: Path, spoil: Any) -> None:
    spoil(write_tree(tmp_path / "bomb"))
    status, found = await create(fleet, "bomb", {"policy_path": str(tmp_path / "bomb"), "camera_names": ["front"]})
    expect_refusal(status, found, "orbax/")


async def test_pushed_tokenizer_bomb_leaves_the_old_policy_running(fleet: Fleet, language: Path) -> None:
    async with AsyncExitStack() as stack:
        following = {"policy_path": str(language), "auto_update": "swap", **LANGUAGE}
        name = await fleet.add_robot(stack, **following)
        stack.push_async_callback(fleet.remove_robot, name)
        async with undisturbed(fleet):
            await asyncio.sleep(1.2)  # The server looks at the folder once a second.
            double(language)
            (pushed,) = await until(lambda: ended_deployments(fleet))
        assert pushed["result"] == "rejected"
        assert "vlm/tokenizer.json" in json.dumps(pushed)
        assert (await fleet.session(name))["status"] == "running"


async def ended_deployments(fleet: Fleet) -> list[dict[str, Any]]:
    return [each for each in await fleet.call("GET", "/deployments") if each["result"]]


async def test_instruction_bomb_is_refused_during_motion(fleet: Fleet, language: Path) -> None:
    double(language, "Regex", "q")  # None of the trial texts of the loader has this letter.
    body = {"session_id": "patched", "policy_path": str(language), "transport_server_url": "direct", **LANGUAGE}
    await fleet.call("POST", "/sessions", body)
    change = {"language_instruction": "a quick pick"}
    async with undisturbed(fleet), fleet.http.patch(f"{fleet.process.url}/sessions/patched", json=change) as answer:
        status, found = answer.status, await answer.json()
    assert (status, found["detail"][0]["loc"]) == (422, ["body", "language_instruction"])
    await fleet.call("DELETE", "/sessions/patched")


async def test_viewers_of_many_recordings_delay_nothing(fleet: Fleet, process: Process, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "one.mcap", subject())
    play(recorder)
    recorder.close()
    assert recorder.join(60)
    folder = process.log.parent / "state" / "recordings"
    folder.mkdir()
    for number in range(RECORDINGS):
        (folder / f"robot-{number:06d}.mcap").hardlink_to(tmp_path / "one.mcap")
    async with undisturbed(fleet), flood("recordings", process.url, "/", 2.0, VIEWERS) as viewers:
        assert json.loads((await viewers.communicate())[0])["bytes"]
    assert len(await fleet.call("GET", "/recordings")) == 100


def read_memory(process: Process, name: str) -> int:
    """Return the resident bytes of a process, now (``VmRSS``) or at most (``VmHWM``)."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return int(kilobytes) << 10


@pytest.mark.parametrize("protocol", ["grpc", "zenoh"])
async def test_hostile_robots_run_no_code_and_delay_nothing(
    fleet: Fleet, process: Process, tmp_path: Path, protocol: str
) -> None:
    command, logged = f"touch {tmp_path / 'executed'}", len(process.words())
    (port,) = re.findall(r"LeRobot's robots: port (\d+)", process.words())
    address = {"grpc": f"127.0.0.1:{port}", "zenoh": ENDPOINT}[protocol]
    arguments = ("-m", "tests.hostile.lerobot_flood", protocol, address, command, str(ATTACK))
    pipes = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
    attack = await asyncio.create_subprocess_exec(sys.executable, *arguments, **pipes, cwd=ROOT)
    try:
        assert attack.stdout is not None
        assert await asyncio.wait_for(attack.stdout.readline(), 60) == b"ready\n"
        async with undisturbed(fleet):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # Resets VmHWM.
            before = read_memory(process, "VmRSS")
            found = json.loads((await asyncio.wait_for(attack.communicate(b"\n"), 120))[0])
            grown = read_memory(process, "VmHWM") - before
    finally:
        if attack.returncode is None:
            attack.kill()
    logger.info("%s took %.0f MB: %s", protocol, grown / 1e6, found["counts"])
    assert found["is_served"], process.words()[logged:][-3000:]
    assert grown < GROWTH
    assert "Traceback" not in process.words()[logged:]
    assert not (tmp_path / "executed").exists()
    pickle.loads(HEAD + call("os", "system", text(command)) + b".")
    assert (tmp_path / "executed").exists()

"""Policy folders with hostile content: each is refused, and other loads do not wait for it."""

import asyncio
import gc
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

import jaxmodels
from service.inference.policy_sources import make_requirements_reader
from service.inference.sandbox import CheckpointSandbox
from service.settings import Settings
from tests.testing.doubles import ScriptedPolicy
from tests.testing.rig import started
from tests.testing.waiting import lives, until, wait_until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "robojax" / "sim" / "policy"
STATE = "policy_preprocessor_step_3_normalizer_processor.safetensors"
# A child process runs this program for a folder that never finishes loading.
STUCK = "import time; time.sleep(600)"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if lives(child.pid)}


class Loader:
    """Open and inspect files as a server does, and return a script; a folder ``slow`` waits for ``gate``."""

    def __init__(self, roots: list[Path] | None = None):
        self.roots = roots
        self.gate = threading.Event()
        self.waiting = 0
        self.loads: list[str] = []

    def __call__(self, path, revision=None, /, *, like=None, on_progress=None):
        folder = Path(path)
        inspect = CheckpointSandbox(program=STUCK) if folder.name.startswith("stuck") else CheckpointSandbox()
        with jaxmodels.PolicyFolder(folder, roots=self.roots) as opened:
            inspect(opened)
        if folder.name.startswith("slow"):
            self.waiting += 1
            assert self.gate.wait(60)
        self.loads.append(folder.name)
        return ScriptedPolicy()


@asynccontextmanager
async def server(load: Loader, **settings):
    """Yield a server on loopback, the complaints of its event loop, and a function for requests."""
    settings |= {"load_memory": 1 << 28, "creates_per_minute": 10_000}
    parts = {"read_requirements": make_requirements_reader(Settings.from_values(**settings).policies)}
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: complaints.append(about))
    async with started(load=load, parts=parts, **settings) as made:

        async def call(method: str, path: str, **body):
            async with made.http.request(method, path, json=body or None) as answer:
                return answer.status, await answer.text()

        call.app = made.app
        call.complaints = complaints
        yield call
    load.gate.set()


def body(folder: Path, session_id: str = "arm") -> dict:
    return {"session_id": session_id, "policy_path": str(folder), "transport_server_url": f"http://rooms/{session_id}"}


@pytest.fixture
def good(tmp_path):
    return Path(shutil.copytree(DEMO, tmp_path / "root" / "good"))


def replace(path: Path, make) -> None:
    path.unlink()
    make(path)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # The path of a socket has a small maximum length.
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path, size: int) -> None:
    """Write a valid, sparse file of statistics with this number of bytes."""
    count = size // 4
    entry = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
    header = json.dumps({"observation.state.mean": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 4 * count)


def rename_state(folder: Path, name: str) -> Path:
    """Rename the statistics to a name that LeRobot does not use."""
    (folder / STATE).rename(folder / name)
    spec = (folder / "policy_preprocessor.json").read_text()
    (folder / "policy_preprocessor.json").write_text(spec.replace(STATE, name))
    return folder / name


def rename_and(spoil):
    return lambda folder: spoil(rename_state(folder, "numbers.safetensors"))


def write_renames(path: Path, count: int) -> None:
    spec = json.loads(path.read_text())
    spec["steps"][0]["config"]["rename_map"] = {f"observation.from{n}": f"observation.to{n}" for n in range(count)}
    path.write_text(json.dumps(spec))


def write_statistics(path: Path) -> None:
    path.write_bytes((DEMO / STATE).read_bytes())


def lead_out(path: Path) -> None:
    outside = path.parents[2] / f"outside of {path.parent.name}"
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def at(name: str, spoil):
    return lambda folder: spoil(folder / name)


NOT_REGULAR = "wanted a regular file"
SPOILS = {
    "config is a pipe": (at("config.json", partial(replace, make=os.mkfifo)), NOT_REGULAR),
    "config is a socket": (at("config.json", partial(replace, make=make_socket)), NOT_REGULAR),
    "config is a folder": (at("config.json", partial(replace, make=os.mkdir)), NOT_REGULAR),
    "config is a device": (at("config.json", partial(replace, make=lambda path: path.symlink_to("/dev/zero"))), "root"),
    "config is a loop": (at("config.json", partial(replace, make=lambda path: path.symlink_to(path))), "root"),
    "config leads nowhere": (at("config.json", partial(replace, make=lambda path: path.symlink_to("no"))), "root"),
    "config is of the kernel": (
        at("config.json", partial(replace, make=lambda path: path.symlink_to("/proc/self/environ"))),
        "root",
    ),
    "weights are a pipe": (at("model.safetensors", partial(replace, make=os.mkfifo)), NOT_REGULAR),
    "tokenizer is a pipe": (at("tokenizer.json", os.mkfifo), NOT_REGULAR),
    "sidecar is a pipe": (at("robojax.json", partial(replace, make=os.mkfifo)), NOT_REGULAR),
    "statistics are a pipe": (at(STATE, partial(replace, make=os.mkfifo)), NOT_REGULAR),
    "odd statistics are a pipe": (rename_and(partial(replace, make=os.mkfifo)), NOT_REGULAR),
    "statistics of 6 GB": (at(STATE, partial(sparse, size=6 << 30)), "wanted at most 16777216"),
    "odd statistics of 6 GB": (rename_and(partial(sparse, size=6 << 30)), "wanted at most 16777216"),
    "config of 6 GB": (at("config.json", lambda path: os.truncate(path, 6 << 30)), "wanted at most 1048576"),
    "weights of 6 GB that were never written": (
        at("model.safetensors", lambda path: sparse(path, 6 << 30)),
        "were ever written",
    ),
    "odd statistics are no such file": (rename_and(lambda path: path.write_bytes(b"x" * 64)), "header claims"),
    "odd statistics lead out": (rename_and(lead_out), "policy_roots"),
    "an error of a million letters": (
        at("policy_preprocessor.json", lambda path: path.write_text(json.dumps({"steps": [{"class": "x" * 10**6}]}))),
        " ...",
    ),
    "statistics lead out": (at(STATE, lead_out), "policy_roots"),
}


async def test_spoiled_folder_is_refused_by_check_and_session(tmp_path, good):
    root = good.parent
    spoiled = {}
    for number, (name, (spoil, words)) in enumerate(SPOILS.items()):
        spoil(folder := Path(shutil.copytree(DEMO, root / f"policy{number}")))
        spoiled[name] = (folder, words)
    wrong = {}
    async with server(load := Loader([root]), policy_roots=(str(root),)) as call:
        for name, (folder, words) in spoiled.items():
            answers = await asyncio.gather(
                call("POST", "/policies/check", policy_path=str(folder)), call("POST", "/sessions", **body(folder))
            )
            # Responses repeat the client's own path, but no other path of the server.
            text = "".join(text for _, text in answers).replace(str(folder), "")
            if [status for status, _ in answers] != [422, 422] or words not in text or str(root) in text:
                wrong[name] = answers
        assert wrong == {}
        assert load.loads == []
        assert (await call("POST", "/policies/check", policy_path=str(good)))[0] == 200
        assert (await call("POST", "/sessions", **body(good, "other")))[0] == 200
        assert call.complaints == []


async def test_refused_check_does_not_use_the_memory_of_the_server(good):
    folder = good
    sparse(rename_state(folder, "numbers.safetensors"), 16 << 20)
    os.truncate(folder / "numbers.safetensors", 15 << 20)
    before = _peak()
    async with server(Loader()) as call:
        answers = [await call("POST", "/policies/check", policy_path=str(folder)) for _ in range(3)]
        assert {status for status, _ in answers} == {422}
        assert _peak() - before < 8 << 20  # Reading in this process would take three times 15 MB.
        write_renames(folder / "policy_preprocessor.json", 20_000)
        write_statistics(folder / "numbers.safetensors")
        status, text = await call("POST", "/policies/check", policy_path=str(folder))
        assert (status, "bytes; wanted at most" in text) == (422, True), text


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


async def test_deletion_during_loading_ends_the_child_and_frees_the_id(tmp_path, good):
    stuck = Path(shutil.copytree(DEMO, tmp_path / "stuck"))
    before = children()
    async with server(Loader()) as call:
        for _ in range(3):
            creating = asyncio.create_task(call("POST", "/sessions", **body(stuck)))
            await until(lambda: children() - before)
            assert (await call("DELETE", "/sessions/arm"))[0] == 200
            assert (await creating)[0] == 404
            await until(lambda: not children() - before)
        assert (await call("POST", "/sessions", **body(good)))[0] == 200
        assert call.complaints == []
        assert call.app.ctx.sessions.engine.get_stats()["policies_loading"] == 0


async def test_load_of_a_departed_client_is_dropped_silently(tmp_path):
    stuck = Path(shutil.copytree(DEMO, tmp_path / "stuck"))
    before = children()
    async with server(Loader()) as call:
        creating = asyncio.create_task(call("POST", "/sessions", **body(stuck)))
        await until(lambda: children() - before)
        creating.cancel()
        with suppress(asyncio.CancelledError):
            await creating
        await asyncio.sleep(0.2)  # Time for the server to notice the disconnect.
        assert (await call("DELETE", "/sessions/arm"))[0] == 200
        await until(lambda: not children() - before)
        await asyncio.sleep(0.05)
        gc.collect()
        assert call.complaints == []


async def test_more_stuck_folders_than_cores_delay_no_other_load(tmp_path, good):
    folders = [Path(shutil.copytree(DEMO, tmp_path / f"stuck{number}")) for number in range(5)]
    async with server(Loader()) as call:
        stuck = [asyncio.create_task(call("POST", "/sessions", **body(one, one.name))) for one in folders]
        await asyncio.sleep(0.1)
        assert (await call("POST", "/sessions", **body(good)))[0] == 200
        assert not any(one.done() for one in stuck)
        for one in folders:
            await call("DELETE", f"/sessions/{one.name}")
        assert {status for status, _ in await asyncio.gather(*stuck)} == {404}


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_endless_build_is_refused_and_other_policies_load(tmp_path, good, is_deleted):
    slow = Path(shutil.copytree(DEMO, tmp_path / "slow"))
    async with server(load := Loader(), load_timeout=5) as call:
        creating = asyncio.create_task(call("POST", "/sessions", **body(slow)))
        await until(lambda: load.waiting)
        if is_deleted:
            assert (await call("DELETE", "/sessions/arm"))[0] == 200
        status, text = await creating
        assert (status, "load_timeout" in text) == ((404, False) if is_deleted else (422, True))
        assert (await call("POST", "/sessions", **body(good, "good")))[0] == 200
        load.gate.set()
        await until(lambda: call.app.ctx.sessions.engine.get_stats()["policies_loading"] == 0)
        assert call.app.ctx.sessions.engine.get_stats()["policies_loaded"] == 1
        assert call.complaints == []


def test_child_process_ends_with_its_killed_server(tmp_path):
    """The server is killed, so that its own cleanup cannot end the child."""
    program = (
        "import sys; from pathlib import Path; from service.inference.sandbox import CheckpointSandbox as Inspection; "
        f"Inspection(program='import os; print(os.getpid(), file=sys.stderr); {STUCK}')(Path({str(DEMO)!r}))"
    )
    server = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    try:
        found = wait_until(psutil.Process(server.pid).children)
        time.sleep(0.3)  # Time for the child to start.
        server.send_signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not any(lives(child.pid) for child in found))
    finally:
        server.kill()

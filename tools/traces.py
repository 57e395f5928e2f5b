"""Count what runs on four paths through the product, in one process.

    python tools/traces.py                 all four paths
    python tools/traces.py policy --calls  one path, with its functions by file

=========  ===========================================================================================
frame      from the first frame of a camera to the first command of a running session
session    from ``POST /sessions`` to its answer, without reading a checkpoint
policy     ``load_policy`` of the shipped policy
push       from a changed file in a followed policy folder to the swap of a running session's policy,
           without the functions that a running robot calls anyway
=========  ===========================================================================================

The policies are scripted and the rooms are in memory, except for `policy`, which loads the real files. A path is
measured by the files and functions that it enters (comprehensions count as functions), by how often it returns to a
file that it had left, and by calls to an object that is among the callers.
"""

import argparse
import asyncio
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "robojax" / "sim" / "policy"
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")


class Call(NamedTuple):
    """Call of a function of the traced package.

    Attributes:
        file, function: its file in the package, and its qualified name.
        thread: name of the thread that ran it.
        is_callback: whether its object is among the callers, behind another object.
    """

    file: str
    function: str
    thread: str
    is_callback: bool


class Trace:
    """Calls of the functions of a package while `is_on`, in all threads that start after the trace was created."""

    def __init__(self, package: str):
        self.is_on = False
        self.calls: list[Call] = []
        self._package = f"{ROOT / package}/"
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def begin(self) -> None:
        """Count from now on; functions that already run in other threads are the first calls."""
        for thread in threading.enumerate():
            frame = sys._current_frames().get(thread.ident or 0)
            while frame is not None and thread is not threading.current_thread():
                self._add(frame, thread.name)
                frame = frame.f_back
        self.is_on = True

    def end(self) -> None:
        """Stop counting."""
        self.is_on = False
        threading.setprofile(None)
        sys.setprofile(None)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call":
            self._add(frame, threading.current_thread().name)

    def _add(self, frame: FrameType, thread: str) -> None:
        if self._is_counted(frame):
            file = frame.f_code.co_filename.removeprefix(self._package)
            self.calls.append(Call(file, frame.f_code.co_qualname, thread, self._is_callback(frame)))

    def _is_counted(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._package)

    def _is_callback(self, frame: FrameType) -> bool:
        called, is_left, caller = frame.f_locals.get("self"), False, frame.f_back
        while called is not None and caller is not None:
            if self._is_counted(caller):
                other = caller.f_locals.get("self")
                if other is called and is_left:
                    return True
                is_left |= other is not None and other is not called
            caller = caller.f_back
        return False

    @property
    def files(self) -> set[str]:
        """Files that were entered."""
        return {call.file for call in self.calls}

    @property
    def functions(self) -> set[tuple[str, str]]:
        """Functions that were entered, with their files."""
        return {(call.file, call.function) for call in self.calls}

    @property
    def callbacks(self) -> int:
        """Number of calls to an object that is among the callers."""
        return sum(call.is_callback for call in self.calls)

    @property
    def returns(self) -> int:
        """Number of returns to a file that had been left."""
        seen: set[str] = set()
        count, here = 0, ""
        for file, *_ in self.calls:
            if file != here:
                count += file in seen
                seen.add(file)
                here = file
        return count


async def trace_frame() -> Trace:
    """Trace the path from a session's first frame to its first command."""
    import numpy as np

    from service.inference.engine import Engine
    from service.sessions.store import NewSession, Sessions, SessionSettings
    from tests.testing.doubles import MemoryTransport, ScriptedLoader, ScriptedPolicy

    trace = Trace("service")
    transport, policy = MemoryTransport(), ScriptedPolicy()
    sessions = Sessions(
        transport=transport, load=ScriptedLoader(lambda: policy), engine=Engine(), settings=SessionSettings()
    )
    await sessions.create(replace(NewSession("traced", "policy", "memory://", rate=50), camera_names=("front",)))
    await sessions.start("traced")
    await asyncio.sleep(0.2)
    link = transport.link
    trace.begin()
    delivered_at = -math.inf
    while not link.sent:
        if time.monotonic() - delivered_at > 0.2:  # Repeated, because a frame becomes too old on a slow machine.
            for camera in link.rooms.cameras:
                link.deliver_frame(camera, np.zeros((48, 64, 3), np.uint8))
            link.deliver_joints(dict.fromkeys(JOINTS, 0.0))
            delivered_at = time.monotonic()
        await asyncio.sleep(0)
    trace.end()
    await sessions.close()
    return trace


async def trace_session() -> Trace:
    """Trace the path from ``POST /sessions`` to its answer."""
    from tests.testing.rig import expect_ok, started

    trace = Trace("service")
    async with started() as server:
        await asyncio.sleep(0.5)  # Until the server's start is over.
        trace.begin()
        expect_ok(await server.create(camera_names=["front"]))
        trace.end()
        expect_ok(await server.call("DELETE", "/sessions/arm"))
    return trace


async def trace_policy() -> Trace:
    """Trace ``load_policy``; a first call imports the modules."""
    from jaxmodels import load_policy

    load_policy(POLICY)
    trace = Trace("jaxmodels")
    trace.begin()
    load_policy(POLICY)
    trace.end()
    return trace


async def trace_push() -> Trace:
    """Trace the path from a changed file in a policy folder to the swap of a running session's policy."""
    from tests.testing.rig import expect_ok, show, started
    from tests.testing.waiting import until

    trace = Trace("service")
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(POLICY, Path(name) / "policy")
        async with started(policy_roots=[name], update_quiet=0.1) as server:
            path = str(folder)
            expect_ok(await server.create(camera_names=["front"], policy_path=path, auto_update="swap", rate=50))
            sending = asyncio.create_task(show(server.transport.link))
            expect_ok(await server.call("POST", "/sessions/arm/start"))
            session = server.app.ctx.sessions.get_live("arm")
            await until(lambda: len(server.transport.link.sent) > 5)
            trace.begin()
            await asyncio.sleep(2.0)  # The watcher of folders sees the folder, and the robot moves.
            others, trace.calls = trace.functions, []
            with (folder / "README.md").open("a") as file:
                file.write("\n")
            (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
            await until(lambda: session.policies.changes)
            trace.end()
            is_new = {call: (call.file, call.function) not in others for call in trace.calls}
            # Idle connections time out meanwhile.
            trace.calls = [call for call in trace.calls if is_new[call] and not call.file.startswith("http/")]
            sending.cancel()
            expect_ok(await server.call("DELETE", "/sessions/arm"))
    return trace


PATHS: Mapping[str, Callable[[], Coroutine[None, None, Trace]]] = {
    "frame": trace_frame,
    "session": trace_session,
    "policy": trace_policy,
    "push": trace_push,
}


def describe(name: str, trace: Trace, *, with_calls: bool = False) -> str:
    """Return the figures of a trace as text."""
    head = (
        f"{name:8} {len(trace.files):3} files {len(trace.functions):4} functions {trace.returns:5} returns "
        f"{trace.callbacks:3} callbacks {len(trace.calls):6} calls"
    )
    if not with_calls:
        return head
    functions = dict.fromkeys((call.file, call.function) for call in trace.calls)
    files = Counter(file for file, _ in functions)
    lines = [
        f"  {count:3} {file}: {', '.join(name for each, name in functions if each == file)}"
        for file, count in files.most_common()
    ]
    return "\n".join([head, *lines])


def run(name: str) -> Trace:
    """Trace one path."""
    return asyncio.run(PATHS[name]())


def main() -> None:
    """Print the figures of the named paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="{" + ",".join(PATHS) + "}", help="paths to trace; default: all")
    parser.add_argument("--calls", action="store_true", help="list the functions by file")
    options = parser.parse_args()
    if len(options.paths) != 1:  # A process for each path, because threads of another path may still run.
        for name in options.paths or PATHS:
            subprocess.run([sys.executable, __file__, name, *["--calls"] * options.calls], check=True)
        return
    sys.path.insert(0, str(ROOT))
    print(describe(options.paths[0], run(options.paths[0]), with_calls=options.calls), flush=True)


if __name__ == "__main__":
    main()

"""How long from light to motion? From a picture being taken to the command that used it, stage by stage.

    python -m benchmarks.glass_to_action                          # rooms and direct, with and without computing
    python -m benchmarks.glass_to_action --seconds 5 --case "rooms, ACT"

The robot of this process shows pictures whose bars say when they were taken, 30 a second. The server is a process of
its own. Its policy reads the bars and repeats them in every action, so that each command names the picture it came
from; ``ACT`` also runs the shipped policy first. Both processes read the same monotonic clock. Stages:

- video: encoding, transfer, decoding (VP8 over WebRTC, or JPEG over a WebSocket)
- waiting for the control loop: until it calls the policy with the picture
- queue, inference: waiting for the device, and computing
- back: until the event loop has the chunk, judged and planned
- waiting for its tick: until a tick sends an action of it
- wire: until the robot has the command; it counts from the moment when the command has been handed to the socket

``light_to_motion_ms`` is the time until the first command of each picture that reached the policy.
``event_to_motion_ms`` is what a person sees: from an event at a random moment to the first command that can react to
it.
"""

import argparse
import asyncio
import io
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import uvloop
from PIL import Image

import jaxmodels
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, sleep_until, write
from benchmarks.processes import Child, Refused, call, child, say
from benchmarks.timed_pictures import BASE, number_of, picture, pose_of, stamp, stamp_of
from jaxmodels import Requirements
from robojax.client import AsyncClient, Command
from robojax.client.stream import AsyncStream
from service.app import create_app
from service.http.server import listen, run
from service.settings import Settings
from service.transport.client.robot import connect_robot
from service.transport.link import Rooms
from tests.testing.doubles import ScriptedPolicy

SIZE = (480, 640)
FPS = 30.0
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
PERCENTS = (50.0, 90.0, 99.0)
# name -> (how the robot is connected, what the policy computes before it says what it saw)
CASES = {
    "rooms, no computing": ("rooms", "none"),
    "rooms, ACT": ("rooms", "shipped"),
    "direct, no computing": ("direct", "none"),
    "direct, ACT": ("direct", "shipped"),
}
STAGES = {
    "video": ("taken", "seen"),
    "waiting for the control loop": ("seen", "asked"),
    "queue": ("asked", "began"),
    "inference": ("began", "ended"),
    "back": ("ended", "planned"),
    "waiting for its tick": ("planned", "sent"),
    "wire": ("sent", "heard"),
}


CAMERA = "front"
NEEDS = Requirements(
    policy_type="act",
    cameras={CAMERA: (480, 640)},
    state=6,
    action=6,
    chunk=20,
    action_steps=5,
    rate=25.0,
    joint_names=JOINTS,
)


# The server.


class Notes:
    """An observer that notes, for each picture by its number, when what happened to it; monotonic seconds."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, float]] = {}

    def add(self, number: int | None, what: str, at: float) -> None:
        """The first time counts."""
        if number is not None:
            self.of.setdefault(number, {}).setdefault(what, at)

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        self.add(stamp_of(image), "seen", observed_at)

    def on_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        self.add(number_of(chunk[-1]), "planned", at)

    def on_tick(self, tick: Any) -> None:
        if tick.command is not None and tick.hold is None:
            self.add(number_of(tick.command), "sent", tick.at)


class Reading:
    """Policy whose actions encode the number of the picture, after the computing time of another policy."""

    def __init__(self, policy: Any, notes: Notes):
        self._policy = policy
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """(b, t, a) float32."""
        began = time.monotonic()
        chunk = self._policy.act(observation)
        ended = time.monotonic()
        numbers = [stamp_of(image) for image in observation[f"observation.images.{CAMERA}"]]
        for number in numbers:
            self._notes.add(number, "began", began)
            self._notes.add(number, "ended", ended)
        poses = np.stack([pose_of(number) for number in numbers])[:, None]
        return np.repeat(poses, chunk.shape[1], axis=1)


def watch(session: Any, notes: Notes) -> None:
    """From now on this session's stages are noted."""
    session.attach(notes)
    runner = session.robot_io.runner
    ask = runner.ask

    async def noted(request: Any) -> Any:
        notes.add(stamp_of(request.snapshot.frames[CAMERA]), "asked", time.monotonic())
        return await ask(request)

    runner.ask = noted


def serve(policy: str) -> None:
    """Run the measured server. It prints one line when it is ready.

    SIGUSR1 starts a new measurement. SIGUSR2 prints the times of each picture.
    """
    notes = Notes()

    def load(path: str, revision: str | None = None, /, **more: Any) -> Any:
        return Reading(ScriptedPolicy(NEEDS) if policy == "none" else jaxmodels.load_policy(SHIPPED), notes)

    needs = NEEDS if policy == "none" else jaxmodels.load_policy(SHIPPED).requirements
    app = create_app(Settings.from_values(state="off"), load=load, read_requirements=lambda path, revision: needs)
    watched: set[str] = set()

    def begin() -> None:
        for session in app.ctx.sessions.list():
            if session.id not in watched:
                watched.add(session.id)
                watch(session, notes)
        notes.of.clear()
        say(event="measuring")

    @app.after_server_start
    async def hear(app: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, begin)
        loop.add_signal_handler(signal.SIGUSR2, lambda: say(event="measured", pictures=notes.of))

    run(app, listen("127.0.0.1", 0), lambda url: say(event="ready", url=url))


# The robot.


class Eye(Protocol):
    """A robot that can be shown pictures."""

    def show(self, camera: str, image: np.ndarray) -> None: ...
    def send_joints(self, values: Mapping[str, float]) -> object: ...


class Robot:
    """What one robot showed and heard."""

    def __init__(self, size: tuple[int, int] = SIZE) -> None:
        self.size = size
        self.taken: dict[int, float] = {}
        self.heard: list[tuple[float, int]] = []
        self._pose = dict(zip(JOINTS, map(float, BASE), strict=True))

    def obey(self, values: Mapping[str, float], received_at: float) -> None:
        """Only joints whose target changed may come."""
        self._pose |= {name: value for name, value in values.items() if name in self._pose}
        number = number_of(np.array([self._pose[name] for name in JOINTS]))
        if number in self.taken:
            self.heard.append((received_at, number))

    async def live(self, eye: Eye) -> None:
        """A picture and the joints, again and again, until cancelled."""
        start = time.monotonic()
        number = 0
        while True:
            number = max(number + 1, int((time.monotonic() - start) * FPS))
            await sleep_until(start + number / FPS)
            now = time.monotonic()
            self.taken[stamp(now)] = now
            eye.show(CAMERA, picture(self.size, now))
            eye.send_joints({name: float(value) for name, value in zip(JOINTS, BASE, strict=True)})


@asynccontextmanager
async def in_rooms(url: str, session: Mapping[str, Any], robot: Robot) -> AsyncIterator[Eye]:
    """Through the session's rooms, as the demo's robot."""
    rooms = Rooms(
        workspace_id=session["workspace_id"],
        cameras=session["camera_room_ids"],
        joint_input=session["joint_input_room_id"],
        joint_output=session["joint_output_room_id"],
    )
    async with connect_robot(url, rooms, on_command=robot.obey, rate=FPS) as eye:
        yield eye


class Stream:
    """Robot on ``WS /sessions/{id}/stream``; pictures are sent as JPEG, together with the joints."""

    def __init__(self, stream: AsyncStream):
        self._stream = stream
        self._sending: set[asyncio.Task[None]] = set()
        self._image: bytes | None = None

    def show(self, camera: str, image: np.ndarray) -> None:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=90)
        self._image = file.getvalue()

    def send_joints(self, values: Mapping[str, float]) -> None:
        images = {} if self._image is None else {CAMERA: self._image}
        task = asyncio.create_task(self._stream.observe(images, dict(values)))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


@asynccontextmanager
async def by_stream(url: str, session_id: str, robot: Robot) -> AsyncIterator[Eye]:
    """Connect the robot to the session's stream, without rooms."""
    async with AsyncClient(url) as client, client.session(session_id).stream() as stream:

        async def listen() -> None:
            async for message in stream:
                if isinstance(message, Command):
                    robot.obey(message.joints, time.monotonic())

        listening = asyncio.create_task(listen())
        try:
            yield Stream(stream)
            if listening.done():
                listening.result()
        finally:
            listening.cancel()


async def drive(server: Child, url: str, way: str, seconds: float) -> tuple[Robot, dict[int, dict[str, float]]]:
    """One session for so long: its robot, and the server's notes by picture."""
    body = {
        "session_id": "arm",
        "policy_path": str(SHIPPED),
        "transport_server_url": url if way == "rooms" else "direct",
        "camera_names": [CAMERA],
        "overlap": "replace",  # Other overlaps would mix the numbers of two pictures.
    }
    session = await asyncio.to_thread(call, f"{url}/sessions", "POST", body)
    robot = Robot()
    async with in_rooms(url, session, robot) if way == "rooms" else by_stream(url, "arm", robot) as eye:
        living = asyncio.create_task(robot.live(eye))
        await asyncio.sleep(1.5)
        await asyncio.to_thread(call, f"{url}/sessions/arm/start", "POST")
        async with asyncio.timeout(120):
            while not robot.heard:  # noqa: ASYNC110 - pictures of this size are compiled for meanwhile
                await asyncio.sleep(0.05)
        await asyncio.sleep(2)  # not counted: first use of everything
        await asyncio.to_thread(server.ask, signal.SIGUSR1, "measuring")
        robot.heard.clear()
        await asyncio.sleep(seconds)
        notes = await asyncio.to_thread(server.ask, signal.SIGUSR2, "measured")
        living.cancel()
        with suppress(asyncio.CancelledError):
            await living
    return robot, {int(number): times for number, times in notes["pictures"].items()}


def figures(robot: Robot, notes: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """All stages of pictures that were used, and what came of the others."""
    first: dict[int, float] = {}
    for at, number in robot.heard:
        first.setdefault(number, at)
    known = {
        number: {"taken": robot.taken[number], **notes[number], "heard": at}
        for number, at in first.items()
        if number in notes
    }
    whole = [times for times in known.values() if all(begin in times for begin, _ in STAGES.values())]
    if not whole:
        raise RuntimeError(f"no command can be followed: {len(robot.heard)} commands, {len(notes)} pictures noted")
    stages = {name: percentiles([t[end] - t[begin] for t in whole], PERCENTS) for name, (begin, end) in STAGES.items()}
    return {
        "stages_ms": stages,
        "light_to_motion_ms": percentiles([t["heard"] - t["taken"] for t in whole], PERCENTS),
        "event_to_motion_ms": percentiles(_after_events(sorted((t["heard"], t["taken"]) for t in whole)), PERCENTS),
        "pictures_seen": sum("seen" in times for times in notes.values()),
        "pictures_used": len(whole),
        "commands_heard": len(robot.heard),  # Only commands that changed a joint are forwarded.
    }


def _after_events(used: list[tuple[float, float]]) -> list[float]:
    """Seconds from each of many moments to the first command whose picture was taken after it."""
    heard, taken = (np.array(times) for times in zip(*used, strict=True))
    moments = np.linspace(taken[0], taken[-1], 5000, endpoint=False)
    places = np.searchsorted(taken, moments, side="left")
    return list(heard[places] - moments)


def measure(name: str, seconds: float) -> dict[str, Any]:
    """One case, in a server of its own."""
    way, policy = CASES[name]
    with ExitStack() as stack:
        server = stack.enter_context(child("-m", "benchmarks.glass_to_action", "--serve", policy))
        url = server.told("ready")["url"]
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        robot, notes = runner.run(drive(server, url, way, seconds))
    return figures(robot, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be given again")
    parser.add_argument("--output", type=Path, default=RESULTS / "glass_to_action.json")
    parser.add_argument("--serve", choices=["none", "shipped"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    quiet = quietness()
    cases: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in options.case or CASES:
        try:
            cases[name] = found = measure(name, options.seconds)
        except Refused as error:
            left_out[name] = str(error)
            print(f"{name}: left out: {error}")
            continue
        stages = "  ".join(f"{stage} {spread['p50']:.1f}" for stage, spread in found["stages_ms"].items())
        print(f"{name}: light to motion p50 {found['light_to_motion_ms']['p50']:.1f} ms; {stages}")
    found = result(
        "milliseconds from a picture being taken to the command that used it, by stage",
        "python -m benchmarks.glass_to_action",
        quiet,
        seconds=options.seconds,
        pictures=f"{SIZE[1]}x{SIZE[0]} at {FPS:g} a second",
        cases=cases,
        left_out=left_out,
    )
    write(options.output, found)


if __name__ == "__main__":
    main()

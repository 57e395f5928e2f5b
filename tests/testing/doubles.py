"""Test doubles: a scripted policy with its loader, and rooms in memory."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError, ObservationError
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, PROMPT_CUT, TASK
from service.errors import TransportError
from service.transport.link import EmergencyStop, Inbox, JointValue, LinkDown, LinkRequest, LinkUp, Orphan, Rooms
from service.transport.protocol import rooms_of


@dataclass(frozen=True)
class Sent:
    joints: tuple[JointValue, ...]
    at: float

    @property
    def values(self) -> dict[str, float]:
        return {joint.name: joint.value for joint in self.joints}


class MemoryLink:
    """A ``Link`` whose other end is the test; with ``is_choked``, ``send`` refuses like a full socket."""

    def __init__(self, rooms: Rooms, cameras: Sequence[str], inbox: Inbox, clock: Callable[[], float]):
        self.rooms = rooms
        self.sent: list[Sent] = []
        self.refused = 0
        self.is_choked = False
        self.is_closed = False
        self.latched: str | None = None
        self._inbox = inbox
        self._clock = clock
        self._up: dict[str, bool] = dict.fromkeys(
            [*rooms.cameras.values(), rooms.joint_input, rooms.joint_output], False
        )
        self._cameras = cameras

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Store one joint_update; return False if the output room is down, or the link is choked or closed."""
        if self.is_closed or self.is_choked or not self._up[self.rooms.joint_output]:
            self.refused += 1
            return False
        self.sent.append(Sent(tuple(joints), self._clock()))
        return True

    def latch(self, reason: str | None) -> None:
        self.latched = reason

    def health(self) -> Mapping[str, object]:
        return {"commands_sent": len(self.sent), "commands_refused": self.refused}

    def deliver_frame(self, camera: str, image: np.ndarray, observed_at: float | None = None) -> None:
        """Deliver this picture (uint8, (h, w, 3), RGB) as a decoded frame."""
        if camera not in self._cameras:
            raise KeyError(f"no camera {camera!r} in this link; it has {sorted(self._cameras)}")
        self._inbox.on_frame(camera, image, self._clock() if observed_at is None else observed_at)

    def deliver_joints(self, values: Mapping[str, float], observed_at: float | None = None) -> None:
        self._inbox.on_joints(values, self._clock() if observed_at is None else observed_at)

    def deliver_emergency_stop(self, reason: str = "a test", source: str = "robot") -> None:
        self._inbox.on_event(EmergencyStop(reason=reason, source=source))

    def go_down(self, room: str | None = None, reason: str = "socket closed") -> None:
        for name in self._named(room):
            if self._up[name]:
                self._up[name] = False
                self._inbox.on_event(LinkDown(room=name, reason=reason))

    def come_up(self, room: str | None = None) -> None:
        for name in self._named(room):
            if not self._up[name]:
                self._up[name] = True
                self._inbox.on_event(LinkUp(room=name))

    def reconnect(self, room: str | None = None, reason: str = "socket closed") -> None:
        self.go_down(room, reason)
        self.come_up(room)

    def _named(self, room: str | None) -> list[str]:
        if room is None:
            return list(self._up)
        if room not in self._up:
            raise KeyError(f"no room {room!r} in this link; it has {sorted(self._up)}")
        return [room]


class MemoryTransport:
    """A ``Transport`` of memory links; ``refuse`` fails the next connections, ``gate`` and ``leaving`` delay them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.links: list[MemoryLink] = []
        self.existing: set[str] = set()
        self.occupied: set[str] = set()
        self.refuse: TransportError | None = None
        self.gate: asyncio.Event | None = None
        self.leaving: asyncio.Event | None = None
        self._clock = clock

    @property
    def link(self) -> MemoryLink:
        if not self.links:
            raise LookupError("nothing has connected yet")
        return self.links[-1]

    @asynccontextmanager
    async def connect(self, request: LinkRequest) -> AsyncIterator[MemoryLink]:
        rooms = rooms_of(request.session_id, request.cameras, request.workspace_id)
        created_rooms = request.created_rooms
        if self.gate is not None:
            await self.gate.wait()
        if self.refuse is not None:
            raise self.refuse
        link = MemoryLink(rooms, request.cameras, request.inbox, self._clock)
        ours: dict[str, str] = {}
        for room in link._named(None):
            name = f"{rooms.workspace_id}/{room}"
            if name not in self.existing:
                if created_rooms is not None:
                    await created_rooms.add(room)
                self.existing.add(name)
                ours[name] = room
            elif created_rooms is not None and room in created_rooms:
                ours[name] = room
        self.links.append(link)
        link.come_up()
        try:
            yield link
        finally:
            link.is_closed = True
            if self.leaving is not None:
                await self.leaving.wait()
            self.existing -= {name for name, room in ours.items() if created_rooms is None or room in created_rooms}

    async def remove_empty_rooms(self, orphan: Orphan) -> Sequence[str]:
        if self.refuse is not None:
            raise self.refuse
        left = [room for room in orphan.rooms if f"{orphan.workspace_id}/{room}" in self.occupied]
        self.existing -= {f"{orphan.workspace_id}/{room}" for room in orphan.rooms if room not in left}
        return left


SO100_REQUIREMENTS = Requirements(
    policy_type="act",
    cameras={"front": (48, 64)},
    state=6,
    action=6,
    chunk=20,
    action_steps=20,
    joint_names=("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"),
)


MAX_WORDS = 100  # Words of an instruction that a scripted policy reads.


@dataclass
class ScriptedPolicy:
    """Moves each joint away from its state by ``step`` per action, and records how it was called."""

    requirements: Requirements = SO100_REQUIREMENTS
    step: float = 0.1
    latency: float = 0.0
    compile_latency: float = 0.0
    compile_failure: Exception | None = None
    failures: list[Exception | np.ndarray | threading.Event] = field(default_factory=list)
    acted: int = 0
    compiled: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    batches: list[tuple[int, dict[str, tuple[int, int]]]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    told: list[tuple[str, ...]] = field(default_factory=list)
    cuts: list[str | None] = field(default_factory=list)
    unreadable: str | None = None
    device: str = "scripted:0"
    commit: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (b, chunk, action) float32, or raise the next failure."""
        self.acted += 1
        self.threads.add(threading.current_thread().name)
        started = time.perf_counter()
        if self.latency:
            time.sleep(self.latency)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            if isinstance(failure, np.ndarray):
                return failure
            failure.wait()
        expected = {f"observation.images.{camera}" for camera in self.requirements.cameras}
        expected |= {"observation.state"} if self.requirements.state is not None else set()
        expected |= {TASK} if self.requirements.language else set()
        expected |= {PROMPT_CUT} & set(observation) if self.requirements.prompt_cuts else set()
        if self.requirements.takes_prefix and PREFIX_ACTIONS in observation:
            expected |= {PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH}
        if expected != set(observation):
            raise ObservationError(f"observation has {sorted(observation)}, expected {sorted(expected)}")
        if TASK in observation:
            self.told.append(tuple(map(str, observation[TASK])))
            for text in self.told[-1]:
                self.prepare_task(text, str(observation[PROMPT_CUT][0]) if PROMPT_CUT in observation else None)
        need = self.requirements
        batch = len(next(iter(observation.values())))
        state = observation.get("observation.state", np.zeros((batch, need.action), np.float32))
        if need.observation_steps > 1:
            shapes = {name: array.shape for name, array in observation.items() if name.startswith("observation.")}
            if any(shape[1] != need.observation_steps for shape in shapes.values()):
                raise ObservationError(f"expected {need.observation_steps} observations on the second axis: {shapes}")
            state = state[:, -1]
        steps = np.arange(1, need.chunk + 1, dtype=np.float32)[None, :, None] * np.float32(self.step)
        chunk = (state[:, None, : need.action] + steps).astype(np.float32)
        if PREFIX_ACTIONS in observation:
            # The chunk begins with the actions that are executed before this result arrives.
            over = (
                np.arange(need.chunk)[None, :]
                < np.minimum(observation[PREFIX_DELAY], observation[PREFIX_LENGTH])[:, None]
            )
            chunk = np.where(over[..., None], observation[PREFIX_ACTIONS], chunk)
        self.timings = {"to_device": 0.0, "compute": time.perf_counter() - started, "to_host": 0.0}
        return chunk

    def prepare_task(self, text: str, prompt_cut: str | None = None) -> int:
        """Refuse invalid text, and return the number of words, of which the first ``MAX_WORDS`` are read."""
        self.cuts.append(prompt_cut)
        if text == self.unreadable:
            raise ObservationError(f"the instruction {text!r} is no instruction")
        return max(len(text.split()) - MAX_WORDS, 0)

    def compile(
        self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, *, with_plan: bool = False
    ) -> None:
        """Wait for ``compile_latency``, then record these sizes as compiled."""
        time.sleep(self.compile_latency)
        if self.compile_failure is not None:
            raise self.compile_failure
        sizes = self._sizes(cameras, with_plan)
        if batch == 1:
            self.compiled.append(sizes)
        else:
            self.batches.append((batch, sizes))

    def is_compiled(
        self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, *, with_plan: bool = False
    ) -> bool:
        sizes = self._sizes(cameras, with_plan)
        return sizes in self.compiled if batch == 1 else (batch, sizes) in self.batches

    def _sizes(self, cameras: Mapping[str, tuple[int, int]] | None, with_plan: bool) -> dict[str, tuple[int, int]]:
        needs = self.requirements
        plan = {PREFIX_ACTIONS: (needs.chunk, needs.action)} if with_plan else {}
        return {**(needs.cameras if cameras is None else cameras), **plan}

    def on(self, device: str) -> "ScriptedPolicy":
        """Return a copy for another device, with separate records and failures."""
        return replace(
            self, device=device, failures=[], acted=0, compiled=[], batches=[], threads=set(), told=[], cuts=[]
        )

    def profile(
        self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, *, with_plan: bool = False
    ) -> float:
        return self.latency


@dataclass
class ScriptedLoader:
    """A ``LoadPolicy`` that records each path, reports ``words`` as progress, and waits for ``gate``."""

    make: Callable[[], ScriptedPolicy] = ScriptedPolicy
    loads: list[str] = field(default_factory=list)
    gate: threading.Event | None = None
    failure: Exception | None = None
    words: Sequence[str] = ("reading", "ready")

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: object = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> ScriptedPolicy:
        self.loads.append(path)
        for word in self.words:
            if on_progress is not None:
                on_progress(word)
        if self.gate is not None and not self.gate.wait(30):
            raise JaxModelsError("the test never opened the gate")
        if self.failure is not None:
            raise self.failure
        return self.make()


def ignore(stage: str) -> None:
    """Accept a stage of loading and do nothing."""

"""The server of ``benchmarks/glass_to_action.py``: its policy says which picture it saw, and every stage is noted.

    python benchmarks/glass_server.py --policy shipped

It prints one line when it is there; SIGUSR1 begins a measurement anew, SIGUSR2 prints what became of each picture.
"""

import argparse
import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import jaxmodels
from benchmarks.measured import SHIPPED
from benchmarks.processes import say
from benchmarks.timed_pictures import number_of, pose_of, stamp_of
from jaxmodels import Requirements
from service.app import create_app
from service.http.server import listen, run
from service.settings import Settings
from tests.testing.doubles import ScriptedPolicy

CAMERA = "front"
NEEDS = Requirements(
    policy_type="act", cameras={CAMERA: (480, 640)}, state=6, action=6, chunk=20, action_steps=5, rate=25.0
)


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
    """A policy whose every action says which picture it saw, after whatever another policy takes to compute."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=["none", "shipped"], default="none")
    options = parser.parse_args()
    notes = Notes()

    def load(path: str, revision: str | None = None, /, **more: Any) -> Any:
        return Reading(ScriptedPolicy(NEEDS) if options.policy == "none" else jaxmodels.load_policy(SHIPPED), notes)

    needs = NEEDS if options.policy == "none" else jaxmodels.load_policy(SHIPPED).requirements
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


if __name__ == "__main__":
    main()

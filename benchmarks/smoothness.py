"""How smooth is the motion, and does it still do its task, when every chunk of the policy comes late?

    python -m benchmarks.smoothness                                  # all overlaps that fit, the shipped policy
    python -m benchmarks.smoothness --policy PATH --overlap rtc      # any policy of the demo's task

The demo's arm in virtual time: control, action queue, guard and overlap are those of a session, ticks and physics take
turns, and nothing sleeps. An answer counts as there ``delay`` after its frame, and 3 ms more, which is what the shipped
policy takes; delays are the same for every chunk, so that the tables differ in nothing but the overlap. ``jitter`` adds
a random delay up to this value, seeded. Jerk is of the arm's joints as simulated, in rad/s^3 (norm over six joints,
third difference of 25 Hz samples), mean over all ticks of all episodes, and the mean over episodes of the largest.

Target: no delay up to 300 ms costs the default more than 2 lifts of 20. Latest: see docs/robots/motion.md.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jaxmodels
from benchmarks.measured import RESULTS, SHIPPED, result, write
from robojax.sim.arm import CAMERA, FRAME, HORIZON, JOINTS, RATE, SimulatedArm, to_radians
from service.control.aggregation import AGGREGATIONS, DEFAULT_AGGREGATION
from service.control.chunk_scheduler import ChunkRequest, PolicyAnswer
from service.control.controller import Controller
from service.control.observation_buffer import ObservationBuffer
from service.sessions.compatibility import configure_control, make_limits
from service.sessions.request import NewSession, SessionSettings

DELAYS = (0, 100, 200, 300, 400)  # milliseconds
OWN = 0.003  # seconds that an inference takes anyway
SEEDS = range(20_000, 20_020)  # cubes that no demonstration began with
SPARE = 60  # ticks that a robot may wait for its first command


@dataclass
class Episode:
    """Result of one episode: whether the cube is up, joints (n, 6) in radians, commands (n, 6) in radians."""

    lifted: bool
    joints: np.ndarray
    commands: np.ndarray


class Robot:
    """One session's control over the simulated arm; time is a number."""

    def __init__(self, policy: Any, overlap: str, delay: float, jitter: float, asked: dict[str, Any]):
        self.now = 1000.0
        self._policy = policy
        self._delay, self._jitter = delay, jitter
        self._random = np.random.default_rng(7)
        new = NewSession(
            session_id="arm",
            policy_path="demo",
            transport_server_url="direct",
            camera_names=(CAMERA,),
            policy_type=policy.requirements.policy_type,
            joint_names=JOINTS,
            rate=RATE,
            overlap=overlap,
            **asked,
        )
        settings = SessionSettings()
        table, pace = configure_control(policy.requirements, new, settings)
        self._buffer = ObservationBuffer((CAMERA,), table)
        self.control = Controller(self._buffer, pace, make_limits(table, policy.requirements, new, settings))
        self._names = table.names
        self._answers: list[tuple[float, PolicyAnswer]] = []
        self._blank = np.zeros((*FRAME, 3), np.uint8)

    def play(self, arm: SimulatedArm, seed: int) -> Episode:
        """One episode, from the first command on ``HORIZON`` ticks."""
        arm.reset(seed)
        self.control.begin(self.now)
        joints, commands = [], []
        target = arm.joints
        for _ in range(HORIZON + SPARE):
            self._buffer.put_joints(dict(zip(self._names, arm.joints.tolist(), strict=True)), self.now)
            # A picture is drawn when it is read: most pictures of an episode are never read.
            self._buffer.put_frame(CAMERA, self._blank, self.now)
            step = self.control.tick(self.now)
            if step.request is not None:
                self._answers.append(self._answer(step.request, arm))
            if step.command is not None:
                target = step.command
            if commands or step.command is not None:
                commands.append(target)
                joints.append(arm.joints)
            arm.step(target)
            if len(commands) == HORIZON:
                break
            self._pass(1 / RATE)
        lifted = arm.is_lifted
        self.control.halt(self.now)
        self._pass(2.0)
        while not self.control.is_idle:
            self.control.tick(self.now)
            self._pass(1 / RATE)
        return Episode(lifted, to_radians(np.array(joints)), to_radians(np.array(commands)))

    def _answer(self, request: ChunkRequest, arm: SimulatedArm) -> tuple[float, PolicyAnswer]:
        snapshot = request.snapshot
        observation = snapshot.observation() | dict(snapshot.prefix)
        observation[f"observation.images.{CAMERA}"] = arm.picture(CAMERA, *FRAME)[None]
        late = OWN + self._delay + self._random.uniform(0, self._jitter)
        return self.now + late, PolicyAnswer(request, self._policy.act(observation))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        due = [answer for answer in self._answers if answer[0] <= self.now + 1e-9]
        self._answers = [answer for answer in self._answers if answer[0] > self.now + 1e-9]
        for at, answer in due:
            self.control.accept(answer, at)


def jerk(positions: np.ndarray) -> np.ndarray:
    """(n - 3,) norm over the joints of the third difference of (n, 6), in rad/s^3."""
    return np.linalg.norm(np.diff(positions, 3, axis=0), axis=1) * RATE**3


def measure(policy: Any, overlap: str, delay: int, jitter: int, seeds: Sequence[int], asked: dict[str, Any]) -> Any:
    """One row: ``delay`` and ``jitter`` in milliseconds."""
    arm, robot = SimulatedArm(), Robot(policy, overlap, delay / 1e3, jitter / 1e3, asked)
    try:
        episodes = [robot.play(arm, seed) for seed in seeds]
    finally:
        arm.close()
    of_arm, of_commands = ([jerk(getattr(one, name)) for one in episodes] for name in ("joints", "commands"))
    control = robot.control
    return {
        "overlap": overlap,
        "delay_ms": delay,
        "lifted": sum(one.lifted for one in episodes),
        "episodes": len(episodes),
        "jerk_mean": round(float(np.concatenate(of_arm).mean()), 1),
        "jerk_peak": round(float(np.mean([one.max() for one in of_arm])), 1),
        "command_jerk_mean": round(float(np.concatenate(of_commands).mean()), 1),
        "command_jerk_peak": round(float(np.mean([one.max() for one in of_commands])), 1),
        "inferences_per_episode": round(control.chunks / len(episodes), 1),
        "starvations": control.starvations,
        "chunks_clamped": sum(control.guard.clamped.by_reason().values()),
        **control.scheduler.get_stats(control.queue.period),
    }


def table(rows: Sequence[Any]) -> str:
    """Lifts and mean jerk by overlap and delay, as Markdown."""
    delays = sorted({row["delay_ms"] for row in rows})
    by = {(row["overlap"], row["delay_ms"]): row for row in rows}
    lines = [
        "| overlap | " + " | ".join(f"{delay} ms" for delay in delays) + " |",
        "|---|" + "---|" * len(delays),
    ]
    for overlap in dict.fromkeys(row["overlap"] for row in rows):
        found = [by.get((overlap, delay)) for delay in delays]
        told = (f"{one['lifted']}/{one['episodes']}, {one['jerk_mean']:.0f}" if one else "" for one in found)
        lines.append(f"| {overlap} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def main() -> None:
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("--policy", default=str(SHIPPED))
    asking.add_argument(
        "--overlap", action="append", choices=list(AGGREGATIONS), help="default: all that fit the policy"
    )
    asking.add_argument("--delay", action="append", type=int, help="milliseconds; default: 0 100 200 300 400")
    asking.add_argument("--jitter", type=int, default=0, help="milliseconds at most")
    asking.add_argument("--episodes", type=int, default=len(SEEDS))
    asking.add_argument("--action-steps", type=int)
    asking.add_argument("--ask-ahead", type=float)
    asking.add_argument("--output", type=Path, default=RESULTS / "smoothness.json")
    options = asking.parse_args()
    policy = jaxmodels.load_policy(options.policy)
    fitting = [one for one, how in AGGREGATIONS.items() if policy.requirements.takes_prefix or not how.sends_plan]
    seeds = range(SEEDS.start, SEEDS.start + options.episodes)
    asked = {"action_steps": options.action_steps, "ask_ahead": options.ask_ahead}
    rows = []
    for overlap in options.overlap or fitting:
        for delay in options.delay or DELAYS:
            rows.append(measure(policy, overlap, delay, options.jitter, seeds, asked))
            print(json.dumps(rows[-1]), flush=True)
    found = result(
        "How smooth is the motion, and does it still do its task, when every chunk comes late?",
        shlex.join(("python", "-m", "benchmarks.smoothness", *sys.argv[1:])),
        {"is_virtual_time": True},
        "mujoco",
        policy="shipped" if options.policy == str(SHIPPED) else Path(options.policy).name,
        default=DEFAULT_AGGREGATION,
        jitter_ms=options.jitter,
        asked={name: value for name, value in asked.items() if value is not None},
        rows=rows,
    )
    write(options.output, found)
    print(table(rows))


if __name__ == "__main__":
    main()

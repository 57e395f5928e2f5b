"""Thread that keeps time, follows fresh commands, else holds."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from robojax.robot.arm import Arm
from robojax.robot.errors import ArmLost, BusLost, RobotError

# LeRobot's names of the joints, by the names that a server may use for them.
WIRE_NAMES = {
    "Rotation": "shoulder_pan",
    "Pitch": "shoulder_lift",
    "Elbow": "elbow_flex",
    "Wrist_Pitch": "wrist_flex",
    "Wrist_Roll": "wrist_roll",
    "Jaw": "gripper",
}
# Joints that keep what they were told when the arm is held: a gripper that opened a little would drop what it has.
GRIPS = frozenset({"gripper"})


@dataclass(frozen=True)
class Goal:
    """What the servos are told.

    Attributes:
        targets: joint to target, in the arm's units; None: nothing new.
        clamped: joints whose target was too far from where they are.
    """

    targets: Mapping[str, float] | None
    clamped: tuple[str, ...] = ()


class Follower:
    """Takes commands, gives goals.

    Attributes:
        hold: why the arm is held; None while it follows.
        is_latched: after an emergency stop: it follows nothing any more, until the program is started anew.
        commands: how many were taken.
        refused: how many were not, because something of them made no sense.

    Args:
        joints: of the arm, by LeRobot's names.
        patience: seconds without a command after which the arm is held.
        max_relative_target: the farthest a target may be from where the joint is: one for all, or by name.
    """

    def __init__(
        self, joints: Iterable[str], patience: float, max_relative_target: float | Mapping[str, float] | None = None
    ):
        self.joints = tuple(joints)
        self._patience = patience
        cap = max_relative_target
        self._caps = dict(cap) if isinstance(cap, Mapping) else {} if cap is None else dict.fromkeys(self.joints, cap)
        self._targets: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._heard: float | None = None
        self.hold: str | None = "no command has come yet"
        self._is_held = True  # whether the servos were told to stay; at first they are, by whoever engaged them
        self.is_latched = False
        self.commands = 0
        self.refused = 0

    def command(self, values: Mapping[str, float], now: float) -> None:
        """Take a command: name to target, of all joints or of some."""
        if self.is_latched:
            return
        named = {plain(name): value for name, value in values.items()}
        if not named or len(named) != len(values) or not all(self._is_target(*each) for each in named.items()):
            # Half of a command that makes no sense is no motion that anybody thought of.
            self.refused += 1
            return
        # Rooms forward only what changed, so what is not named keeps its target.
        self._targets.update(named)
        self._heard = now
        self.commands += 1

    def stop(self, reason: str, is_latched: bool = False) -> None:
        """Hold from now on: until the next command, or for good."""
        self._heard = None
        if self.hold is None or is_latched:
            self._is_held = False
        if is_latched or not self.is_latched:
            self.hold = reason  # a watchdog may have been quicker than whoever knows why
        self.is_latched = self.is_latched or is_latched

    def goal(self, pose: Mapping[str, float], now: float) -> Goal:
        """What the servos are told now, when the joints are here."""
        if self._heard is not None and now - self._heard > self._patience:
            self.stop(f"no command for {self._patience * 1e3:.0f} ms")
        if self._heard is None or self.is_latched:
            if self._is_held:
                return Goal(None)
            self._is_held = True
            # Once only: told again and again where it hangs, an arm sinks.
            self._sent = {name: self._sent.get(name, at) if name in GRIPS else at for name, at in pose.items()}
            return Goal(dict(self._sent))
        self.hold, self._is_held = None, False
        targets, clamped = {}, []
        for name, target in self._targets.items():
            cap, at = self._caps.get(name, math.inf), pose[name]
            targets[name] = min(max(target, at - cap), at + cap)
            if targets[name] != target:
                clamped.append(name)
        self._sent.update(targets)
        return Goal(targets, tuple(clamped))

    def _is_target(self, name: str, value: object) -> bool:
        return name in self.joints and isinstance(value, int | float) and math.isfinite(value)


def plain(name: str) -> str:
    """LeRobot's name of a joint: ``Rotation``, ``shoulder_pan.pos`` and ``main_shoulder_pan`` are all one."""
    name = name.removesuffix(".pos").removeprefix("main_")
    return WIRE_NAMES.get(name, name)


# Seconds that are left between two turns, so that commands that come in a heap do not fill the bus.
BREATH = 0.004


class ArmThread:
    """An arm that follows commands; as a context manager it runs from beginning to end.

    Every method may be called from any thread.

    Attributes:
        failure: what ended it, when something did.
    """

    def __init__(self, arm: Arm, follower: Follower, rate: float):
        self._arm, self._follower, self._period = arm, follower, 1 / rate
        self._lock = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._newest: tuple[dict[str, float], float] | None = None
        self._thread = threading.Thread(target=self._run, name="arm", daemon=True)
        self._clamped: dict[str, int] = {}
        self.failure: RobotError | None = None

    def __enter__(self) -> "ArmThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._wake.set()
        self._thread.join()

    def command(self, values: Mapping[str, float]) -> None:
        """Take a command; it is done at once."""
        with self._lock:
            self._follower.command(values, time.monotonic())
        self._wake.set()

    def stop(self, reason: str, is_latched: bool = False) -> None:
        """Hold at once: until the next command, or (an emergency stop) for good."""
        with self._lock:
            self._follower.stop(reason, is_latched)
        self._wake.set()

    @property
    def pose(self) -> tuple[dict[str, float], float] | None:
        """Where the joints were last, and when that was read (monotonic); None before the first reading."""
        return self._newest

    @property
    def hold(self) -> str | None:
        """Why it is held."""
        return self._follower.hold

    @property
    def is_latched(self) -> bool:
        """Whether an emergency stop holds it for good."""
        return self._follower.is_latched

    @property
    def is_over(self) -> bool:
        """Whether it does not run any more."""
        return self._over.is_set()

    def figures(self) -> dict[str, object]:
        """Counters."""
        with self._lock:
            return {
                "commands": self._follower.commands,
                "refused": self._follower.refused,
                "clamped": dict(self._clamped),
                "complaints": dict(self._arm.complaints),
            }

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._over.is_set():
                self._turn()
                due = max(due + self._period, time.monotonic() + BREATH)
                self._over.wait(BREATH)
                self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()
            with self._lock:
                self._follower.stop("the program ends", is_latched=True)
            while not self._turn():
                pass  # a reading that fails once must not be why the arm is not held; one that goes on failing raises
        except RobotError as error:
            left = self._hold_what_is_left()
            self.failure = ArmLost(f"{error}; {left}", error.then)
        except Exception as error:
            # A fault of ours must not leave an arm that follows an old target.
            self.failure = ArmLost(f"{type(error).__name__}: {error}; {self._hold_what_is_left()}", "report it")
        finally:
            self._over.set()

    def _turn(self) -> bool:
        """One look and one goal; False when the arm could not be read this once."""
        pose = self._arm.pose()
        if pose is None:
            return False
        now = time.monotonic()
        self._newest = (pose, now)
        with self._lock:
            goal = self._follower.goal(pose, now)
            for joint in goal.clamped:
                self._clamped[joint] = self._clamped.get(joint, 0) + 1
        if goal.targets is not None:
            self._arm.move(goal.targets)
        return True

    def _hold_what_is_left(self) -> str:
        with self._lock:
            self._follower.stop("the arm does not answer", is_latched=True)
        try:
            held = self._arm.hold_what_is_left()
        except (BusLost, OSError):
            held = []
        return f"held are {', '.join(held)}" if held else "nothing could be told to hold; switch the arm's power off"

"""Real-time thread of an arm, which follows recent commands and holds without them."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from robojax.robot.arm import GRIPPER, Arm, normalize_joint_name
from robojax.robot.errors import ArmLost, BusLost, RobotError
from robojax.robot.lerobot_arm import LeRobotArm


@dataclass(frozen=True)
class ArmLatch:
    """Emergency stop that holds the arm until a reset.

    Attributes:
        number: number of the stop, so that the reset of a stop does not release a later stop.
        since: monotonic time of the stop.
        is_final: whether no reset releases the latch, because the arm is lost or the program ends.
    """

    number: int
    reason: str
    since: float
    is_final: bool = False


@dataclass(frozen=True)
class Goal:
    """New targets of a cycle (joint to value in the arm's units, or None), and the clamped joints."""

    targets: Mapping[str, float] | None
    clamped: tuple[str, ...] = ()


class JointTracker:
    """Chooses an arm's goal from commands: the newest targets, or hold when commands stop.

    Attributes:
        hold: why the arm is held; None while it follows.
        latch: the emergency stop that holds the arm until ``reset``; None without an emergency stop.
        commands: number of accepted commands. A command with an unknown joint or a value that is not finite is refused.

    Args:
        joints: the arm's joints, by LeRobot's names.
        command_timeout: seconds without a command after which the arm is held.
        max_relative_target: largest distance of a target from the joint's position, for all joints or by name.
    """

    def __init__(
        self,
        joints: Iterable[str],
        command_timeout: float,
        max_relative_target: float | Mapping[str, float] | None = None,
    ):
        self.joints = tuple(joints)
        self._command_timeout = command_timeout
        cap = max_relative_target
        self._caps = dict(cap) if isinstance(cap, Mapping) else {} if cap is None else dict.fromkeys(self.joints, cap)
        self._targets: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._commanded_at: float | None = None
        self.hold: str | None = "no command has arrived yet"
        self._is_held = True  # Whether the hold was sent; `Arm.enable_torque` sends the first one.
        self.latch: ArmLatch | None = None
        self._stops = 0
        self.commands = 0

    def command(self, values: Mapping[str, float], now: float) -> None:
        """Take a command: targets by joint name, for all joints or some."""
        if self.latch is not None:
            return
        named = {normalize_joint_name(name): value for name, value in values.items()}
        if not named or len(named) != len(values) or not all(self._is_target(*target) for target in named.items()):
            return  # Half of an invalid command is not the motion that the policy intended.
        # Rooms forward only changed targets, so the other joints keep theirs.
        self._targets.update(named)
        self._commanded_at = now
        self.commands += 1

    def stop(self, reason: str, is_latched: bool = False, now: float = 0.0, *, is_final: bool = False) -> None:
        """Hold until the next command, (latched) until ``reset``, or (final) forever."""
        self._commanded_at = None
        if self.hold is None or (is_latched and self.latch is None):
            self._is_held = False
        if is_latched or self.latch is None:
            self.hold = reason  # Also if the command timeout held the arm before.
        if is_latched:
            self._stops += 1
            is_final = is_final or (self.latch is not None and self.latch.is_final)
            self.latch = ArmLatch(self._stops, reason, now, is_final)

    def reset(self) -> None:
        """Release the latch. Nothing moves until the next command, and targets from before the stop are forgotten."""
        self.latch, self._commanded_at = None, None
        # Rooms send only changed targets, so targets from before the stop must not be used again.
        self._targets.clear()
        self.hold = "the emergency stop was reset; no command has arrived since"

    def compute_goal(self, pose: Mapping[str, float], now: float) -> Goal:
        """Return the present targets of the servos, given the joints' positions."""
        if self._commanded_at is not None and now - self._commanded_at > self._command_timeout:
            self.stop(f"no command for {self._command_timeout * 1e3:.0f} ms")
        if self._commanded_at is None or self.latch is not None:
            if self._is_held:
                return Goal(None)
            self._is_held = True
            # Only once, because an arm that repeatedly gets its measured pose as its goal sinks.
            # Grippers keep their target, because a gripper that opens a little drops its load.
            self._sent = {n: self._sent.get(n, at) if n.endswith(GRIPPER) else at for n, at in pose.items()}
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


BREATH = 0.004  # minimum seconds between cycles, so that many commands at once do not fill the bus
MAX_POSE_AGE = 0.5  # seconds since the last reading of the servos after which a latch is not released


class ArmThread:
    """Thread in which an arm follows commands; a context manager; methods may be called from any thread.

    ``failure`` is the error that ended the thread; ``clamped`` are the joints whose target was clamped so far.
    """

    def __init__(self, arm: Arm | LeRobotArm, tracker: JointTracker, rate: float):
        self._arm, self._tracker, self._period = arm, tracker, 1 / rate
        self._lock = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._newest: tuple[dict[str, float], float] | None = None
        self._thread = threading.Thread(target=self._run, name="arm", daemon=True)
        self.clamped: frozenset[str] = frozenset()
        self.failure: RobotError | None = None

    def __enter__(self) -> "ArmThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._wake.set()
        self._thread.join()

    def command(self, values: Mapping[str, float]) -> None:
        """Take a command, which the thread executes at once."""
        with self._lock:
            self._tracker.command(values, time.monotonic())
        self._wake.set()

    def stop(self, reason: str, is_latched: bool = False) -> None:
        """Hold at once, until the next command, or (latched) until ``reset``."""
        with self._lock:
            self._tracker.stop(reason, is_latched, time.monotonic())
        self._wake.set()

    def reset(self, number: int) -> str | None:
        """Release the latch of this emergency stop, unless a later stop followed; return why the arm stays held."""
        with self._lock:
            latch, newest = self._tracker.latch, self._newest
            if latch is None:
                return None
            if latch.is_final or self._over.is_set():
                return f"{self.failure or latch.reason}"
            if newest is None or time.monotonic() - newest[1] > max(MAX_POSE_AGE, 3 * self._period):
                return "the servos cannot be read; check the arm's power and cables"
            if latch.number != number:
                return latch.reason
            self._tracker.reset()
            return None

    @property
    def pose(self) -> tuple[dict[str, float], float] | None:
        """Last positions of the joints and their monotonic time; None before the first reading."""
        return self._newest

    @property
    def hold(self) -> str | None:
        """Reason why the arm is held."""
        return self._tracker.hold

    @property
    def latch(self) -> ArmLatch | None:
        """The emergency stop that holds the arm until a reset, or None."""
        return self._tracker.latch

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return self._over.is_set()

    @property
    def commands(self) -> int:
        """Number of commands that the arm followed."""
        return self._tracker.commands

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._over.is_set():
                self._run_cycle()
                due = max(due + self._period, time.monotonic() + BREATH)
                self._over.wait(BREATH)
                self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()
            with self._lock:
                self._tracker.stop("the program ends", is_latched=True, is_final=True)
            while not self._run_cycle():
                pass  # A failed reading must not prevent the hold; several in a row raise.
        except RobotError as error:
            left = self._hold_responding_servos()
            self.failure = ArmLost(f"{error}; {left}", error.then)
        except Exception as error:
            # After an internal error, the arm must not follow an old target.
            self.failure = ArmLost(f"{type(error).__name__}: {error}; {self._hold_responding_servos()}", "report it")
        finally:
            self._over.set()

    def _run_cycle(self) -> bool:
        """Read the arm once and send one goal; return False if the reading failed."""
        pose = self._arm.read_pose()
        if pose is None:
            return False
        now = time.monotonic()
        self._newest = (pose, now)
        with self._lock:
            goal = self._tracker.compute_goal(pose, now)
        self.clamped = self.clamped.union(goal.clamped)
        if goal.targets is not None:
            self._arm.move(goal.targets)
        return True

    def _hold_responding_servos(self) -> str:
        with self._lock:
            self._tracker.stop("the arm does not answer", is_latched=True, is_final=True)
        try:
            held = self._arm.hold_responding_servos()
        except (BusLost, OSError):
            held = []
        return f"held are {', '.join(held)}" if held else "no joint could be held; switch the arm's power off"

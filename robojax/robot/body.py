"""The arm on a thread of its own, which keeps time and holds it whatever becomes of the network."""

import threading
import time
from collections.abc import Mapping

from robojax.robot.arm import Arm
from robojax.robot.errors import ArmLost, BusLost, RobotError
from robojax.robot.follower import Follower

# Seconds that are left between two turns, so that commands that come in a heap do not fill the bus.
BREATH = 0.004


class Body:
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

    def __enter__(self) -> "Body":
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

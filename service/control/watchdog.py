"""Detects stale, frozen, late or bad input; demands hold or stop."""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# Pictures are told apart by about so many of their points at first, and by all of them only when those are equal.
POINTS = 32
# Seconds that nothing ran, after which a robot is held whatever age its frames may have: an event loop counts as
# blocked from here on, too, and a robot that hears nothing for 0.5 s is held by its own side.
STALL = 0.25
# Codes of the holds that a look may ask for.
HOLDS = ("paused", "inference_slow", "action_stale")


@dataclass(frozen=True)
class WatchdogTimeouts:
    """How long things may be wrong; seconds.

    Attributes:
        frame_age: a frame older than this holds the robot, and so does a pause of this process, from ``STALL`` on.
        degraded_after: so long held because it cannot see or reach the robot, a session is ``degraded``.
        stop_after: so long, and it is stopped until somebody resets it: nobody expects a motion any more.
        frozen_after: so long with the same picture, a camera is said to be frozen.
        frozen_stops: whether a frozen camera also stops the robot.
        bad_inputs: so many bad joint values within ``bad_input_window`` stop the robot; 0 for never.
        action_age: an action of a chunk whose frame is older is not done; None leaves it to the chunk's length.
        slow: an inference may take so many times what its actions take to do.
    """

    frame_age: float = 0.3
    degraded_after: float = 3.0
    stop_after: float = 30.0
    frozen_after: float = 2.0
    frozen_stops: bool = False
    bad_inputs: int = 20
    bad_input_window: float = 1.0
    action_age: float | None = None
    slow: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.degraded_after < self.stop_after:
            raise ValueError(
                f"degraded_after {self.degraded_after:g} and stop_after {self.stop_after:g} s: wanted the first below"
            )

    def for_frames(self, frame_age: float) -> "WatchdogTimeouts":
        """The same for cameras whose frames may be so old: where that is long, the later steps move away from it."""
        stretch = max(1.0, 2 * frame_age / self.degraded_after)
        return replace(
            self,
            frame_age=frame_age,
            degraded_after=stretch * self.degraded_after,
            stop_after=stretch * self.stop_after,
        )


@dataclass(frozen=True)
class Stop:
    """Why the robot has to be stopped until somebody resets it: a stable code, and a text for people."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True)
class Looked:
    """What there is to judge at one tick.

    Attributes:
        seen_at: when each camera's newest frame was seen, None before the first.
        lost: rooms that are down.
        is_felt: whether every joint is known.
        chunk_seen_at: what the actions that are queued belong to, or None when there are none.
        asked_at: when the inference that runs was asked for, or None.
    """

    seen_at: Mapping[str, float | None]
    lost: Sequence[str] = ()
    is_felt: bool = True
    chunk_seen_at: float | None = None
    asked_at: float | None = None


@dataclass(frozen=True)
class Findings:
    """What follows.

    Attributes:
        holds: code to text of what forbids motion at this tick.
        blind: why the robot cannot be seen, felt or reached for ``degraded_after`` already, or None.
        stop: why it has to be stopped for good, or None.
    """

    holds: Mapping[str, str] = field(default_factory=dict)
    blind: str | None = None
    stop: Stop | None = None


class Watchdog:
    """Looks at every tick of a robot that moves; takes the time, reads no clock.

    Attributes:
        slow_after: seconds after which an inference is slow.
        frozen: cameras that show the same picture for too long.
    """

    def __init__(self, patience: WatchdogTimeouts, *, executed: float, covered: float, period: float = 0.0):
        """``executed`` and ``covered``: seconds that the actions done of a chunk take, and all of it.

        ``period``: seconds from one look to the next.
        """
        self.patience = patience
        self._period = period
        self.expect(executed=executed, covered=covered)
        self.frozen: set[str] = set()
        self._begun_at = self._resumed_at = 0.0
        self._looked_at: float | None = None
        self._pause: float | None = None
        self._since: dict[str, float] = {}
        self._pictures: dict[str, _Still] = {}
        self._bad: deque[tuple[float, int]] = deque()

    def expect(self, *, executed: float, covered: float) -> None:
        """So many seconds are done of each chunk from now on."""
        # An answer that comes while its chunk still covers the present is of use, however slow it was.
        self.slow_after = max(self.patience.slow * executed, covered)

    def begin(self, now: float) -> None:
        """The robot begins to move, or begins anew: nothing of before counts."""
        self._begun_at = self._resumed_at = now
        self._looked_at = self._pause = None
        self._since.clear()
        self._bad.clear()

    def frame(self, camera: str, image: np.ndarray, now: float) -> None:
        """A usable frame came."""
        still = self._pictures.get(camera)
        if still is None or not still.goes_on(image, now, self.patience.frozen_after):
            self._pictures[camera] = _Still(image, now)
            self.frozen.discard(camera)
        elif now - still.since >= self.patience.frozen_after:
            self.frozen.add(camera)

    def warnings(self, now: float) -> dict[str, str]:
        """Code to text of what is odd and holds nothing."""
        if not self.frozen:
            return {}
        names = ", ".join(
            f"{camera!r} for {now - self._pictures[camera].since:.1f} s" for camera in sorted(self.frozen)
        )
        return {"camera_frozen": f"camera {names}: the same picture"}

    def bad_input(self, reasons: Mapping[str, int], now: float) -> Stop | None:
        """Joint values came that cannot be used; a reason to stop when they are too many."""
        self._bad.append((now, sum(reasons.values())))
        count = self.bad_inputs(now)
        if not 0 < self.patience.bad_inputs <= count:
            return None
        self._bad.clear()
        named = ", ".join(f"{reason} {times}" for reason, times in sorted(reasons.items()))
        return Stop(
            "bad_input",
            f"{count} joint values in {self.patience.bad_input_window:g} s could not be used, limit "
            f"{self.patience.bad_inputs} (the last ones: {named})",
        )

    def bad_inputs(self, now: float) -> int:
        """How many there were lately."""
        while self._bad and now - self._bad[0][0] > self.patience.bad_input_window:
            self._bad.popleft()
        return sum(count for _, count in self._bad)

    def look(self, now: float, looked: Looked) -> Findings:
        """Judge one moment of a robot that moves."""
        patience = self.patience
        holds = self._holds(now, looked)
        self._looked_at = now
        code, text, since = self._blindness(now, looked)
        stop = None
        if code is not None and now - since > patience.stop_after:
            stop = Stop(code, f"{text} for {now - since:.0f} s, limit {patience.stop_after:g} s")
        elif patience.frozen_stops and self.frozen:
            names = ", ".join(map(repr, sorted(self.frozen)))
            stop = Stop("camera_frozen", f"camera {names}: the same picture for {patience.frozen_after:g} s")
        is_long = code is not None and now - since > patience.degraded_after
        return Findings(holds, f"{code}: {text} for {now - since:.1f} s" if is_long else None, stop)

    def _holds(self, now: float, looked: Looked) -> dict[str, str]:
        patience = self.patience
        holds = {}
        pause = 0.0 if self._looked_at is None else now - self._looked_at
        if pause - self._period > min(patience.frame_age, STALL):
            self._resumed_at, self._pause = now, pause
        if self._pause is not None:
            # Whatever was planned before is not for a robot that went on without us, and what the cameras showed
            # meanwhile comes bit by bit: one pause is one hold, until each has shown something since. One that does not
            # soon is stale by itself.
            is_seen = all(seen_at is not None and seen_at >= self._resumed_at for seen_at in looked.seen_at.values())
            if now == self._resumed_at or (not is_seen and now - self._resumed_at <= patience.frame_age):
                holds["paused"] = f"this process did nothing for {self._pause:.2f} s"
            else:
                self._pause = None
        if looked.asked_at is not None:
            ran = now - max(looked.asked_at, self._resumed_at)
            if ran > self.slow_after:
                holds["inference_slow"] = f"an inference runs for {ran:.2f} s, limit {self.slow_after:.2f} s"
        seen_at = looked.chunk_seen_at
        if patience.action_age is not None and seen_at is not None and now - seen_at > patience.action_age:
            holds["action_stale"] = (
                f"the actions belong to what was seen {now - seen_at:.2f} s ago, limit {patience.action_age:g} s"
            )
        return holds

    def _dark(self, now: float, looked: Looked) -> dict[str, float]:
        """Cameras whose newest frame is too old, and since when they have shown nothing."""
        return {
            camera: max(self._begun_at, seen_at or self._begun_at)
            for camera, seen_at in looked.seen_at.items()
            if seen_at is None or now - seen_at > self.patience.frame_age
        }

    def _blindness(self, now: float, looked: Looked) -> tuple[str | None, str, float]:
        """The oldest reason not to see, feel or reach the robot: code, text, and since when."""
        reasons: dict[str, tuple[str, float]] = {}
        if looked.lost:
            text = "room " + ", ".join(map(repr, sorted(looked.lost))) + " lost"
            reasons["link_lost"] = (text, self._since.setdefault("link_lost", now))
        else:
            self._since.pop("link_lost", None)
        dark = self._dark(now, looked)
        if dark:
            names = ", ".join(map(repr, sorted(dark)))
            code = "camera_stale" if all(looked.seen_at[camera] is not None for camera in dark) else "camera_missing"
            reasons[code] = (f"camera {names}: no new frame", min(dark.values()))
        if looked.is_felt:
            self._since.pop("joints_missing", None)
        else:
            since = self._since.setdefault("joints_missing", now)
            reasons["joints_missing"] = ("joints: not all of them are known", since)
        if not reasons:
            return None, "", now
        # A lost link explains the others.
        code = "link_lost" if "link_lost" in reasons else min(reasons, key=lambda code: reasons[code][1])
        return code, reasons[code][0], min(since for _, since in reasons.values())


class _Still:
    """The first of equal pictures."""

    def __init__(self, image: np.ndarray, now: float):
        self.since = now
        self._image = image
        self._print = _fingerprint(image)
        self._compared_at = now

    def goes_on(self, image: np.ndarray, now: float, confirm_after: float) -> bool:
        """Whether this one is equal too: judged by some points, and every so many seconds by all of them."""
        if _fingerprint(image) != self._print:
            return False
        if now - self._compared_at < confirm_after:
            return True
        self._compared_at = now
        return np.array_equal(image, self._image)


def _fingerprint(image: np.ndarray) -> int:
    rows, columns = (max(side // POINTS, 1) for side in image.shape[:2])
    return zlib.crc32(image[::rows, ::columns].tobytes(), hash(image.shape) & 0xFFFFFFFF)

"""How far, how fast and how abruptly each joint of a session may be commanded, and who says so."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from service.errors import InvalidRequest
from service.motion.joints import SO100, Joint, JointTable, plain
from service.safety.sources import LimitsFile, Said

Mode = Literal["clamp", "refuse"]
_ROUNDING = 1e-6

# Ranges per second that a joint may be commanded when nobody says how fast it is: what it limits is jumps, never normal
# motion. The demo's policy asks for 0.4 at most (its jaw: 1.8, more than 2.5 at a seam of two chunks); the servos of an
# SO-100 reach about 1.25.
VELOCITY = 4.0
# A range that is only what a policy's data happened to cover is often a small part of the joint's own.
VELOCITY_OF_DATA = 5.0
# How far a policy may go beyond its data: of that joint's span, and of the widest joint's, for one that hardly moved.
MARGIN, LEAST_MARGIN = 0.25, 0.05
# What a refusing guard still brings in: networks end a little beyond the range that they were trained in.
SLACK = 0.05


@dataclass(frozen=True)
class MotionLimits:
    """Of one session; arrays are (a,) float64 in the joint's own unit and seconds, infinite where nobody knows.

    Attributes:
        names: wire names of the joints.
        low, high: position.
        step: largest change of a command from one tick to the next, LeRobot's ``max_relative_target``.
        velocity, acceleration, jerk: largest first, second and third derivative of the commanded positions.
        mode: whether what leaves them is brought inside, or refused whole.
        origin: joint to where its limits came from, the most trusted first; ``none`` where nobody says anything.
        unmatched: joints of the limits file that the session does not have.
        believable: (2, a) the lowest and highest value that a working policy may ask for, inside the limits or not.
            Further out than a joint's own range is wide, the policy is broken, or counts in another unit: going to the
            end of the range at limited speed would be no answer to that. None where no range is known.
    """

    names: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray
    step: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray
    jerk: np.ndarray
    mode: Mode = "clamp"
    origin: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    believable: np.ndarray | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: {low:g}..{high:g}, step {step:g}, velocity {velocity:g}, acceleration {acceleration:g}, "
            f"jerk {jerk:g}"
            for name, low, high, step, velocity, acceleration, jerk in zip(
                self.names, self.low, self.high, self.step, self.velocity, self.acceleration, self.jerk, strict=True
            )
            if not (low < high and min(step, velocity, acceleration, jerk) > 0)
        ]
        if wrong:
            raise ValueError(f"limits of {'; '.join(wrong)}; wanted low < high and the others above 0")

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Joint to the lowest and highest position that may be commanded, with room for rounding to float32."""
        ends = zip(self.names, self.low.tolist(), self.high.tolist(), strict=True)
        return {name: (low - _ROUNDING * abs(low), high + _ROUNDING * abs(high)) for name, low, high in ends}

    @property
    def unlimited(self) -> list[str]:
        """Joints whose position or whose speed nobody limits."""
        open_ended = ~(np.isfinite(self.high - self.low) & np.isfinite(np.minimum(self.step, self.velocity)))
        return [name for name, is_open in zip(self.names, open_ended, strict=True) if is_open]

    def as_json(self) -> dict[str, dict[str, object]]:
        """Joint to its limits, JSON-ready: None where nobody knows."""
        kinds = ("low", "high", "step", "velocity", "acceleration", "jerk")
        columns = {kind: getattr(self, kind).tolist() for kind in kinds}
        limits: dict[str, dict[str, object]] = {}
        for index, name in enumerate(self.names):
            limits[name] = {kind: _known(column[index]) for kind, column in columns.items()}
            limits[name]["origin"] = self.origin.get(name, "none")
        return limits


@dataclass(frozen=True)
class Asked:
    """What the settings and the request say; the tighter of two steps counts.

    Attributes:
        mode: see `MotionLimits`.
        requested: ``max_relative_target`` of the request, for all joints or by name.
        setting: the same of the settings; no request goes above it.
        file: the limits file of the settings.
    """

    mode: Mode = "clamp"
    requested: float | Mapping[str, float] | None = None
    setting: float | Mapping[str, float] | None = None
    file: LimitsFile | None = None


def motion_limits(
    table: JointTable,
    asked: Asked | None = None,
    action_range: tuple[Sequence[float], Sequence[float]] | None = None,
) -> MotionLimits:
    """All limits of a session.

    Args:
        action_range: smallest and largest value (a,) of each joint in the data that the policy was trained on.

    Raises:
        InvalidRequest: a name that is no joint of the session, or sources that contradict each other.
    """
    asked = asked or Asked()
    joints = table.joints
    requested = _by_joint(asked.requested, joints, "max_relative_target of the request", is_strict=True)
    setting = _by_joint(asked.setting, joints, "max_relative_target of the settings", is_strict=False)
    filed, unmatched = _filed(asked.file, joints)
    data = _data_ranges(action_range, len(joints))
    rows, origin = [], {}
    for place, joint in enumerate(joints):
        row, sources = _limits_of(joint, requested[place], setting[place], filed[place], data[place])
        rows.append(row)
        origin[joint.name] = ", ".join(sources) or "none"
    low, high, step, velocity, acceleration, jerk = np.array(rows, np.float64).reshape(-1, 6).T.copy()
    return MotionLimits(
        table.names,
        low,
        high,
        step,
        velocity,
        acceleration,
        jerk,
        asked.mode,
        origin,
        tuple(unmatched),
        _believable(joints, data),
    )


def _believable(joints: Sequence[Joint], data: Sequence[tuple[float, float] | None]) -> np.ndarray:
    # Not the limits of a file: those may keep a joint to a small part of what its policy rightly asks for.
    unknown = (-math.inf, math.inf)
    own = [(joint.low, joint.high) for joint in joints]
    ranges = np.array([found if found != unknown else data[place] or unknown for place, found in enumerate(own)])
    low, high = ranges.reshape(-1, 2).T
    return np.stack([low - (high - low), high + (high - low)])


def _limits_of(
    joint: Joint,
    requested: float | None,
    setting: float | None,
    filed: tuple[Said, str] | None,
    data: tuple[float, float] | None,
) -> tuple[tuple[float, ...], list[str]]:
    said, file = filed or (Said(), "")
    steps = {"request": requested, "settings": setting, file: said.step}
    given = {source: step for source, step in steps.items() if step is not None}
    step = min(given.values(), default=math.inf)
    sources = [source for source, value in given.items() if value == step][:1]
    if filed is not None:
        sources += [file] if file not in sources else []
        _check_unit(joint, said, file)
    low = max(joint.low, -math.inf if said.low is None else said.low)
    high = min(joint.high, math.inf if said.high is None else said.high)
    if not low < high:
        raise InvalidRequest(
            f"limits file {file!r}, joint {joint.name!r}: found {said.low}..{said.high}; its range on the wire is "
            f"{joint.low:g}..{joint.high:g}, wanted limits inside of it"
        )
    if (joint.low, joint.high) != (-math.inf, math.inf) and not (said.low is not None and said.high is not None):
        sources.append("joint table")
    factor = VELOCITY
    if low == -math.inf and high == math.inf and data is not None:
        (low, high), factor = data, VELOCITY_OF_DATA
        sources.append("checkpoint")
    velocity = said.velocity if said.velocity is not None else factor * (high - low)
    return (low, high, step, velocity, said.acceleration or math.inf, said.jerk or math.inf), sources


def _check_unit(joint: Joint, said: Said, file: str) -> None:
    if said.is_unscaled_urdf and joint in SO100:
        raise InvalidRequest(
            f"limits file {file!r}, joint {joint.name!r}: a URDF counts in radians, this joint in {joint.low:g}.."
            f"{joint.high:g} on the wire; wanted a TOML file that gives its scale and offset (docs/safety.md shows one)"
        )


def _by_joint(
    value: float | Mapping[str, float] | None, joints: Sequence[Joint], what: str, *, is_strict: bool
) -> list[float | None]:
    if value is None or isinstance(value, int | float):
        _check_step(value, what)
        return [value] * len(joints)
    found: list[float | None] = [None] * len(joints)
    unknown = []
    for name, step in value.items():
        _check_step(step, f"{what}, joint {name!r}")
        place = _place(name, joints)
        if place is None:
            unknown.append(name)
        elif found[place] not in (None, step):
            raise InvalidRequest(f"{what}: joint {joints[place].name!r} has two values, under two names; wanted one")
        else:
            found[place] = step
    if unknown and is_strict:
        raise InvalidRequest(
            f"{what} names {', '.join(map(repr, sorted(unknown)))}, which the policy does not have; "
            f"its joints are {', '.join(joint.name for joint in joints)}",
            ("body", "max_relative_target"),
        )
    return found


def _check_step(step: float | None, what: str) -> None:
    if step is not None and not 0 < step < math.inf:
        raise InvalidRequest(f"{what}: found {step}; wanted a finite number above 0", ("body", "max_relative_target"))


def _filed(file: LimitsFile | None, joints: Sequence[Joint]) -> tuple[list[tuple[Said, str] | None], list[str]]:
    found: list[tuple[Said, str] | None] = [None] * len(joints)
    unmatched = []
    for name, said in (file.joints if file else {}).items():
        place = _place(name, joints)
        if place is None:
            unmatched.append(name)
            continue
        if found[place] is not None:
            assert file is not None
            raise InvalidRequest(
                f"limits file {file.name!r}: joint {joints[place].name!r} is there twice, under two names; wanted once"
            )
        found[place] = (said, said.origin)
    return found, sorted(unmatched)


def _place(name: str, joints: Sequence[Joint]) -> int | None:
    for place, joint in enumerate(joints):
        if plain(name) in (plain(joint.name), joint.alias):
            return place
    return None


def _data_ranges(
    action_range: tuple[Sequence[float], Sequence[float]] | None, width: int
) -> list[tuple[float, float] | None]:
    if action_range is None or not len(action_range[0]) == len(action_range[1]) == width:
        return [None] * width
    least, most = np.array(action_range[0], np.float64), np.array(action_range[1], np.float64)
    spans = most - least
    # Statistics of nothing, or of one number, are no range.
    usable = np.isfinite(spans) & (spans >= 0) & (np.abs(least) < 1e30) & (np.abs(most) < 1e30)
    widest = float(spans[usable].max(initial=0.0))
    if widest == 0:
        return [None] * width
    margin = np.maximum(MARGIN * spans, LEAST_MARGIN * widest)
    return [
        (float(least[place] - margin[place]), float(most[place] + margin[place])) if usable[place] else None
        for place in range(width)
    ]


def _known(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None

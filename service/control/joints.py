"""Joints of a policy: names, order and ranges; converts values to arrays and commands."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from service.errors import InvalidRequest, PolicyError, ServiceError
from service.transport.link import JointValue

# Policies compute in float32, so a value has to be finite in float32 too.
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NUMBERS = (int, float, np.integer, np.floating)
# Share of its range by which a joint may be outside of it; values further outside are probably in another unit.
OUT_OF_RANGE_SHARE = 0.1
# Names of grippers: gripper.pos, Jaw, left_gripper, panda_finger_joint1.
_GRIPPER = re.compile("gripper|jaw|finger", re.IGNORECASE)


@dataclass(frozen=True)
class Joint:
    """One joint of a robot.

    Attributes:
        name: name on the wire.
        index: position in the robot's joint order, which is sent with the value.
        low, high: range of commands, infinite if unknown. Measured values may be outside.
        alias: second name, which updates may use.
    """

    name: str
    index: int
    low: float = -math.inf
    high: float = math.inf
    alias: str | None = None

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"joint {self.name!r}: range {self.low}..{self.high} is empty; low must be below high")


# The order of LeRobot's SO-100 and SO-101 arms, normalised units.
SO100 = (
    Joint("Rotation", 0, -100, 100, "shoulder_pan"),
    Joint("Pitch", 1, -100, 100, "shoulder_lift"),
    Joint("Elbow", 2, -100, 100, "elbow_flex"),
    Joint("Wrist_Pitch", 3, -100, 100, "wrist_flex"),
    Joint("Wrist_Roll", 4, -100, 100, "wrist_roll"),
    Joint("Jaw", 5, 0, 100, "gripper"),
)
JOINT_NAMES = ("body", "joint_names")
_SO100_BY_NAME = {name: joint for joint in SO100 for name in (joint.name, joint.alias)}


@dataclass(frozen=True)
class ReadJoints:
    """Usable values of one joint update.

    Attributes:
        values: position of the joint in the table to its measured value, which may be out of range.
        dropped: reason to number of unusable values.
        out_of_range: the part of ``values`` that is far out of range and may be in another unit.
    """

    values: Mapping[int, float]
    dropped: Mapping[str, int]
    out_of_range: Mapping[int, float] = field(default_factory=dict)


class JointTable:
    """The joints of one policy, in the order of its actions (and of its state).

    Attributes:
        names: wire names.
        ranges: lowest and highest values, (a,) float32 each; infinite if unknown.
        grippers: (a,) bool: which joints are grippers.
    """

    def __init__(self, joints: Sequence[Joint]):
        self.joints = tuple(joints)
        self._position = {
            name: position
            for position, joint in enumerate(self.joints)
            for name in (joint.name, joint.alias)
            if name is not None
        }
        self._position |= _other_spellings(self._position)
        self.names = tuple(joint.name for joint in self.joints)
        low, high = [joint.low for joint in self.joints], [joint.high for joint in self.joints]
        self.ranges = np.array(low, np.float32), np.array(high, np.float32)
        self.grippers = np.array([bool(_GRIPPER.search(joint.name)) for joint in self.joints], bool)
        self._usual = np.clip(np.stack(self.ranges), -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float64)
        self._indices = tuple(joint.index for joint in self.joints)

    def __len__(self) -> int:
        return len(self.joints)

    def find(self, name: object) -> int | None:
        """Return the position of the joint with this name, or None."""
        return self._position.get(name) if isinstance(name, str) else None

    def read_update(self, values: Mapping[str, object]) -> ReadJoints:
        """Read one partial update from the wire. Unusable values are dropped, never replaced or clamped."""
        if tuple(values) == self.names and set(map(type, values.values())) == {float}:
            numbers = np.array(list(values.values()))
            if ((self._usual[0] <= numbers) & (numbers <= self._usual[1])).all():
                return ReadJoints(dict(enumerate(numbers.tolist())), {})
        usable: dict[int, float] = {}
        dropped: dict[str, int] = {}
        odd: dict[int, float] = {}
        contradicting: set[int] = set()
        for name, raw in values.items():
            position, value, reason = self._position.get(name, -1), math.nan, None
            if position < 0:
                reason = "unknown_joint"
            elif isinstance(raw, bool) or not isinstance(raw, _NUMBERS):
                reason = "not_a_number"
            else:
                try:
                    value = float(raw)
                except OverflowError:  # The integer is larger than any double.
                    value = math.inf
                if not abs(value) <= _FLOAT32_MAX:  # True for NaN.
                    reason = "not_finite"
                elif position in contradicting or usable.get(position, value) != value:
                    # One update has different values for two names of a joint, so none is used.
                    reason = "contradicting"
                    contradicting.add(position)
                    usable.pop(position, None)
            if reason is not None:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            joint = self.joints[position]
            usable[position] = value
            if max(joint.low - value, value - joint.high) > OUT_OF_RANGE_SHARE * (joint.high - joint.low):
                odd[position] = value
        return ReadJoints(usable, dropped, odd)

    def to_commands(self, values: np.ndarray, pose: np.ndarray | None = None) -> tuple[JointValue, ...]:
        """Convert commands (a,) in the table's order to wire values, limited to each joint's range.

        Args:
            values: one command per joint.
            pose: measured pose (a,), or None. The command of a joint that is measured out of range may be between its
                range and that value.

        Raises:
            ValueError: the shape is wrong, or a value is not finite. No part of the command may be sent then.
        """
        if values.shape != (len(self.joints),):
            raise ValueError(f"command has shape {values.shape}, wanted ({len(self.joints)},)")
        if not np.isfinite(values).all():
            bad = [name for name, value in zip(self.names, values, strict=True) if not math.isfinite(value)]
            raise ValueError(f"command has values that are not finite, of {', '.join(bad)}")
        low, high = self.ranges
        if pose is not None:
            low, high = np.minimum(low, pose), np.maximum(high, pose)
        clamped = np.clip(values, low, high).tolist()
        return tuple(map(JointValue, self.names, clamped, self._indices))


def create_joint_table(
    width: int,
    *,
    checkpoint: Sequence[str] | None = None,
    requested: Sequence[str] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    is_positional: bool = False,
) -> JointTable:
    """Create the joint table of a policy with actions of this width.

    Names come from the checkpoint, else from the request. Joints of an SO-100 in any spelling (``shoulder_pan``,
    ``shoulder_pan.pos``, ``main_shoulder_pan``, ``Rotation``) get its wire names and ranges.

    Args:
        ranges: ranges of other joints, which are otherwise unlimited.
        is_positional: whether unnamed joints are allowed, as ``action_1``, ``action_2``, ..., without ranges.

    Raises:
        InvalidRequest: the requested names do not fit the policy, or neither source has names.
        PolicyError: the checkpoint's names do not fit its actions.
    """
    if requested is not None:
        _check_names(requested, width, partial(InvalidRequest, loc=JOINT_NAMES), "joint_names of the request")
    if checkpoint is not None:
        _check_names(checkpoint, width, PolicyError, "joint names of the checkpoint")
        if requested is not None and not have_same_joints(requested, checkpoint):
            raise InvalidRequest(
                f"joint_names {list(requested)} differ from the checkpoint's {list(checkpoint)}; leave joint_names out",
                JOINT_NAMES,
            )
    names = checkpoint or requested
    if names is None and not is_positional:
        example = ", ".join(f'"{joint.alias}"' for joint in SO100)
        raise InvalidRequest(
            f"joint_names is missing: the checkpoint does not name the joints of its actions; send {width} "
            f"name{'s' if width > 1 else ''} in the order of the policy's actions (for an SO-101: [{example}]); or "
            'write them as "joint_names" into robojax.json in the policy\'s folder',
            JOINT_NAMES,
        )
    if names is None:
        return JointTable([Joint(f"action_{index + 1}", index) for index in range(width)])
    known = [_SO100_BY_NAME.get(strip_feature_name(name)) for name in names]
    if width == len(SO100) and len({joint.name for joint in known if joint is not None}) == width:
        return JointTable([joint for joint in known if joint is not None])
    limits = ranges or {}
    return JointTable(
        [Joint(name, index, *limits.get(name, (-math.inf, math.inf))) for index, name in enumerate(names)]
    )


def have_same_joints(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two lists name the same joints in the same order, in any spelling."""
    return [*map(_to_wire_name, names)] == [*map(_to_wire_name, others)]


def _to_wire_name(name: str) -> str:
    joint = _SO100_BY_NAME.get(stripped := strip_feature_name(name))
    return stripped if joint is None else joint.name


def strip_feature_name(name: str) -> str:
    """Strip LeRobot's additions from a joint's name: ``shoulder_pan.pos``, ``main_shoulder_pan`` (older datasets)."""
    return name.removesuffix(".pos").removeprefix("main_")


def _other_spellings(positions: Mapping[str, int]) -> dict[str, int]:
    """Return LeRobot's spellings of these names (``shoulder_pan.pos``, ``main_shoulder_pan``) that are unambiguous."""
    found: dict[str, int] = {}
    ambiguous = set(positions)
    for name, position in positions.items():
        base = strip_feature_name(name)
        for spelling in (base, f"{base}.pos", f"main_{base}", f"main_{base}.pos"):
            if found.setdefault(spelling, position) != position:
                ambiguous.add(spelling)
    return {spelling: position for spelling, position in found.items() if spelling not in ambiguous}


def _check_names(names: Sequence[str], width: int, error: Callable[[str], ServiceError], what: str) -> None:
    wrong = None
    if len(names) != width:
        wrong = f"are {len(names)}, but the policy's actions have {width} values"
    elif len(set(names)) != width:
        wrong = f"name a joint twice: {sorted({name for name in names if list(names).count(name) > 1})}"
    elif bad := [name for name in names if not (0 < len(name) <= 50 and name.isprintable())]:
        wrong = f"have {bad[0]!r:.80}; wanted 1 to 50 printable characters"
    if wrong is not None:
        raise error(f"{what} {wrong}")

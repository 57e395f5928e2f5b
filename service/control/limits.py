"""Position, speed and step limits per joint, from TOML or URDF."""

import math
import tomllib
import xml.parsers.expat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from service.control.config import Mode, SafetySettings
from service.control.joints import SO100, Joint, JointTable, strip_feature_name
from service.errors import InvalidRequest

MAX_FILE = 4 << 20  # Bytes; the URDF of a humanoid has less than 1 MiB.
_MAX_JOINTS = 4096
_MAX_LINE = 1024  # Characters of a line of TOML, because the time to parse dotted keys is quadratic.


class LimitsError(ValueError):
    """An invalid limits file; the text names the file, each joint, the found value and the accepted values."""


@dataclass(frozen=True)
class FileLimits:
    """Limits of one joint in a file, in the joint's unit on the wire and seconds; None if missing.

    Attributes:
        origin: name of the file.
        is_unscaled_urdf: whether the range comes from a URDF without a scale.
    """

    low: float | None = None
    high: float | None = None
    step: float | None = None
    velocity: float | None = None
    acceleration: float | None = None
    jerk: float | None = None
    origin: str = ""
    is_unscaled_urdf: bool = False


# Content of a limits file: joint name to its limits.
LimitsFile = Mapping[str, FileLimits]
_LIMIT_KEYS = tuple(each.name for each in fields(FileLimits) if each.name not in ("origin", "is_unscaled_urdf"))
_URDF_KEYS = ("urdf", "scale", "offset")


def read_limits(path: str | Path) -> LimitsFile:
    """Read a TOML file with ``[joints.NAME]`` tables, or a URDF (``.urdf``, ``.xml``).

    Raises:
        LimitsError: the file cannot be read or has errors, which are all listed.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() in (".urdf", ".xml"):
        wrong: list[str] = []
        joints = {
            name: _limits_from_urdf(name, limits, {}, path.name, wrong) for name, limits in _read_urdf(path).items()
        }
        return _check_file(path, joints, wrong)
    return _read_toml(path)


def _read_toml(path: Path) -> LimitsFile:
    text = _read_text(path)
    if (longest := max(map(len, text.splitlines()), default=0)) > _MAX_LINE:
        raise LimitsError(
            f"limits file {path.name!r}: found a line of {longest} characters; wanted at most {_MAX_LINE}"
        )
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise LimitsError(f"limits file {path.name!r}: {error}; wanted a TOML file or a URDF") from None
    wrong = [
        f"found {key!r}; wanted 'joints' and 'urdf' only" for key in sorted(table) if key not in ("joints", "urdf")
    ]
    urdf, scale, offset = _read_urdf_table(table.get("urdf", {}), path, wrong)
    named = table.get("joints", {})
    if not isinstance(named, dict):
        raise LimitsError(f"limits file {path.name!r}: found joints = {named!r:.40}; wanted tables [joints.NAME]")
    joints: dict[str, FileLimits] = {}
    used = set()
    for name, table in named.items():
        if not isinstance(table, dict):
            wrong.append(f"joint {name!r}: found {table!r:.40}; wanted a table [joints.{name}]")
            continue
        joints[name] = _read_joint(name, table, path.name, wrong)
        source = table.get("urdf", name)
        if source in urdf:
            used.add(source)
            scaling = {"scale": scale, "offset": offset} | {
                key: table[key] for key in ("scale", "offset") if key in table
            }
            base = _limits_from_urdf(name, urdf[source], scaling, path.name, wrong)
            joints[name] = _merge_limits(joints[name], base)
        elif any(key in table for key in _URDF_KEYS):
            wrong.append(f"joint {name!r}: found no joint {source!r} with limits in the URDF; wanted the name of one")
    for name, limits in urdf.items():
        if name not in used and name not in joints:
            joints[name] = _limits_from_urdf(name, limits, {"scale": scale, "offset": offset}, path.name, wrong)
    return _check_file(path, joints, wrong)


def _read_urdf_table(
    table: Any, path: Path, wrong: list[str]
) -> tuple[dict[str, dict[str, float]], float | None, float | None]:
    if isinstance(table, str):
        table = {"file": table}
    if not isinstance(table, dict) or not isinstance(table.get("file", ""), str):
        wrong.append(f'found urdf = {table!r:.60}; wanted [urdf] with file = "robot.urdf", and scale and offset')
        return {}, None, None
    wrong += [
        f"urdf: found {key!r}; wanted file, scale, offset" for key in sorted(set(table) - {"file", *_URDF_KEYS[1:]})
    ]
    if not table:
        return {}, None, None
    return _read_urdf(path.parent / table.get("file", "")), table.get("scale"), table.get("offset")


def _read_joint(name: str, table: Mapping[str, Any], origin: str, wrong: list[str]) -> FileLimits:
    known = (*_LIMIT_KEYS, *_URDF_KEYS)
    wrong += [f"joint {name!r}: found {key!r}; wanted {', '.join(known)}" for key in sorted(table) if key not in known]
    numbers: dict[str, Any] = {
        key: _read_number(table[key], f"joint {name!r}: {key}", wrong) for key in _LIMIT_KEYS if key in table
    }
    return FileLimits(**numbers, origin=origin)


def _read_number(value: object, what: str, wrong: list[str]) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:  # True for NaN.
        wrong.append(f"{what}: found {value!r:.40}; wanted a finite number")
        return None
    return float(value)


def _merge_limits(limits: FileLimits, base: FileLimits) -> FileLimits:
    """Merge limits of the TOML with limits of the URDF, which the TOML overrides."""
    given: dict[str, Any] = {key: getattr(limits, key) for key in _LIMIT_KEYS if getattr(limits, key) is not None}
    unscaled = base.is_unscaled_urdf and not {"low", "high"} <= set(given)
    return replace(base, **given, is_unscaled_urdf=unscaled)


def _limits_from_urdf(
    name: str, urdf: Mapping[str, float], scaling: Mapping[str, Any], origin: str, wrong: list[str]
) -> FileLimits:
    scale, offset = (
        default if scaling.get(key) is None else _read_number(scaling[key], f"joint {name!r}: {key}", wrong)
        for key, default in (("scale", 1.0), ("offset", 0.0))
    )
    if scale is None or offset is None:
        return FileLimits(origin=origin)
    if scale == 0:
        wrong.append(f"joint {name!r}: found scale 0; wanted units on the wire per unit of the URDF")
        return FileLimits(origin=origin)
    ends = [urdf[key] * scale + offset for key in ("lower", "upper") if key in urdf]
    low, high = (min(ends), max(ends)) if len(ends) == 2 and urdf["lower"] < urdf["upper"] else (None, None)
    if len(ends) == 2 and low is None:
        wrong.append(
            f"joint {name!r}: found lower {urdf['lower']:g} and upper {urdf['upper']:g} in the URDF; "
            "wanted lower below upper"
        )
    velocity = urdf["velocity"] * abs(scale) if "velocity" in urdf else None
    return FileLimits(low, high, velocity=velocity, origin=origin, is_unscaled_urdf=scaling.get("scale") is None)


def _check_file(path: Path, joints: Mapping[str, FileLimits], wrong: list[str]) -> LimitsFile:
    for name, said in joints.items():
        if said.low is not None and said.high is not None and not said.low < said.high:
            wrong.append(f"joint {name!r}: found low {said.low:g} and high {said.high:g}; wanted low below high")
        wrong += [
            f"joint {name!r}: found {key} {value:g}; wanted more than 0"
            for key in _LIMIT_KEYS[2:]
            if (value := getattr(said, key)) is not None and value <= 0
        ]
    if not joints and not wrong:
        wrong.append("found no joint; wanted [joints.NAME] tables with low, high, step, velocity, acceleration or jerk")
    if wrong:
        raise LimitsError(f"limits file {path.name!r}: " + "; ".join(wrong))
    return dict(joints)


def _read_urdf(path: Path) -> dict[str, dict[str, float]]:
    """Return joint name to ``lower``, ``upper`` and ``velocity`` of ``<robot><joint><limit>``.

    Document types and entities are refused, so that nothing expands or is fetched.
    """
    joints: dict[str, dict[str, float]] = {}
    elements: list[tuple[str, Mapping[str, str]]] = []
    wrong: list[str] = []

    def started(tag: str, attributes: dict[str, str]) -> None:
        elements.append((tag, attributes))
        if tag == "limit" and [each for each, _ in elements] == ["robot", "joint", "limit"]:
            _read_urdf_limit(elements[1][1], attributes, joints, wrong)
        if len(elements) > 64 or len(joints) > _MAX_JOINTS:
            raise LimitsError(f"limits file {path.name!r}: nested too deep, or too many joints; wanted a robot's URDF")

    def refuse(*_: object) -> Any:
        raise LimitsError(f"limits file {path.name!r}: found a document type or an entity; wanted plain XML")

    parser = xml.parsers.expat.ParserCreate()
    parser.StartElementHandler = started
    parser.EndElementHandler = lambda tag: elements.pop()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    try:
        parser.Parse(_read_text(path), True)
    except xml.parsers.expat.ExpatError as error:
        raise LimitsError(f"limits file {path.name!r}: {error}; wanted a URDF") from None
    if wrong:
        raise LimitsError(f"limits file {path.name!r}: " + "; ".join(wrong))
    return joints


def _read_urdf_limit(
    joint: Mapping[str, str], limit: Mapping[str, str], joints: dict[str, dict[str, float]], wrong: list[str]
) -> None:
    name, kind = joint.get("name", ""), joint.get("type", "")
    if not name or kind == "fixed":
        return
    if name in joints:
        wrong.append(f"joint {name!r}: found it twice; wanted each name once")
    # A missing end is 0 in this format; a continuous joint has no ends.
    values = {} if kind == "continuous" else {"lower": limit.get("lower", "0"), "upper": limit.get("upper", "0")}
    values |= {"velocity": limit["velocity"]} if "velocity" in limit else {}
    joints[name] = {}
    for key, text in values.items():
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) < 1e30:
            wrong.append(f"joint {name!r}: found {key} {text[:40]!r}; wanted a finite number")
        else:
            joints[name][key] = value


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)
        if len(raw) > MAX_FILE:
            raise LimitsError(
                f"limits file {path.name!r}: more than {MAX_FILE >> 20} MiB; wanted the limits of a robot"
            )
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise LimitsError(f"limits file {str(path)!r}: {reason}; wanted a readable TOML file or URDF") from None


_ROUNDING = 1e-6

# Largest speed in ranges per second of a joint without a known speed, for known ranges and for ranges of a policy's
# data. It limits jumps, not normal motion: an SO-100 reaches about 1.25.
DEFAULT_VELOCITY, DEFAULT_DATA_VELOCITY = 4.0, 5.0
# Share of the joint's span, and at least of the widest joint's span, by which a policy may exceed its data.
DATA_MARGIN, MIN_DATA_MARGIN = 0.25, 0.05
REFUSAL_SLACK = 0.05  # Share of the range by which an action may overshoot; it is clamped instead of refused.


@dataclass(frozen=True)
class MotionLimits:
    """Motion limits of one session; arrays are (a,) float64 in the joint's unit and seconds, infinite where unknown.

    Attributes:
        names: wire names of the joints.
        step: largest change of a command from one tick to the next, LeRobot's ``max_relative_target``.
        velocity, acceleration, jerk: largest derivatives of the commanded positions.
        mode: whether a chunk outside of the limits is clamped or refused.
        origin: joint to the sources of its limits, the most trusted first; ``none`` without a source.
        unmatched: joints of the limits file that the session does not have.
        believable: lowest and highest value (2, a) of a working policy, one range beyond the joint's own range. A
            chunk outside of it is refused in every mode.
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
        """Joints without a limit of position, or of speed."""
        open_ended = ~(np.isfinite(self.high - self.low) & np.isfinite(np.minimum(self.step, self.velocity)))
        return [name for name, is_open in zip(self.names, open_ended, strict=True) if is_open]

    def as_json(self) -> dict[str, dict[str, object]]:
        """Return joint to its limits, JSON-ready; None if unknown."""
        kinds = ("low", "high", "step", "velocity", "acceleration", "jerk")
        columns = {kind: getattr(self, kind).tolist() for kind in kinds}
        limits: dict[str, dict[str, object]] = {}
        for index, name in enumerate(self.names):
            limits[name] = {kind: _finite_or_none(column[index]) for kind, column in columns.items()}
            limits[name]["origin"] = self.origin.get(name, "none")
        return limits


def create_motion_limits(
    table: JointTable,
    safety: SafetySettings | None = None,
    *,
    file: LimitsFile | None = None,
    requested: float | Mapping[str, float] | None = None,
    action_range: tuple[Sequence[float], Sequence[float]] | None = None,
) -> MotionLimits:
    """Combine all limits of a session.

    Args:
        file: content of the limits file of the settings.
        requested: ``max_relative_target`` of the request, for all joints or by name; settings may lower it.
        action_range: smallest and largest value (a,) of each joint in the policy's training data.

    Raises:
        InvalidRequest: a name is not a joint of the session, or sources contradict each other.
    """
    safety = safety or SafetySettings()
    joints = table.joints
    request = _by_joint(requested, joints, "max_relative_target of the request", is_strict=True)
    settings = _by_joint(safety.max_relative_target, joints, "max_relative_target of the settings", is_strict=False)
    filed, unmatched = _match_file(file, joints)
    data = _data_ranges(action_range, len(joints))
    rows, origin = [], {}
    for index, joint in enumerate(joints):
        row, sources = _combine_limits(joint, request[index], settings[index], filed[index], data[index])
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
        safety.safety,
        origin,
        tuple(unmatched),
        _believable_range(joints, data),
    )


def _believable_range(joints: Sequence[Joint], data: Sequence[tuple[float, float] | None]) -> np.ndarray:
    # Limits of a file do not count, because a working policy may exceed them.
    unknown = (-math.inf, math.inf)
    own = [(joint.low, joint.high) for joint in joints]
    ranges = np.array(
        [ends if ends != unknown else measured or unknown for ends, measured in zip(own, data, strict=True)]
    )
    low, high = ranges.reshape(-1, 2).T
    return np.stack([low - (high - low), high + (high - low)])


def _combine_limits(
    joint: Joint,
    requested: float | None,
    setting: float | None,
    filed: FileLimits | None,
    data: tuple[float, float] | None,
) -> tuple[tuple[float, ...], list[str]]:
    limits = filed or FileLimits()
    file = limits.origin
    steps = {"request": requested, "settings": setting, file: limits.step}
    given = {source: step for source, step in steps.items() if step is not None}
    step = min(given.values(), default=math.inf)
    sources = [source for source, value in given.items() if value == step][:1]
    if filed is not None:
        sources += [file] if file not in sources else []
        _check_unit(joint, limits, file)
    low = max(joint.low, -math.inf if limits.low is None else limits.low)
    high = min(joint.high, math.inf if limits.high is None else limits.high)
    if not low < high:
        raise InvalidRequest(
            f"limits file {file!r}, joint {joint.name!r}: found {limits.low}..{limits.high}; its range on the wire is "
            f"{joint.low:g}..{joint.high:g}, wanted limits inside of it"
        )
    if (joint.low, joint.high) != (-math.inf, math.inf) and not (limits.low is not None and limits.high is not None):
        sources.append("joint table")
    factor = DEFAULT_VELOCITY
    if low == -math.inf and high == math.inf and data is not None:
        (low, high), factor = data, DEFAULT_DATA_VELOCITY
        sources.append("checkpoint")
    velocity = limits.velocity if limits.velocity is not None else factor * (high - low)
    return (low, high, step, velocity, limits.acceleration or math.inf, limits.jerk or math.inf), sources


def _check_unit(joint: Joint, limits: FileLimits, file: str) -> None:
    if limits.is_unscaled_urdf and joint in SO100:
        raise InvalidRequest(
            f"limits file {file!r}, joint {joint.name!r}: a URDF counts in radians, this joint in {joint.low:g}.."
            f"{joint.high:g} on the wire; wanted a TOML file that gives its scale and offset (docs/robots/safety.md "
            "shows one)"
        )


def _by_joint(
    value: float | Mapping[str, float] | None, joints: Sequence[Joint], what: str, *, is_strict: bool
) -> list[float | None]:
    if value is None or isinstance(value, int | float):
        _check_step(value, what)
        return [value] * len(joints)
    steps: list[float | None] = [None] * len(joints)
    unknown = []
    for name, step in value.items():
        _check_step(step, f"{what}, joint {name!r}")
        index = _find_joint(name, joints)
        if index is None:
            unknown.append(name)
        elif steps[index] not in (None, step):
            raise InvalidRequest(f"{what}: joint {joints[index].name!r} has two values, under two names; wanted one")
        else:
            steps[index] = step
    if unknown and is_strict:
        raise InvalidRequest(
            f"{what} names {', '.join(map(repr, sorted(unknown)))}, which the policy does not have; "
            f"its joints are {', '.join(joint.name for joint in joints)}",
            ("body", "max_relative_target"),
        )
    return steps


def _check_step(step: float | None, what: str) -> None:
    if step is not None and not 0 < step < math.inf:
        raise InvalidRequest(f"{what}: found {step}; wanted a finite number above 0", ("body", "max_relative_target"))


def _match_file(file: LimitsFile | None, joints: Sequence[Joint]) -> tuple[list[FileLimits | None], list[str]]:
    matched: list[FileLimits | None] = [None] * len(joints)
    unmatched = []
    for name, limits in (file or {}).items():
        index = _find_joint(name, joints)
        if index is None:
            unmatched.append(name)
            continue
        if matched[index] is not None:
            raise InvalidRequest(
                f"limits file {limits.origin!r}: joint {joints[index].name!r} is there twice, under two names; "
                "wanted once"
            )
        matched[index] = limits
    return matched, sorted(unmatched)


def _find_joint(name: str, joints: Sequence[Joint]) -> int | None:
    for index, joint in enumerate(joints):
        if strip_feature_name(name) in (strip_feature_name(joint.name), joint.alias):
            return index
    return None


def _data_ranges(
    action_range: tuple[Sequence[float], Sequence[float]] | None, width: int
) -> list[tuple[float, float] | None]:
    if action_range is None or not len(action_range[0]) == len(action_range[1]) == width:
        return [None] * width
    least, most = np.array(action_range[0], np.float64), np.array(action_range[1], np.float64)
    spans = most - least
    # Statistics without values, or of constant values, are not usable.
    usable = np.isfinite(spans) & (spans >= 0) & (np.abs(least) < 1e30) & (np.abs(most) < 1e30)
    widest = float(spans[usable].max(initial=0.0))
    if widest == 0:
        return [None] * width
    margin = np.maximum(DATA_MARGIN * spans, MIN_DATA_MARGIN * widest)
    return [
        (float(least[index] - margin[index]), float(most[index] + margin[index])) if usable[index] else None
        for index in range(width)
    ]


def _finite_or_none(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None

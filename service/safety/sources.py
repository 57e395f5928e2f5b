"""Limits of joints from a TOML file or a URDF; nothing in it is guessed, and all that is wrong is said at once."""

import math
import tomllib
import xml.parsers.expat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

# A URDF of a humanoid with all its meshes named is below one megabyte.
LARGEST = 4 << 20
_JOINTS = 4096
# Characters of a line of TOML. Dots in one take the square of their number: 128 KiB of "a.a.a" took 4 s.
_LINE = 1024


class LimitsError(ValueError):
    """A limits file that cannot be used; the text names the file, each joint, what was found and what was wanted."""


@dataclass(frozen=True)
class Said:
    """What a file says of one joint, in the joint's unit on the wire and seconds; None is nothing.

    Attributes:
        origin: name of the file.
        is_unscaled_urdf: whether its range is a URDF's, as it stands there.
    """

    low: float | None = None
    high: float | None = None
    step: float | None = None
    velocity: float | None = None
    acceleration: float | None = None
    jerk: float | None = None
    origin: str = ""
    is_unscaled_urdf: bool = False


@dataclass(frozen=True)
class LimitsFile:
    """A limits file, read.

    Attributes:
        name: of the file, without its folder.
        joints: joint name to what it says of it.
    """

    name: str
    joints: Mapping[str, Said] = field(default_factory=dict)


_NUMBERS = tuple(each.name for each in fields(Said) if each.name not in ("origin", "is_unscaled_urdf"))
_OF_URDF = ("urdf", "scale", "offset")


def read_limits(path: str | Path) -> LimitsFile:
    """A TOML file with ``[joints.NAME]`` tables, or a URDF (``.urdf``, ``.xml``).

    Raises:
        LimitsError: it cannot be read or used; lists everything that is wrong.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() in (".urdf", ".xml"):
        wrong: list[str] = []
        joints = {name: _from_urdf(name, found, {}, path.name, wrong) for name, found in _read_urdf(path).items()}
        return _finished(path, joints, wrong)
    return _read_toml(path)


def _read_toml(path: Path) -> LimitsFile:
    text = _text(path)
    if (longest := max(map(len, text.splitlines()), default=0)) > _LINE:
        raise LimitsError(f"limits file {path.name!r}: found a line of {longest} characters; wanted at most {_LINE}")
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise LimitsError(f"limits file {path.name!r}: {error}; wanted a TOML file or a URDF") from None
    wrong = [
        f"found {key!r}; wanted 'joints' and 'urdf' only" for key in sorted(table) if key not in ("joints", "urdf")
    ]
    urdf, scale, offset = _urdf_of(table.get("urdf", {}), path, wrong)
    named = table.get("joints", {})
    if not isinstance(named, dict):
        raise LimitsError(f"limits file {path.name!r}: found joints = {named!r:.40}; wanted tables [joints.NAME]")
    joints: dict[str, Said] = {}
    used = set()
    for name, said in named.items():
        if not isinstance(said, dict):
            wrong.append(f"joint {name!r}: found {said!r:.40}; wanted a table [joints.{name}]")
            continue
        joints[name] = _joint(name, said, path.name, wrong)
        source = said.get("urdf", name)
        if source in urdf:
            used.add(source)
            scaling = {"scale": scale, "offset": offset} | {
                key: said[key] for key in ("scale", "offset") if key in said
            }
            base = _from_urdf(name, urdf[source], scaling, path.name, wrong)
            joints[name] = _over(joints[name], base)
        elif any(key in said for key in _OF_URDF):
            wrong.append(f"joint {name!r}: found no joint {source!r} with limits in the URDF; wanted the name of one")
    for name, found in urdf.items():
        if name not in used and name not in joints:
            joints[name] = _from_urdf(name, found, {"scale": scale, "offset": offset}, path.name, wrong)
    return _finished(path, joints, wrong)


def _urdf_of(
    table: Any, path: Path, wrong: list[str]
) -> tuple[dict[str, dict[str, float]], float | None, float | None]:
    if isinstance(table, str):
        table = {"file": table}
    if not isinstance(table, dict) or not isinstance(table.get("file", ""), str):
        wrong.append(f'found urdf = {table!r:.60}; wanted [urdf] with file = "robot.urdf", and scale and offset')
        return {}, None, None
    wrong += [
        f"urdf: found {key!r}; wanted file, scale, offset" for key in sorted(set(table) - {"file", *_OF_URDF[1:]})
    ]
    if not table:
        return {}, None, None
    return _read_urdf(path.parent / table.get("file", "")), table.get("scale"), table.get("offset")


def _joint(name: str, said: Mapping[str, Any], origin: str, wrong: list[str]) -> Said:
    known = (*_NUMBERS, *_OF_URDF)
    wrong += [f"joint {name!r}: found {key!r}; wanted {', '.join(known)}" for key in sorted(said) if key not in known]
    numbers: dict[str, Any] = {
        key: _number(said[key], f"joint {name!r}: {key}", wrong) for key in _NUMBERS if key in said
    }
    return Said(**numbers, origin=origin)


def _number(value: object, what: str, wrong: list[str]) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:  # also true of NaN
        wrong.append(f"{what}: found {value!r:.40}; wanted a finite number")
        return None
    return float(value)


def _over(said: Said, base: Said) -> Said:
    """What the TOML says, and of the rest what the URDF says."""
    given: dict[str, Any] = {key: getattr(said, key) for key in _NUMBERS if getattr(said, key) is not None}
    unscaled = base.is_unscaled_urdf and not {"low", "high"} <= set(given)
    return replace(base, **given, is_unscaled_urdf=unscaled)


def _from_urdf(
    name: str, found: Mapping[str, float], scaling: Mapping[str, Any], origin: str, wrong: list[str]
) -> Said:
    scale, offset = (
        default if scaling.get(key) is None else _number(scaling[key], f"joint {name!r}: {key}", wrong)
        for key, default in (("scale", 1.0), ("offset", 0.0))
    )
    if scale is None or offset is None:
        return Said(origin=origin)
    if scale == 0:
        wrong.append(f"joint {name!r}: found scale 0; wanted units on the wire per unit of the URDF")
        return Said(origin=origin)
    ends = [found[key] * scale + offset for key in ("lower", "upper") if key in found]
    low, high = (min(ends), max(ends)) if len(ends) == 2 and found["lower"] < found["upper"] else (None, None)
    if len(ends) == 2 and low is None:
        wrong.append(
            f"joint {name!r}: found lower {found['lower']:g} and upper {found['upper']:g} in the URDF; "
            "wanted lower below upper"
        )
    velocity = found["velocity"] * abs(scale) if "velocity" in found else None
    return Said(low, high, velocity=velocity, origin=origin, is_unscaled_urdf=scaling.get("scale") is None)


def _finished(path: Path, joints: Mapping[str, Said], wrong: list[str]) -> LimitsFile:
    for name, said in joints.items():
        if said.low is not None and said.high is not None and not said.low < said.high:
            wrong.append(f"joint {name!r}: found low {said.low:g} and high {said.high:g}; wanted low below high")
        wrong += [
            f"joint {name!r}: found {key} {value:g}; wanted more than 0"
            for key in _NUMBERS[2:]
            if (value := getattr(said, key)) is not None and value <= 0
        ]
    if not joints and not wrong:
        wrong.append("found no joint; wanted [joints.NAME] tables with low, high, step, velocity, acceleration or jerk")
    if wrong:
        raise LimitsError(f"limits file {path.name!r}: " + "; ".join(wrong))
    return LimitsFile(path.name, dict(joints))


def _read_urdf(path: Path) -> dict[str, dict[str, float]]:
    """Joint name to ``lower``, ``upper`` and ``velocity`` of its limit, of ``<robot><joint><limit>`` only.

    Expat alone, with no document type and no entity let through: what cannot be declared cannot expand or be fetched.
    """
    joints: dict[str, dict[str, float]] = {}
    places: list[tuple[str, Mapping[str, str]]] = []
    wrong: list[str] = []

    def started(tag: str, attributes: dict[str, str]) -> None:
        places.append((tag, attributes))
        if tag == "limit" and [each for each, _ in places] == ["robot", "joint", "limit"]:
            _take(places[1][1], attributes, joints, wrong)
        if len(places) > 64 or len(joints) > _JOINTS:
            raise LimitsError(f"limits file {path.name!r}: nested too deep, or too many joints; wanted a robot's URDF")

    def refuse(*_: object) -> Any:
        raise LimitsError(f"limits file {path.name!r}: found a document type or an entity; wanted plain XML")

    parser = xml.parsers.expat.ParserCreate()
    parser.StartElementHandler = started
    parser.EndElementHandler = lambda tag: places.pop()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    try:
        parser.Parse(_text(path), True)
    except xml.parsers.expat.ExpatError as error:
        raise LimitsError(f"limits file {path.name!r}: {error}; wanted a URDF") from None
    if wrong:
        raise LimitsError(f"limits file {path.name!r}: " + "; ".join(wrong))
    return joints


def _take(
    joint: Mapping[str, str], limit: Mapping[str, str], joints: dict[str, dict[str, float]], wrong: list[str]
) -> None:
    name, kind = joint.get("name", ""), joint.get("type", "")
    if not name or kind == "fixed":
        return
    if name in joints:
        wrong.append(f"joint {name!r}: found it twice; wanted each name once")
    # The format's own default of an end that is left out is 0; a continuous joint has no ends.
    found = {} if kind == "continuous" else {"lower": limit.get("lower", "0"), "upper": limit.get("upper", "0")}
    found |= {"velocity": limit["velocity"]} if "velocity" in limit else {}
    joints[name] = {}
    for key, text in found.items():
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) < 1e30:
            wrong.append(f"joint {name!r}: found {key} {text[:40]!r}; wanted a finite number")
        else:
            joints[name][key] = value


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise LimitsError(f"limits file {path.name!r}: more than {LARGEST >> 20} MiB; wanted the limits of a robot")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise LimitsError(f"limits file {str(path)!r}: {reason}; wanted a readable TOML file or URDF") from None

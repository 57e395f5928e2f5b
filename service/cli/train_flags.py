"""The flags of ``robojax train``, read strictly: a name that is not known is refused with the nearest one.

Not by draccus, which reads LeRobot's: it takes the last of a flag that is there twice, stops at the first complaint,
names no nearest flag, and refuses a bare --resume, 0-49 and 0,1,5; its wheel installs packages `tests` and `examples`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from service.cli.train_table import FLAGS, POLICY_PREFIX, Flag, elsewhere

ON, OFF = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
NOTHING = ("null", "none", "")


class WrongFlags(Exception):
    """What cannot be read, all complaints together."""


@dataclass(frozen=True)
class Given:
    """What was written on the command line.

    Attributes:
        values: flag name to value, of flags of the table.
        policy: field of the policy's config to its text, which nobody can read who does not know the policy's type.
    """

    values: Mapping[str, Any]
    policy: Mapping[str, str]


def read_flags(arguments: Sequence[str]) -> Given:
    """Reads ``--name=value`` and ``--name value``; a flag that is true or false may stand alone.

    Raises:
        WrongFlags: unknown names, values of another kind, or a flag given twice.
    """
    values: dict[str, Any] = {}
    policy: dict[str, str] = {}
    wrong: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            wrong.append(f"{word!r} is no flag; wanted --name=value")
            continue
        name, equals, text = word[2:].partition("=")
        flag = FLAGS.get(name)
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        if name in values or name.removeprefix(POLICY_PREFIX) in policy:
            wrong.append(f"--{name} is there twice")
        elif flag is None and name.startswith(POLICY_PREFIX):
            policy[name.removeprefix(POLICY_PREFIX)] = text if equals else "true"
        elif flag is None:
            advice = elsewhere(name)
            wrong.append(f"--{name}: {advice}" if advice else f"--{name} is not known{nearest(name, FLAGS)}")
        else:
            try:
                values[name] = _read(flag, text if equals else None)
            except ValueError as error:
                wrong.append(f"--{name} is {text!r}; wanted {error}")
    if wrong:
        raise WrongFlags("\n".join(wrong))
    return Given(values, policy)


def check_fields(texts: Mapping[str, str], fields: Iterable[str], type_name: str | None) -> None:
    """Refuses flags of a policy that are neither a field that it may have nor in the table.

    Args:
        texts: of `Given`.
        fields: of the policy's type, or of every type that it may be of.
        type_name: None when that is not known yet.

    Raises:
        WrongFlags: such flags, and the nearest of both kinds.
    """
    flags = (name.removeprefix(POLICY_PREFIX) for name in FLAGS if name.startswith(POLICY_PREFIX))
    _refuse_unknown(texts, dict.fromkeys((*flags, *fields)), type_name)


def policy_values(texts: Mapping[str, str], kinds: Mapping[str, str], type_name: str) -> dict[str, Any]:
    """Fields of a policy's config, as ``config.json`` would have them.

    Args:
        texts: of `Given`.
        kinds: the fields there are, and their types in words.

    Raises:
        WrongFlags: fields that this type does not have.
    """
    _refuse_unknown(texts, kinds, type_name)
    return {name: _json(text, kinds[name]) for name, text in texts.items()}


def nearest(name: str, known: Mapping[str, Any], prefix: str = "") -> str:
    """Which names might have been meant."""
    # The last part is what is remembered: --lr is --optimizer.lr.
    found = get_close_matches(name, known, 2, 0.7) or [one for one in known if one.split(".")[-1] == name][:2]
    found = found or get_close_matches(name, known, 2, 0.5)
    return f"; did you mean {' or '.join(f'--{prefix}{one}' for one in found)}?" if found else "; see --help"


def _refuse_unknown(names: Iterable[str], known: Mapping[str, Any], type_name: str | None) -> None:
    where = f" of {type_name}" if type_name else ""
    unknown = [
        f"--{POLICY_PREFIX}{name} is not known{where}{nearest(name, known, POLICY_PREFIX)}"
        for name in names
        if name not in known
    ]
    if unknown:
        raise WrongFlags("\n".join(unknown))


def _read(flag: Flag, text: str | None) -> Any:
    if text is None and flag.kind != "bool":
        raise ValueError(flag.wanted)
    if flag.kind == "bool":
        lower = "true" if text is None else text.lower()
        if lower not in (*ON, *OFF):
            raise ValueError(flag.wanted)
        return lower in ON
    assert text is not None
    try:
        return _READERS[flag.kind](text)
    except ValueError:
        raise ValueError(flag.wanted) from None


def _json(text: str, kind: str) -> Any:
    """A value of a config's field; a text is taken as it is where the field is one."""
    lower = text.lower()
    if lower in NOTHING:
        return None
    if lower in ("true", "false") and "str" not in kind:
        return lower == "true"
    if "str" in kind:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.strip("[]()").split(",")]


def _episodes(text: str) -> list[int]:
    """``[0, 1, 5]`` or ``0,1,5``, and ranges as ``0-9``."""
    found: list[int] = []
    for part in filter(None, text.strip("[]()").replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if dash and int(last) < int(first):
            raise ValueError
        found += range(int(first), int(last) + 1) if dash else [int(first)]
    return found


def _size(text: str) -> tuple[int, int]:
    """``96`` or ``height x width`` as ``96x128``."""
    height, by, width = text.lower().partition("x")
    size = (int(height), int(width if by else height))
    if min(size) < 1:
        raise ValueError
    return size


def _mesh(text: str) -> dict[str, int]:
    """``data:2,fsdp:4``."""
    found = {name.strip(): int(count) for name, _, count in (part.partition(":") for part in text.split(","))}
    if set(found) - {"data", "fsdp"}:
        raise ValueError
    return found


def _betas(text: str) -> tuple[float, float]:
    first, second = _numbers(text)
    return first, second


_READERS: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "json": json.loads,
    "episodes": _episodes,
    "size": _size,
    "mesh": _mesh,
    "betas": _betas,
}

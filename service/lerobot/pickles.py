"""Pickles that LeRobot's robots and servers exchange, read and written without the pickle module.

A client of LeRobot 0.3 to 0.6 sends pickled ``RemotePolicyConfig`` and ``TimedObservation`` objects, and expects a
pickled list of ``TimedAction``. Unpickling runs code that the sender chooses. The reader here interprets only the
opcodes and globals of these objects, so nothing is imported or called by name.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.errors import InvalidRequest, PolicyFailed, TooLarge

# Module paths of the pickled classes: since 0.4, and before.
CLIENT_MODULES = ("lerobot.async_inference.helpers", "lerobot.scripts.server.helpers")
MAX_BYTES = 32 << 20  # Two 1080p cameras take 12 MB.
MAX_TIMESTEP = 1 << 30  # A year at 30 actions per second; the reply has timesteps as int32.
EXECUTED = -1  # Timestep of an action that each client drops, because it begins with the timestep 0.
MAX_REPLY = (4 << 20) - 16  # LeRobot's gRPC channel accepts messages below 4 MiB; the message adds a few bytes.
_MAX_OPCODES = 4096  # An observation has at most 10 per joint and 40 per camera. They are read in 20 ms.
_MAX_TEXT = 1 << 18  # Bytes of all texts, because a text in memory may take four times as many.
_MAX_DEPTH = 16

# Opcode to the format of its number, of the length of its data, or of its index of the memo.
_FORMATS = {
    opcode.to_bytes(): struct.Struct(code)
    for code, opcodes in (("<B", b"K\x8cCh\x8a"), ("<H", b"M"), ("<I", b"XBj"), ("<Q", b"\x8d\x8e\x96"))
    for opcode in opcodes
} | {b"J": struct.Struct("<i"), b"G": struct.Struct(">d")}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
# Opcode to the number of objects that it takes from the stack; others take all after a MARK.
_TAKEN = {b"\x85": 1, b"\x86": 2, b"\x87": 3, b"a": 1, b"s": 2, b"b": 1, b"\x93": 2, b"\x81": 2, b"R": 2}
_TAKEN_TO_MARK = (b"t", b"e", b"u")
_CODES = ("u1", "u2", "u4", "i1", "i2", "i4", "i8", "f2", "f4", "f8")  # Dtypes of numbers: neither bool nor object.
# Fields of LeRobot's classes.
_CLASSES: dict[str, dict[str, type]] = {
    "RemotePolicyConfig": {"policy_type": str, "pretrained_name_or_path": str, "lerobot_features": dict}
    | {"actions_per_chunk": int, "device": str, "rename_map": dict},
    "TimedObservation": {"timestamp": float, "timestep": int, "observation": dict, "must_go": bool},
}


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


# Accepted globals, and the opcode (REDUCE or NEWOBJ) that makes an object of each.
_GLOBALS = {_Global("numpy", "ndarray"): b"", _Global("numpy", "dtype"): b"R"} | {
    _Global(f"numpy.{core}.{module}", name): b"R"
    for core in ("_core", "core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
}
_GLOBALS |= {_Global(module, name): b"\x81" for module in CLIENT_MODULES for name in _CLASSES}


@dataclass(eq=False)
class _Object:
    """Description of an object of a pickle, which is not made."""

    type: _Global
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class RobotPolicyRequest:
    """A robot's request for a policy: LeRobot's ``RemotePolicyConfig``.

    The client accepts any texts. Do not download a path because a robot names it.
    """

    policy_type: str
    path: str  # The policy's name or folder.
    features: Mapping[str, Mapping[str, Any]]  # Name to ``dtype``, ``shape`` and ``names``, as the client sent them.
    actions_per_chunk: int  # Largest number of actions of a reply.
    renames: Mapping[str, str]  # Feature of the robot to feature of the policy.


@dataclass(frozen=True)
class RobotObservation:
    """What a robot observed at one time: LeRobot's ``TimedObservation``."""

    timestamp: float  # The client's clock, in seconds since 1970.
    timestep: int  # Number of the last action that the robot executed; 0 at the start.
    must_go: bool  # Whether the robot has no actions left, so this observation must be answered.
    values: Mapping[str, float]  # Value of each joint and other number, in the robot's units.
    images: Mapping[str, np.ndarray]  # Read-only views of the pickle, uint8 or uint16 (height, width, channels).
    task: str  # Instruction for the policy; may be empty.
    module: str  # Module path of the client's classes; its replies need the same.


def read_policy_request(data: bytes | memoryview, max_bytes: int = MAX_BYTES) -> RobotPolicyRequest:
    """Read a pickled ``RemotePolicyConfig``, of protocol 4 or 5 and at most ``max_bytes``.

    Raises:
        InvalidRequest: the pickle is malformed, has an opcode, global or value that is not accepted, or another object.
        TooLarge: the pickle has too many bytes, opcodes or values.
    """
    _, (policy_type, path, features, steps, _, renames) = _read_fields(data, max_bytes, "RemotePolicyConfig")
    _check(steps > 0, "actions_per_chunk", steps, "a positive integer")
    for name, value in features.items():
        _check(isinstance(value, dict), name, value, "a dict")
    for name, value in renames.items():
        _check(isinstance(value, str), name, value, "a str")
    _check_plain(features)
    return RobotPolicyRequest(policy_type, path, features, steps, renames)


def read_observation(data: bytes | memoryview, max_bytes: int = MAX_BYTES) -> RobotObservation:
    """Read a pickled ``TimedObservation``; its images are views of ``data``. Raises as ``read_policy_request``."""
    module, (timestamp, timestep, observation, must_go) = _read_fields(data, max_bytes, "TimedObservation")
    _check(math.isfinite(timestamp), "timestamp", timestamp, "a finite number")
    _check(0 <= timestep <= MAX_TIMESTEP, "timestep", timestep, f"0 to {MAX_TIMESTEP}")
    values: dict[str, float] = {}
    images: dict[str, np.ndarray] = {}
    task = observation.pop("task", None)
    _check(isinstance(task, str), "task", task, "a str")
    for name, value in observation.items():
        array = _find_array(value)
        if array is not None and array.dtype in (np.uint8, np.uint16) and array.ndim in (2, 3):
            images[name] = array if array.ndim == 3 else array[..., None]
            continue
        number = array.item() if array is not None and array.ndim == 0 else value
        _check(_is_number(number), name, value, "a finite number, or a uint8 or uint16 image (height, width, channels)")
        values[name] = float(number)
    return RobotObservation(timestamp, timestep, must_go, values, images, task, module)


def write_actions(actions: np.ndarray, timestep: int, timestamp: float, period: float, module: str) -> bytes:
    """Pickle an action chunk as a list of ``TimedAction``, which LeRobot's client reads as torch tensors.

    Args:
        actions: float32 actions (steps, joints) in the robot's units.
        timestep: timestep of the first action, which is that of the observation, or `EXECUTED`.
        timestamp: time of the first action, in seconds of the client's clock.
        period: seconds between two actions.
        module: module path of the client's classes, as read from its pickles.

    Raises:
        PolicyFailed: the chunk is empty or not float32 (steps, joints), has NaN or infinite actions, or takes 4 MiB.
        ValueError: the module or the timestep is not accepted.

    Example:
        >>> len(write_actions(np.zeros((8, 6), np.float32), 7, 1760000000.0, 1 / 30, CLIENT_MODULES[0]))
        1350
    """
    if module not in CLIENT_MODULES or not EXECUTED <= timestep <= MAX_TIMESTEP:
        accepted = f"{' or '.join(CLIENT_MODULES)}, and {EXECUTED} to {MAX_TIMESTEP}"
        raise ValueError(f"module {module!r}, timestep {timestep}: a LeRobot client has {accepted}")
    if actions.ndim != 2 or actions.dtype != np.float32 or not actions.size or not np.isfinite(actions).all():
        found = f"{actions.dtype} {actions.shape} from {np.min(actions, initial=0)} to {np.max(actions, initial=0)}"
        raise PolicyFailed(f"the actions are {found}; expected finite float32 (steps, joints)")
    numbers = np.empty(actions.shape, [("opcode", "S1"), ("value", ">f8")])
    numbers["opcode"], numbers["value"] = b"G", actions
    start = _pack_texts(module, "TimedAction") + b"\x93)\x81}(" + _pack_texts("timestamp") + b"G"
    action = _pack_texts("action", "torch", "tensor") + b"\x93]("
    reply = bytearray(b"\x80\x04](")
    for index, row in enumerate(numbers, timestep):
        opcode = b"K" if 0 <= index < 1 << 8 else b"M" if 0 <= index < 1 << 16 else b"J"
        reply += start + struct.pack(">d", timestamp + (index - timestep) * period) + _pack_texts("timestep")
        reply += opcode + _FORMATS[opcode].pack(index) + action + row.tobytes() + b"e\x85Rub"
    reply += b"e."
    if len(reply) > MAX_REPLY:
        raise PolicyFailed(f"{len(actions)} actions take {len(reply)} bytes, and LeRobot's client accepts {MAX_REPLY}")
    return bytes(reply)


def _pack_texts(*texts: str) -> bytes:
    return b"".join(b"\x8c" + bytes((len(text),)) + text.encode() for text in texts)


class _PickleReader:
    """Stack machine for the opcodes of one pickle."""

    def __init__(self, data: bytes | memoryview, max_bytes: int):
        if len(data) > max_bytes:
            raise TooLarge(f"the pickle has {len(data)} bytes; at most {max_bytes} are accepted")
        self._data = memoryview(data).toreadonly()
        self._position = self._opcode_position = 0
        self._stack, self._memo = list[Any](), list[Any]()
        self._outer_stacks: list[list[Any]] = []  # One for each open MARK.
        self._text_left = _MAX_TEXT

    def read(self) -> object:
        """Return the object of the pickle."""
        if bytes(self._take(2)) not in (b"\x80\x04", b"\x80\x05"):
            raise self._error("protocol 4 or 5 was expected")
        for _ in range(_MAX_OPCODES):
            self._opcode_position = self._position
            opcode = bytes(self._take(1))
            if opcode == b".":
                if self._outer_stacks or len(self._stack) != 1 or self._position != len(self._data):
                    raise self._error("STOP must end the data and leave one object")
                return self._stack[0]
            try:
                self._run(opcode)
            except IndexError:
                raise self._error("the stack or the memo lacks an object") from None
        raise TooLarge(f"the pickle has more than {_MAX_OPCODES} opcodes")

    def _run(self, opcode: bytes) -> None:
        packed = _FORMATS.get(opcode)
        number = 0 if packed is None else packed.unpack(self._take(packed.size))[0]
        items = [self._stack.pop() for _ in range(_TAKEN.get(opcode, 0))][::-1]
        if opcode in _TAKEN_TO_MARK:
            items, self._stack = self._stack, self._outer_stacks.pop()
        push = self._stack.append
        match opcode:
            case b"K" | b"M" | b"J" | b"G":  # BININT1, BININT2, BININT, BINFLOAT
                push(number)
            case b"\x8a":  # LONG1
                if number > 8:
                    raise self._error(f"an integer has {number} bytes; at most 8 are accepted")
                push(int.from_bytes(self._take(number), "little", signed=True))
            case b"\x8c" | b"X" | b"\x8d":  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                push(self._read_text(number))
            case b"C" | b"B" | b"\x8e" | b"\x96":  # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
                push(self._take(number))
            case b"N" | b"\x88" | b"\x89":  # NONE, NEWTRUE, NEWFALSE
                push(_CONSTANTS[opcode])
            case b"h" | b"j":  # BINGET, LONG_BINGET
                push(self._memo[number])
            case b"\x94":  # MEMOIZE
                self._memo.append(self._stack[-1])
            case b"\x95":  # FRAME
                self._take(8)
            case b"(":  # MARK
                self._outer_stacks.append(self._stack)
                self._stack = []
            case b")" | b"\x85" | b"\x86" | b"\x87" | b"t":  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
                push(tuple(items))
            case b"]" | b"}":  # EMPTY_LIST, EMPTY_DICT
                push([] if opcode == b"]" else {})
            case b"a" | b"e":  # APPEND, APPENDS
                self._expect(list).extend(items)
            case b"s" | b"u":  # SETITEM, SETITEMS
                target = self._expect(dict)
                if len(items) % 2:
                    raise self._error("SETITEMS has a key without a value")
                for key, value in zip(items[::2], items[1::2], strict=True):
                    if not isinstance(key, str) or key in target:
                        raise self._error(f"key {_describe(key)} of a dict is repeated or is not text")
                    target[key] = value
            case b"\x93":  # STACK_GLOBAL
                if not all(isinstance(each, str) for each in items) or _Global(*items) not in _GLOBALS:
                    accepted, found = ", ".join(map(_describe, _GLOBALS)), " ".join(map(_describe, items))
                    raise self._error(f"global {found} is not accepted; accepted are {accepted}")
                push(_Global(*items))
            case b"\x81" | b"R":  # NEWOBJ, REDUCE
                made, arguments = items
                if not isinstance(made, _Global) or _GLOBALS[made] != opcode or not isinstance(arguments, tuple):
                    raise self._error(f"opcode {opcode!r} cannot make {_describe(made)} from {_describe(arguments)}")
                push(_Object(made, arguments))
            case b"b":  # BUILD
                target = self._expect(_Object)
                if target.state is not None:
                    raise self._error(f"{_describe(target)} has a state already")
                target.state = items[0]
            case _:
                raise self._error(f"opcode {opcode!r} is not accepted; LeRobot's clients do not send it")

    def _expect(self, kind: type) -> Any:
        target = self._stack[-1]
        if not isinstance(target, kind):
            raise self._error(f"the stack has {_describe(target)}; expected {kind.__name__.strip('_').lower()}")
        return target

    def _read_text(self, length: int) -> str:
        self._text_left -= length
        if self._text_left < 0:
            raise TooLarge(f"the texts of the pickle have more than {_MAX_TEXT} bytes")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise self._error("a text is not UTF-8") from None

    def _take(self, length: int) -> memoryview:
        start, left = self._position, len(self._data) - self._position
        if length > left:
            raise self._error(f"{length} bytes were expected, but {left} are left")
        self._position += length
        return self._data[start : self._position]

    def _error(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"pickle, opcode at byte {self._opcode_position}: {what}")


def _read_fields(data: bytes | memoryview, max_bytes: int, name: str) -> tuple[str, list[Any]]:
    """Return the module path of the client's classes, and the values of the fields of a pickled object."""
    record, types = _PickleReader(data, max_bytes).read(), _CLASSES[name]
    if not isinstance(record, _Object) or record.type.name != name or not isinstance(record.state, dict):
        raise InvalidRequest(f"the pickle has {_describe(record)}; expected {name} with a dict of fields")
    # LeRobot 0.3 has no renames.
    fields = {"rename_map": {}, **record.state} if "rename_map" in types else record.state
    # Versions of the client add times of sending, which need no answer.
    extra = {field for field in fields.keys() - types.keys() if not _is_number(fields[field])}
    if different := extra | (types.keys() - fields.keys()):
        names = ", ".join(_describe(field) for field in sorted(different)[:8])
        raise InvalidRequest(f"{name} has unknown fields or lacks some: {names}")
    for field, kind in types.items():
        _check(type(fields[field]) is kind, field, fields[field], f"a {kind.__name__}")
    return record.type.module, [fields[field] for field in types]


def _find_array(value: object) -> np.ndarray | None:
    """Return the array or scalar that an object describes; None if it is not a valid array of numbers."""
    match value:
        case _Object(_Global(name="scalar"), (dtype, memoryview() as data), None):
            shape, order = (), "C"
        case _Object(
            _Global(name="_frombuffer"), (memoryview() as data, dtype, tuple(shape), ("C" | "F") as order), None
        ):
            pass
        case _Object(
            _Global(name="_reconstruct"),
            (_Global(name="ndarray"), (0,), b"b"),
            (1, tuple(shape), dtype, bool(is_fortran), memoryview() as data),
        ):
            order = "F" if is_fortran else "C"
        case _:
            return None
    match dtype:
        case _Object(_Global(name="dtype"), (str(code), False, True), (3, "<" | "|", None, None, None, -1, -1, 0)):
            kind = np.dtype(f"<{code}") if code in _CODES else None
        case _:
            kind = None
    if kind is None or len(shape) > 3 or any(type(size) is not int or size < 1 for size in shape):
        return None
    if math.prod(shape) * kind.itemsize != len(data):
        return None
    return np.frombuffer(data, kind).reshape(shape, order=order)


def _check(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise InvalidRequest(f"{_describe(name)} is {_describe(value)}; expected {expected}")


def _check_plain(features: object) -> None:
    """Raise an error unless the value has only containers, texts and numbers, and does not contain itself."""
    waiting = [(features, 0)]
    for _ in range(_MAX_OPCODES):
        if not waiting:
            return
        value, depth = waiting.pop()
        if isinstance(value, dict | list | tuple):
            _check(depth < _MAX_DEPTH, "lerobot_features", value, f"at most {_MAX_DEPTH} levels, not one in itself")
            waiting += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]
        else:
            is_plain = isinstance(value, str | bool | None) or _is_number(value)
            _check(is_plain, "a value of lerobot_features", value, "text or a finite number")
    raise TooLarge(f"lerobot_features has more than {_MAX_OPCODES} values")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _describe(value: object) -> str:
    """Return a short text for a message; a container by its type only, because it may contain itself."""
    match value:
        case str():
            return repr(value[:80])[:80]
        case int() | float() | None:
            return repr(value)
        case _Global(module, name):
            return f"{module} {name}"
        case _Object(kind):
            return f"an object of {_describe(kind)}"
        case _:
            return f"a {type(value).__name__}"

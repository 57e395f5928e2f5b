"""Pickles that attack: each is read as pickle reads it or refused, quickly, in little memory, and runs nothing."""

import io
import multiprocessing
import pickle
import random
import struct
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from service.errors import InvalidRequest, TooLarge
from service.lerobot.pickles import RobotObservation, read_observation, read_policy_request

GOLDEN = Path("tests/golden/lerobot_async_grpc")
MODULE = "lerobot.async_inference.helpers"
SECONDS = 0.05  # Of the thread's processor time.
BYTES = 64 << 20
MUTATIONS = 2000

HEAD = b"\x80\x04"
TRUE, FALSE, NONE, EMPTY_TUPLE, EMPTY_DICT, EMPTY_LIST, MARK = b"\x88", b"\x89", b"N", b")", b"}", b"]", b"("
MEMOIZE, REDUCE, NEWOBJ, BUILD = b"\x94", b"R", b"\x81", b"b"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def data(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def integer(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return text(module) + text(name) + b"\x93" + MARK + b"".join(arguments) + b"t" + REDUCE


def sequence(*values: bytes) -> bytes:
    return MARK + b"".join(values) + b"t"


def mapping(**items: bytes) -> bytes:
    return EMPTY_DICT + MARK + b"".join(text(name) + value for name, value in items.items()) + b"u"


def record(name: str, state: bytes) -> bytes:
    return HEAD + text(MODULE) + text(name) + b"\x93" + EMPTY_TUPLE + NEWOBJ + MEMOIZE + state + BUILD + b"."


def observation(observed: bytes | None = None, **fields: bytes) -> bytes:
    known = {"timestamp": real(1.5), "timestep": b"K\x07", "observation": mapping(task=text("")), "must_go": TRUE}
    return record("TimedObservation", mapping(**known | ({"observation": observed} if observed else {}) | fields))


def observed(value: bytes) -> bytes:
    """Return an observation with a joint of this value."""
    return observation(mapping(task=text(""), joint=value))


def config(**fields: bytes) -> bytes:
    known = {"policy_type": text("act"), "pretrained_name_or_path": text("a"), "lerobot_features": EMPTY_DICT}
    known |= {"actions_per_chunk": b"K\x08", "device": text("cpu")}
    return record("RemotePolicyConfig", mapping(**known | fields))


def dtype_state(order: str = "|") -> bytes:
    return sequence(b"K\x03", text(order), NONE, NONE, NONE, integer(-1), integer(-1), b"K\0")


def dtype(code: str = "u1", order: str = "|", state: bytes | None = None) -> bytes:
    return call("numpy", "dtype", text(code), FALSE, TRUE) + (state or dtype_state(order) + BUILD)


def array_state(shape: bytes, content: bytes | None = None, kind: bytes | None = None, fortran: bytes = FALSE) -> bytes:
    return sequence(b"K\1", shape, kind or dtype(), fortran, content or data(b"abcdef"))


def array(shape: bytes, *state: bytes, made: bytes = b"K\0", code: bytes = data(b"b")) -> bytes:
    kind = text("numpy") + text("ndarray") + b"\x93"
    empty = call("numpy._core.multiarray", "_reconstruct", kind, sequence(made), code)
    return empty + array_state(shape, *state) + BUILD


def shaped(*sizes: int) -> bytes:
    return sequence(*map(integer, sizes))


def from_buffer(shape: bytes, kind: bytes, content: bytes = data(b"abcdef"), order: bytes = text("C")) -> bytes:
    return call("numpy._core.numeric", "_frombuffer", content, kind, shape, order)


def scalar(kind: bytes, content: bytes) -> bytes:
    return call("numpy._core.multiarray", "scalar", kind, data(content))


CALLED = [
    *(("os", "system"), ("posix", "system"), ("nt", "system"), ("builtins", "eval"), ("builtins", "exec")),
    *(("builtins", "__import__"), ("builtins", "getattr"), ("builtins", "open"), ("__builtin__", "eval"), ("", "")),
    *(("subprocess", "Popen"), ("importlib", "import_module"), ("pickle", "loads"), ("copyreg", "_reconstructor")),
    *(("numpy", "load"), ("numpy", "fromfile"), ("numpy.testing._private.utils", "runstring"), ("numpy", "frompyfunc")),
    *(
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
        ("functools", "partial"),
    ),
    *(
        (MODULE, "TimedAction"),
        (MODULE, "os.system"),
        ("numpy", "dtype.type"),
        ("numpy._core.multiarray", "frombuffer"),
    ),
    *(
        (MODULE, "TimedObservation.__reduce__"),
        ("numpy", "ndarray.tofile"),
        ("numpy", "ndarray"),
        (MODULE, "RemotePolicyConfig"),
    ),
]
DOUBLED = EMPTY_TUPLE + b"".join(MEMOIZE + b"h" + bytes([1 + index]) + b"\x86" for index in range(40))
# Values that no accepted pickle has anywhere.
VALUES: dict[str, bytes] = {
    **{f"call {module} {name}": call(module, name, text("echo")) for module, name in CALLED},
    **{
        f"new {module} {name}": text(module) + text(name) + b"\x93" + text("a") + b"\x85\x81" for module, name in CALLED
    },
    "GLOBAL": b"cposix\nsystem\n" + text("echo") + b"\x85R",
    "GLOBAL of numpy": b"cnumpy\ndtype\n" + sequence(text("u1"), FALSE, TRUE) + REDUCE,
    "INST": MARK + text("echo") + b"iposix\nsystem\n",
    "OBJ": MARK + b"cposix\nsystem\n" + text("echo") + b"o",
    "OBJ of numpy": MARK + text("numpy") + text("dtype") + b"\x93" + text("u1") + b"o",
    "NEWOBJ_EX": text("numpy") + text("dtype") + b"\x93" + EMPTY_TUPLE + EMPTY_DICT + b"\x92",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"Pmodule\n",
    "BINPERSID": text("a") + b"Q",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": data(b"a") + b"\x98",
    "STACK_GLOBAL of numbers": b"K\1K\1\x93",
    "STACK_GLOBAL of lists": EMPTY_LIST + EMPTY_LIST + b"\x93",
    "BUILD of a list": EMPTY_LIST + EMPTY_DICT + BUILD,
    "BUILD of a dict": EMPTY_DICT + mapping(__class__=text("a")) + BUILD,
    "BUILD of text": text("a") + mapping(__reduce__=text("a")) + BUILD,
    "BUILD of a global": text("numpy") + text("dtype") + b"\x93" + mapping(__setstate__=text("a")) + BUILD,
    "BUILD of slots": array(shaped(1)) + sequence(NONE, mapping(__setstate__=NONE)) + BUILD,
    "BUILD twice": dtype() + EMPTY_DICT + BUILD,
    "BUILD of an array twice": array(shaped(2, 3, 1)) + array_state(shaped(3, 2, 1)) + BUILD,
    "array that is made with a shape": array(shaped(2, 3, 1), made=b"K\6"),
    "array that is made of text": array(shaped(2, 3, 1), code=text("b")),
    "a global": text("numpy") + text("ndarray") + b"\x93",
    "REDUCE of text": text("os.system") + EMPTY_TUPLE + REDUCE,
    "REDUCE with a list": text("numpy") + text("dtype") + b"\x93" + EMPTY_LIST + REDUCE,
    "NEWOBJ of an object": dtype() + EMPTY_TUPLE + NEWOBJ,
    "a dtype": dtype(),
    "a record": text(MODULE) + text("TimedObservation") + b"\x93)\x81",
    **{
        f"dtype {code}": from_buffer(shaped(6), dtype(code))
        for code in ("O8", "O", "V6", "U6", "M8[s]", "b1", "u1,u1", "")
    },
    "dtype that is copied": from_buffer(shaped(6), call("numpy", "dtype", text("u1"), TRUE, TRUE)),
    "dtype of bytes": from_buffer(shaped(6), call("numpy", "dtype", data(b"u1"), FALSE, TRUE)),
    "dtype of itself": from_buffer(shaped(6), call("numpy", "dtype", dtype(), FALSE, TRUE)),
    "dtype without state": from_buffer(shaped(6), dtype(state=b"\x94")),
    "dtype with fields": from_buffer(
        shaped(6), dtype(state=sequence(b"K\3", text("|"), NONE, NONE, EMPTY_DICT) + BUILD)
    ),
    "big-endian dtype": from_buffer(shaped(3), dtype("u2", ">")),
    "dtype of another array": from_buffer(shaped(6), array(shaped(6))),
    **{
        f"{name} of shape {shape}": make
        for shape in [
            (-1, -6, 1),
            (0,),
            (2**62, 2, 1),
            (2**31, 2**31, 4),
            (6,),
            (1, 1, 1, 6),
            (7, 1, 1),
            (5, 1, 1),
            (-6,),
            (),
        ]
        for name, make in (("array", array(shaped(*shape))), ("buffer", from_buffer(shaped(*shape), dtype())))
    },
    **{
        f"array of {name}": array(sequence(b"K\6", b"K\1", size))
        for name, size in {"text": text("1"), "bool": TRUE, "real": real(1), "None": NONE, "tuple": EMPTY_TUPLE}.items()
    },
    "array of 1 GB": array(shaped(1 << 10, 1 << 10, 1 << 10)),
    "array of objects": array(shaped(1, 1, 1), EMPTY_LIST, dtype("O8")),
    "array of a list shape": array(EMPTY_LIST),
    "array of text": array(shaped(2, 3, 1), text("abcdef")),
    "array of floats": array(shaped(1, 1, 1), data(bytes(4)), dtype("f4", "<")),
    "array with a number as order": array(shaped(2, 3, 1), data(b"abcdef"), dtype(), b"K\2"),
    "array without state": call("numpy._core.multiarray", "_reconstruct", text("a")),
    "order A": from_buffer(shaped(2, 3, 1), dtype(), order=text("A")),
    "order None": from_buffer(shaped(2, 3, 1), dtype(), order=NONE),
    "buffer of text": from_buffer(shaped(2, 3, 1), dtype(), text("abcdef")),
    **{f"{code} scalar": scalar(dtype(code), bytes(8)) for code in ("O8", "O", "u8", "V8", "M8[s]", "c8", "S8", "zz")},
    "bool scalar": scalar(dtype("b1"), b"\1"),
    "dtype by NEWOBJ": scalar(
        text("numpy") + text("dtype") + b"\x93" + sequence(text("u1"), FALSE, TRUE) + NEWOBJ + dtype_state() + BUILD,
        b"1",
    ),
    "scalar of no bytes": scalar(dtype("f4", "<"), b""),
    "scalar of 3 bytes": scalar(dtype("f4", "<"), b"abc"),
    "NaN scalar": scalar(dtype("f4", "<"), struct.pack("<f", float("nan"))),
    "infinite scalar": scalar(dtype("f2", "<"), struct.pack("<e", float("-inf"))),
    "NaN": real(float("nan")),
    "infinity": real(float("inf")),
    **{
        f"{opcode!r} of {size} bytes": opcode + size.to_bytes(width, "little") + b"abc"
        for opcode, width in {
            b"X": 4,
            b"B": 4,
            b"\x8d": 8,
            b"\x8e": 8,
            b"\x96": 8,
            b"\x8b": 4,
            b"T": 4,
            b"r": 4,
        }.items()
        for size in (1 << 30, (1 << 8 * width - 1) - 1, (1 << 8 * width) - 1)
    },
    "SHORT_BINUNICODE cut": b"\x8c\xff",
    "SHORT_BINBYTES cut": b"C\xffabc",
    "LONG1 of 255 bytes": b"\x8a\xff" + b"\x7f" * 255,
    "LONG1 of 9 bytes": b"\x8a\x09" + b"\xff" * 9,
    "LONG4 of 1 MB": b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20),
    "INT": b"I1\n",
    "LONG": b"L" + b"9" * 10_000 + b"L\n",
    "FLOAT": b"F1.5\n",
    "BINPUT": b"K\1q\xff",
    "LONG_BINPUT": b"K\1r\xff\xff\xff\x7f",
    "memo entry that does not exist": b"h\xff",
    "large memo index": b"j\xff\xff\xff\xff",
    "deep lists": EMPTY_LIST * 4000 + b"a" * 3999,
    "deep tuples": EMPTY_TUPLE + b"\x85" * 9000,
    "deep dicts": (EMPTY_DICT + text("a")) * 3000 + NONE + b"s" * 3000,
    "open marks": MARK * 9000,
    "too many marks": MARK * 1_000_000,
    "too many numbers": b"K\1" * 1_000_000,
    "too many memo entries": b"N" + MEMOIZE * 1_000_000,
    "too many frames": (b"\x95" + bytes(8)) * 100_000,
    "doubled tuples": DOUBLED,
    "list that grows": EMPTY_LIST + MEMOIZE + (MARK + b"h\1" * 10 + b"e") * 300,
    "list in itself": EMPTY_LIST + MEMOIZE + b"h\1a",
    "dict in itself": EMPTY_DICT + MEMOIZE + text("a") + b"h\1s",
    "tuple in its list": EMPTY_LIST + MEMOIZE + b"h\1\x85a",
    "record in itself": b"h\0",
    "wide tuples": sequence(*[b"K\0"] * 4000) + MEMOIZE + b"\x85" + b"\x85" + MARK + b"h\1" * 4000 + b"t\x86",
    "key 1": EMPTY_DICT + b"K\1Ns",
    "key None": EMPTY_DICT + b"NNs",
    "key of bytes": EMPTY_DICT + data(b"a") + b"Ns",
    "key that cannot be hashed": EMPTY_DICT + EMPTY_LIST + b"Ns",
    "keys that hash slowly": EMPTY_DICT + DOUBLED + b"Ns",
    "repeated key": mapping(a=NONE) + text("a") + TRUE + b"s",
    "key without a value": EMPTY_DICT + MARK + text("a") + b"u",
    "SETITEMS of a list": EMPTY_LIST + MARK + text("a") + b"Nu",
    "APPENDS of a dict": EMPTY_DICT + MARK + b"Ne",
    "APPEND of a tuple": EMPTY_TUPLE + b"Na",
    "text that is not UTF-8": b"\x8c\x02\xff\xfe",
    "lone surrogate": b"\x8c\x03\xed\xa0\x80",
    "long text": text("a" * 300_000),
    "many wide texts": b"".join(text("\U0001f916" + "a" * 4000) for _ in range(2000)),
    "8 MB of wide text": text("\U0001f916" + "a" * (8 << 20)),
    "second PROTO": HEAD + NONE,
    "POP": b"NN0",
    "DUP": b"N2",
}
VALUES |= {f"opcode {code:#04x}": bytes([code]) for code in range(256) if bytes([code]) not in b"N\x88\x89)]}"}
REFUSED = {
    **{
        f"joint that is {name}": observed(value)
        for name, value in {
            "None": NONE,
            "True": TRUE,
            "text": text("1"),
            "bytes": data(b"1"),
            "a list": EMPTY_LIST,
        }.items()
    },
    **{
        f"{field} that is {name}": observation(**{field: value})
        for field, values in {
            "timestamp": {"NaN": real(float("nan")), "infinite": real(float("inf")), "text": text("1"), "True": TRUE},
            "timestep": {"-1": integer(-1), "2**62": integer(1 << 62), "a float": real(7), "True": TRUE, "None": NONE},
            "must_go": {"1": b"K\1", "None": NONE, "text": text("True")},
            "observation": {"a list": EMPTY_LIST, "None": NONE, "the record": b"h\0", "without a task": EMPTY_DICT},
            "unknown": {"None": NONE},
        }.items()
        for name, value in values.items()
    },
    "state in itself": record(
        "TimedObservation",
        mapping(timestamp=real(1), timestep=b"K\1", must_go=TRUE) + MEMOIZE + text("observation") + b"h\1s",
    ),
    "record by REDUCE": observation().replace(EMPTY_TUPLE + NEWOBJ, EMPTY_TUPLE + REDUCE),
    "task that is None": observation(mapping(task=NONE)),
    "record without fields": record("TimedObservation", EMPTY_DICT),
    "record with a list": record("TimedObservation", EMPTY_LIST),
    "features in themselves": config(lerobot_features=EMPTY_DICT + MEMOIZE + text("a") + b"h\1s"),
    **{
        f"{field} that is {name}": config(**{field: value})
        for field, values in {
            "policy_type": {"None": NONE, "bytes": data(b"act")},
            "pretrained_name_or_path": {"a list": EMPTY_LIST},
            "lerobot_features": {"a list": EMPTY_LIST, "flat": mapping(a=b"K\1")},
            "actions_per_chunk": {"0": b"K\0", "-1": integer(-1), "True": TRUE, "a float": real(8)},
            "device": {"None": NONE},
            "rename_map": {"a list": EMPTY_LIST, "of numbers": mapping(a=b"K\1")},
            "unknown": {"None": NONE},
        }.items()
        for name, value in values.items()
    },
    "more than 32 MiB": bytes((32 << 20) + 1),
    "nothing": b"",
    "a header": HEAD,
    "data after STOP": observation() + b".",
    **{f"protocol {protocol}": bytes([0x80, protocol]) + observation()[2:] for protocol in (0, 1, 2, 3, 6, 255)},
    "protocol 0": b"cposix\nsystem\n(S'echo'\ntR.",
}


def attacks() -> Iterator[tuple[str, bytes]]:
    yield from REFUSED.items()
    for name, value in VALUES.items():
        yield f"{name}, alone", HEAD + value + b"."
        yield f"{name}, as a joint", observed(value)
        yield f"{name}, as a feature", config(lerobot_features=mapping(state=mapping(shape=value)))


def mutations() -> Iterator[tuple[str, bytes]]:
    """Yield pickles of LeRobot with random changes, mostly outside of the pixels."""
    files = [path.read_bytes() for path in sorted(GOLDEN.glob("*.pkl"))]
    for seed in range(MUTATIONS):
        dice = random.Random(seed)
        changed = bytearray(dice.choice(files))
        places = [dice.randrange(450), len(changed) - 1 - dice.randrange(60), dice.randrange(len(changed))]
        place, count = min(dice.choice(places), len(changed) - 1), 1 << dice.randrange(7)
        match kind := dice.choice(["flip", "set", "cut", "splice", "repeat", "remove"]):
            case "flip":
                changed[place] ^= 1 << dice.randrange(8)
            case "set":
                changed[place] = dice.choice(b"K\x93\x81Rb.(tcioPQ\x94h0q\x8b" + bytes([dice.randrange(256)]))
            case "cut":
                del changed[place:]
            case "splice":
                other = dice.choice(files)
                changed[place:] = other[min(place + dice.randrange(-20, 20), len(other)) :]
            case "repeat":
                changed[place:place] = changed[place : place + count]
            case "remove":
                del changed[place : place + count]
        yield f"mutation {seed} ({kind} at {place})", bytes(changed)


class Made:
    """Object of LeRobot that pickle makes in the test."""


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ("TimedObservation", "RemotePolicyConfig"):
            return Made
        assert module.startswith("numpy"), module
        assert name in ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"), name
        return super().find_class(module, name)


def unpickle(data: bytes) -> dict[str, Any] | None:
    """Return the fields that pickle reads; None if it raises an error."""
    try:
        return vars(SafeUnpickler(io.BytesIO(data)).load())
    except Exception:
        return None


def difference(found: Any, data: bytes) -> str | None:
    """Return how the read object differs from what pickle reads; None if it does not, or pickle raises an error."""
    expected = unpickle(data)
    if expected is None:
        return None
    if isinstance(found, RobotObservation):
        observed = {**found.values, **found.images, "task": found.task}
        fields = {"timestamp": found.timestamp, "timestep": found.timestep, "must_go": found.must_go}
        other = expected.pop("observation")
        if observed.keys() != other.keys() or any(not np.array_equal(observed[name], other[name]) for name in other):
            return f"read {observed}, pickle {other}"
    else:
        fields = {"policy_type": found.policy_type, "pretrained_name_or_path": found.path}
        fields |= {"lerobot_features": found.features, "actions_per_chunk": found.actions_per_chunk}
        fields |= {"rename_map": found.renames}
        expected.setdefault("rename_map", {})
        del expected["device"]
    return None if fields == expected else f"read {fields}, pickle {expected}"


def outcome_of(read: Callable[[bytes], Any], data: bytes) -> Any:
    """Return what was read, or the error."""
    try:
        return read(data)
    except Exception as error:
        return error


def examine() -> tuple[list[str], Counter[str], list[str]]:
    """Return the problems, the number of outcomes by kind, and the audit events of an attack on pickle itself."""
    events: list[str] = []
    is_watched = False

    def watch(event: str, _: object) -> None:
        if is_watched:
            events.append(event)

    sys.addaudithook(watch)
    problems: list[str] = []
    counts: Counter[str] = Counter()
    for is_mutation, cases in ((False, attacks()), (True, mutations())):
        for name, data in cases:
            read = read_policy_request if b"RemotePolicyConfig" in data[:100] else read_observation
            for _ in range(3):  # A pause of the machine is not the reader's time.
                start = time.thread_time()
                is_watched = True
                found: Any = outcome_of(read, data)
                is_watched = False
                seconds = time.thread_time() - start
                if seconds < SECONDS:
                    break
            tracemalloc.start()
            outcome_of(read, data)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            counts[f"{'mutation' if is_mutation else 'attack'} {type(found).__name__}"] += 1
            if isinstance(found, InvalidRequest | TooLarge):
                problem = None if len(str(found)) < 1000 else f"has a message of {len(str(found))} characters"
            elif isinstance(found, Exception):
                problem = f"raised {found!r}"
            else:
                problem = difference(found, data) if is_mutation else "was read"
            problems += [f"{name}: {problem}"] if problem else []
            problems += [f"{name}: took {seconds:.3f} s"] if seconds >= SECONDS else []
            problems += [f"{name}: took {peak} bytes"] if peak > BYTES else []
            problems += [f"{name}: caused {sorted(set(events))}"] if events else []
            events.clear()
    is_watched = True
    pickle.loads(HEAD + call("os", "getenv", text("HOME")) + b".")
    is_watched = False
    return problems, counts, events


def test_parts_of_the_attacks_are_valid() -> None:
    image = read_observation(observed(array(shaped(2, 3, 1)))).images["joint"]
    np.testing.assert_array_equal(
        image, read_observation(observed(from_buffer(shaped(2, 3, 1), dtype()))).images["joint"]
    )
    assert image.tobytes() == b"abcdef"
    assert read_observation(observed(scalar(dtype("i2", "<"), b"\xff\xff"))).values == {"joint": -1}
    assert read_observation(observation()).timestep == 7
    assert read_policy_request(config()).actions_per_chunk == 8


def test_hostile_pickles_are_refused_and_run_nothing() -> None:
    # In a process of its own, because an audit hook cannot be removed.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        problems, counts, events = process.submit(examine).result()
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problem[:300] for problem in problems[:40])
    assert "pickle.find_class" in events
    assert counts["mutation InvalidRequest"] > 1000, counts
    assert counts["mutation RobotObservation"] > 100, counts
    assert counts["mutation RobotPolicyRequest"] > 10, counts
    assert counts["attack TooLarge"] > 10, counts
    assert counts["attack InvalidRequest"] > 1000, counts

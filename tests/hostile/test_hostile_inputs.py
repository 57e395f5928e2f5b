"""Reading untrusted bytes takes time in proportion to their length, and less than half a tick.

``READERS`` lists each reader with its slowest input, at the largest size that reaches it.
"""

import asyncio
import gc
import io
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import msgpack
import numpy as np
import pytest
from aiortc.sdp import SessionDescription, candidate_from_sdp
from pydantic import BaseModel
from sanic.headers import parse_content_header

from hooks.payload import WebhookPayload
from hooks.receiver import parsing
from hooks.registry.delivery import is_valid_secret
from hooks.server.event_routes import HOST
from service import logging
from service.api import schemas
from service.control import limits as sources
from service.control.joints import Joint, JointTable
from service.dashboard import live
from service.http import array_formats
from service.http import bodies as body
from service.http import bodies as reason
from service.http.array_formats import ARRAY_FORMATS, ARRAY_FORMS, ArrayLimits
from service.http.bodies import choose_form
from service.http.origins import Origins
from service.sessions import request as session_request
from service.streaming import codec, observation
from service.streaming.websocket import unmask
from service.transport import address, protocol
from service.transport.server import bodies
from service.transport.webrtc import ice, jitter_buffer, peer

LIMIT = 0.010  # Seconds: half a tick at 50 Hz.
RATIO = 2.5  # Allowed ratio of times for a doubled size; 4 means quadratic time.
# Shorter times have no visible effect and are too short for a ratio.
SHORT = 0.002
HEAD = 8192  # Bytes of a request's head.


@dataclass(frozen=True)
class Reader:
    name: str
    call: Callable[[Any], object]
    worst: Callable[[int], Any]  # Builds the argument of `call` from a size.
    most: int  # The largest size that reaches the reader.
    is_on_loop: bool = True  # False: it runs in a thread.


def repeated(piece: str, head: str = "", tail: str = "") -> Callable[[int], str]:
    return lambda size: head + piece * max((size - len(head) - len(tail)) // len(piece), 0) + tail


def counted(piece: str, head: str = "", tail: str = "", between: str = ",") -> Callable[[int], str]:
    """Return a function that joins numbered, distinct pieces."""
    return lambda size: (
        head
        + between.join(piece % number for number in range((size - len(head) - len(tail)) // (len(piece) + 5)))
        + tail
    )


def encoded(worst: Callable[[int], str]) -> Callable[[int], bytes]:
    return lambda size: worst(size).encode(errors="surrogatepass")[:size]


# The slowest JSON values; each reader adds the surrounding document.
VALUES: dict[str, Callable[[int], str]] = {
    "nested lists": repeated("["),
    "nested objects": repeated('{"a":'),
    "empty lists": repeated("[],", "[", "0]"),
    "lists of ten": repeated("[" * 10 + "]" * 10 + ",", "[", "0]"),
    "empty objects": repeated("{},", "[", "0]"),
    "small numbers": repeated("1,", "[", "1]"),
    "fractions": repeated("1.5e-7,", "[", "1]"),
    "long numbers": repeated("9" * 640 + ",", "[", "1]"),
    "longer numbers": repeated("9" * 4300 + ",", "[", "1]"),
    "one number": repeated("9"),
    "one fraction": repeated("9", "0."),
    "long fractions": repeated("0." + "9" * 1000 + ",", "[", "1]"),
    "names": counted('"%x":0', "{", "}"),
    "texts": repeated('"",', "[", '""]'),
    "one text": repeated("a", '"', '"'),
    "a text without end": repeated("a", '"'),
    "a text of all planes": repeated("\U0001f600", '"', '"'),
    "escapes": repeated("\\n", '"', '"'),
    "quotes": repeated('\\"', '"', '"'),
    "backslashes": repeated("\\\\", '"', '"'),
    "code points": repeated("\\u00e9", '"', '"'),
    "halves of letters": repeated("\\ud800", '"', '"'),
    "spaces": repeated(" ", "[", "]"),
    "commas in a text": repeated(",", '"', '"'),
    "quotes alone": repeated('"'),
    "minus signs": repeated("-"),
    "constants": repeated("NaN,", "["),
    "beginnings of constants": repeated("Infinit", '["', '"'),
}


def json_readers(
    name: str, call: Callable[[Any], object], most: int, where: str = "%s", is_on_loop: bool = True
) -> list[Reader]:
    head, tail = where.split("%s")

    def inside(worst: Callable[[int], str]) -> Callable[[int], bytes]:
        return encoded(lambda size: head + worst(size - len(where)) + tail)

    return [Reader(f"{name}: {kind}", call, inside(worst), most, is_on_loop) for kind, worst in VALUES.items()]


@dataclass(frozen=True)
class Sent:
    body: bytes
    headers: dict[str, str]


def read(model: type[BaseModel]) -> Callable[[bytes], object]:
    return lambda raw: body.read_body(Sent(raw, {"content-type": "application/json"}), model)  # type: ignore[arg-type]


NEEDED = '{"session_id":"a","policy_path":"p","transport_server_url":"direct","%s":%%s}'


def body_readers() -> Iterator[Reader]:
    most = body.MAX_BODY
    yield from json_readers("a session", read(schemas.NewSessionRequest), most)
    yield from json_readers("steps", read(schemas.NewSessionRequest), most, NEEDED % "max_relative_target")
    yield from json_readers("cameras", read(schemas.NewSessionRequest), most, NEEDED % "camera_names")
    for model in (schemas.AdjustRequest, schemas.PolicyRequest, schemas.PolicyCheckRequest):
        yield Reader(f"{model.__name__}: names", read(model), encoded(VALUES["names"]), most)
    # The slowest case: a decoding error, followed by an unterminated run of quotes.
    for name, head in (("no UTF-8", b'\xff"'), ("a constant", b'[NaN,"'), ("half a text", b'"')):
        yield Reader(f"a session: {name}, then quotes", read(schemas.NewSessionRequest),
                     lambda size, head=head: head + b'\\"' * ((size - 2) // 2), most)  # fmt: skip
    yield Reader("a session: UTF-16", read(schemas.NewSessionRequest),
                 lambda size: VALUES["names"](size // 2).encode("utf-16"), most)  # fmt: skip
    yield from json_readers("a reason", reason.parse_reason, most, '{"reason":%s}')
    for letter in ("http://%s", "http://%s.example", "http://a:%s", "http://[%s]"):
        for what in ("a", "9", ".", "\u00e9", "\ufdfa", "@", "%41", ":"):
            worst = filled(letter, what)
            yield Reader(f"a URL {letter % what}", read_url, worst, 4096)
    yield Reader("an error about all that was sent", *errors_about_names("a"), 4096)
    yield Reader("an error about something else", *errors_about_names("b"), 4096)


def filled(where: str, what: str) -> Callable[[int], str]:
    return lambda size: where % (what * (size // len(what)))


def read_url(url: str) -> None:
    session_request._validate_url(url)
    address.Address.parse(url)


def errors_about_names(letter: str) -> tuple[Callable[[Any], object], Callable[[int], Any]]:
    """Return a parser whose error lists the fields, and a body with the maximum number of similar names."""

    def alike(count: int, size: int) -> list[str]:
        return [letter * (size // 2) + chr(0x100 + number) + letter * (size // 2 - 1) for number in range(count)]

    sent = schemas.NewSessionRequest.model_construct(
        {"camera_names", "joint_names", "policy_path", "language_instruction"},
        camera_names=alike(64, 64),
        joint_names=alike(256, 50),
        policy_path="a/" * 2048,
        language_instruction="a" * 4096,
    )
    return (lambda words: body.show_to_sender(words, sent)), repeated("a")


def frames(kind: str, field: str) -> str:
    return f'{{"type":"{kind}","{field}":%s}}'


def wire_readers() -> Iterator[Reader]:
    most = protocol.MAX_FRAME_BYTES
    yield from json_readers("a frame", protocol.parse_message, most)
    yield from json_readers("joints", protocol.parse_message, most, frames("joint_update", "data"))
    yield from json_readers("a state", protocol.parse_message, most, frames("state_sync", "data"))
    yield from json_readers("a join", protocol.parse_join, most)
    yield from json_readers("a signal", partial(bodies.read_body, bodies.Signal), 1 << 20,
                            '{"client_id":"a","message":{"type":"offer","sdp":%s}}')  # fmt: skip
    yield from json_readers("a command", partial(bodies.read_body, bodies.CommandBody), 1 << 20, '{"joints":%s}')
    yield from json_readers("a room", partial(bodies.read_optional_body, bodies.NewVideoRoom), 1 << 20)
    yield Reader("a joint's text again", lambda raw: protocol.build_message(protocol.parse_message(raw)),
                 repeated("\u00e9", '{"type":"joint_update","data":[],"source":"', '"}'), most)  # fmt: skip
    yield from json_readers("the page's socket", live.parse_message, live.MAX_MESSAGE)


SDP = "v=0\r\no=- 1 1 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\n"
MEDIA = (
    "m=video 9 UDP/TLS/RTP/SAVPF 96\r\nc=IN IP4 0.0.0.0\r\na=mid:0\r\na=sendonly\r\na=ice-ufrag:abcd\r\n"
    "a=ice-pwd:abcdefghijklmnopqrstuvwx\r\na=fingerprint:sha-256 AA:BB\r\na=setup:actpass\r\na=rtpmap:96 VP8/90000\r\n"
)
LINES = {
    "sources": "a=ssrc:%d cname:x\r\n",
    "candidates": "a=candidate:%d 1 udp 1 127.0.0.1 5000 typ host\r\n",
    "refused candidates": "a=candidate:%d 1 udp 1 224.0.0.1 5000 typ host\r\n",
    "named candidates": "a=candidate:%d 1 udp 1 x.local 5000 typ host\r\n",
    "codecs": "a=rtpmap:%d VP8/90000\r\n",
    "parameters": "a=fmtp:%d a=b;c=d\r\n",
    "feedback": "a=rtcp-fb:%d nack\r\n",
    "extensions": "a=extmap:%d urn:x\r\n",
    "fingerprints": "a=fingerprint:sha-%d AA\r\n",
    "empty lines": "\r\n%.0s",
    "sections": MEDIA + "a=mid:%d\r\n",
    "groups": "a=group:BUNDLE %d\r\n",
    "data channels": "a=sctpmap:%d a 1\r\n",
}


def describe(sdp: str) -> object:
    peer.check_description(sdp)
    return SessionDescription.parse(ice.split_candidates(peer.keep_known_codecs(sdp))[0])


def video_readers() -> Iterator[Reader]:
    # The first size is the maximum of a frame or a signal: descriptions above their own limit are not even split.
    for name, line in LINES.items():
        yield Reader(
            f"a description of {name}", describe, counted(line, SDP + MEDIA, between=""), protocol.MAX_FRAME_BYTES
        )
        yield Reader(f"a short description of {name}", describe, counted(line, SDP + MEDIA, between=""), peer.MAX_SDP)
    for name, line in (("a=fmtp:96 ", "a=b;"), ("a=ssrc-group:FID ", "1 "), ("m=video 9 x ", "96 "), ("o=- ", "1 ")):
        yield Reader(f"a long line {name}", describe, repeated(line, SDP + MEDIA + name), peer.MAX_SDP)
    for what in ("1 ", "a", "1 1 udp 1 a 1 typ host raddr "):
        yield Reader(f"a candidate of {what!r}", candidate_from_sdp, repeated(what), ice.MAX_CANDIDATE_LENGTH)
    # An access unit has at most as many packets as the buffer keeps.
    for name, piece in (
        ("empty units", b"\0\0\1"),
        ("empty descriptions", b"\0\0\1\x67"),
        ("long descriptions", b"\0\0\1\x67\x64" + b"\xff" * 1000),
        ("descriptions of scales", b"\0\0\1\x67\x64\0\0\xad\x3f" + b"\xaa" * 1000),
        ("zeros", b"\0"),
    ):
        yield Reader(
            f"H.264: {name}", jitter_buffer.h264_pixels, lambda size, piece=piece: piece * (size // len(piece)), 1 << 20
        )


def door_readers() -> Iterator[Reader]:
    # A thread reads larger inputs.
    yield from json_readers("an act", codec.unpack_json, codec._MAX_ON_LOOP, '{"state":%s}')
    yield from json_readers("a long act", codec.unpack_json, codec.MAX_JSON, '{"a":%s}', is_on_loop=False)
    large = 16 << 20
    for name, worst in {
        "a picture": lambda size: {"a": {"dtype": "uint8", "shape": [size], "data": bytes(size)}},
        "numbers the other way round": lambda size: {
            "a": {b"__ndarray__": True, b"dtype": ">f8", b"shape": [size // 8], b"data": bytes(size // 8 * 8)}
        },
        "booleans": lambda size: {"a": {"dtype": "bool", "shape": [size], "data": bytes(size)}},
    }.items():
        yield Reader(f"msgpack: {name}", codec.unpack, lambda size, worst=worst: msgpack.packb(worst(size)), large)
    for name, piece in (("lists", b"\x90"), ("maps", b"\x80"), ("numbers", b"\1"), ("texts", b"\xa1a"),
                        ("nested lists", b"\x91"), ("long maps", b"\xdf\xff\xff\xff\xff")):  # fmt: skip
        yield Reader(f"msgpack: {name}", codec.unpack,
                     lambda size, piece=piece: b"\xdd" + struct.pack(">I", size) + piece * size, 1 << 20)  # fmt: skip
    yield Reader("the same texts again", codec.unpack, lambda size: msgpack.packb(
        {str(number): "x" * 4096 for number in range(min(size // 4096, 250))}), 1 << 20)  # fmt: skip
    yield Reader("a mask", lambda data: unmask(data, b"abcd"), lambda size: np.zeros(size, np.uint8), large)
    yield Reader("base64", partial(observation.decode_base64, "a"), repeated("A"), codec.MAX_JSON, is_on_loop=False)
    wanted = observation.ObservationSpec(
        ("front",), JointTable([Joint(f"joint{number}", number, -1.0, 1.0) for number in range(256)]), 1 << 21
    )
    for name, seen in {
        "strange joints": lambda size: {"state": {f"{number}".ljust(64): 0.5 for number in range(size)}},
        "strange cameras": lambda size: {"images": {f"{number}": "" for number in range(size)}},
        "half of the joints": lambda size: {"state": {f"joint{number}": "1" for number in range(size)}},
        "too many numbers": lambda size: {"state": [0.5] * size},
    }.items():
        yield Reader(
            f"an observation: {name}",
            lambda seen: observation.read_observation(seen, wanted, is_complete=True),
            seen,
            4096,
        )
    yield Reader("words", logging.sanitize_text, repeated("\x01a"), 4 << 20)
    yield Reader("words of spaces", logging.sanitize_text, repeated(" ", "a"), 4 << 20)


def model_readers() -> Iterator[Reader]:
    limits = ArrayLimits()
    some = 1 << 17  # The default limit is 1 MiB, and a setting may raise it.
    yield from json_readers("arrays", lambda raw: array_formats.decode_json(raw, limits, {}), some,
                            '{"inputs":{"a":%s}}',
                            is_on_loop=False)  # fmt: skip
    yield Reader("arrays: rows of one", lambda raw: array_formats.decode_json(raw, limits, {}),
                 encoded(repeated("[1],", '{"inputs":{"a":[', "[1]]}}")), some, is_on_loop=False)  # fmt: skip
    yield Reader("an npz's header", npz_of, lambda size: "(" * size, 4096, is_on_loop=False)


def npz_of(shape: str) -> object:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
    return array_formats._read_npz_header("a", io.BytesIO(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head))


def hook_readers() -> Iterator[Reader]:
    quick, some = parsing.QUICK, 1 << 18  # The limit is 5 MB.

    def take(raw: bytes) -> object:
        data = parsing.parse_json(raw)
        parsing.check_payload(WebhookPayload, data)
        return parsing.read_facts(data)

    yield from json_readers("a webhook", lambda raw: take(raw) if parsing.is_quick_to_parse(raw) else None, quick)
    yield from json_readers("a long webhook", parsing.parse_json, some, '{"a":%s}', is_on_loop=False)
    yield Reader("a webhook's name", parsing.read_facts, lambda size: {"repo": {"name": "ab" * (size // 2)}}, quick)
    yield Reader("a secret", lambda text: is_valid_secret(text, ("s", "t")), repeated("a"), HEAD)


def head_readers() -> Iterator[Reader]:
    origins = Origins(("https://robots.example",))

    def look(origin: str) -> None:
        origins.allows(origin, origin)
        origins.allows_host(origin)
        HOST.fullmatch(origin)

    for what in ("a", "1.", "9", ":", "@", "\\", "[", "%41", "\u00e9", "\ufdfa", "http://"):
        for where in ("%s", "http://%s", "http://[%s]", "http://a:%s"):
            yield Reader(f"an origin {where % what}", look, filled(where, what), HEAD)
    for what in ('a="', "a=b;", '\\"', " ", "a", ";", ";a", 'a;a="\\"'):
        yield Reader(f"a content type {what}", parse_content_header, repeated(what, "a/b;"), HEAD)
        yield Reader(
            f"an Accept {what}",
            lambda accept: choose_form(accept, ARRAY_FORMATS[0], ARRAY_FORMS),
            repeated(what + ","),
            HEAD,
        )
    yield Reader("a query", parse_qs, repeated("a=1&"), HEAD)
    yield Reader("a path", unquote, repeated("%ff"), HEAD)


def log_readers() -> Iterator[Reader]:
    for what in ("a.", "eyJaaaaaaaa-", "eyJ-", "a://", "/a", "/", "token ", "token:'", "token:bearer ", "bearer ", "-",
                 "x-api-key=", "hf_aaaaaaaa-", "secret:\t ", "a", " ", "rjk_", '"', "=:"):  # fmt: skip
        yield Reader(
            f"a log line of {what!r}", lambda words: logging.redact(logging._truncate(words)), repeated(what), 1 << 20
        )
        yield Reader(f"a whole message of {what!r}", logging.redact, repeated(what), logging.MAX_MESSAGE)


def file_readers() -> Iterator[Reader]:
    for name, worst in {
        "tables": counted("[joints.a%d]\nlow = 0.0", between="\n"),
        "names": counted("a%d = 1", between="\n"),
        "dots": repeated("a."),
        "brackets": repeated("[", "a = "),
        "a long number": repeated("9", "a = "),
        "quotes": repeated("'", "a = "),
        "escapes": repeated('\\"', 'a = "'),
    }.items():
        yield Reader(f"TOML: {name}", limits_of, worst, 1 << 17, is_on_loop=False)
    joint = '<joint name="%d" type="revolute"><limit lower="0" upper="1"/></joint>'
    for name, worst in {
        "joints": counted(joint, "<robot>", "</robot>", ""),
        "depth": repeated("<a>"),
        "attributes": counted('a%d="1"', "<robot ", between=" "),
        "entities": repeated("&lt;", "<robot>"),
    }.items():
        yield Reader(f"URDF: {name}", partial(limits_of, suffix=".urdf"), worst, 1 << 17, is_on_loop=False)


def limits_of(words: str, suffix: str = ".toml") -> object:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        Path(file.name).write_text(words)
        return sources.read_limits(file.name)


READERS = [
    *body_readers(),
    *wire_readers(),
    *video_readers(),
    *door_readers(),
    *model_readers(),
    *hook_readers(),
    *head_readers(),
    *log_readers(),
    *file_readers(),
]


@pytest.fixture(scope="module", autouse=True)
def without_collections() -> Iterator[None]:
    """Freeze all objects as a server does, so that garbage collection does not count them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def seconds(reader: Reader, size: int, times: int) -> float:
    """Return the minimum processor time of this thread in seconds, so that other processes do not count."""
    given, least = reader.worst(size), float("inf")
    for _ in range(times):
        began = time.thread_time()
        # A refusal counts as a read; other tests check the types of errors.
        try:
            reader.call(given)
        except (NameError, AttributeError):
            raise
        except Exception:
            pass
        least = min(least, time.thread_time() - began)
        if least < SHORT:
            break
    return least


@pytest.mark.alone  # Other processes use the same caches of the processor, and each read may take 10 ms at most.
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_slowest_input_is_read_in_linear_and_bounded_time(reader: Reader) -> None:
    whole = seconds(reader, reader.most, 3)
    if whole < SHORT:
        return
    if reader.is_on_loop:
        whole = whole if whole <= LIMIT else min(whole, seconds(reader, reader.most, 12))
        assert whole <= LIMIT, f"{whole * 1e3:.1f} ms for {reader.most} bytes"
    times = ""
    # If a limit lies between the two sizes, the larger input may take less time.
    for _ in range(4):
        half = seconds(reader, reader.most // 2, 3)
        if whole <= RATIO * max(half, SHORT):
            return
        whole, times = min(whole, seconds(reader, reader.most, 3)), f"{whole * 1e3:.1f} and {half * 1e3:.1f}"
    raise AssertionError(f"{times} ms for {reader.most} bytes and for half of them")


def picture() -> str:
    return '{"images":{"front":"' + "A" * (4_000_000) + '"},"state":[0.5]}'


async def decoded() -> object:
    file = observation.ClientObservation(files={"front": "/9j/" * 1_000_000})
    return await file.decode_images(observation.ObservationSpec(("front",), JointTable([]), 1 << 21))


# Large valid inputs are read in threads while the loop continues.
IN_THREADS: dict[str, Callable[[], Awaitable[object]]] = {
    "an act with a picture": lambda: codec.read_json(picture()),
    "an act of escapes": lambda: codec.read_json(picture().replace("A" * 100, "\\n" * 50)),
    "a picture in base64": decoded,
    "arrays": lambda: asyncio.to_thread(
        array_formats.decode_json, b'{"inputs":{"a":[' + b"[1,2,3]," * 40_000 + b"[1,2,3]]}}", ArrayLimits(), {}
    ),
    "a listing": lambda: asyncio.to_thread(
        parsing.parse_json, b"[" + b'{"path":"%s","size":1},' % (b"a" * 60) * 10_000 + b"1]"
    ),
}


@pytest.mark.parametrize("name", IN_THREADS)
async def test_reading_in_a_thread_does_not_block_the_loop(name: str) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)  # The engine uses the same interval.
    try:
        # Take the minimum, with a thread that releases the lock on request: on a shared machine, either thread may lose
        # its core while it holds the lock.
        bare, pauses = list[float](), list[float]()
        while len(pauses) < 12 and (not pauses or min(pauses) > LIMIT + min(bare)):
            pauses.append(await longest_pause(IN_THREADS[name]))
            bare.append(await longest_pause(lambda: asyncio.to_thread(spin, 0.3)))
        assert min(pauses) <= LIMIT + min(bare), f"{[round(pause * 1e3, 1) for pause in pauses]} ms"
    finally:
        sys.setswitchinterval(before)


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def longest_pause(read: Callable[[], Awaitable[object]]) -> float:
    """Return the longest time in seconds for which the loop did not run during `read`."""
    reading, longest = asyncio.ensure_future(read()), 0.0
    while not reading.done():
        began = time.monotonic()
        await asyncio.sleep(0.001)
        longest = max(longest, time.monotonic() - began - 0.001)
    with suppress(Exception):
        reading.result()
    return longest

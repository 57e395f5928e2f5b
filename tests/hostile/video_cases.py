"""``python -m tests.hostile.video_cases --cases 5000 --seed 7``: cases of a hostile camera for a `PeerConnection`.

Half of the cases are mutated packets of an encoder. The result is one line of JSON.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from fractions import Fraction
from typing import Any

import av
import numpy as np
import psutil
import pylibsrtp
from aiortc.codecs.h264 import H264Encoder
from aiortc.codecs.vpx import Vp8Encoder
from aiortc.rtp import HeaderExtensionsMap, RtpPacket

from service.transport.webrtc.decoding import FrameDecoder
from service.transport.webrtc.encoding import CameraTrack, VideoCamera
from service.transport.webrtc.ice import transports_of
from service.transport.webrtc.peer import BadSignal, PeerConnection
from tests.testing.waiting import until

SSRC = 4711
SIZES = (0, 1, 15, 16, 17, 63, 64, 1080, 1088, 1089, 1920, 1921, 4096, 8192, 16383)
COOKIE = 0x2112A442
H264 = "a=rtpmap:99 H264/90000\r\na=rtcp-fb:99 nack pli\r\na=fmtp:99 packetization-mode=1;profile-level-id=42e01f\r\n"


def memory() -> float:
    return psutil.Process().memory_info().rss / 1e6


def picture(shade: int, height: int = 48, width: int = 64) -> av.VideoFrame:
    """Return a picture of one shade with a line in it."""
    image = np.full((height, width, 3), shade, np.uint8)
    image[shade % height] = 255 - shade
    frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuv420p")
    frame.pts, frame.time_base = 0, Fraction(1, 90000)
    return frame


class Pair:
    """A robojax camera connected to the server's side of the connection."""

    def __init__(self) -> None:
        self.shown: list[np.ndarray] = []
        self.screen = FrameDecoder(lambda image, at: self.shown.append(image), lambda error: None)
        self.hostile, self.server = PeerConnection([]), PeerConnection([])

    async def connect(self) -> "Pair":
        offer = await self.hostile.create_offer(CameraTrack(VideoCamera(25)))
        # Offer all codecs that the server decodes, as browsers do; a camera of robojax offers VP8 alone.
        offer = offer.replace("RTP/SAVPF 97 98", "RTP/SAVPF 97 98 99").rstrip() + "\r\n" + H264
        await self.hostile.accept_answer(await self.server.answer_offer(offer, self.screen))
        await until(lambda: self.hostile.connected_at and self.server.connected_at and self.codecs)
        return self

    async def close(self) -> None:
        await asyncio.gather(self.hostile.close(), self.server.close())

    @property
    def codecs(self) -> dict[int, Any]:
        return self.server._pc.getReceivers()[0]._RTCRtpReceiver__codecs  # type: ignore[attr-defined]

    def kind(self, name: str) -> int:
        return next(number for number, codec in self.codecs.items() if codec.name == name)

    @property
    def transport(self) -> Any:
        (found,) = transports_of(self.hostile._pc)
        return found

    @property
    def reader(self) -> Any:
        (found,) = transports_of(self.server._pc)
        return found

    @property
    def address(self) -> tuple[str, int]:
        nominated = self.reader.transport._connection._nominated[1]
        return nominated.protocol.transport.get_extra_info("sockname")[:2]

    async def send(self, packet: bytes) -> None:
        """Encrypt a packet with the right keys and send it; a packet that libsrtp refuses is handed over directly."""
        try:
            await self.transport._send_rtp(packet)
        except (pylibsrtp.Error, ValueError, ConnectionError):
            is_rtcp = len(packet) > 1 and 192 <= packet[1] <= 208
            handle = self.reader._handle_rtcp_data if is_rtcp else self.reader._handle_rtp_data
            await asyncio.create_task(handle(packet, *(() if is_rtcp else (0,))))

    async def is_seen(self, shade: int) -> bool:
        """Return whether the server shows a valid picture after the camera restarts."""
        self.shown.clear()
        number, kind = random.randrange(65536), self.kind("VP8")
        for turn in range(100):
            for packet in packets(kind, Vp8Encoder().encode(picture(shade), True)[0], number, number + turn):
                await self.send(packet)
                number += 1
            await asyncio.sleep(0.02)
            if any(abs(float(image.mean()) - shade) < 8 for image in self.shown):
                return True
        return False


def packets(kind: int, payloads: list[bytes], number: int, stamp: int, ssrc: int = SSRC) -> list[bytes]:
    made = []
    for index, payload in enumerate(payloads):
        packet = RtpPacket(kind, int(index == len(payloads) - 1), (number + index) % 65536, stamp % (1 << 32), ssrc)
        packet.payload = payload
        made.append(packet.serialize(HeaderExtensionsMap()))
    return made


class Generator:
    """Source of cases from a seed: ``(name, bytes to send)``."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.number = 100
        encoders = {"VP8": Vp8Encoder(), "H264": H264Encoder()}
        self.streams = {
            name: [encoder.encode(picture(shade, 96, 128), shade % 16 == 0)[0] for shade in range(0, 240, 8)]
            for name, encoder in encoders.items()
        }
        self.streams["VP8"].append(Vp8Encoder().encode(picture(10, 1080, 1920), True)[0])
        self.streams["H264"].append(H264Encoder().encode(picture(10, 1080, 1920), True)[0])

    def mutated(self, data: bytes) -> bytes:
        """Return the data changed, cut or doubled."""
        chance, made = self.random, bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(made) + 1)
            match chance.randrange(6):
                case 0:
                    del made[at:]
                case 1 if made:
                    made[at % len(made)] ^= 1 << chance.randrange(8)
                case 2:
                    made[at:at] = chance.randbytes(chance.randrange(1, 40))
                case 3:
                    made[at : at + 4] = chance.choice(
                        (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\1\x67", b"\x9d\1\x2a\xff")
                    )
                case 4:
                    del made[at : at + chance.randrange(1, 20)]
                case _:
                    made += made[at : at + 200]
        return bytes(made[:1400])

    def codec(self) -> str:
        return self.random.choice(("VP8", "H264"))

    def stream(self, kinds: dict[str, int]) -> list[bytes]:
        """Return an encoded picture with packets or payloads broken, missing, reordered or of another codec."""
        chance, name = self.random, self.codec()
        payloads = list(chance.choice(self.streams[name]))
        if chance.random() < 0.5:
            index = chance.randrange(len(payloads))
            payloads[index] = self.mutated(payloads[index])
        kind = kinds[name if chance.random() < 0.9 else self.codec()]
        made = packets(
            kind, payloads, self.number, self.number * 3000, SSRC if chance.random() < 0.95 else chance.getrandbits(32)
        )
        self.number += len(made) + chance.choice((0,) * 20 + (1, 600, 33000))
        if chance.random() < 0.3:
            made[chance.randrange(len(made))] = self.mutated(chance.choice(made))
        if chance.random() < 0.2:
            chance.shuffle(made)
        return made[:40]

    def built(self, kinds: dict[str, int]) -> list[bytes]:
        """Return a picture that no encoder makes: any size, endless fragments, nested aggregates."""
        chance = self.random
        side = lambda: chance.choice(SIZES)  # noqa: E731
        tail = chance.randbytes(chance.randrange(1200))
        if self.codec() == "VP8":
            head = chance.choice((b"\x10", b"\x00", b"\x90\xf0\xff\xff\x00\x00", b"\x90\x80", b"\x9f\xff", b""))
            size = (side() | chance.randrange(4) << 14).to_bytes(2, "little") + side().to_bytes(2, "little")
            first = (chance.randrange(1 << 19) << 5 | chance.randrange(16) << 1).to_bytes(3, "little")
            payloads, kind = [head + first + b"\x9d\x01\x2a" + size + tail], kinds["VP8"]
        else:
            kind = kinds["H264"]
            match chance.randrange(4):
                case 0:  # Fragments, possibly without a first or a last one.
                    payloads = [bytes([0x7C, chance.choice((0x85, 5, 5, 0x45, 0x87))]) + tail for _ in range(12)]
                case 1:
                    inner = b"\x78" + struct.pack("!H", len(tail)) + tail
                    payloads = [b"\x78" + struct.pack("!H", chance.choice((len(inner), 65535, 0))) + inner]
                case 2:  # A description of any size, then a slice.
                    description = b"\x67" + bytes(chance.choice((66, 77, 100, 244))) + self.golomb(12)
                    payloads = [b"\0\0\1" * chance.choice((0, 1, 300)) + description, b"\x65" + tail]
                case _:
                    payloads = [bytes([chance.randrange(256)]) + tail]
        made = packets(kind, payloads, self.number, self.number * 3000)
        self.number += len(made)
        return made

    def golomb(self, count: int) -> bytes:
        numbers = (self.random.choice((0, 1, 7, 119, 1023, 1 << 16, (1 << 31) - 1)) + 1 for _ in range(count))
        bits = "".join("0" * (number.bit_length() - 1) + f"{number:b}" for number in numbers)
        return int(bits.ljust(-(-len(bits) // 8) * 8, "1"), 2).to_bytes(-(-len(bits) // 8), "big")

    def rtp(self, kinds: dict[str, int]) -> list[bytes]:
        """Return RTP packets with false headers: extensions, padding, sources, payload types."""
        chance = self.random
        head = struct.pack(
            "!BBHII",
            128 | chance.randrange(64), chance.choice((*kinds.values(), 98, 0, 127)) | chance.choice((0, 128)),
            chance.randrange(65536), chance.getrandbits(32), chance.choice((SSRC, chance.getrandbits(32))),
        )  # fmt: skip
        extension = struct.pack("!HH", chance.choice((0xBEDE, 0x1000, 0)), chance.choice((0, 1, 4, 65535)))
        return [head + extension + chance.randbytes(chance.randrange(300))]

    def rtcp(self, kinds: dict[str, int]) -> list[bytes]:
        """Return reports of each type with random counts, lengths and contents. A goodbye may end a stream."""
        chance = self.random
        made = b""
        for _ in range(chance.randrange(1, 5)):
            kind = chance.choice((200, 201, 202, 204, 205, 205, 206, 206, 206, 207))
            body = struct.pack("!II", chance.choice((SSRC, 1)), chance.choice((SSRC, 0, chance.getrandbits(32))))
            body += chance.choice((b"", b"REMB\xff\xff\xff\xff", chance.randbytes(4 * chance.randrange(60))))
            length = chance.choice((len(body) // 4, len(body) // 4, chance.randrange(65536)))
            made += struct.pack("!BBH", 128 | chance.randrange(64), kind, length) + body
        return [made]

    def stun(self) -> bytes:
        """Return a STUN message of any length, with attributes of any length."""
        chance, body = self.random, b""
        for _ in range(chance.choice((0, 1, 3, 10, 200))):
            value = chance.randbytes(chance.choice((0, 1, 3, 4, 8, 20)))
            kind = chance.choice((1, 6, 8, 9, 0x20, 0x24, 0x25, 0x8028, 0x8029, 0x802A, chance.randrange(65536)))
            body += (
                struct.pack("!HH", kind, chance.choice((len(value), len(value), 65535)))
                + value
                + bytes(-len(value) % 4)
            )
        length = chance.choice((len(body), len(body), chance.randrange(65536)))
        kind = chance.choice((1, 0x101, 0x111, 0x11, chance.randrange(1 << 14)))
        return struct.pack("!HHI", kind, length, chance.choice((COOKIE, COOKIE, 0))) + chance.randbytes(12) + body

    def dtls(self) -> bytes:
        """Return DTLS records and handshake messages, some without end."""
        chance = self.random
        length = chance.choice((0, 10, 1 << 20, (1 << 24) - 1))
        message = bytes([chance.randrange(25)]) + length.to_bytes(3, "big") + chance.randbytes(chance.randrange(200))
        kind, epoch = chance.choice((20, 21, 22, 22, 23, 24, 63)), chance.choice((0, 1, 2, 65535))
        announced = chance.choice((len(message), len(message), 65535))
        head = struct.pack(
            "!BHHHIH", kind, chance.choice((0xFEFD, 0xFEFF, 0)), epoch, 0, chance.randrange(100), announced
        )
        return head + message

    def datagram(self) -> bytes:
        chance = self.random
        size = chance.choice((0, 1, 2, 11, 12, 13, 20, 1400, 2048, 2049, 9000, 65000))
        return chance.choice((b"", b"\x80\x60", b"\x80\xc8", b"\x16\xfe\xfd"))[:size] + chance.randbytes(size)

    def description(self, sdp: str) -> str:
        """Return a description with broken, doubled, missing or repeated lines."""
        chance, lines = self.random, sdp.splitlines()
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(lines))
            match chance.randrange(7):
                case 0:
                    del lines[at]
                case 1:
                    lines[at] = self.mutated(lines[at].encode()).decode("latin1")
                case 2:
                    lines.insert(at, lines[chance.randrange(len(lines))])
                case 3:
                    lines[at:at] = [lines[at]] * chance.choice((10, 100, 1000))
                case 4:
                    lines[at] += "9" * chance.choice((10, 300, 5000))
                case 5:
                    lines += [f"m={chance.choice(('video', 'audio', 'application', 'x'))} 9 UDP/TLS/RTP/SAVPF 97"]
                case _:
                    kind = chance.choice(("rtpmap", "fmtp", "rtcp-fb", "ssrc", "extmap", "candidate", "group", "rid"))
                    lines.append(
                        f"a={kind}:{chance.randrange(300)} {chance.choice(('VP8/90000', 'apt=x', '* nack', '-1'))}"
                    )
            lines = lines or [""]
        return "\r\n".join(lines) + "\r\n"

    def candidate(self) -> dict[str, Any]:
        chance = self.random
        host = chance.choice(("127.0.0.1", "169.254.169.254", "::1", "x.local", "224.0.0.1", "0", "host", "9" * 600))
        text = f"candidate:1 {chance.randrange(3)} udp 5 {host} {chance.choice((9, 80, 50000, 70000))} typ host"
        return {"candidate": self.mutated(text.encode()).decode("latin1"), "sdpMid": "0", "sdpMLineIndex": 0}


class Turns:
    """Processor time of this thread in each turn of its loop, without the time of other processes."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.long: Counter[str] = Counter()
        self.case = "start"
        self._ours = asyncio.current_task()
        self._run = asyncio.Handle._run

    def __enter__(self) -> "Turns":
        def run(handle: asyncio.Handle) -> None:
            if getattr(handle._callback, "__self__", None) is self._ours:  # type: ignore[attr-defined]
                self._run(handle)  # The attacker's own work does not count.
                return
            began = time.thread_time()
            self._run(handle)
            took = time.thread_time() - began
            self.longest = max(self.longest, took)
            if took > 0.01:
                self.long[self.case] += 1

        asyncio.Handle._run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]


KINDS = ("stream",) * 6 + ("built",) * 3 + ("rtp", "rtcp", "stun", "dtls", "datagram", "description", "candidate")


async def run_cases(count: int, seed: int) -> dict[str, Any]:
    generator, ran, failures = Generator(seed), Counter[str](), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(str(context)[:300]))
    strangers = {family: socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)}
    pair, connections, first, seen, counts = await Pair().connect(), 1, 0.0, True, Counter[str]()
    asked = PeerConnection([])
    offer = await asked.create_offer(CameraTrack(VideoCamera(25)))
    with Turns() as turns:
        for number in range(count):
            kinds = {"VP8": pair.kind("VP8"), "H264": pair.kind("H264")}
            name = turns.case = generator.random.choice(KINDS)
            ran[name] += 1
            match name:
                case "stream" | "built" | "rtp" | "rtcp":
                    for packet in getattr(generator, name)(kinds):
                        await pair.send(packet)
                case "stun" | "dtls" | "datagram":
                    data = getattr(generator, name)()
                    if generator.random.random() < 0.5:
                        with contextlib.suppress(ConnectionError):
                            await pair.transport.transport._send(data)
                    else:
                        family = socket.AF_INET6 if ":" in pair.address[0] else socket.AF_INET
                        strangers[family].sendto(data, pair.address)
                case "description":
                    peer = PeerConnection([])
                    try:
                        screen = FrameDecoder(lambda image, at: None, lambda error: None)
                        await asyncio.create_task(peer.answer_offer(generator.description(offer), screen))
                    except BadSignal:
                        ran["refused descriptions"] += 1
                    await peer.close()
                case _:
                    pair.server.add_candidates([generator.candidate()])
            await asyncio.sleep(0.001)  # Let the loop receive it.
            # Replace a connection that ended itself or served its share of cases, as after a new offer.
            if pair.server.state != "connected" or number % 500 == 499:
                seen = seen and (pair.server.state != "connected" or await pair.is_seen(200))
                counts.update(pair.screen.get_counts())
                counts.update(pair.server.datagram_filter.dropped)
                await pair.close()
                pair, connections = await Pair().connect(), connections + 1
            if number == count // 5:
                gc.collect()
                first = memory()
        turns.case = "end"
        seen = await pair.is_seen(200) and seen
    counts.update(pair.screen.get_counts())
    counts.update(pair.server.datagram_filter.dropped)
    await asyncio.gather(pair.close(), asked.close())
    for stranger in strangers.values():
        stranger.close()
    await asyncio.sleep(0.1)
    gc.collect()
    return {
        "cases": count,
        "seed": seed,
        "ran": dict(ran),
        "connections": connections,
        "counts": {name: value for name, value in counts.items() if value},
        "grown_mb": round(memory() - first, 1),
        "longest_turn_ms": round(turns.longest * 1e3, 1),
        "long_turns": dict(turns.long),
        "failures": failures[:5],
        "tasks_left": len(asyncio.all_tasks()) - 1,
        "threads_left": sum("decoder" in thread.name for thread in threading.enumerate()),
        "is_seen": seen,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sys.stdout.write(json.dumps(asyncio.run(run_cases(given.cases, given.seed))) + "\n")

"""Video packets that no sender should make: the process lives, they are counted, and the next good picture is seen."""

import asyncio
import os
import random
from fractions import Fraction

import av
import numpy as np
import pytest
from aiortc.codecs.h264 import H264Encoder
from aiortc.codecs.vpx import Vp8Encoder
from aiortc.rtcdtlstransport import RTCDtlsTransport, RtpRouter
from aiortc.rtcrtpparameters import RTCRtpCodecParameters, RTCRtpReceiveParameters
from aiortc.rtcrtpreceiver import RemoteStreamTrack, RTCRtpReceiver
from aiortc.rtp import HeaderExtensionsMap, RtpPacket

from service.transport.webrtc.decoding import MAX_DECLARED, FrameDecoder
from service.transport.webrtc.jitter_buffer import UNREADABLE_SIZE, h264_pixels

pytestmark = pytest.mark.timed

# 5,000 of each kind were sent when this was written; the suite has less time.
PACKETS = int(os.environ.get("ROBOJAX_TEST_PACKETS", "500"))
VP8, H264 = 96, 97
BASELINE = {"packetization-mode": "1", "profile-level-id": "42e01f"}
CODECS = [
    RTCRtpCodecParameters(mimeType="video/VP8", clockRate=90000, payloadType=VP8),
    RTCRtpCodecParameters(mimeType="video/H264", clockRate=90000, payloadType=H264, parameters=BASELINE),
]


class Wire:
    """The end of a connection under a receiver: takes bytes as they come from the network."""

    state = "connected"

    def __init__(self):
        self._rtp_header_extensions_map = HeaderExtensionsMap()
        self._rtp_router = RtpRouter()
        self.answers = 0
        self.noted = 0

    def _register_rtp_receiver(self, receiver, parameters):
        self._rtp_router.register_receiver(receiver, [1234], [VP8, H264])

    def _unregister_rtp_receiver(self, receiver):
        self._rtp_router.unregister_receiver(receiver)

    def _RTCDtlsTransport__log_debug(self, *arguments):
        self.noted += 1

    async def _send_rtp(self, data):
        self.answers += 1

    async def arrive(self, data: bytes) -> None:
        await RTCDtlsTransport._handle_rtp_data(self, data, 0)  # type: ignore[arg-type]


class Sender:
    """Pictures to packets, as a robot's; each a keyframe."""

    def __init__(self, payload_type: int):
        self._payload_type = payload_type
        self._encoder = Vp8Encoder() if payload_type == VP8 else H264Encoder()
        self._number, self._stamp = 1000, 0

    def packets(self, shade: int, height: int = 48, width: int = 64) -> list[bytes]:
        self._stamp += 3000
        frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), shade, np.uint8), format="rgb24")
        frame.pts, frame.time_base = self._stamp, Fraction(1, 90000)
        payloads, stamp = self._encoder.encode(frame.reformat(format="yuv420p"), True)
        made = []
        for index, payload in enumerate(payloads):
            packet = RtpPacket(self._payload_type, int(index == len(payloads) - 1), self._number % 65536, stamp, 1234)
            packet.payload = payload
            self._number += 1
            made.append(packet.serialize(HeaderExtensionsMap()))
        return made


class Viewer:
    """A receiver with our screen, and what it showed."""

    def __init__(self, wire: Wire):
        self.shown: list[np.ndarray] = []
        self.receiver = RTCRtpReceiver("video", wire)  # type: ignore[arg-type]
        self.receiver._track = RemoteStreamTrack(kind="video")
        self.screen = FrameDecoder(lambda image, at: self.shown.append(image), lambda error: None)
        self.screen.install(self.receiver)

    async def sees(self, shade: int, shape=(48, 64, 3), *, looks: int = 3000) -> bool:
        for _ in range(looks):
            if any(image.shape == shape and abs(float(image.mean()) - shade) < 4 for image in self.shown):
                return True
            await asyncio.sleep(0.01)
        return False


@pytest.fixture
async def wire():
    return Wire()


@pytest.fixture
async def viewer(wire):
    viewer = Viewer(wire)
    await viewer.receiver.receive(RTCRtpReceiveParameters(codecs=CODECS))
    yield viewer
    await viewer.receiver.stop()


def mutated(chance: random.Random, packet: bytes) -> bytes:
    data = bytearray(packet)
    match chance.randrange(6):
        case 0:
            del data[chance.randrange(len(data)) :]
        case 1:
            for _ in range(chance.randrange(1, 8)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 2:
            data[12:] = chance.randbytes(chance.randrange(1400))
        case 3:
            at = chance.randrange(12, len(data) + 1)
            data[at:at] = chance.randbytes(chance.randrange(64))
        case 4:
            data = bytearray(chance.randbytes(chance.randrange(200)))
        case _:  # a head that is right, of any number, time and kind
            data[1:8] = bytes([chance.choice((VP8, H264, 0, 127)) | chance.choice((0, 128)), *chance.randbytes(6)])
    return bytes(data)


@pytest.mark.parametrize("kind", [VP8, H264], ids=["VP8", "H.264"])
async def test_hundreds_of_broken_packets_harm_nobody_and_the_picture_comes_back(wire, viewer, kind, caplog):
    chance = random.Random(kind)
    sender = Sender(kind)
    for packet in sender.packets(60):
        await wire.arrive(packet)
    assert await viewer.sees(60)
    for number in range(PACKETS):
        good = sender.packets(90) if number % 10 == 0 else [packet]
        packet = good[-1]
        for each in good:
            await wire.arrive(mutated(chance, each))
    # The stream has a gap in it and numbers from anywhere; a few pictures later it is whole again.
    for _ in range(40):
        for packet in sender.packets(200):
            await wire.arrive(packet)
        await asyncio.sleep(0.02)
    counts = viewer.screen.get_counts()
    again = Sender(kind)  # as a robot whose process was replaced
    if not await viewer.sees(200, looks=300):
        for packet in again.packets(200):
            await wire.arrive(packet)
    assert await viewer.sees(200), counts
    assert counts["decode_errors"] + counts["packets_lost"] > 0
    assert viewer.receiver._RTCRtpReceiver__decoder_thread.is_alive()  # type: ignore[attr-defined]


async def test_another_size_in_the_middle_of_a_stream_is_seen(wire, viewer):
    sender, larger = Sender(VP8), Sender(VP8)
    larger._number, larger._stamp = 1001, 90000
    for packet in sender.packets(60):
        await wire.arrive(packet)
    assert await viewer.sees(60)
    for packet in larger.packets(120, 96, 128):
        await wire.arrive(packet)
    assert await viewer.sees(120, (96, 128, 3))


@pytest.mark.parametrize(("kind", "side"), [(VP8, 2048), (H264, 4096)], ids=["VP8", "H.264"])
async def test_a_picture_that_is_far_too_large_never_reaches_the_decoder(wire, viewer, kind, side):
    sender = Sender(kind)
    for packet in sender.packets(60, side, side):
        await wire.arrive(packet)
    assert viewer.screen.get_counts()["oversize"] == 1
    assert not viewer.shown


@pytest.mark.parametrize(("height", "width"), [(48, 64), (480, 640), (1080, 1920), (1200, 1920), (4096, 4096)])
def test_the_size_that_h264_declares_is_read(height, width):
    frame = av.VideoFrame(width, height, "yuv420p")
    codec = av.CodecContext.create("libx264", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "yuv420p", Fraction(1, 30)
    for profile in ("baseline", "high"):
        codec = av.CodecContext.create("libx264", "w")
        codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "yuv420p", Fraction(1, 30)
        codec.options = {"profile": profile, "preset": "ultrafast", "tune": "zerolatency"}
        data = b"".join(bytes(packet) for packet in codec.encode(frame))
        assert h264_pixels(data) == -(-height // 16) * 16 * -(-width // 16) * 16
    assert (h264_pixels(data) > MAX_DECLARED) == (height > 1080)


@pytest.mark.parametrize("data", [b"\0\0\1\x67", b"\0\0\1\x67" + b"\0" * 40, b"\0\0\1\x67\x42\0\x1f" + b"\0" * 9])
def test_a_size_that_cannot_be_read_is_too_large(data):
    assert h264_pixels(data) == UNREADABLE_SIZE


def test_a_picture_of_descriptions_alone_is_not_decoded():
    assert h264_pixels(b"\0\0\1\x67\x42\0\x1e\xda\x02\x80" * 17) == UNREADABLE_SIZE
    assert h264_pixels(b"\0\0\1\x09" * 1025) == UNREADABLE_SIZE
    assert h264_pixels(b"\0\0\1\x09" * 1024) == 0


def test_what_declares_no_size_has_none():
    assert h264_pixels(b"") == h264_pixels(b"\x10\0\0\x9d\1\x2a") == h264_pixels(b"\0\0\1\x65abc") == 0

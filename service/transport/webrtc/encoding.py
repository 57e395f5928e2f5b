"""Encoding of a camera's newest picture for video tracks."""

import asyncio
import time
from fractions import Fraction
from itertools import islice

import av
import av.video.frame
import numpy as np
from aiortc import MediaStreamTrack, RTCRtpCodecCapability, RTCRtpSender
from aiortc.codecs.vpx import Vp8Encoder
from aiortc.mediastreams import VIDEO_CLOCK_RATE, MediaStreamError, convert_timebase
from aiortc.rtp import AnyRtcpPacket, RtcpRtpfbPacket
from av.frame import Frame
from av.video.codeccontext import VideoCodecContext

from service.errors import TransportError
from service.http.limits import Bucket
from service.transport.webrtc.decoding import EXACT_COLORS

# Seconds after which a picture is not sent to a new peer, because the peer would take it for a new picture.
MAX_IMAGE_AGE = 0.3
BITS_PER_PIXEL = 0.5  # It keeps a rendered scene within one level of 255.
MIN_BITRATE, MAX_BITRATE = 1_000_000, 8_000_000
KEYFRAME_INTERVAL = 0.5  # Seconds between requested keyframes, each of which is as large as ten other pictures.
# Retransmitted packets of one peer, per second and at once; one datagram can request 5,800 packets.
RETRANSMIT_RATE = (300, 32)
TIME_BASE = Fraction(1, VIDEO_CLOCK_RATE)
_ENCODER = "_RTCRtpSender__encoder"


class VideoCamera:
    """Newest picture of one camera, which is sent once, at most ``rate`` times per second."""

    def __init__(self, rate: float):
        self.rate = rate
        self.show_count = 0
        self.image: np.ndarray | None = None
        self.newest_at = float("-inf")
        self.tracks: set[CameraTrack] = set()

    def show(self, image: np.ndarray) -> None:
        """Send a copy of this picture, uint8 (h, w, 3) RGB, to all connected peers.

        Raises:
            ValueError: the picture has another type or shape.
        """
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ValueError(f"a picture is uint8 (h, w, 3), got {image.dtype} {image.shape}")
        self.image = np.array(image, order="C")
        self.newest_at = time.monotonic()
        self.show_count += 1
        for track in self.tracks:
            track.wake()


class CameraTrack(MediaStreamTrack):
    """Video track of one camera for one peer, with the newest picture whenever the sender is ready."""

    kind = "video"

    def __init__(self, camera: VideoCamera):
        super().__init__()
        self.camera = camera
        self.sent = 0
        self._sent_number = 0
        self._started_at = time.monotonic()
        self._sent_at = float("-inf")
        self._wake_event = asyncio.Event()
        camera.tracks.add(self)

    def wake(self) -> None:
        """Wake the track for a new picture or its end."""
        self._wake_event.set()

    def stop(self) -> None:
        """End the stream."""
        super().stop()
        self.camera.tracks.discard(self)
        self.wake()

    async def recv(self) -> av.VideoFrame:
        """Wait for a new picture and the rate, and return the newest picture."""
        # Less than the period, because jitter of the source would otherwise drop every second picture.
        await asyncio.sleep(max(0.0, self._sent_at + 0.8 / self.camera.rate - time.monotonic()))
        while True:
            self._wake_event.clear()
            if self.readyState != "live":
                raise MediaStreamError
            camera = self.camera
            if camera.image is not None and camera.show_count != self._sent_number:
                self._sent_number = camera.show_count
                if time.monotonic() < camera.newest_at + MAX_IMAGE_AGE:
                    break
            await self._wake_event.wait()
        self._sent_at = time.monotonic()
        self.sent += 1
        frame = av.VideoFrame.from_ndarray(camera.image, format="rgb24")
        frame.pts = int((camera.newest_at - self._started_at) * VIDEO_CLOCK_RATE)
        frame.time_base = TIME_BASE
        return frame


class CameraEncoder(Vp8Encoder):
    """VP8 encoder for policies: bits by picture size, no denoising, exact colours, no bandwidth estimates."""

    def __init__(self, rate: float):
        super().__init__()
        self._rate = rate
        self._context: VideoCodecContext | None = None
        self._is_keyframe_due = False
        self._keyframe_at = float("-inf")

    @property
    def target_bitrate(self) -> int:
        """Bits per second that the encoder may use."""
        return MIN_BITRATE if self._context is None else self._context.bit_rate or MIN_BITRATE

    @target_bitrate.setter
    def target_bitrate(self, bitrate: int) -> None:
        """Ignore the receiver's estimate, which aiortc sets."""

    def encode(self, frame: Frame, force_keyframe: bool = False) -> tuple[list[bytes], int]:
        """Encode one picture as RTP payloads; called by aiortc in a thread."""
        assert isinstance(frame, av.VideoFrame)
        planar = frame.reformat(format="yuv420p", interpolation=EXACT_COLORS)
        planar.pts, planar.time_base = frame.pts, frame.time_base
        # An early request is kept, because its sender has no picture.
        self._is_keyframe_due |= force_keyframe
        now = time.monotonic()
        if self._is_keyframe_due and now >= self._keyframe_at + KEYFRAME_INTERVAL:
            self._is_keyframe_due, self._keyframe_at = False, now
            planar.pict_type = av.video.frame.PictureType.I
        data = b"".join(bytes(packet) for packet in self._context_for(planar).encode(planar))
        payloads = self._packetize(data, self.picture_id)
        self.picture_id = (self.picture_id + 1) % (1 << 15)
        assert frame.pts is not None
        assert frame.time_base is not None
        return payloads, convert_timebase(frame.pts, frame.time_base, TIME_BASE)

    def _context_for(self, frame: av.VideoFrame) -> VideoCodecContext:
        if self._context is None or (self._context.width, self._context.height) != (frame.width, frame.height):
            bitrate = int(frame.width * frame.height * self._rate * BITS_PER_PIXEL)
            self._context = self._create_context(frame, max(MIN_BITRATE, min(bitrate, MAX_BITRATE)))
        return self._context

    @staticmethod
    def _create_context(frame: av.VideoFrame, bitrate: int) -> VideoCodecContext:
        context = av.CodecContext.create("libvpx", "w")
        assert isinstance(context, VideoCodecContext)
        context.width, context.height = frame.width, frame.height
        context.pix_fmt = "yuv420p"
        context.bit_rate = bitrate
        context.time_base = TIME_BASE
        context.gop_size = 3000  # Keyframes only on request.
        context.qmin, context.qmax = 2, 48
        context.thread_count = 1 if frame.width * frame.height <= 640 * 480 else 2
        context.options = {
            "bufsize": str(bitrate),
            "maxrate": str(bitrate),
            "cpu-used": "-6",
            "deadline": "realtime",
            "lag-in-frames": "0",
            "noise-sensitivity": "0",
            "static-thresh": "0",
            "partitions": "0",
            "undershoot-pct": "100",
            "overshoot-pct": "15",
        }
        return context


def vp8_codecs() -> list[RTCRtpCodecCapability]:
    """Return the offered codecs: VP8 and its retransmission."""
    codecs = RTCRtpSender.getCapabilities("video").codecs
    return [codec for codec in codecs if codec.mimeType.lower() in ("video/vp8", "video/rtx")]


def install_encoder(sender: RTCRtpSender, track: CameraTrack) -> None:
    """Replace the encoder of a sender before its start; raises TransportError for another aiortc."""
    if not hasattr(sender, _ENCODER):
        raise TransportError("this aiortc has another encoder attribute; install aiortc 1.16")
    setattr(sender, _ENCODER, CameraEncoder(track.camera.rate))


def limit_retransmissions(sender: RTCRtpSender) -> None:
    """Limit the packets that a sender retransmits to a viewer; called before the sender starts."""
    original, bucket = sender._handle_rtcp_packet, Bucket(*RETRANSMIT_RATE)

    async def handle(packet: AnyRtcpPacket) -> None:
        if isinstance(packet, RtcpRtpfbPacket):
            lost = dict.fromkeys(packet.lost)
            packet.lost = [number for number in islice(lost, RETRANSMIT_RATE[1]) if bucket.take()]
        await original(packet)

    sender._handle_rtcp_packet = handle  # type: ignore[method-assign]

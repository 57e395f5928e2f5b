"""Video of a camera: each image is sent once, at its rate, and close to the original."""

import asyncio
import time

import av
import numpy as np
import pytest
from aiortc.codecs.vpx import vp8_depayload
from aiortc.mediastreams import MediaStreamError

from service.transport.webrtc.decoding import EXACT_COLORS
from service.transport.webrtc.encoding import (
    KEYFRAME_INTERVAL,
    MAX_BITRATE,
    MAX_IMAGE_AGE,
    MIN_BITRATE,
    TIME_BASE,
    CameraEncoder,
    CameraTrack,
    VideoCamera,
)
from service.transport.webrtc.jitter_buffer import is_keyframe


def scene(number: int, side: int = 240) -> np.ndarray:
    """Return an image like a rendering: a chequered floor with a gradient, a turning bar and a red cube."""
    y, x = np.mgrid[0:side, 0:side].astype(np.float32)
    image = np.stack([90 + 60 * y / side, 100 + 50 * y / side, 110 + 40 * x / side], -1)
    image += (((x // 20 + y // 20) % 2) * 18)[..., None]
    angle = number / 25
    across = np.abs((x - side / 2) * np.cos(angle) + (y - side / 2) * np.sin(angle))
    image[across < side * 0.04] = (220, 190, 45)
    image[(np.abs(x - side * 0.7) < side * 0.05) & (np.abs(y - side * 0.65) < side * 0.05)] = (200, 30, 30)
    return image.clip(0, 255).astype(np.uint8)


def video_frame(image: np.ndarray, number: int) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(image, format="rgb24")
    frame.pts, frame.time_base = number * 3600, TIME_BASE
    return frame


def test_the_codec_changes_an_image_by_less_than_two_levels():
    encoder, decoder = CameraEncoder(25), av.CodecContext.create("libvpx", "r")
    errors, bias = [], []
    for number in range(50):
        image = scene(number)
        payloads, _ = encoder.encode(video_frame(image, number))
        (decoded,) = decoder.decode(av.Packet(b"".join(map(vp8_depayload, payloads))))
        difference = decoded.to_ndarray(format="rgb24", interpolation=EXACT_COLORS).astype(int) - image
        errors.append(np.abs(difference).mean())
        bias.append(difference.mean())
    assert max(errors) < 2, max(errors)
    assert abs(np.mean(bias)) < 0.3, np.mean(bias)


def test_a_keyframe_is_sent_on_request_and_for_a_new_size():
    encoder = CameraEncoder(25)

    def is_key(number: int, side: int = 64, force: bool = False) -> bool:
        payloads, _ = encoder.encode(video_frame(scene(number, side), number), force)
        return is_keyframe(b"".join(map(vp8_depayload, payloads)))

    assert [is_key(0), is_key(1), is_key(2)] == [True, False, False]
    assert is_key(3, force=True)
    # Constant requests give one keyframe per KEYFRAME_INTERVAL. An early request is answered later.
    assert not any(is_key(number, force=True) for number in range(10, 15))
    encoder._keyframe_at -= KEYFRAME_INTERVAL
    assert [is_key(20), is_key(21)] == [True, False]
    assert [is_key(4), is_key(5, side=96), is_key(6, side=96)] == [False, True, False]


def test_the_bit_rate_follows_the_size_and_not_the_estimate():
    encoder = CameraEncoder(30)
    assert encoder._context_for(video_frame(np.zeros((96, 96, 3), np.uint8), 0)).bit_rate == MIN_BITRATE
    context = encoder._context_for(video_frame(np.zeros((480, 640, 3), np.uint8), 0))
    assert MIN_BITRATE < context.bit_rate < MAX_BITRATE
    encoder.target_bitrate = 250_000
    assert encoder.target_bitrate == context.bit_rate
    assert encoder._context_for(video_frame(np.zeros((480, 640, 3), np.uint8), 1)) is context
    assert encoder._context_for(video_frame(np.zeros((1080, 1920, 3), np.uint8), 2)).bit_rate == MAX_BITRATE


async def test_only_the_newest_image_is_sent_and_only_once():
    camera = VideoCamera(rate=1000)
    track = CameraTrack(camera)
    image = np.zeros((4, 4, 3), np.uint8)
    for level in (10, 20, 30):
        image[:] = level
        camera.show(image)
    image[:] = 99
    frame = await track.recv()
    assert frame.to_ndarray(format="rgb24")[0, 0, 0] == 30
    again = asyncio.ensure_future(track.recv())
    await asyncio.sleep(0.02)
    assert not again.done()
    camera.show(np.full((4, 4, 3), 40, np.uint8))
    later = await again
    assert later.to_ndarray(format="rgb24")[0, 0, 0] == 40
    assert later.pts > frame.pts
    track.stop()


async def test_an_old_image_is_not_sent_to_a_new_peer():
    camera = VideoCamera(rate=1000)
    camera.show(np.zeros((4, 4, 3), np.uint8))
    camera.newest_at -= MAX_IMAGE_AGE
    track = CameraTrack(camera)
    waiting = asyncio.ensure_future(track.recv())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    track.stop()
    with pytest.raises(MediaStreamError):
        await waiting
    assert camera.tracks == set()


async def test_the_rate_is_a_limit():
    camera = VideoCamera(rate=50)
    track = CameraTrack(camera)
    began = time.monotonic()
    for _ in range(4):
        camera.show(np.zeros((4, 4, 3), np.uint8))
        await track.recv()
    assert time.monotonic() - began >= 3 * 0.8 / 50
    track.stop()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 4, 3), np.float32), ((4, 4), np.uint8), ((4, 4, 4), np.uint8), ((0, 4, 3), np.uint8)]
)
def test_an_image_of_another_shape_or_type_is_refused(shape, dtype):
    with pytest.raises(ValueError, match=r"uint8 \(h, w, 3\)"):
        VideoCamera(rate=30).show(np.zeros(shape, dtype))

"""Cancellation of a peer connection closes all its sockets."""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from service.transport.webrtc.decoding import FrameDecoder
from service.transport.webrtc.encoding import CameraTrack, VideoCamera
from service.transport.webrtc.peer import PeerConnection

TURNS = 8  # Turns of the event loop; the cancellation meets another step in each turn.


def sockets() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


async def cancelled(work: Coroutine[Any, Any, Any], turns: int) -> None:
    """Start the coroutine and cancel it after this number of turns of the event loop."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def connected() -> tuple[PeerConnection, PeerConnection]:
    screen = FrameDecoder(lambda image, observed_at: None, lambda error: None)
    producer, consumer = PeerConnection([]), PeerConnection([])
    offer = await producer.create_offer(CameraTrack(VideoCamera(25)))
    await producer.accept_answer(await consumer.answer_offer(offer, screen))
    for peer in (producer, consumer):
        while not peer.connected_at:
            peer.changed.clear()
            await peer.changed.wait()
    return producer, consumer


async def test_a_cancelled_offer_leaves_no_socket_open():
    before = sockets()
    for turns in range(TURNS):
        peer = PeerConnection([])
        await cancelled(peer.create_offer(CameraTrack(VideoCamera(25))), turns)
        await peer.close()
        assert sockets() == before, f"cancelled after {turns} turns of the loop"


async def test_a_cancelled_close_leaves_no_socket_open():
    before = sockets()
    for turns in range(TURNS):
        producer, consumer = await connected()
        opened = sockets()
        await cancelled(producer.close(), turns)
        await cancelled(consumer.close(), turns)
        assert sockets() == (before if turns else opened), f"cancelled after {turns} turns of the loop"
        await asyncio.gather(producer.close(), consumer.close())
        assert sockets() == before

"""Real video from a robot to a session through the embedded server."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.jitterbuffer import JitterFrame
from aiortc.mediastreams import AudioStreamTrack, VideoStreamTrack

from service.errors import TransportError
from service.transport.address import Address, Kind
from service.transport.client.camera_rooms import CameraReceiver
from service.transport.client.connection import RoomConnection
from service.transport.client.rest import RoomsApi, http_session
from service.transport.client.rooms_link import run_beside
from service.transport.link import LinkDown, Rooms
from service.transport.protocol import ParticipantJoined, ParticipantRole, WebrtcIce, WebrtcOffer
from service.transport.webrtc.decoding import MAX_BACKLOG, FrameDecoder
from service.transport.webrtc.ice import EarlyCandidates, split_candidates
from service.transport.webrtc.peer import BadSignal, PeerConnection

ROOT = Path(__file__).parents[3]
RED, GREEN = (200, 30, 40), (20, 180, 60)


def picture(colour, height=48, width=64):
    return np.full((height, width, 3), colour, np.uint8)


@contextlib.asynccontextmanager
async def filming(robot, colour, camera="front", rate=30, **size):
    async def film():
        while True:
            robot.show(camera, picture(colour, **size))
            await asyncio.sleep(1 / rate)

    task = asyncio.create_task(film())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def watching(url, inbox, pace):
    async with http_session() as session:
        api = RoomsApi(session, Address.parse(url), pace)
        receiver = CameraReceiver("front", "s-front", api, inbox, ())
        connection = RoomConnection(
            api, Kind.VIDEO, "w", "s-front", id_prefix="viewer", role=ParticipantRole.CONSUMER, listener=receiver
        )
        await connection.open()
        try:
            async with run_beside(connection.run(), receiver.run(connection)):
                yield
        finally:
            await connection.close()


def is_colour(image, colour):
    return np.abs(image.astype(int) - colour).mean() < 3


async def see(seen, until, colour, camera="front", within=30.0):
    return await until(
        lambda: any(name == camera and is_colour(image, colour) for name, image, _ in seen.frames), within
    )


async def show_and_see(robot, seen, until, colour, within=30.0):
    async with filming(robot, colour):
        await see(seen, until, colour, within=within)


async def test_known_colour_arrives_in_three_seconds_in_its_size(both, seen, until):
    async with both("front") as (_, robot), filming(robot, RED, height=120, width=160):
        await see(seen, until, RED, within=3)
    _, image, observed_at = seen.frames[-1]
    assert image.dtype == np.uint8
    assert image.shape == (120, 160, 3)
    assert 0 <= time.monotonic() - observed_at < 5
    assert not [thread for thread in threading.enumerate() if "decoder" in thread.name]


async def test_session_that_joins_after_the_robot_gets_video(join_robot, connect, server, seen, until):
    rooms = Rooms("w", {"front": "s-front"}, "s-joint-input", "s-joint-output")
    await server.call("POST", "/video/workspaces/w/rooms", {"room_id": "s-front"})
    for room in (rooms.joint_input, rooms.joint_output):
        await server.call("POST", "/robotics/workspaces/w/rooms", {"room_id": room})
    async with join_robot(rooms) as robot, filming(robot, RED):
        await asyncio.sleep(0.2)
        async with connect("front"):
            await see(seen, until, RED)


async def test_two_cameras_are_not_mixed(both, seen, until):
    async with both("front", "wrist") as (_, robot), filming(robot, RED), filming(robot, GREEN, "wrist"):
        await see(seen, until, RED, "front")
        await see(seen, until, GREEN, "wrist")
    assert {name for name, image, _ in seen.frames if is_colour(image, GREEN)} == {"wrist"}
    assert {name for name, image, _ in seen.frames if is_colour(image, RED)} == {"front"}


async def test_several_consumers_get_one_camera(join_robot, connect, server, seen, quick, until):
    watchers = [type(seen)(), type(seen)()]
    async with connect("front") as link, contextlib.AsyncExitStack() as stack:
        robot = await stack.enter_async_context(join_robot(link.rooms))
        for watcher in watchers:
            await stack.enter_async_context(watching(server.url, watcher, quick))
        await stack.enter_async_context(filming(robot, RED))
        for each in (seen, *watchers):
            await see(each, until, RED)
        assert len(robot.health()["rooms"]["s-front"]["video"]["peers"]) == 3


async def test_video_works_with_loopback_only(both, seen, until, monkeypatch):
    monkeypatch.setattr("aioice.ice.get_host_addresses", lambda use_ipv4, use_ipv6: [])
    async with both("front") as (_, robot), filming(robot, RED):
        await see(seen, until, RED)


async def test_last_picture_before_a_pause_arrives(both, seen, until):
    async with both("front") as (_, robot):
        await show_and_see(robot, seen, until, RED)
        await asyncio.sleep(0.1)
        robot.show("front", picture(GREEN))
        await see(seen, until, GREEN)


async def test_second_offer_replaces_the_first(both, seen, until):
    async with both("front") as (link, robot):
        await show_and_see(robot, seen, until, RED)
        robot._senders["front"].on_joined("")
        await until(lambda: link.health()["rooms"]["s-front"]["video"]["offers"] == 2)
        await show_and_see(robot, seen, until, GREEN)
        video = link.health()["rooms"]["s-front"]["video"]
        assert (video["offers"], video["state"]) == (2, "connected")
        assert seen.of(LinkDown) == []
    assert not [thread for thread in threading.enumerate() if "decoder" in thread.name]


async def test_undecodable_picture_is_counted_and_video_continues(both, seen, until):
    async with both("front") as (link, robot):
        async with filming(robot, RED):
            await see(seen, until, RED)
            receiver = link._receivers["s-front"]._peer._pc.getReceivers()[0]
            codec = next(iter(receiver._RTCRtpReceiver__codecs.values()))
            receiver._RTCRtpReceiver__decoder_queue.put((codec, JitterFrame(b"\x10garbage", 0)))
            await until(lambda: link.health()["rooms"]["s-front"]["video"]["decode_errors"] == 1)
        await show_and_see(robot, seen, until, GREEN)


async def test_silent_peer_is_asked_for_a_new_offer(both, seen, quick, until):
    pace = dataclasses.replace(quick, silence=0.5, ask_first=0.2)
    async with both("front", pace=pace) as (link, robot):
        await show_and_see(robot, seen, until, RED)
        # The robot's process lives but its track has ended, as after an encoder error.
        await until(lambda: any("no picture for 0.5 s" in down.reason for down in seen.of(LinkDown)))
        await show_and_see(robot, seen, until, GREEN)
        assert link.health()["rooms"]["s-front"]["video"]["asked_again"] >= 1


async def test_failed_peer_is_asked_for_a_new_offer(both, seen, until):
    async with both("front") as (_, robot):
        await show_and_see(robot, seen, until, RED)
        await robot._senders["front"]._peers[next(iter(robot._senders["front"]._peers))][0].close()  # A goodbye.
        await show_and_see(robot, seen, until, GREEN, within=5)


@pytest.mark.parametrize("sdp", ["", "garbage", "v=0\r\nm=video 9 UDP/TLS/RTP/SAVPF\r\n", "m=video x y z\r\n" * 3])
async def test_invalid_offer_is_counted_and_dropped(join_robot, connect, seen, until, sdp):
    async with connect("front") as link:
        receiver = link._receivers["s-front"]
        receiver.on_message(WebrtcOffer({"type": "offer", "sdp": sdp}, "p"), 0.0)
        receiver.on_message(WebrtcIce({"candidate": ""}, from_producer="p"), 0.0)
        receiver.on_message(WebrtcIce({"candidate": "candidate:x.local"}, from_producer="p"), 0.0)
        await until(lambda: link.health()["rooms"]["s-front"]["video"]["offers"] == 1)
        async with join_robot(link.rooms) as robot, filming(robot, RED):
            await see(seen, until, RED)


async def test_offer_without_video_is_answered(join_robot, connect, seen, until):
    async with connect("front") as link:
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        peer.createDataChannel("nothing to see yet")
        await peer.setLocalDescription()
        offer = WebrtcOffer({"type": "offer", "sdp": peer.localDescription.sdp}, "early-bird")
        link._receivers["s-front"].on_message(offer, 0.0)
        video = lambda: link.health()["rooms"]["s-front"]["video"]  # noqa: E731
        await until(lambda: video()["offers"] == 1 and link._receivers["s-front"]._peer)
        assert video()["refused_offers"] == 0
        await peer.close()
        async with join_robot(link.rooms) as robot, filming(robot, RED):
            await see(seen, until, RED)


async def test_audio_track_is_not_accepted():
    theirs = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    theirs.addTrack(AudioStreamTrack())
    theirs.addTrack(VideoStreamTrack())
    await theirs.setLocalDescription()
    ours = PeerConnection(())
    answer = await ours.answer_offer(
        theirs.localDescription.sdp, FrameDecoder(lambda image, at: None, lambda error: None)
    )
    kinds = {part.split()[0]: part for part in answer.split("m=")[1:]}
    assert "a=inactive" in kinds["audio"]
    assert "a=recvonly" in kinds["video"]
    assert "a=candidate:" in kinds["video"]
    await ours.close()
    await theirs.close()


async def test_unexpected_answer_is_refused():
    peer = PeerConnection(())
    with pytest.raises(BadSignal, match="while the connection was stable"):
        await peer.accept_answer("v=0\r\n")
    await peer.close()


async def test_candidates_before_their_offer_are_used(until):
    """The producer's description has no candidates; they arrive later, but before the offer is processed."""
    theirs = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    theirs.addTrack(VideoStreamTrack())
    await theirs.setLocalDescription()
    lines = theirs.localDescription.sdp.splitlines()
    bare = "\r\n".join(line for line in lines if not line.startswith(("a=candidate", "a=end-of"))) + "\r\n"
    early = EarlyCandidates()
    fragment = next(line.partition(":")[2] for line in lines if line.startswith("a=ice-ufrag"))
    for line in lines:
        if line.startswith("a=candidate"):
            early.keep("p", {"candidate": line[2:], "sdpMid": "0", "sdpMLineIndex": 0, "usernameFragment": fragment})
    early.keep("p", {"candidate": "", "sdpMid": "0", "usernameFragment": fragment})
    early.keep("p", {"candidate": "candidate:1 1 udp 1 x.local 9 typ host", "usernameFragment": "older"})
    assert len(early.for_description("p", bare)) == sum(line.startswith("a=candidate") for line in lines) + 1
    frames = []
    ours = PeerConnection(())
    answer = await ours.answer_offer(bare, FrameDecoder(lambda image, at: frames.append(image), lambda error: None))
    ours.add_candidates(early.for_description("p", bare))
    # The other side gets no candidates either, so only the early candidates can connect them.
    lines = answer.splitlines()
    answer = "\r\n".join(line for line in lines if not line.startswith(("a=candidate", "a=end-of"))) + "\r\n"
    await theirs.setRemoteDescription(RTCSessionDescription(answer, "answer"))
    await until(lambda: frames)
    await ours.close()
    await theirs.close()


def test_early_candidates_are_kept_by_sender_and_bounded():
    early = EarlyCandidates(max_senders=2, per_sender=3)
    for sender in "abc":
        for number in range(5):
            early.keep(sender, {"candidate": f"{sender}{number}"})
    assert early.for_description("a", "") == []
    assert [kept["candidate"] for kept in early.for_description("c", "")] == ["c2", "c3", "c4"]
    early.forget("c")
    assert early.for_description("c", "") == []


def test_mdns_candidates_leave_a_description_and_trickle_instead():
    named, plain = "a=candidate:1 1 udp 5 abc.local 50009 typ host", "a=candidate:2 1 udp 5 10.0.0.1 50009 typ host"
    sdp = f"v=0\r\nm=video 9\r\n{named}\r\n{plain}\r\n"
    plain, named = split_candidates(sdp)
    assert "local" not in plain
    assert "10.0.0.1" in plain
    assert named == [{"candidate": "a=candidate:1 1 udp 5 abc.local 50009 typ host", "sdpMLineIndex": 0}]


async def test_unusable_candidate_is_ignored():
    peer = PeerConnection(())
    peer.add_candidates(
        [{"candidate": "x"}, {"candidate": 5}, {}, {"candidate": "candidate:1 1 udp 1 h h typ host", "sdpMid": 7}]
    )
    await asyncio.sleep(0)
    await peer.close()


async def test_only_consumers_get_offers(both, until):
    async with both("front") as (_, robot):
        await until(lambda: robot.health()["rooms"]["s-front"]["video"]["offers"] == 1)
        robot._senders["front"].on_message(ParticipantJoined("s-front", "other", ParticipantRole.PRODUCER), 0.0)
        await asyncio.sleep(0.3)
        assert robot.health()["rooms"]["s-front"]["video"]["offers"] == 1


class Stage:
    def __init__(self):
        self.shown, self.failures = [], []
        self.screen = FrameDecoder(lambda image, at: self.shown.append(image), self.failures.append)

    async def put(self, *frames):
        scheduled = [work for work in map(self.screen.put, frames) if work is not None]
        for each in scheduled:
            await each
        return len(scheduled)


def frame_of(colour, height=48, width=64):
    return av.VideoFrame.from_ndarray(picture(colour, height, width), format="rgb24").reformat(format="yuv420p")


async def test_only_the_newest_of_queued_pictures_is_shown():
    stage = Stage()
    # The loop wakes up once for all pictures, and at the end.
    assert await stage.put(frame_of(RED), frame_of(RED), frame_of(GREEN), None) == 2
    assert len(stage.shown) == 1
    assert is_colour(stage.shown[0], GREEN)
    assert stage.screen.get_counts() == {
        "frames": 1, "oversize": 0, "late": 0, "superseded": 2, "decode_errors": 0, "packets_lost": 0,
    }  # fmt: skip


async def test_oversized_picture_is_dropped_and_counted():
    stage = Stage()
    await stage.put(frame_of(RED, 1082, 1920))
    await stage.put(frame_of(GREEN, 1920, 1080))
    assert [image.shape for image in stage.shown] == [(1920, 1080, 3)]
    assert stage.screen.oversize == 1


@pytest.mark.parametrize(("name", "value", "late"), [("_backlog", lambda: MAX_BACKLOG + 1, 1), ("is_muted", True, 0)])
async def test_picture_after_a_backlog_or_when_muted_is_not_shown(name, value, late):
    stage = Stage()
    setattr(stage.screen, name, value)
    await stage.put(frame_of(RED))
    assert (stage.shown, stage.screen.late) == ([], late)


async def test_error_of_the_owner_reaches_the_owner():
    stage = Stage()
    stage.screen._on_frame = lambda image, at: 1 / 0
    await stage.put(frame_of(RED))
    assert isinstance(stage.failures[0], ZeroDivisionError)


async def test_other_aiortc_is_refused_with_the_version_to_install():
    with pytest.raises(TransportError, match=r"install aiortc 1\.16"):
        Stage().screen.install(SimpleNamespace(track=None))

"""A hostile camera over real sockets: before the handshake, during it, and with valid keys."""

import asyncio
import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiortc.rtcrtpreceiver
import aiortc.utils
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.codecs.vpx import Vp8Encoder
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtp import RtcpByePacket, RtcpRtpfbPacket, RtpPacket
from OpenSSL import SSL

from service.http.fair_queue import SHARE, TURN_SECONDS, FairQueue
from service.transport.client.camera_rooms import ANSWER_RATE, MAX_PEERS, CameraReceiver, CameraSender
from service.transport.client.connection import TransportTimeouts
from service.transport.protocol import ParticipantJoined, ParticipantRole, WebrtcIce, WebrtcOffer
from service.transport.webrtc import ice
from service.transport.webrtc import peer as peers
from service.transport.webrtc.decoding import DECODE_RATE, MAX_PENDING, DecoderThread, FrameDecoder
from service.transport.webrtc.encoding import RETRANSMIT_RATE, CameraTrack, VideoCamera, limit_retransmissions
from service.transport.webrtc.ice import (
    MAX_CANDIDATES,
    MAX_SOURCES,
    MAX_WAITING,
    MEDIA_BUDGET,
    STRANGER_RATE,
    DatagramFilter,
)
from service.transport.webrtc.jitter_buffer import BoundedNacks
from service.transport.webrtc.peer import MAX_SDP, BadSignal, PeerConnection
from tests.hostile.video_cases import SSRC, Pair, packets, picture
from tests.testing.waiting import until

ROOT = Path(__file__).parents[2]
CASES = int(os.environ.get("ROBOJAX_TEST_CASES", "300"))  # 5,000 cases take half a minute.
SEED = int(os.environ.get("ROBOJAX_TEST_SEED", "1"))
QUICK = TransportTimeouts(greet=0.05, connect=1.0, answer=5.0)


def no_screen() -> FrameDecoder:
    return FrameDecoder(lambda image, at: None, lambda error: None)


@pytest.fixture
async def pair():
    made = await Pair().connect()
    yield made
    await made.close()


@pytest.fixture
async def browser():
    made = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    yield made
    await made.close()


@pytest.fixture
async def peer():
    made = PeerConnection([])
    yield made
    await made.close()


async def offer_of(browser: RTCPeerConnection) -> str:
    browser.addTransceiver("video", direction="sendonly")
    await browser.setLocalDescription()
    return browser.localDescription.sdp


async def throw(data: bytes, address: tuple[str, int], count: int = 1) -> None:
    """Send datagrams from a socket that is not the peer's."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as stranger:
        for number in range(count):
            stranger.sendto(data, address)
            if number % 20 == 19:
                await asyncio.sleep(0)
    await asyncio.sleep(0.05)


def sockets_of(peer: PeerConnection) -> list[Any]:
    return [each for transport in ice.transports_of(peer._pc) for each in transport.transport._connection._protocols]


async def test_no_case_crashes_or_delays_the_decoding_process():
    """Run the cases in a child process, where a decoder crash is an exit code. ROBOJAX_TEST_CASES sets their number."""
    command = [sys.executable, "-m", "tests.hostile.video_cases", "--cases", str(CASES), "--seed", str(SEED)]
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0, f"seed {SEED}: ended with {child.returncode}"
    found = json.loads(out)
    assert found["failures"] == [], found
    assert (found["tasks_left"], found["threads_left"]) == (0, 0), found
    assert found["is_seen"], found
    assert found["grown_mb"] < 64, found
    # Processor time of the loop's thread; a few turns include a garbage collection.
    assert sum(found["long_turns"].values()) <= 2 + CASES / 200, found


BAD_STUN = struct.pack("!HHI12s", 1, 8, 0x2112A442, b"x" * 12) + struct.pack("!HHI", 0x24, 3, 1)
BAD_REPORT = b"\x8f\xce\x00\x04" + b"\0" * 8 + b"REMB\xff\xff\xff\xff"  # Announces 255 sources and contains none.


@pytest.mark.parametrize(
    ("data", "is_encrypted", "dropped"),
    [(b"", False, {"size": 1}), (BAD_STUN, False, {"malformed": 10}), (BAD_REPORT, True, {"malformed": 1})],
    ids=["empty", "STUN", "report"],
)
async def test_malformed_datagram_ends_no_connection(pair, data, is_encrypted, dropped):
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    if is_encrypted:
        await pair.send(data)
    else:
        await throw(data, pair.address, *dropped.values())
    await until(lambda: pair.server.datagram_filter.dropped.items() >= dropped.items())
    assert errors == []
    assert pair.server.state == "connected"
    assert await pair.is_seen(150)


async def test_datagrams_before_the_handshake_are_not_kept(browser, peer):
    await peer.answer_offer(await offer_of(browser), no_screen())
    protocol = sockets_of(peer)[0]
    # Send at most the content of a socket's buffer at a time, even if it is read late.
    for number in range(1, 7):
        await throw(b"\x80" * 1400, protocol.transport.get_extra_info("sockname")[:2], 50)
        await until(lambda count=50 * number: peer.datagram_filter.dropped["stranger"] == count)
    assert protocol.receiver._queue.qsize() == 0


async def test_stun_is_read_only_up_to_its_maximum_length(pair, monkeypatch):
    read = []
    monkeypatch.setattr("aioice.stun.parse_message", lambda data: read.append(data) or 1 / 0)
    attribute = struct.pack("!HHI", 0x24, 4, 1)
    for count in (8000, 200):
        body = attribute * count
        await throw(struct.pack("!HHI12s", 1, len(body), 0x2112A442, b"x" * 12) + body, pair.address)
    await throw(struct.pack("!HHI12s", 0x101, 0, 0x2112A442, b"x" * 12), pair.address)  # A response without a request.
    await throw(struct.pack("!HHI12s", 1, 0, 0, b"x" * 12), pair.address)
    assert [len(data) for data in read] == [1620]
    assert pair.server.datagram_filter.dropped == {"size": 1, "stranger": 1, "rate": 0, "sources": 0, "malformed": 2}


async def test_flood_of_one_stranger_is_dropped_and_video_continues(pair):
    head = struct.pack("!HHI12s", 1, 36, 0x2112A442, b"x" * 12)
    wrong = head + struct.pack("!HH8s", 6, 8, b"abcd:efg") + struct.pack("!HH20s", 8, 20, b"y" * 20)
    answered = []
    for protocol in sockets_of(pair.server):
        protocol.send_stun = lambda message, address: answered.append(message)
    await throw(wrong, pair.address, 1000)
    assert len(answered) <= ice.STRANGER_RATE[1] + 50
    assert pair.server.datagram_filter.dropped["rate"] > 300
    assert await pair.is_seen(90)


class Selector(selectors.SelectSelector):
    """Selector that does not wait: ``now`` is the total time of work and waits, ``longest`` the longest turn."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.longest = self._began = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.longest = max(self.longest, self.now - self._began)
        self.now += timeout or 0.0
        self._began = self.now
        return []


class Wire:
    """Receiving half of one aiortc peer, down to its datagram queue; ``late`` has the delay of each read."""

    def __init__(self, work: Selector, host: str, cost: float):
        self.work, self.cost, self.late = work, cost, list[float]()
        self._came: deque[float] = deque()
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._recv = self._queue.get
        self._connection = SimpleNamespace(_queue=self._queue, _nominated={1: SimpleNamespace(remote_addr=(host, 5))})
        self._handle_rtp_data = self._handle_rtcp_data = None
        # Guard it like a real connection; no other part of the DTLS transport is used.
        dtls = SimpleNamespace(getTransceivers=lambda: [], sctp=SimpleNamespace(transport=self))
        self.transport = self
        DatagramFilter().guard_connection(dtls)  # type: ignore[arg-type]

    def send(self) -> None:
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put_nowait(b"\x80")
            self._came.append(self.work.now)

    async def read(self) -> None:
        while True:
            await self._recv()
            self.work.now += self.cost
            self.late.append(self.work.now - self._came.popleft())


@pytest.fixture
def run_by_work(monkeypatch):
    """Return a function that runs a coroutine on a loop whose clock counts only the work of the loop."""

    def run(main: Callable[[Selector], Coroutine[Any, Any, None]]) -> None:
        work = Selector()
        clock = SimpleNamespace(**dict.fromkeys(("thread_time", "perf_counter", "monotonic"), lambda: work.now))
        monkeypatch.setattr(ice, "time", clock)

        async def begin() -> None:
            loop = asyncio.get_running_loop()
            FairQueue._queues[loop] = FairQueue(loop, clock=lambda: work.now, cpu=lambda: work.now)
            await main(work)

        def make() -> asyncio.AbstractEventLoop:
            loop = asyncio.SelectorEventLoop(work)
            loop.time = lambda: work.now  # type: ignore[method-assign]
            return loop

        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(begin())

    return run


@pytest.mark.parametrize("cost", [0.0001, 0.001], ids=["packets of video", "slow packets"])
def test_media_floods_delay_neither_the_loop_nor_other_cameras(run_by_work, cost):
    async def main(work: Selector) -> None:
        floods = [Wire(work, f"10.0.0.{number}", cost) for number in range(4)]
        camera, loop = Wire(work, "10.0.1.1", 0.0001), asyncio.get_running_loop()
        late = list[float]()

        def tick(due: float) -> None:
            late.append(work.now - due)
            loop.call_at(due + 0.02, tick, due + 0.02)

        async def flood() -> None:
            while True:
                for wire in floods:
                    for _ in range(8):
                        wire.send()
                await asyncio.sleep(0.001)

        async def show() -> None:
            while True:
                for _ in range(20):  # 600 packets per second.
                    camera.send()
                await asyncio.sleep(1 / 30)

        tick(0.0)
        tasks = [asyncio.create_task(each) for each in (flood(), show(), *(wire.read() for wire in (*floods, camera)))]
        await asyncio.sleep(0.5)  # The initial budget of each peer is used up.
        for wire in (*floods, camera):
            wire.late.clear()
        late.clear()
        work.longest, began = 0.0, work.now
        await asyncio.sleep(2.0)
        took = work.now - began
        for task in tasks:
            task.cancel()
        # The rest of the previous turn, the budget of this turn, and rounding.
        most = 2 * TURN_SECONDS + 2 * cost + 1e-9
        assert work.longest <= most, "seconds in one turn of the loop, for all peers together"
        assert max(late) <= most
        read = [len(wire.late) * cost for wire in floods]
        assert sum(read) <= (SHARE + 4 * MEDIA_BUDGET[0]) * took, "seconds, for all flooding peers together"
        assert min(read) > 0.05 * took
        assert len(camera.late) >= 0.95 * 600 * took
        assert max(camera.late) <= 0.015, "seconds for twenty packets in a few turns of the loop"

    run_by_work(main)


def test_checks_of_all_peers_take_bounded_time_per_turn(run_by_work):
    check = struct.pack("!HHI12s", 1, 0, 0x2112A442, b"x" * 12)
    answered = Counter[int]()

    async def main(work: Selector) -> None:
        def answer(number: int) -> None:
            work.now += 0.0005
            answered[number] += 1

        for number in range(8):
            intake = DatagramFilter()
            ice = SimpleNamespace(_remote_candidates=[])
            for _ in range(STRANGER_RATE[1]):
                plain = partial(lambda number, data, address: answer(number), number)
                intake._receive(ice, SimpleNamespace(transactions={}), plain, check, ("10.0.0.9", 5000))
        assert answered.total() <= TURN_SECONDS / 0.0005, "the remaining checks are answered in later turns"
        await asyncio.sleep(1.0)
        assert work.longest <= TURN_SECONDS + 0.0005

    run_by_work(main)
    assert set(answered.values()) == {STRANGER_RATE[1]}


def with_lines(sdp: str, line: str, count: int) -> str:
    return sdp + "".join(line.format(number) + "\r\n" for number in range(count))


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("a=x:{}", 1000), ("a=rtpmap:{} VP8/90000", 64), ("a=ssrc:{} cname:x", 65), ("a=extmap:{} urn:x", 65),
        ("a=candidate:{} 1 udp 5 10.0.0.1 5000 typ host", 128), ("m=video 9 UDP/TLS/RTP/SAVPF {}", 4),
        ("a=x:" + "9" * 2100, 1), ("a=ice-ufrag:" + "a" * 300, 1), ("a=fmtp:97 " + "x" * 1900, 40),
    ],
)  # fmt: skip
async def test_oversized_description_is_refused_before_parsing(browser, peer, monkeypatch, line, count):
    offer = with_lines(await offer_of(browser), line, count)
    monkeypatch.setattr("aiortc.sdp.SessionDescription.parse", lambda sdp: pytest.fail("it was parsed"))
    with pytest.raises(BadSignal, match=r"at most|more than"):
        await peer.answer_offer(offer, no_screen())


async def test_unsupported_offered_codecs_are_ignored(browser):
    offer = await offer_of(browser)
    others = with_lines("", "a=rtpmap:{0} VP9/90000\r\na=rtcp-fb:{0} nack", 40)
    thinned = peers.keep_known_codecs(offer + others)
    assert thinned == offer
    again = with_lines("", "a=rtpmap:97 VP8/90000\r\na=fmtp:97 x\r\na=rtcp-fb:97 nack{}", 40)
    assert len(peers.keep_known_codecs(offer + again).splitlines()) < len(offer.splitlines()) + 10


@pytest.mark.parametrize("missing", ["a=sendonly", "a=rtcp-mux", "a=ice-pwd", "a=rtpmap"])
async def test_incomplete_offer_is_refused_and_ends_no_session(receiver, browser, missing):
    lines = (await offer_of(browser)).splitlines()
    receiver.on_message(offer_signal("\r\n".join(line for line in lines if not line.startswith(missing)) + "\r\n"), 0.0)
    await until(lambda: receiver.health()["refused_offers"] == 1)
    receiver.on_message(offer_signal("\r\n".join(lines) + "\r\n"), 0.0)
    await until(lambda: receiver.signals.sent)


async def test_number_of_tried_candidates_is_limited_on_each_way(browser, peer):
    plain = "a=candidate:{0} 1 udp 5 10.0.0.{0} 50000 typ host"
    offer = with_lines(await offer_of(browser), plain, 100).replace("a=end-of-candidates\r\n", "")
    await peer.answer_offer(offer, no_screen())
    each = ({"candidate": plain.format(number)[2:], "sdpMLineIndex": 0} for number in range(100, 250))
    peer.add_candidates(each)
    assert len(peer._adding) <= 2 * MAX_CANDIDATES
    await asyncio.gather(*peer._adding)
    (transport,) = ice.transports_of(peer._pc)
    assert len(transport.transport._connection._remote_candidates) == MAX_CANDIDATES


async def test_data_channel_never_opens(browser, peer):
    opened: list[Any] = []
    channel = browser.createDataChannel("shell")
    channel.on("open", lambda: opened.append(channel))
    browser.addTransceiver("video", direction="sendonly")
    await browser.setLocalDescription()
    answer = await peer.answer_offer(browser.localDescription.sdp, no_screen())
    await browser.setRemoteDescription(aiortc.RTCSessionDescription(answer, "answer"))
    await until(lambda: peer.connected_at and browser.connectionState == "connected")
    await asyncio.sleep(0.2)
    assert opened == []
    assert all(transport._data_receiver is None for transport in ice.transports_of(peer._pc))


async def test_sockets_of_a_data_channel_are_guarded(browser, peer):
    browser.createDataChannel("shell")
    await browser.setLocalDescription()
    await peer.answer_offer(browser.localDescription.sdp.replace("a=end-of-candidates\r\n", ""), no_screen())
    (protocol, *_) = sockets_of(peer)
    await throw(b"", protocol.transport.get_extra_info("sockname")[:2])
    assert peer.datagram_filter.dropped["size"] == 1
    before = len(protocol.receiver._remote_candidates)
    named = SimpleNamespace(host="x.local", port=50_000, component=1, transport="udp", type="host")
    protocol.receiver._add_remote_candidate(named, "169.254.169.254")  # As if the name had been resolved.
    assert len(protocol.receiver._remote_candidates) == before


async def test_second_handshake_is_refused(monkeypatch):
    plain, made = peers.forbid_renegotiation, []
    # The hostile first peer of the pair keeps the right to request another handshake.
    monkeypatch.setattr(
        peers, "forbid_renegotiation", lambda each: made.append(each) or (len(made) > 1 and plain(each))
    )
    pair, sent = await Pair().connect(), []
    send = pair.reader.transport._send

    async def note(data: bytes) -> None:
        sent.append(data[0])
        await send(data)

    pair.reader.transport._send = note
    for _ in range(3):
        with contextlib.suppress(SSL.Error):
            pair.transport._ssl.renegotiate()
            pair.transport._ssl.do_handshake()
        await pair.transport._write_ssl()
        await asyncio.sleep(0.1)
    assert 22 not in sent, "no handshake record is sent"
    assert pair.server.state == "connected"
    assert await pair.is_seen(70)
    await pair.close()


async def test_endless_sources_are_not_remembered(pair):
    kind = pair.kind("VP8")
    for number in range(200):
        (packet,) = packets(kind, [b"\x10abc"], number, number, 10_000 + number)
        await pair.send(packet)
        if number % 10 == 9:
            await asyncio.sleep(0.001)
    await until(lambda: pair.server.datagram_filter.dropped["sources"] > 100)
    receiver = pair.server._pc.getReceivers()[0]
    assert len(receiver._RTCRtpReceiver__remote_streams) <= MAX_SOURCES
    assert pair.server.state == "connected"


async def test_goodbye_does_not_wait_for_queued_pictures(pair):
    """aiortc joins its decoder thread on the event loop, after all queued pictures."""
    receiver, began, may_go_on = pair.server._pc.getReceivers()[0], threading.Event(), threading.Event()
    decoder: DecoderThread = receiver._RTCRtpReceiver__decoder_queue

    def decode(name: str, frame: JitterFrame) -> list[Any]:
        began.set()
        may_go_on.wait(30)
        return []

    decoder._decode = decode  # type: ignore[method-assign]
    kind = pair.kind("VP8")
    (key,) = packets(kind, Vp8Encoder().encode(picture(50), True)[0], 1, 1)
    await pair.send(key)
    await until(began.is_set)
    await pair.send(bytes(RtcpByePacket(sources=[SSRC])))
    await until(lambda: receiver._RTCRtpReceiver__decoder_thread is None)
    assert decoder._thread.is_alive()
    may_go_on.set()


def idle_decoder(clock: Callable[[], float], want: Callable[[], object] = lambda: None) -> DecoderThread:
    """Return a decoder whose thread never starts."""
    receiver: Any = SimpleNamespace(_RTCRtpReceiver__decoder_thread=None)
    return DecoderThread(receiver, lambda frame: None, lambda: None, want, clock=clock)


async def test_surplus_pictures_are_dropped_and_a_keyframe_is_requested():
    now, requests = 0.0, list[bool]()
    decoder = idle_decoder(lambda: now, lambda: requests.append(True))
    vp8, key = SimpleNamespace(name="VP8"), JitterFrame(b"\x10\x02\x00\x9d\x01\x2a\x80\x07\x38\x04" + b"x" * 100, 0)
    for _ in range(500):
        decoder.put((vp8, key))  # type: ignore[arg-type]
    assert decoder.qsize() <= DECODE_RATE[1]
    assert decoder.overrun + decoder.qsize() == 500
    assert requests
    for _ in range(300):  # At an allowed rate, while the decoder does not run.
        now += 1 / DECODE_RATE[0]
        decoder.put((vp8, key))  # type: ignore[arg-type]
        assert decoder.qsize() <= MAX_PENDING


async def test_stream_continues_at_a_keyframe_after_a_dropped_picture():
    now = 0.0
    decoder = idle_decoder(lambda: now)
    vp8 = SimpleNamespace(name="VP8")
    key = JitterFrame(b"\x10\x02\x00\x9d\x01\x2a\x10\x00\x10\x00", 0)  # 16x16
    built_on_it = JitterFrame(b"\x11\x02\x00", 0)
    decoder.put((vp8, key))  # type: ignore[arg-type]
    while not decoder.overrun:
        decoder.put((vp8, built_on_it))  # type: ignore[arg-type]
        assert decoder.qsize() <= 2 * DECODE_RATE[1]
    now, waiting = 10.0, decoder.qsize()
    for _ in range(2):
        decoder.put((vp8, built_on_it))  # type: ignore[arg-type]
    assert (decoder.overrun, decoder.qsize()) == (3, waiting)
    decoder.put((vp8, key))  # type: ignore[arg-type]
    decoder.put((vp8, built_on_it))  # type: ignore[arg-type]
    assert (decoder.overrun, decoder.qsize()) == (3, waiting + 2)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("VP8", b"\x10\x02\x00\x9d\x01\x2a\xff\x3f\xff\x3f"),
        ("H264", b"\0\0\1\x67\x42\0\x1f" + b"\0" * 9),
        ("H264", b"no start code first\0\0\1\x67\x42\0\x1f" + b"\0" * 9),
        ("H264", b"\0\0\1\x65" * 5000),
        ("H264", b"\0\0\1\x67\x42\xc0\x1f\xda\x01\x40\x16\xe8" * 3),
        ("opus", b"abc"),
    ],
)
async def test_picture_with_a_huge_claimed_size_is_not_decoded(name, data):
    decoder = idle_decoder(time.monotonic)
    decoder.put((SimpleNamespace(name=name), JitterFrame(data, 0)))  # type: ignore[arg-type]
    assert (decoder.oversize, decoder.qsize()) == (1, 0)


def test_jump_in_sequence_numbers_takes_bounded_time(monkeypatch):
    steps = []
    plain = aiortc.utils.uint16_add
    monkeypatch.setattr(aiortc.rtcrtpreceiver, "uint16_add", lambda a, b: steps.append(a) or plain(a, b))
    now = 0.0
    nacks = BoundedNacks(lambda: now)
    assert not nacks.add(RtpPacket(sequence_number=65_000))
    assert nacks.add(RtpPacket(sequence_number=30_000))
    assert nacks.missing == set(range(29_872, 30_000))
    assert len(steps) < 200
    assert not nacks.add(RtpPacket(sequence_number=30_002)), "the next report is due after 5 ms"
    assert not nacks.add(RtpPacket(sequence_number=29_990))
    now += 0.01
    assert nacks.add(RtpPacket(sequence_number=30_003))
    assert {29_999, 30_001} < nacks.missing
    assert 29_990 not in nacks.missing


async def test_retransmissions_are_once_per_packet_and_limited():
    asked: list[int] = []

    async def retransmit(packet: RtcpRtpfbPacket) -> None:
        asked.extend(packet.lost)

    sender = SimpleNamespace(_handle_rtcp_packet=retransmit)
    limit_retransmissions(sender)  # type: ignore[arg-type]
    await sender._handle_rtcp_packet(RtcpRtpfbPacket(fmt=1, ssrc=1, media_ssrc=2, lost=[7] * 5000 + [8]))
    assert asked == [7, 8]
    for _ in range(20):
        await sender._handle_rtcp_packet(RtcpRtpfbPacket(fmt=1, ssrc=1, media_ssrc=2, lost=list(range(6000))))
    assert len(asked) <= 2 * RETRANSMIT_RATE[1]


class Signals:
    """Stand-in for the server's API and connection that records signals only."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.rejoined: list[str] = []
        self.participant_id, self.workspace, self.kind = "server", "w", None
        self.presence = SimpleNamespace(producer="p", consumers=frozenset())
        self.timeouts = QUICK

    async def post_signal(self, workspace: str, room: str, sender: str, message: Any) -> None:
        self.sent.append(message)

    async def get_presence(self, *arguments: Any) -> Any:
        return self.presence

    def send(self, message: Any) -> None:
        """Accept the start of a stream."""

    def rejoin(self, reason: str) -> None:
        self.rejoined.append(reason)


@pytest.fixture
async def receiver():
    signals = Signals()
    inbox = SimpleNamespace(on_frame=lambda *each: None, on_joints=lambda *each: None, on_event=lambda event: None)
    made = CameraReceiver("front", "room", signals, inbox, ())  # type: ignore[arg-type]
    made.signals = signals  # type: ignore[attr-defined]
    task = asyncio.create_task(made.run(signals))  # type: ignore[arg-type]
    yield made
    assert not task.done(), task
    task.cancel()
    await asyncio.wait([task])


def offer_signal(sdp: str) -> WebrtcOffer:
    return WebrtcOffer({"type": "offer", "sdp": sdp}, "p")


async def test_few_of_a_thousand_offers_and_the_newest_are_answered(receiver, browser):
    offer = await offer_of(browser)
    for number in range(1000):
        receiver.on_message(offer_signal(offer.replace("s=-", f"s={number}")), 0.0)
        if number % 100 == 99:
            await asyncio.sleep(0.01)
    await until(lambda: receiver._pending_offer is None and receiver._signals.empty())
    answered = lambda: receiver.health()["offers"] - receiver.health()["refused_offers"]  # noqa: E731
    await until(lambda: answered() == len(receiver.signals.sent))
    assert len(receiver.signals.sent) <= ANSWER_RATE[1] + 4
    assert receiver.health()["refused_offers"] + receiver.health()["signals_dropped"] > 990
    assert "faster than" in receiver.health()["last_error"]
    receiver.on_message(offer_signal(offer), 0.0)
    count = len(receiver.signals.sent)
    await until(lambda: len(receiver.signals.sent) == count + 1)


async def test_incomplete_peer_is_closed_despite_continuous_signals(receiver, browser):
    offer = await offer_of(browser)
    receiver.on_message(offer_signal(offer), 0.0)
    await until(lambda: receiver._peer is not None)
    peer = receiver._peer
    opened = sockets_of(peer)
    assert opened

    async def send_signals() -> None:
        while True:
            receiver.on_message(WebrtcIce({"candidate": "candidate:x"}, from_producer="p"), 0.0)
            await asyncio.sleep(0.01)

    pestering = asyncio.create_task(send_signals())
    await until(lambda: receiver._peer is None, within=QUICK.connect + 10)
    pestering.cancel()
    await until(lambda: peer.state == "closed")
    assert all(protocol.transport.is_closing() for protocol in opened)
    await until(lambda: any("not connected within" in reason for reason in receiver.signals.rejoined))


async def test_oversized_signals_are_not_queued(receiver):
    receiver.on_message(offer_signal("x" * (MAX_SDP + 1)), 0.0)
    receiver.on_message(WebrtcIce({"candidate": "x" * 600}, from_producer="p"), 0.0)
    receiver.on_message(WebrtcIce({"candidate": "x", "more": ["y" * 10_000]}, from_producer="p"), 0.0)
    assert receiver._signals.qsize() == 1
    assert receiver._signals._queue[0].candidate == {"candidate": "x"}
    health = receiver.health()
    assert (health["refused_offers"], health["signals_dropped"]) == (1, 1)


async def test_number_of_viewers_of_a_camera_is_limited(monkeypatch):
    async def offer(self: PeerConnection, track: CameraTrack) -> str:
        return "v=0"

    monkeypatch.setattr(PeerConnection, "create_offer", offer)
    signals = Signals()
    sender = CameraSender(VideoCamera(25), "room", signals, (), lambda stop: None)  # type: ignore[arg-type]
    task = asyncio.create_task(sender.run(signals))  # type: ignore[arg-type]
    for number in range(50):
        sender.on_message(ParticipantJoined("room", f"viewer-{number}", ParticipantRole.CONSUMER), 0.0)
    await until(sender._signals.empty)
    assert len(sender._peers) == MAX_PEERS
    assert len(signals.sent) == MAX_PEERS
    assert f"{MAX_PEERS} viewers" in str(sender.health()["last_error"])
    task.cancel()
    await asyncio.wait([task])

"""ICE candidates: nothing is sent to addresses that cannot belong to a robot."""

import asyncio
from types import SimpleNamespace

import pytest
from aioice import ice
from aiortc import RTCPeerConnection

from service.transport.webrtc.decoding import FrameDecoder
from service.transport.webrtc.ice import explain_refused_address, split_candidates
from service.transport.webrtc.peer import PeerConnection


@pytest.mark.parametrize(
    ("host", "port"),
    [
        # Metadata services of clouds, multicast, broadcast, and unspecified addresses.
        *((host, 50000) for host in ("169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200")),
        *((host, 50000) for host in ("ff02::1", "255.255.255.255", "0.0.0.0", "::")),
        *((host, 50000) for host in ("metadata.google.internal", "2130706433")),
        *(("224.0.0.251", 5353), ("127.0.0.1", 53), ("192.168.1.7", 0), ("192.168.1.7", 70000)),
    ],
)
def test_a_candidate_with_an_unsafe_address_is_dropped(host: str, port: int) -> None:
    assert explain_refused_address(host, port) is not None
    line = f"a=candidate:1 1 udp 5 {host} {port} typ host"
    assert split_candidates(f"v=0\r\nm=video 9\r\n{line}\r\n") == ("v=0\r\nm=video 9\r\n", [])


@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.7", "10.0.0.1", "203.0.113.5", "fd12::7", "fe80::1%eth0"])
def test_a_candidate_with_a_possible_robot_address_is_used(host: str) -> None:
    assert explain_refused_address(host, 50000) is None


async def test_a_trickled_candidate_is_checked_in_the_same_way() -> None:
    peer, added = PeerConnection(()), []

    async def note(candidate) -> None:
        added.append(candidate.ip)

    peer._pc.addIceCandidate = note
    hosts = ("169.254.169.254", "192.168.1.7")
    for host in hosts:
        await peer._add_candidate({"candidate": f"candidate:1 1 udp 5 {host} 50000 typ host", "sdpMLineIndex": 0})
    assert added == ["192.168.1.7"]
    await peer.close()


@pytest.mark.parametrize(("address", "is_used"), [("169.254.169.254", False), ("10.255.255.7", True)])
async def test_the_address_of_an_mdns_name_is_checked_in_the_same_way(address, is_used, monkeypatch) -> None:
    """Any machine on the network may answer for a name of mDNS."""

    async def resolve(name: str) -> str:
        return address

    async def protocol(subscriber: object) -> SimpleNamespace:
        return SimpleNamespace(resolve=resolve, unsubscribe=lambda subscriber: None)

    monkeypatch.setattr(ice, "get_or_create_mdns_protocol", protocol)
    remote = RTCPeerConnection()
    remote.addTransceiver("video")
    await remote.setLocalDescription(await remote.createOffer())
    peer = PeerConnection(())
    try:
        named = "a=candidate:1 1 udp 5 abc.local 50000 typ host\r\na=end-of-candidates\r\n"
        offer = remote.localDescription.sdp.replace("a=end-of-candidates\r\n", named)
        assert named in offer
        await peer.answer_offer(offer, FrameDecoder(lambda image, at: None, lambda error: None))
        await asyncio.gather(*peer._adding)
        (connection,) = {
            item.receiver.transport.transport.iceGatherer._connection for item in peer._pc.getTransceivers()
        }
        found = {candidate._network_host for candidate in connection._remote_candidates}
        assert (address in found) is is_used
    finally:
        await peer.close()
        await remote.close()

"""Nothing is sent to addresses that are no robot's, whoever names them."""

import pytest

from service.transport.candidates import refusal, sorted_out
from service.transport.peer import Peer


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("169.254.169.254", 50000),
        ("::ffff:169.254.169.254", 50000),
        ("fd00:ec2::254", 50000),
        ("100.100.100.200", 50000),
        ("224.0.0.251", 5353),
        ("ff02::1", 50000),
        ("255.255.255.255", 50000),
        ("0.0.0.0", 50000),
        ("::", 50000),
        ("127.0.0.1", 53),
        ("192.168.1.7", 0),
        ("192.168.1.7", 70000),
        ("metadata.google.internal", 50000),
        ("2130706433", 50000),
    ],
)
def test_what_is_no_robots_address_is_not_tried(host: str, port: int) -> None:
    assert refusal(host, port) is not None
    line = f"a=candidate:1 1 udp 5 {host} {port} typ host"
    assert sorted_out(f"v=0\r\nm=video 9\r\n{line}\r\n") == ("v=0\r\nm=video 9\r\n", [])


@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.7", "10.0.0.1", "203.0.113.5", "fd12::7", "fe80::1%eth0"])
def test_what_may_be_a_robots_address_is_tried(host: str) -> None:
    assert refusal(host, 50000) is None


async def test_a_trickled_candidate_is_held_to_the_same() -> None:
    peer, added = Peer(()), []

    async def note(candidate) -> None:
        added.append(candidate.ip)

    peer._pc.addIceCandidate = note
    hosts = ("169.254.169.254", "192.168.1.7")
    for host in hosts:
        await peer._add({"candidate": f"candidate:1 1 udp 5 {host} 50000 typ host", "sdpMLineIndex": 0})
    assert added == ["192.168.1.7"]
    await peer.close()

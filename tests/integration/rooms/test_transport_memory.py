"""The transport without a network."""

import asyncio

import numpy as np
import pytest

from service.errors import InvalidRequest, TransportError
from service.transport.link import EmergencyStop, JointValue, Link, LinkDown, LinkUp, Transport
from tests.testing.doubles import MemoryTransport


def connect(transport: Transport, inbox, cameras=("front",), workspace_id=None, session_id="s"):
    return transport.connect("memory:", session_id=session_id, cameras=cameras, workspace_id=workspace_id, inbox=inbox)


async def test_a_session_gets_what_the_test_delivers_and_the_test_reads_what_it_sent(seen):
    transport = MemoryTransport(clock=lambda: 7.0)
    async with connect(transport, seen, workspace_id="w") as link:
        checked: Link = link
        assert checked.rooms.cameras == {"front": "s-front"}
        assert transport.existing == {"w/s-front", "w/s-joint-input", "w/s-joint-output"}
        assert seen.events == [LinkUp("s-front"), LinkUp("s-joint-input"), LinkUp("s-joint-output")]
        image = np.zeros((2, 3, 3), np.uint8)
        transport.link.deliver_frame("front", image)
        transport.link.deliver_joints({"Jaw": 4.0}, observed_at=6.5)
        transport.link.deliver_emergency_stop("smoke", "operator")
        assert seen.frames == [("front", image, 7.0)]
        assert (seen.poses, seen.posed_at) == ([{"Jaw": 4.0}], [6.5])
        assert seen.events[-1] == EmergencyStop("smoke", "operator")
        assert link.send([JointValue("Jaw", 3.0, 5)])
        assert transport.link.sent[0].values == {"Jaw": 3.0}
        assert transport.link.sent[0].at == 7.0
    assert transport.link.is_closed
    assert transport.existing == set()
    assert not link.send([JointValue("Jaw", 3.0)])


async def test_nothing_is_sent_while_the_output_room_is_down_or_choked(seen):
    transport = MemoryTransport()
    async with connect(transport, seen) as link:
        transport.link.go_down("s-joint-output", "killed")
        assert seen.events[-1] == LinkDown("s-joint-output", "killed")
        assert not link.send([JointValue("Jaw", 1.0)])
        transport.link.come_up()
        assert seen.events[-1] == LinkUp("s-joint-output")
        assert link.send([JointValue("Jaw", 2.0)])
        transport.link.is_choked = True
        assert not link.send([JointValue("Jaw", 3.0)])
        assert [sent.values["Jaw"] for sent in transport.link.sent] == [2.0]
        assert link.health()["commands_refused"] == 2


async def test_a_connection_that_fails_leaves_nothing_behind(seen):
    transport = MemoryTransport()
    transport.refuse = TransportError("no server at memory:")
    with pytest.raises(TransportError, match="no server"):
        async with connect(transport, seen):
            pass
    assert transport.existing == set()
    with pytest.raises(LookupError):
        _ = transport.link


async def test_connecting_waits_at_the_gate(seen):
    transport = MemoryTransport()
    transport.gate = gate = asyncio.Event()

    async def enter():
        async with connect(transport, seen):
            return "in"

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    assert not transport.links
    gate.set()
    assert await entering == "in"


@pytest.mark.parametrize(
    ("cameras", "why"),
    [
        *[((name,), "cannot name a room") for name in ("", "a/b", "a b", "..", "ä", "x" * 65)],
        (("front", "front"), "its own id"),
        (("joint-input",), "its own id"),
    ],
)
async def test_names_that_make_no_room_ids_of_their_own_are_refused(seen, cameras, why):
    with pytest.raises(InvalidRequest, match=why):
        async with connect(MemoryTransport(), seen, cameras=cameras):
            pass


async def test_delivering_for_an_unknown_camera_is_an_error_of_the_test(seen):
    transport = MemoryTransport()
    async with connect(transport, seen):
        with pytest.raises(KeyError, match="front"):
            transport.link.deliver_frame("wrist", np.zeros((1, 1, 3), np.uint8))

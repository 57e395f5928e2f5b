"""The transport without a network."""

import asyncio

import numpy as np
import pytest

from service.errors import InvalidRequest, TransportError
from service.transport.base import EmergencyStop, JointValue, Link, LinkDown, LinkUp, Transport
from service.transport.memory import MemoryTransport


class Seen:
    def __init__(self):
        self.frames, self.joint_updates, self.events = [], [], []

    def frame(self, camera, image, seen_at):
        self.frames.append((camera, image, seen_at))

    def joints(self, values, seen_at):
        self.joint_updates.append((values, seen_at))

    def event(self, event):
        self.events.append(event)


def connect(transport: Transport, inbox, cameras=("front",), workspace_id=None, session_id="s"):
    return transport.connect("memory:", session_id=session_id, cameras=cameras, workspace_id=workspace_id, inbox=inbox)


async def test_a_session_gets_what_the_test_delivers_and_the_test_reads_what_it_sent():
    transport, seen = MemoryTransport(clock=lambda: 7.0), Seen()
    async with connect(transport, seen, workspace_id="w") as link:
        checked: Link = link
        assert checked.rooms.cameras == {"front": "s-front"}
        assert transport.existing == {"w/s-front", "w/s-joint-input", "w/s-joint-output"}
        assert seen.events == [LinkUp("s-front"), LinkUp("s-joint-input"), LinkUp("s-joint-output")]
        image = np.zeros((2, 3, 3), np.uint8)
        transport.link.deliver_frame("front", image)
        transport.link.deliver_joints({"Jaw": 4.0}, seen_at=6.5)
        transport.link.deliver_emergency_stop("smoke", "operator")
        assert seen.frames == [("front", image, 7.0)]
        assert seen.joint_updates == [({"Jaw": 4.0}, 6.5)]
        assert seen.events[-1] == EmergencyStop("smoke", "operator")
        assert link.send([JointValue("Jaw", 3.0, 5)])
        assert transport.link.sent[0].values == {"Jaw": 3.0}
        assert transport.link.sent[0].at == 7.0
    assert transport.link.is_closed
    assert transport.existing == set()
    assert not link.send([JointValue("Jaw", 3.0)])


async def test_nothing_is_sent_while_the_output_room_is_down_or_choked():
    transport, seen = MemoryTransport(), Seen()
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


async def test_a_connection_that_fails_leaves_nothing_behind():
    transport = MemoryTransport()
    transport.refuse = TransportError("no server at memory:")
    with pytest.raises(TransportError, match="no server"):
        async with connect(transport, Seen()):
            pass
    assert transport.existing == set()
    with pytest.raises(LookupError):
        _ = transport.link


async def test_connecting_waits_at_the_gate():
    transport = MemoryTransport()
    transport.gate = gate = asyncio.Event()

    async def enter():
        async with connect(transport, Seen()):
            return "in"

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    assert not transport.links
    gate.set()
    assert await entering == "in"


@pytest.mark.parametrize("camera", ["", "a/b", "a b", "..", "ä", "x" * 65])
async def test_a_name_that_cannot_stand_in_a_url_is_refused(camera):
    with pytest.raises(InvalidRequest, match="cannot name a room"):
        async with connect(MemoryTransport(), Seen(), cameras=(camera,)):
            pass


@pytest.mark.parametrize("cameras", [("front", "front"), ("joint-input",)])
async def test_two_rooms_never_share_an_id(cameras):
    with pytest.raises(InvalidRequest, match="its own id"):
        async with connect(MemoryTransport(), Seen(), cameras=cameras):
            pass


async def test_delivering_for_an_unknown_camera_is_an_error_of_the_test():
    transport = MemoryTransport()
    async with connect(transport, Seen()):
        with pytest.raises(KeyError, match="front"):
            transport.link.deliver_frame("wrist", np.zeros((1, 1, 3), np.uint8))

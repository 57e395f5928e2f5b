"""Hostile messages of a joint room: only finite values are accepted, and missing values are never filled in."""

import ast
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.control.joints import SO100, JointTable
from service.control.observation_buffer import ObservationBuffer
from service.transport.client.joint_rooms import JointInputListener
from service.transport.link import BadInput, LinkEvent, Rooms
from service.transport.protocol import WireError, parse_message

NAMES = [name for joint in SO100 for name in (joint.name, joint.alias)]
POSE = {joint.name: 7.0 + position for position, joint in enumerate(SO100)}
# Numbers as text on the wire; some of them are not valid JSON.
NUMBERS = st.one_of(
    st.floats(-1e3, 1e3).map(repr),
    st.floats().map(repr),
    st.integers(-(10**400), 10**400).map(str),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e39", "null", "true", '"3"', '"NaN"', "[]"]),
)
JOINTS = st.builds(
    lambda name, value: "{" + ", ".join(part for part in (name, value) if part) + "}",
    st.one_of(
        st.none(),
        st.one_of(st.sampled_from(NAMES), st.text(max_size=5)).map(lambda name: f'"name": {json.dumps(name)}'),
    ),
    st.one_of(st.none(), NUMBERS.map(lambda value: f'"value": {value}')),
)
FRAMES = st.one_of(
    st.lists(JOINTS, max_size=4).map(lambda joints: f'{{"type": "joint_update", "data": [{", ".join(joints)}]}}'),
    st.text(max_size=40),
)


class Robot:
    """Inbox of a session without its control loop."""

    def __init__(self) -> None:
        self.buffer = ObservationBuffer((), JointTable(SO100))
        self.buffer.put_joints(POSE, 0.0)
        self.room = JointInputListener(Rooms("w"), None, self)  # type: ignore[arg-type]

    def receive(self, frame: str) -> None:
        """Handle a frame as the reader of the socket does."""
        try:
            message = parse_message(frame)
        except WireError:
            self.room.on_malformed()
            return
        self.room.on_message(message, 1.0)

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None: ...

    def on_joints(self, values: Mapping[str, float], observed_at: float) -> None:
        self.buffer.put_joints(values, observed_at)

    def on_event(self, event: LinkEvent) -> None:
        if isinstance(event, BadInput):
            self.buffer.refuse_joints(event.reasons)


@settings(max_examples=2000)
@given(FRAMES)
def test_only_finite_values_of_known_joints_get_in(frame: str) -> None:
    robot = Robot()
    robot.receive(frame)
    after = robot.buffer.measured_joints()
    for joint in SO100:
        value = after[joint.name]
        assert value is not None
        assert math.isfinite(value)
        if f'"{joint.name}"' not in frame and f'"{joint.alias}"' not in frame:
            assert value == POSE[joint.name], "a joint that is not in the message keeps its value"
    if robot.buffer.joint_updates.count == 1:
        assert after == POSE, "a message without usable values changes nothing"
        assert robot.buffer.dropped.total or '"data": []' in frame or "joint_update" not in frame


@pytest.mark.parametrize(
    ("data", "dropped", "elbow"),
    [
        ('{"name": "Elbow", "value": NaN}', {"malformed": 1}, 9.0),
        ('{"name": "Elbow", "value": 1e999}', {"malformed": 1}, 9.0),
        ('{"name": "Elbow"}', {"malformed": 1}, 9.0),
        ('{"name": "Elbow", "value": 1e300}', {"not_finite": 1}, 9.0),
        ('{"name": "Elbow", "value": 1}, {"name": "Elbow", "value": 2}', {"contradicting": 1}, 9.0),
        ('{"name": "Elbow", "value": 1}, {"name": "elbow_flex", "value": 2}', {"contradicting": 1}, 9.0),
        ('{"name": "Elbow", "value": 1}, {"name": "Elbow", "value": 1.0}', {}, 1.0),
        ('{"name": "Elbow", "value": 1}, {"name": "Tail", "value": 1}', {"unknown_joint": 1}, 1.0),
        ('{"name": "elbow_flex.pos", "value": 1}, {"name": "elbow_flex.vel", "value": 2}', {"unknown_joint": 1}, 1.0),
        ('{"name": "Elbow", "value": 1}, {"name": "elbow_flex.pos", "value": 2}', {"contradicting": 1}, 9.0),
    ],
)
def test_each_kind_of_bad_value_is_counted_by_its_reason(data: str, dropped: dict[str, int], elbow: float) -> None:
    robot = Robot()
    robot.receive(f'{{"type": "joint_update", "data": [{data}]}}')
    assert robot.buffer.dropped.by_reason() == dropped
    assert robot.buffer.measured_joints() == POSE | {"Elbow": elbow}


# Packages and modules that decide about motion or deliver its inputs.
DECIDING = (
    *("control", "inference", "transport", "transport/client", "transport/server", "transport/webrtc"),
    *("sessions/session", "rollout/gates", "stage", "threads"),
)


def test_decisions_about_motion_use_a_monotonic_clock() -> None:
    service = Path(__file__).parents[3] / "service"
    files = [path for name in DECIDING for path in [*service.glob(f"{name}.py"), *service.glob(f"{name}/*.py")]]
    assert len(files) > 30
    jumping = [
        f"{path.relative_to(service)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "datetime.now", "datetime.utcnow")
        # The timestamps on the wire are for people. The server never reads them.
        and path.parts[-2:] != ("server", "websocket.py")
    ]
    assert jumping == []

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.joints import SO100, Joint, JointTable, create_joint_table
from service.errors import InvalidRequest, PolicyError

WIRE = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
STANDARD = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


@pytest.mark.parametrize(
    ("sent", "values"),
    [
        (dict(zip(WIRE, range(6), strict=True)), {position: position for position in range(6)}),
        (dict(zip(STANDARD, range(6), strict=True)), {position: position for position in range(6)}),
        ({"Jaw": 3, "gripper": 3}, {5: 3}),
        # Contradicting values are dropped.
        ({"Jaw": 3, "gripper": 4}, {}),
        ({"Jaw": 3, "gripper": 4, "gripper.pos": 4, "Pitch": 1}, {1: 1}),
    ],
)
def test_both_sets_of_so100_names_are_accepted(sent: dict[str, float], values: dict[int, float]) -> None:
    update = JointTable(SO100).read_update(sent)
    assert update.values == values
    assert bool(update.dropped) is (5 not in values)


def test_commands_use_wire_names_and_indices_and_stay_within_range() -> None:
    commands = JointTable(SO100).to_commands(np.array([-150, 150, 0.5, 1, 2, -3], np.float32))
    assert [(command.name, command.index) for command in commands] == list(zip(WIRE, range(6), strict=True))
    assert [command.value for command in commands] == [-100, 100, 0.5, 1, 2, 0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((value, "not_finite") for value in (math.nan, math.inf, -math.inf, 1e300, 10**400)),
        *((value, "not_a_number") for value in ("1", None, True, [1])),
    ],
)
def test_values_that_are_not_finite_numbers_are_dropped_and_counted(value: object, reason: str) -> None:
    update = JointTable(SO100).read_update({"Jaw": value, "Pitch": 4})
    assert update.values == {1: 4}
    assert update.dropped == {reason: 1}


def test_values_outside_the_range_are_kept_as_measured_and_sent() -> None:
    update = JointTable(SO100).read_update({"Jaw": -4.0, "Pitch": 120.5, "Elbow": 100, "Rotation": -115})
    assert update.values == {5: -4, 1: 120.5, 2: 100, 0: -115}
    assert update.out_of_range == {1: 120.5}, "the value is outside by more than a tenth of the range"
    pose = np.array([-115, 103, 0, 0, 0, -2], np.float32)
    commands = JointTable(SO100).to_commands(np.array([-130, 102, 150, -115, 1, -2], np.float32), pose)
    assert [command.value for command in commands] == [-115, 102, 100, -100, 1, -2]


@pytest.mark.parametrize(
    ("names", "sent", "position"),
    [
        (("left_elbow.pos", "right_elbow.pos"), "left_elbow", 0),
        (("left_elbow", "right_elbow"), "right_elbow.pos", 1),
        (("elbow", "elbow.pos"), "elbow.pos", 1),  # An exact name wins.
        (("elbow", "elbow.pos"), "main_elbow", None),  # It could mean either joint.
        (("main_elbow", "wrist"), "elbow.pos", 0),
        (("elbow", "wrist"), "elbow.vel", None),
    ],
)
def test_joints_are_found_by_lerobots_spellings(names: tuple[str, ...], sent: str, position: int | None) -> None:
    table = JointTable([Joint(name, index) for index, name in enumerate(names)])
    assert table.find(sent) == position
    assert table.read_update({sent: 2.0}).values == ({} if position is None else {position: 2.0})
    assert table.names == names


@pytest.mark.parametrize("bad", [[0, 0, 0, 0, 0, math.nan], [0, math.inf, 0, 0, 0, 0], [0] * 5, [[0] * 6]])
def test_a_command_that_is_not_finite_or_misshaped_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="command has"):
        JointTable(SO100).to_commands(np.array(bad, np.float32))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=6, max_size=6))
def test_any_finite_command_is_limited_to_its_range(values: list[float]) -> None:
    for joint, command in zip(SO100, JointTable(SO100).to_commands(np.array(values, np.float32)), strict=True):
        assert joint.low <= command.value <= joint.high


@given(st.dictionaries(st.sampled_from([*WIRE, *STANDARD, "x"]), st.floats() | st.integers() | st.text() | st.none()))
def test_only_finite_values_are_kept_and_stay_unchanged(values: dict[str, object]) -> None:
    update = JointTable(SO100).read_update(values)
    for position, value in update.values.items():
        assert math.isfinite(value)
        assert value in [values.get(name or "") for name in (SO100[position].name, SO100[position].alias)]
    assert len(update.values) + sum(update.dropped.values()) <= len(values) + len(WIRE)


@pytest.mark.parametrize("width", [6, 14])
def test_joints_without_names_are_refused(width: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"send {width} names in the order .*\[\"shoulder_pan\", ") as error:
        create_joint_table(width)
    assert error.value.loc == ("body", "joint_names")
    assert "robojax.json" in str(error.value)


def test_actions_by_position_are_numbered_and_have_no_ranges() -> None:
    table = create_joint_table(6, is_positional=True)
    assert table.names == tuple(f"action_{number}" for number in range(1, 7))
    assert table.to_commands(np.full(6, 1e6, np.float32))[5].value == 1e6
    assert create_joint_table(6, requested=STANDARD, is_positional=True).names == WIRE


@pytest.mark.parametrize("spelling", ["{}", "{}.pos", "main_{}"])
def test_a_checkpoint_may_spell_and_order_so100_names_freely(spelling: str) -> None:
    names = [spelling.format(name) for name in STANDARD]
    assert create_joint_table(6, checkpoint=names).names == WIRE
    command = create_joint_table(6, checkpoint=[names[5], *names[:5]]).to_commands(np.full(6, 55, np.float32))[0]
    assert (command.name, command.value, command.index) == ("Jaw", 55, 5)


def test_joint_names_come_from_the_checkpoint_or_the_request() -> None:
    assert create_joint_table(2, checkpoint=["a", "b"]).names == ("a", "b")
    assert create_joint_table(2, requested=["c", "d"]).names == ("c", "d")
    assert create_joint_table(2, checkpoint=["a", "b"], requested=["a", "b"]).names == ("a", "b")
    assert create_joint_table(6, checkpoint=STANDARD, requested=WIRE).names == WIRE
    with pytest.raises(InvalidRequest, match="differ from the checkpoint's") as error:
        create_joint_table(2, checkpoint=["a", "b"], requested=["b", "a"])
    assert error.value.loc == ("body", "joint_names")


@pytest.mark.parametrize(
    ("names", "grippers"),
    [
        (WIRE, {"Jaw"}),
        (["waist", "wrist_rotate", "left_gripper.pos"], {"left_gripper.pos"}),
        (["leftArm", "leftGripper", "panda_finger_joint1"], {"leftGripper", "panda_finger_joint1"}),
        (["joint_1", "joint_2"], set()),
    ],
)
def test_grippers_are_recognized_by_their_names(names: Sequence[str], grippers: set[str]) -> None:
    table = create_joint_table(len(names), checkpoint=names)
    assert {name for name, holds in zip(table.names, table.grippers, strict=True) if holds} == grippers


def test_ranges_are_set_by_joint_name_and_must_not_be_empty() -> None:
    table = create_joint_table(2, requested=["a", "b"], ranges={"b": (-1, 1)})
    assert [command.value for command in table.to_commands(np.array([5, 5], np.float32))] == [5, 1]
    with pytest.raises(ValueError, match="is empty"):
        Joint("a", 0, 1, 1)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", ""], ["a", "x" * 51], ["a", "b\n"], ["a", "\x1b[31m"]])
def test_names_that_do_not_fit_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        create_joint_table(2, requested=names)
    assert error.value.loc == ("body", "joint_names")
    with pytest.raises(PolicyError):
        create_joint_table(2, checkpoint=names)

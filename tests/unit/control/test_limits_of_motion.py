"""Motion limits: their sources, their order of precedence, and the errors for invalid limits."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from service.control.config import SafetySettings
from service.control.joints import SO100, Joint, JointTable, create_joint_table
from service.control.limits import FileLimits, LimitsError, MotionLimits, create_motion_limits, read_limits
from service.errors import InvalidRequest
from service.sessions.compatibility import make_limits
from service.sessions.policy_slots import list_differences
from service.sessions.request import NewSession, SessionSettings
from service.setting_types import SettingsError
from service.settings import load_settings
from tests.testing.doubles import SO100_REQUIREMENTS

TABLE = JointTable(SO100)
UNKNOWN = create_joint_table(3, requested=["waist", "elbow", "finger"])
GUIDE = Path(__file__).parents[3] / "docs" / "robots" / "safety.md"
URDF = """<?xml version="1.0"?>
<robot name="two">
  <link name="base"/>
  <joint name="waist" type="revolute"><limit lower="-3.1" upper="3.1" velocity="2.0" effort="9"/></joint>
  <joint name="wheel" type="continuous"><limit velocity="7" effort="1"/></joint>
  <joint name="plate" type="fixed"/>
  <joint name="finger" type="prismatic"><limit lower="0.02" upper="0.06" velocity="1" effort="1"/></joint>
</robot>"""


def write(folder: Path, text: str, name: str = "limits.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def limits_of(limits: MotionLimits, joint: str) -> dict[str, object]:
    return limits.as_json()[joint]


def test_without_any_setting_the_joint_table_limits_known_joints() -> None:
    limits = create_motion_limits(TABLE)
    assert (limits.mode, limits.unlimited) == ("clamp", [])
    found = limits_of(limits, "Jaw")
    assert (found["low"], found["high"], found["velocity"], found["step"]) == (0, 100, 400, None)
    assert found["origin"] == "joint table"
    json.dumps(limits.as_json(), allow_nan=False)
    # A step limits the motion of an unknown joint but not its position.
    for requested, origin in ((None, "none"), (0.1, "request")):
        limits = create_motion_limits(UNKNOWN, requested=requested)
        assert limits.unlimited == ["waist", "elbow", "finger"]
        assert limits_of(limits, "waist")["origin"] == origin


def test_the_range_of_a_checkpoint_is_used_only_for_unknown_joints() -> None:
    data = ((-1.0, 0.0, 0.5), (1.0, 0.0, 0.6))
    limits = create_motion_limits(UNKNOWN, action_range=data)
    # A joint that hardly moved in the data gets a small range.
    for joint, low, high in (("waist", -1.5, 1.5), ("elbow", -0.1, 0.1)):
        assert (limits_of(limits, joint)["low"], limits_of(limits, joint)["high"]) == (low, high)
    assert limits_of(limits, "waist")["origin"] == "checkpoint"
    assert limits.unlimited == []
    known = create_motion_limits(TABLE, action_range=((-1.0,) * 6, (1.0,) * 6))
    assert np.array_equal(known.high, create_motion_limits(TABLE).high)
    for nonsense in (((0.0,) * 3, (0.0,) * 3), ((0.0,), (1.0,)), ((math.nan,) * 3, (1.0,) * 3)):
        assert create_motion_limits(UNKNOWN, action_range=nonsense).unlimited


def test_a_policy_with_another_action_range_may_take_over() -> None:
    current = SimpleNamespace(requirements=SO100_REQUIREMENTS)
    candidate = SimpleNamespace(requirements=replace(SO100_REQUIREMENTS, action_range=((0.0,) * 6, (1.0,) * 6)))
    assert list_differences(current, candidate) == []  # type: ignore[arg-type]
    candidate.requirements = replace(candidate.requirements, chunk=7)
    assert list_differences(current, candidate) == ["chunk: the session has 20, the new policy needs 7"]  # type: ignore[arg-type]


def test_the_smallest_step_applies_and_names_its_source() -> None:
    file = {"elbow_flex": FileLimits(step=3.0, origin="arm.toml")}
    settings, requested = SafetySettings(max_relative_target=5.0), {"shoulder_pan": 9.0, "gripper": 2.0}
    limits = create_motion_limits(TABLE, settings, file=file, requested=requested)
    steps = {name: limits_of(limits, name)["step"] for name in TABLE.names}
    assert steps == {"Rotation": 5, "Pitch": 5, "Elbow": 3, "Wrist_Pitch": 5, "Wrist_Roll": 5, "Jaw": 2}
    assert limits_of(limits, "Elbow")["origin"] == "arm.toml, joint table"
    assert limits_of(limits, "Jaw")["origin"] == "request, joint table"
    assert limits_of(limits, "Pitch")["origin"] == "settings, joint table"


@pytest.mark.parametrize("wrong", [{"elbow": 1.0, "knee": 1.0}, {"Rotation": 1.0, "shoulder_pan": 2.0}, 0.0, math.nan])
def test_a_step_for_an_unknown_joint_or_of_zero_is_refused(wrong: object) -> None:
    new = NewSession("s", "p", "memory://", max_relative_target=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"max_relative_target|two values") as caught:
        make_limits(TABLE, SO100_REQUIREMENTS, new, SessionSettings())
    if isinstance(wrong, dict) and "knee" in wrong:
        assert "'elbow', 'knee'" in str(caught.value)
        assert caught.value.loc == ("body", "max_relative_target")


def test_a_file_narrows_the_range_of_the_table_and_cannot_widen_it(tmp_path: Path) -> None:
    path = write(tmp_path, "[joints.Rotation]\nlow = -30\nhigh = 400\nvelocity = 40\n[joints.knee]\nstep = 1")
    limits = create_motion_limits(TABLE, file=read_limits(path))
    found = limits_of(limits, "Rotation")
    assert (found["low"], found["high"], found["velocity"]) == (-30, 100, 40)
    assert limits.unmatched == ("knee",)
    with pytest.raises(InvalidRequest, match=r"'limits.toml', joint 'Jaw': found -9.0..-1.0; .* 0..100"):
        create_motion_limits(TABLE, file=read_limits(write(tmp_path, "[joints.gripper]\nlow = -9\nhigh = -1")))
    twice = write(tmp_path, "[joints.gripper]\nstep = 9\n[joints.Jaw]\nstep = 1")
    with pytest.raises(InvalidRequest, match="'Jaw' is there twice"):
        create_motion_limits(TABLE, file=read_limits(twice))


def test_a_urdf_limits_joints_by_name_unless_the_units_differ(tmp_path: Path) -> None:
    file = read_limits(write(tmp_path, URDF, "two.urdf"))
    limits = create_motion_limits(UNKNOWN, file=file)
    unlimited = dict.fromkeys(("step", "acceleration", "jerk"))
    assert limits_of(limits, "waist") == unlimited | {"low": -3.1, "high": 3.1, "velocity": 2.0, "origin": "two.urdf"}
    assert limits.unlimited == ["elbow"]
    assert limits.unmatched == ("wheel",)
    assert file["wheel"].velocity == 7
    file = read_limits(write(tmp_path, URDF.replace('"waist"', '"shoulder_pan"'), "so.urdf"))
    with pytest.raises(InvalidRequest, match=r"'so.urdf', joint 'Rotation': a URDF counts in radians.*scale"):
        create_motion_limits(TABLE, file=file)


def test_a_toml_file_scales_and_extends_the_limits_of_a_urdf(tmp_path: Path) -> None:
    write(tmp_path, URDF, "two.urdf")
    path = write(
        tmp_path,
        '[urdf]\nfile = "two.urdf"\nscale = 10\n[joints.waist]\njerk = 9\n'
        '[joints.Jaw]\nurdf = "finger"\nscale = -2500\noffset = 150\nvelocity = 60',
    )
    file = read_limits(path)
    assert file["waist"] == FileLimits(-31, 31, velocity=20, jerk=9, origin="limits.toml")
    assert file["Jaw"] == FileLimits(0, 100, velocity=60, origin="limits.toml")
    assert "finger" not in file
    assert limits_of(create_motion_limits(TABLE, file=file), "Jaw")["velocity"] == 60


WRONG = {
    "[joints.a]\nlow = 3\nhigh = 1\nstep = 0": ("found low 3 and high 1", "found step 0; wanted more than 0"),
    "[joints.a]\nspeed = 3\n[joints.b]\nlow = true": ("joint 'a': found 'speed'", "joint 'b': low: found True"),
    "[joints.a]\nvelocity = nan\njerk = inf": ("velocity: found nan", "jerk: found inf"),
    '[joints.a]\nurdf = "b"': ("found no joint 'b'",),
    "[joint.a]\nlow = 1": ("found 'joint'; wanted 'joints'",),
    "joints = 3": ("wanted tables [joints.NAME]",),
    "[joints]\na = 3": ("joint 'a': found 3",),
    "": ("found no joint",),
    "[joints.a": ("wanted a TOML file",),
    'urdf = "nowhere.urdf"': ("nowhere.urdf", "No such file"),
    "urdf = 3": ("found urdf = 3",),
    '[urdf]\nfile = "two.urdf"\nunits = "deg"': ("found 'units'",),
    '[urdf]\nfile = "two.urdf"\nscale = 0': ("found scale 0",),
}


@pytest.mark.parametrize("text", WRONG)
def test_one_error_names_all_faults_of_a_limits_file(tmp_path: Path, text: str) -> None:
    write(tmp_path, URDF, "two.urdf")
    with pytest.raises(LimitsError) as caught:
        read_limits(write(tmp_path, text))
    assert str(caught.value).startswith("limits file '")
    for words in WRONG[text]:
        assert words in str(caught.value)


BOMB = '<!DOCTYPE r [<!ENTITY a "x"><!ENTITY b "&a;&a;">]><robot><joint name="&b;" type="revolute"/></robot>'
BAD_XML = {
    "entities": (BOMB, "document type or an entity"),
    "a fetched entity": ('<!DOCTYPE r SYSTEM "file:///etc/passwd"><robot/>', "document type or an entity"),
    "not closed": ("<robot><joint>", "wanted a URDF"),
    "too deep": ("<a>" * 1000, "too deep"),
    "no joint": ("<robot/>", "found no joint"),
    "ends swapped": (URDF.replace('"3.1"', '"-4"'), "lower -3.1 and upper -4"),
    "no ends": (URDF.replace('lower="-3.1" upper="3.1"', ""), "lower 0 and upper 0"),
    "words": (URDF.replace('"2.0"', '"fast"'), "found velocity 'fast'"),
    "no speed": (URDF.replace('"2.0"', '"0"'), "found velocity 0"),
    "twice": (URDF.replace('"wheel"', '"waist"'), "joint 'waist': found it twice"),
    "too large": ("<robot>" + " " * (5 << 20), "more than 4 MiB"),
}


@pytest.mark.parametrize("kind", BAD_XML)
def test_an_invalid_or_unsafe_urdf_is_refused(tmp_path: Path, kind: str) -> None:
    text, words = BAD_XML[kind]
    with pytest.raises(LimitsError, match=re.escape(words)):
        read_limits(write(tmp_path, text, "bad.urdf"))


def test_the_server_does_not_start_with_an_invalid_limits_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "[joints.Jaw]\nlow = 3\nhigh = 1")
    with pytest.raises(SettingsError, match=r"limits \(flag --limits\): limits file 'limits.toml': joint 'Jaw'"):
        load_settings({"limits": str(path)})
    settings = load_settings({"max_relative_target": '{"Jaw": 4}', "on_hold": "ramp"})
    assert (settings.safety.max_relative_target, settings.safety.on_hold) == ({"Jaw": 4.0}, "ramp")
    assert load_settings({"max_relative_target": "2.5"}).safety.max_relative_target == 2.5
    with pytest.raises(SettingsError, match="max_relative_target"):
        load_settings({"max_relative_target": "0"})


def test_the_examples_of_the_guide_are_valid(tmp_path: Path) -> None:
    so101, aloha = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    limits = create_motion_limits(TABLE, file=read_limits(write(tmp_path, so101)))
    assert (limits_of(limits, "Rotation")["acceleration"], limits_of(limits, "Jaw")["step"]) == (600, 8)
    assert limits.unmatched == ()
    urdf = URDF.replace('"waist"', '"left_waist"').replace('"finger"', '"left_finger"')
    write(tmp_path, urdf, "aloha.urdf")
    names = [f"{side}_{joint}" for side in ("left", "right") for joint in ("waist", "a", "b", "c", "d", "e", "gripper")]
    table = JointTable([Joint(name, index) for index, name in enumerate(names)])
    limits = create_motion_limits(table, file=read_limits(write(tmp_path, aloha)))
    assert limits_of(limits, "left_waist")["high"] == 3.1
    assert limits_of(limits, "left_waist")["velocity"] == 1.5
    assert (limits_of(limits, "left_gripper")["low"], limits_of(limits, "left_gripper")["step"]) == (0.15, 0.2)
    assert "right_waist" in limits.unlimited

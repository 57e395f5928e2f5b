"""Comparison of a policy with an arm: joints, units and rate, without access to the arm or the server."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robojax.robot.arm import GRIPPER, JOINTS, JointRanges, normalize_joint_name

PERCENT_LIMIT = 101.0  # largest recorded value of a joint in -100..100 of its range, with rounding
SATURATED = 99.5  # largest value from which on a joint seems to be clipped at 100, which degrees are not
RADIANS_LIMIT = 3.3  # largest value of a joint in radians
RANGE_TOLERANCE = 1.1  # share of the range that the demonstrations may reach
SLACK = 0.95  # share of a rate that counts as this rate
STATISTICS = "look at min and max in the dataset's meta/stats.json: a joint beyond 100 or -100 means degrees"


@dataclass(frozen=True)
class RobotFinding:
    """Result of one check.

    Attributes:
        level: ok, warn or fail.
        fix: advice; "" without one.
    """

    name: str
    level: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class PolicyFit:
    """Answer of POST /policies/check: what a policy needs, and whether the server would take it.

    Attributes:
        joint_names: names of the actions in order, from the server or else the checkpoint; None if both lack them.
        is_named: whether the checkpoint names its joints.
        action_range: lowest and highest values of the actions in training, in the order of the actions; None if the
            checkpoint lacks them.
        trained_rate: actions per second in the checkpoint; None if it is missing.
        rate: actions per second of a session.
    """

    fits: bool
    misfits: tuple[str, ...]
    policy_type: str
    camera_names: tuple[str, ...]
    width: int
    controls_joints: bool
    joint_names: tuple[str, ...] | None
    is_named: bool
    action_range: tuple[Sequence[float], Sequence[float]] | None
    trained_rate: float | None
    rate: float | None


def read_policy_fit(answer: Mapping[str, Any]) -> PolicyFit:
    """Parse the answer of POST /policies/check."""
    needs = answer["requirements"]
    names, own = answer.get("joint_names"), needs.get("joint_names")
    ranges = needs.get("action_range")
    return PolicyFit(
        fits=answer["fits"],
        misfits=tuple(answer["misfits"]),
        policy_type=answer["policy_type"],
        camera_names=tuple(answer["camera_names"]),
        width=needs["action"],
        controls_joints=needs.get("controls_joints", True),
        joint_names=tuple(names or own) if names or own else None,
        is_named=bool(own),
        action_range=None if ranges is None else (ranges[0], ranges[1]),
        trained_rate=needs.get("rate"),
        rate=answer.get("rate") or needs.get("rate"),
    )


def suggest_cameras(fit: PolicyFit) -> str:
    """Return advice for a policy that the server refuses."""
    return (
        f"its cameras are {', '.join(fit.camera_names) or 'none'}: use these names in --robot.cameras, or give "
        "--rename POLICYS_NAME=YOURS"
        if any("camera" in text for text in fit.misfits)
        else "robojax check POLICY says what it needs"
    )


def compare_joints(fit: PolicyFit, given: Sequence[str] | None, joints: Sequence[str] = (*JOINTS,)) -> RobotFinding:
    """Compare the policy's joints with the arm's; ``given`` are the names in ``--policy.joint_names``."""
    arm, names = ", ".join(joints), fit.joint_names or given
    give = f"give their names in the order of the dataset's action: --policy.joint_names={','.join(joints)}"
    other = "use a policy that was trained on this type of arm"
    if not fit.controls_joints:
        return RobotFinding("joints", "fail", "the policy's actions are not targets of joints", other)
    if fit.width != len(joints):
        named = f" ({', '.join(names)})" if names else ""
        text = f"the policy moves {fit.width} joints{named}, this arm has {len(joints)}: {arm}"
        return RobotFinding("joints", "fail", text, other)
    if names is None:
        refused = [text for text in fit.misfits if "joint" in text]
        return RobotFinding("joints", "fail", "; ".join(refused) or "the checkpoint does not name its joints", give)
    if unknown := compare_joint_names(names, joints):
        return RobotFinding("joints", "fail", unknown, other if fit.is_named else give)
    return RobotFinding("joints", "ok", ", ".join(map(normalize_joint_name, names)))


def compare_joint_names(names: Sequence[str], joints: Iterable[str] = JOINTS) -> str | None:
    """Return how the names of a policy's joints differ from the arm's; None for the same names in any order."""
    found = [normalize_joint_name(name) for name in names]
    if sorted(found) == sorted(joints):
        return None
    return f"the policy moves {', '.join(names)}; this arm has {', '.join(joints)}"


def compare_units(fit: PolicyFit, use_degrees: bool | None, ranges: JointRanges | None) -> RobotFinding:
    """Compare the arm's unit with the values in the policy's training.

    Args:
        use_degrees: None if it is not given.
        ranges: the arm's ranges in degrees, or in the unit of another robot than an SO-101; None if they are unknown.
    """
    trained = _trained_ranges(fit, JOINTS if ranges is None else ranges)
    if trained is None:
        text = "the checkpoint has no ranges of its joints, so their unit cannot be compared"
        if use_degrees is None:
            return RobotFinding("units", "fail", f"--robot.use_degrees is missing; {text}", STATISTICS)
        return RobotFinding("units", "warn", f"{_describe(use_degrees)}; {text}", STATISTICS)
    farthest = {name: max(ends, key=abs) for name, ends in trained.items()}
    name = max(farthest, key=lambda name: (not name.endswith(GRIPPER), abs(farthest[name])))
    reach = f"{name} reaches {farthest[name]:.4g} in training"
    is_wide = ranges is None or any(abs(end) > RADIANS_LIMIT for ends in ranges.values() for end in ends)
    if is_wide and all(abs(value) <= RADIANS_LIMIT for value in farthest.values()):
        text = f"no joint goes beyond {RADIANS_LIMIT:g} in training ({reach}): these are radians"
        return RobotFinding(
            "units", "fail", text, "use a policy that was trained in degrees or in -100..100 of the range"
        )
    is_degrees = abs(farthest[name]) > PERCENT_LIMIT
    if use_degrees is None:
        advice = f"give --robot.use_degrees={'true' if is_degrees else 'true or false'}, as the demonstrations were "
        return RobotFinding(
            "units", "fail", f"--robot.use_degrees is missing; {reach}", f"{advice}recorded. {STATISTICS}"
        )
    if is_degrees and not use_degrees:
        text = f"{reach}, which is not -100..100 of its range but degrees"
        return RobotFinding("units", "fail", text, "give --robot.use_degrees=true")
    if use_degrees and is_degrees and trained.keys() == JOINTS.keys():
        text = f"degrees; {reach}, and the server cuts targets at 100 and -100"
        return RobotFinding("units", "warn", text, "the policy moves this arm only within 100 degrees of the middle")
    if use_degrees and SATURATED <= abs(farthest[name]) <= PERCENT_LIMIT:
        text = f"degrees; but {reach}, where -100..100 of a range ends"
        return RobotFinding("units", "warn", text, f"{STATISTICS}; else give --robot.use_degrees=false")
    if use_degrees and (beyond := _find_beyond_range(trained, ranges or {})):
        text = f"degrees; in training {beyond} of this arm's range"
        return RobotFinding(
            "units", "warn", text, "the demonstrations' arm had a different calibration; use that calibration"
        )
    return RobotFinding("units", "ok", f"{_describe(use_degrees)}; {reach}")


def compare_rates(
    fit: PolicyFit,
    fps: float,
    *,
    readings: float | None,
    cameras: Mapping[str, float],
    command_timeout: float,
) -> RobotFinding:
    """Compare the rate of the policy's actions with the rate of observations and the timeout of commands.

    Args:
        fps: observations per second, ``--fps``.
        readings: measured readings of all servos per second; None if they could not be read.
        cameras: camera name to its pictures per second.
        command_timeout: seconds without a command after which the arm is held.
    """
    rate = fit.rate
    measured = "" if readings is None else f", the servos can be read {readings:.0f} times"
    if rate is None:
        return RobotFinding(
            "rate", "warn", "the policy's rate is unknown, because it does not fit", "see the lines above"
        )
    text = f"the policy acts {rate:g} times a second, the arm is observed {fps:g} times (--fps){measured}"
    slow = [f"{name} ({pictures:g})" for name, pictures in cameras.items() if pictures < SLACK * rate]
    if readings is not None and readings < SLACK * rate:
        return RobotFinding("rate", "fail", text, "check the USB port and its latency timer, or use a slower policy")
    if fps < SLACK * rate:
        return RobotFinding("rate", "fail", text, f"give --fps={rate:g}")
    if command_timeout < 2 / rate:
        text = f"the policy acts {rate:g} times a second; {command_timeout * 1e3:g} ms without a command hold the arm"
        return RobotFinding("rate", "fail", text, f"give --watchdog-ms={2e3 / rate:.0f} or more")
    if readings is not None and readings < SLACK * fps:
        return RobotFinding("rate", "warn", text, f"give --fps={rate:g}")
    if slow:
        text = f"the policy acts {rate:g} times a second; cameras are slower: {', '.join(slow)}"
        return RobotFinding("rate", "warn", text, "give the fps that the demonstrations were recorded with")
    if fit.trained_rate is None:
        text = f"{text}; the checkpoint does not say its rate"
        fix = f"if the dataset's fps is not {rate:g}, write {{\"rate\": FPS}} into the policy's robojax.json"
        return RobotFinding("rate", "warn", text, fix)
    return RobotFinding("rate", "ok", text)


def _trained_ranges(fit: PolicyFit, joints: Iterable[str]) -> JointRanges | None:
    """Return the lowest and highest value in training of each of these joints; None if they are unknown."""
    names = [normalize_joint_name(name) for name in fit.joint_names or joints]
    if fit.action_range is None or fit.width != len(names) or sorted(names) != sorted(joints):
        return None
    return dict(zip(names, zip(*fit.action_range, strict=True), strict=True))


def _find_beyond_range(trained: JointRanges, ranges: JointRanges) -> str:
    """Describe the first joint that exceeds its range, in degrees; "" without such a joint."""
    for name in ranges:
        reached, end = max(trained[name], key=abs), max(map(abs, ranges[name]))
        if not name.endswith(GRIPPER) and abs(reached) > RANGE_TOLERANCE * end:
            return f"{name} reaches {reached:.4g}, beyond the {end:.4g} degrees"
    return ""


def _describe(use_degrees: bool) -> str:
    return "degrees" if use_degrees else "-100..100 of the range"

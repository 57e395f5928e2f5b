"""Checks of a robot's port, servos, cameras and server, without motion. A failed check does not stop the others."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from robojax.client import Client, RobojaxError
from robojax.robot.arm import JOINTS, Arm, Calibration, JointRanges, compute_ranges
from robojax.robot.bus import PRESENT_POSITION, Bus
from robojax.robot.cameras import Camera, CameraConfig, OpenSource
from robojax.robot.config import RobotConfig, load_calibration, open_bus
from robojax.robot.errors import RobotError
from robojax.robot.fit import (
    PolicyFit,
    RobotFinding,
    compare_joints,
    compare_rates,
    compare_units,
    read_policy_fit,
    suggest_cameras,
)
from robojax.robot.lerobot_arm import LeRobotArm
from robojax.robot.runner import RobotRunner, build_check

COUNTED, ENOUGH = 1.0, 0.8  # seconds of counting a camera's pictures, and the required share of its rate
WARM = 10  # degrees Celsius below the limit
READINGS = 20  # readings of all servos, whose median time gives the measured rate
COMPARED = ("joints", "units", "rate")
UNREACHED = RobotFinding("policy", "warn", "not checked: the server refuses requests", "repair the line above")
Findings = Generator[RobotFinding, None, Any]


def check_robot(runner: RobotRunner, problems: Mapping[str, RobotError] | None = None) -> Iterator[RobotFinding]:
    """Run all checks of a robot; ``problems`` are invalid flags by part of the robot (``read_robot_config``)."""
    problems, config = problems or {}, runner.robot
    if runner.lerobot is not None:
        readings = yield from _run_check("robot", partial(_check_lerobot, runner.lerobot))
        ranges = runner.lerobot.limits
    else:
        readings, ranges = yield from _check_arm(runner, problems)
    fit = yield from _check_server(runner)
    unit = problems.get("units")
    if fit is None:
        for name in COMPARED:
            if name == "units" and unit is not None:
                yield RobotFinding(name, "fail", str(unit), unit.then)
            else:
                yield RobotFinding(name, "warn", "not compared: no policy was read", "see the line about the policy")
        return
    yield compare_joints(fit, runner.joint_names, runner.joints)
    yield compare_units(fit, None if unit is not None else config.use_degrees, ranges)
    cameras = {name: float(camera.fps or 0) for name, camera in config.cameras.items()}
    yield compare_rates(fit, runner.rate, readings=readings, cameras=cameras, command_timeout=runner.command_timeout)


def _check_lerobot(arm: LeRobotArm) -> Generator[RobotFinding, None, float]:
    """Check a robot of LeRobot; return the rate at which it can be read, in Hz."""
    pose, seconds = arm.connect(), []
    for joint, at in pose.items():
        low, high = arm.limits[joint]
        text = f"{at:.1f}, limits {low:.4g} to {high:.4g}"
        is_inside = low <= at <= high
        fix = "" if is_inside else "move it into its limits, or calibrate the robot again"
        yield RobotFinding(joint, "ok" if is_inside else "warn", text, fix)
    for name, picture in arm.pictures.items():
        yield RobotFinding(f"camera {name}", "ok", f"{picture.shape[1]}x{picture.shape[0]}")
    for _ in range(READINGS):
        began = perf_counter()
        arm.read_pose()
        seconds.append(perf_counter() - began)
    rate = 1 / median(seconds)
    yield RobotFinding("readings", "ok", f"joints and cameras can be read {rate:.0f} times a second")
    return rate


def _check_arm(
    runner: RobotRunner, problems: Mapping[str, RobotError]
) -> Generator[RobotFinding, None, tuple[float | None, JointRanges | None]]:
    """Check calibration, port, servos and cameras; return the rate of readings in Hz, and the joints' ranges."""
    config, simulation = runner.robot, runner.simulation
    calibration = readings = None
    for name, problem in problems.items():
        if name != "units":  # The unit is compared with the policy below.
            yield RobotFinding(name, "fail", str(problem), problem.then)
    if not problems.keys() & {"type", "id"}:
        calibration = yield from _run_check("calibration", partial(_check_calibration, config))
    if not problems.keys() & {"type", "port"}:
        servos = None if simulation is None else simulation.servos
        readings = yield from _run_check("port", partial(_check_port, config, servos, calibration))
    open_simulated = None if simulation is None else simulation.open_camera
    for name, camera in config.cameras.items():
        yield from _run_check(f"camera {name}", partial(_check_camera, name, camera, open_simulated))
    if not config.cameras and "cameras" not in problems:
        yield RobotFinding("cameras", "warn", "none given", "most policies need some: --robot.cameras")
    return readings, None if calibration is None else compute_ranges(calibration)


def _run_check(name: str, check: Callable[[], Findings]) -> Findings:
    """Run a check and convert its errors to a finding; return the result of the check, or None."""
    try:
        return (yield from check())
    except RobotError as error:
        yield RobotFinding(name, "fail", str(error), error.then)
    except (OSError, RuntimeError, ValueError) as error:
        yield RobotFinding(name, "fail", f"{type(error).__name__}: {error}", "report it if the cause is unclear")


def _check_calibration(config: RobotConfig) -> Generator[RobotFinding, None, Calibration]:
    calibration = load_calibration(config)
    narrow = [name for name, joint in calibration.items() if joint.range_max - joint.range_min < 300]
    if narrow:
        text = f"{', '.join(narrow)} can hardly move"
        yield RobotFinding("calibration", "warn", text, "calibrate again and move every joint through its whole range")
    else:
        yield RobotFinding("calibration", "ok", f"{config.id}: {len(calibration)} joints")
    return calibration


def _check_port(config: RobotConfig, servos: Any, calibration: Calibration | None) -> Findings:
    """Check the port and each servo; return the rate at which all servos can be read, in Hz."""
    with open_bus(config, servos) as bus:
        yield RobotFinding("port", "ok", config.port or "simulated")
        arm = Arm(bus, calibration or {}, config.use_degrees)
        missing = arm.find_missing_servos()
        if len(missing) == len(JOINTS):
            fix = "is the arm's power supply on? the USB cable gives none"
            yield RobotFinding("power", "fail", "no servo answers at all", fix)
        for name in JOINTS:
            if name in missing:
                fix = "check the cables to it and from the previous servo, and its id"
                yield RobotFinding(name, "fail", missing[name], fix)
            else:
                yield from _run_check(name, partial(_check_servo, arm, name, calibration is not None))
        return None if missing else (yield from _run_check("readings", partial(_measure_readings, bus)))


def _measure_readings(bus: Bus) -> Generator[RobotFinding, None, float]:
    seconds = []
    for _ in range(READINGS):
        began = perf_counter()
        bus.read_all(list(JOINTS.values()), PRESENT_POSITION)
        seconds.append(perf_counter() - began)
    rate = 1 / median(seconds)
    yield RobotFinding("readings", "ok", f"all servos can be read {rate:.0f} times a second")
    return rate


def _check_servo(arm: Arm, name: str, is_calibrated: bool) -> Findings:
    figures, alarms = arm.read_figures(name), arm.read_status(name)
    text = f"{figures.volts:.1f} V, {figures.celsius} °C, torque {'on' if figures.is_held else 'off'}"
    wrong = arm.find_miscalibrated_servos([name]).get(name) if is_calibrated else None
    if alarms:
        fix = "switch the arm's power off and on; let the servo cool"
        yield RobotFinding(name, "fail", f"{text}; {', '.join(alarms)}", fix)
    elif not figures.lowest <= figures.volts <= figures.highest:
        allowed = f"{figures.lowest:g} to {figures.highest:g} V"
        fix = "use a power supply for these servos"
        yield RobotFinding(name, "fail", f"{text}; it needs {allowed}", fix)
    elif wrong is not None:
        fix = "give the right --robot.id, or let lerobot-calibrate write the file to the servos"
        yield RobotFinding(name, "fail", f"{text}; {wrong}", fix)
    elif figures.celsius > figures.hottest - WARM:
        yield RobotFinding(name, "warn", f"{text}; it switches itself off at {figures.hottest} °C", "let it cool")
    else:
        yield RobotFinding(name, "ok", text)


def _check_camera(name: str, config: CameraConfig, open_simulated: OpenSource | None) -> Findings:
    camera = Camera(name, config, open_simulated)
    try:
        before, began = camera.pictures, time.monotonic()
        time.sleep(COUNTED)
        seconds = time.monotonic() - began
        rate = (camera.pictures - before) / seconds
        picture = camera.newest(time.monotonic())
    finally:
        camera.close()
    text = f"{picture.shape[1]}x{picture.shape[0]}, {rate:.0f} pictures a second"
    if rate < ENOUGH * float(config.fps or 0):
        fix = "more light, fourcc: MJPG, or another USB port"
        yield RobotFinding(f"camera {name}", "warn", f"{text}, instead of {config.fps:g}", fix)
    elif picture.max() < 20:
        yield RobotFinding(f"camera {name}", "warn", f"{text}, all dark", "is its lid on?")
    else:
        yield RobotFinding(f"camera {name}", "ok", text)


def _check_server(runner: RobotRunner) -> Generator[RobotFinding, None, PolicyFit | None]:
    """Check the server, the key and the policy; return the policy's requirements, or None."""
    try:
        client = Client(runner.server, key=runner.key)
        client.request("GET", "/health")
    except RobojaxError as error:
        yield RobotFinding("server", "fail", str(error), "start it with `robojax serve`, or give --server")
        yield UNREACHED
        return None
    with client:
        yield RobotFinding("server", "ok", client.url)
        try:
            client.sessions()
        except RobojaxError as error:
            yield RobotFinding("key", "fail", str(error), "put an operator's key into ROBOJAX_KEY")
            yield UNREACHED
            return None
        if runner.policy is None and runner.session is None:
            yield RobotFinding("policy", "warn", "none given", "give --policy.path=user/act_so101, or --session")
            return None
        try:
            request, cameras = _build_policy_check(runner, client)
            fit = read_policy_fit(client.request("POST", "/policies/check", request, timeout=600))
        except RobojaxError as error:
            yield RobotFinding(
                "policy", "fail", str(error), "robojax sessions lists sessions, robojax check reads a policy"
            )
            return None
    lacking = sorted(set(cameras) - set(runner.cameras))
    if lacking:
        text = f"session {runner.session} has the cameras {', '.join(cameras)}; {', '.join(lacking)} not given"
        yield RobotFinding("policy", "fail", text, "use these names in --robot.cameras")
    elif not fit.fits:
        yield RobotFinding("policy", "fail", "; ".join(fit.misfits), suggest_cameras(fit))
    else:
        rate = "" if fit.rate is None else f", {fit.rate:g} Hz"
        yield RobotFinding("policy", "ok", f"{fit.policy_type}{rate}")
    return fit


def _build_policy_check(runner: RobotRunner, client: Client) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the body of POST /policies/check, and the cameras of the session that is joined."""
    if runner.policy is not None:
        return build_check(runner), ()
    status = client.session(runner.session_id).status()
    # Only the policy of the joined session is checked, because the cameras have the session's names.
    request = {"policy_path": status.policy_path, "revision": status.stats.get("policy_commit")}
    return request, status.camera_names

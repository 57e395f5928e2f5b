"""Checks of a robot's port, servos, cameras and server, in which nothing moves."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from robojax.client import Client, ClientError
from robojax.robot.arm import JOINTS, Arm
from robojax.robot.cameras import Camera, CameraConfig
from robojax.robot.config import RobotConfig, load_calibration, open_arm
from robojax.robot.errors import BusLost, RobotError
from robojax.robot.runner import RobotRunner, build_check, suggest_policy_fix

# Seconds that a camera's pictures are counted, and the share of its rate that is good enough.
COUNTED, ENOUGH = 1.0, 0.8
WARM = 10  # degrees Celsius below its limit


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        level: ok, warn or fail.
        fix: what to do; "" when nothing.
    """

    name: str
    level: str
    found: str
    fix: str = ""


def check_robot(runner: RobotRunner) -> Iterator[Finding]:
    """Run all checks of a robot, one after the other."""
    config = runner.robot
    yield from _run_check("calibration", lambda: _calibration(config))
    try:
        with open_arm(config) as arm:
            yield Finding("port", "ok", config.port or "simulated")
            yield from _servos(arm)
    except RobotError as error:
        yield Finding("port", "fail", str(error), error.then)
    for name, camera in config.cameras.items():
        yield from _run_check(f"camera {name}", lambda name=name, camera=camera: _camera(name, camera))
    if not config.cameras:
        yield Finding("cameras", "warn", "none given", "most policies want some: --robot.cameras")
    yield from _server(runner)


def _run_check(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except RobotError as error:
        yield Finding(name, "fail", str(error), error.then)


def _calibration(config: RobotConfig) -> Iterator[Finding]:
    calibration = load_calibration(config)
    narrow = [name for name, joint in calibration.items() if joint.range_max - joint.range_min < 300]
    if narrow:
        text = f"{', '.join(narrow)} can hardly move"
        yield Finding("calibration", "warn", text, "calibrate again and move every joint through its whole range")
    else:
        yield Finding("calibration", "ok", f"{config.id}: {len(calibration)} joints")


def _servos(arm: Arm) -> Iterator[Finding]:
    missing = arm.find_missing_servos()
    answering = [name for name in JOINTS if name not in missing]
    for name, text in missing.items():
        yield Finding(name, "fail", text, "look at the cable to it and from the servo before it, and at its id")
    if not answering:
        yield Finding(
            "power", "fail", "no servo answers at all", "is the arm's power supply on? the USB cable gives none"
        )
        return
    if missing:
        return
    wrong = arm.find_miscalibrated_servos()
    held = arm.held
    for name in answering:
        try:
            yield _servo(arm, name, wrong.get(name), name in held)
        except BusLost as error:
            yield Finding(name, "fail", str(error), error.then)


def _servo(arm: Arm, name: str, wrong: str | None, is_held: bool) -> Finding:
    figures, alarms = arm.read_figures(name), arm.read_status(name)
    text = f"{figures.volts:.1f} V, {figures.celsius} °C, torque {'on' if is_held else 'off'}"
    if alarms:
        return Finding(name, "fail", f"{text}; {', '.join(alarms)}", "switch the arm's power off and on; let it cool")
    if not figures.lowest <= figures.volts <= figures.highest:
        allowed = f"{figures.lowest:g} to {figures.highest:g} V"
        return Finding(name, "fail", f"{text}; it wants {allowed}", "use the power supply that the servos are made for")
    if wrong is not None:
        then = "give the right --robot.id, or let lerobot-calibrate write the file to the servos"
        return Finding(name, "fail", f"{text}; {wrong}", then)
    if figures.celsius > figures.hottest - WARM:
        return Finding(name, "warn", f"{text}; it switches itself off at {figures.hottest} °C", "let it cool")
    return Finding(name, "ok", text)


def _camera(name: str, config: CameraConfig) -> Iterator[Finding]:
    camera = Camera(name, config)
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
        yield Finding(
            f"camera {name}", "warn", f"{text}, wanted {config.fps:g}", "more light, fourcc: MJPG, or another USB port"
        )
    elif picture.max() < 20:
        yield Finding(f"camera {name}", "warn", f"{text}, all dark", "is its lid on?")
    else:
        yield Finding(f"camera {name}", "ok", text)


def _server(runner: RobotRunner) -> Iterator[Finding]:
    try:
        with Client(runner.server, key=runner.key) as client:
            client.request("GET", "/health")
            client.sessions()
            yield Finding("server", "ok", client.url)
            if runner.policy is not None:
                request = build_check(runner, runner.robot.cameras)
                fit = client.request("POST", "/policies/check", request, timeout=600)
                text = "; ".join(fit["misfits"]) or f"{fit['policy_type']}, {fit['rate']:g} Hz"
                fix = "" if fit["fits"] else suggest_policy_fix(runner, fit)
                yield Finding("policy", "ok" if fit["fits"] else "fail", text, fix)
    except ClientError as error:
        yield Finding("server", "fail", str(error), "start one with `robojax serve`; a key goes into ROBOJAX_KEY")

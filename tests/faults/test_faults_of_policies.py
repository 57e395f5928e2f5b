"""Faults F7 to F11: invalid, missing and late results of a policy."""

import asyncio
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.arm import Arm, is_moving
from tests.faults.history import LIMITS, USUAL
from tests.faults.processes import ROOT, Process, server
from tests.faults.script import Script
from tests.testing.rig import body as session_body

Make = Callable[..., Any]
SHIPPED = ROOT / "robojax" / "sim" / "policy"


@pytest.mark.parametrize("mode", ["nan", "inf", "shape", "wild"])
async def test_f07_invalid_chunks_are_refused_whole_and_three_stop(
    scripted: Process, script: Callable[..., Script], arms: Make, mode: str, moment: random.Random
) -> None:
    """Each invalid chunk is refused whole: HOLD `policy_invalid`; 3 in a row -> STOP; no value is sent."""
    policy = script()
    await _is_refused(await arms(scripted, policy), policy, mode, moment)


async def test_f07_huge_jump_is_refused_or_clamped_as_configured(
    own: ExitStack, scripted: Process, script: Callable[..., Script], arms: Make, tmp_path: Path, moment: random.Random
) -> None:
    """As above with `--safety refuse`; the default clamps, and no sent step is larger than allowed."""
    # Start the server before the robot, because the start blocks this process and its reports.
    refusing, other = own.enter_context(server(tmp_path / "refusing", "--safety", "refuse")), script()
    policy = script()
    arm: Arm = await arms(scripted, policy)
    arm.history.step = 2.0
    await arm.go(max_relative_target=2.0)
    policy.set_mode("jump", times=2)
    await arm.until(lambda session: session["stats"]["safety"]["clamped"], within=2)
    await arm.until(is_moving, within=2)
    await _is_refused(await arms(refusing, other), other, "jump", moment)


async def _is_refused(arm: Arm, policy: Script, mode: str, moment: random.Random) -> None:
    await arm.go()
    await asyncio.sleep(moment.uniform(0.0, 0.4))
    written_at = time.monotonic()
    policy.set_mode(mode, times=1)
    session = await arm.until(lambda session: session["stats"]["chunks_rejected"] >= 1, within=2)
    # A pause of the machine may add one hold.
    assert 1 <= session["stats"]["holds"]["policy_invalid"] <= 1 + arm.meter.pauses(written_at)
    await arm.until(is_moving, within=2)
    await arm.moves()
    policy.set_mode(mode)
    session = await arm.until(lambda session: session["status"] != "running", within=2)
    assert session["status"] == "stopped"
    assert session["stats"]["emergency_stop"].startswith("policy_invalid")
    stopped = time.monotonic()
    await arm.expect_no_motion(stopped)


async def test_f08_actions_outside_the_limits_are_clamped_and_counted(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """Clamp position, step (`max_relative_target`) and velocity; count them. Each sent target is inside the limits."""
    policy = script()
    arm: Arm = await arms(scripted, policy)
    arm.history.step = 2.0
    await arm.go(max_relative_target=2.0)
    await asyncio.sleep(moment.uniform(0.0, 0.4))
    policy.set_mode("outside")
    await asyncio.sleep(1.5)
    assert arm.session["status"] == "running"
    for _, target in arm.history.targets():
        for joint, value in target.items():
            low, high = LIMITS.get(joint, USUAL)
            assert low <= value <= high
    clamped = arm.session["stats"]["safety"]["clamped"]
    assert clamped.get("position"), clamped
    assert clamped.get("step") or clamped.get("seam"), clamped


async def _moving_arms_of_two_policies(
    server: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> tuple[Script, Arm, Arm]:
    """Return a policy, its moving arm, and an arm that another policy moves."""
    policy = script()
    arm, other = await arms(server, policy), await arms(server, script())
    await arm.go()
    await other.go()
    await asyncio.sleep(moment.uniform(0.0, 0.4))
    return policy, arm, other


@pytest.mark.parametrize(("mode", "error"), [("raise", "runtimeerror"), ("memory", "memory")])
async def test_f09_f11_failing_policy_ends_only_its_session(
    scripted: Process, script: Callable[..., Script], arms: Make, mode: str, error: str, moment: random.Random
) -> None:
    """HOLD; status `error` and a message in GET /sessions within a second; other sessions continue."""
    policy, arm, other = await _moving_arms_of_two_policies(scripted, script, arms, moment)
    policy.set_mode(mode)
    began = time.monotonic()
    await arm.until(lambda session: session["status"] == "error")
    # A chunk lasts 0.2 s, and three inferences are tried: the second starts at the third failure.
    assert time.monotonic() - began < 1.5 + arm.meter.lost(began)
    assert error in arm.session["error_message"].lower()
    assert "/secret/place" not in json.dumps(arm.session)
    failed = time.monotonic()
    await arm.expect_no_motion(failed)
    await other.moves(20)
    await other.is_undisturbed(began - 0.2)


async def test_f09_hanging_policy_ends_only_its_session(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """After 5 s: HOLD; status `error`; other sessions of the process are held, and continue when it returns.

    Fault F26 covers the replacement of an engine's process.
    """
    policy, arm, other = await _moving_arms_of_two_policies(scripted, script, arms, moment)
    policy.set_mode("hang")
    try:
        await arm.until(lambda session: session["stats"]["hold"] is not None, within=1.0)
        session = await arm.until(lambda session: session["status"] == "error", within=6.0)
        assert "did not return in 5 s" in session["error_message"]
        held = await other.until(lambda session: session["stats"]["hold"] is not None, within=1.0)
        assert held["status"] == "running"
    finally:
        policy.set_mode("good")
    await other.until(is_moving, within=2)
    await other.moves(20)


@pytest.fixture(scope="module")
def real(place: Path) -> Iterator[Process]:
    """The command ``robojax serve`` without a script."""
    with server(place / "real", scripted=False) as running:
        yield running


def _broken(folder: Path, how: str) -> Path:
    """Write a policy that cannot be loaded."""
    if how == "missing":
        return folder / "nothing"
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    weights, config = folder / "model.safetensors", folder / "config.json"
    match how:
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "another file":
            weights.write_bytes(b"\xff" * 4096)
        case "header too long":
            weights.write_bytes((1 << 62).to_bytes(8, "little") + weights.read_bytes()[8:])
        case "wrong config":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"dim_model": 48}))
        case "no json":
            config.write_text("{")
    return folder


@pytest.mark.parametrize("how", ["missing", "cut short", "another file", "header too long", "wrong config", "no json"])
async def test_f10_unloadable_policy_leaves_nothing(
    real: Process, tmp_path: Path, how: str, moment: random.Random
) -> None:
    """The response is 4xx with a reason; no rooms are left; the server survives."""
    name = f"broken-{moment.randrange(1 << 32)}"
    more = {"transport_server_url": real.url, "workspace_id": name}
    body = session_body(name, policy_path=str(_broken(tmp_path / "policy", how)), **more)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), trust_env=False) as http:
        async with http.post(f"{real.url}/sessions", json=body) as answer:
            assert 400 <= answer.status < 500, await answer.text()
            detail = json.dumps((await answer.json())["detail"])
        assert len(detail) > 60
        for kind in ("robotics", "video"):
            async with http.get(f"{real.url}/{kind}/workspaces/{name}/rooms") as answer:
                assert (await answer.json())["rooms"] == []
        async with http.get(f"{real.url}/health") as answer:
            assert answer.status == 200
    assert real.is_alive
    assert "Traceback" not in detail

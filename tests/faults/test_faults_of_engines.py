"""Faults F26 to F30: engines are killed, stopped or orphaned while robots move and STOP is called."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.fleet import Fleet, moving_fleet
from tests.faults.processes import Process, server
from tests.testing.waiting import until

ROBOTS = 3
HELD = 0.3  # Seconds within which a robot is held after its engine is lost.
STUCK_AFTER = 1.0
PATIENCE = 60.0  # Seconds in which a slow machine starts two engines; the default of engine_patience.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def process(place: Path) -> Iterator[Process]:
    flags = ("--devices", "cpu:0,cpu:0", "--stuck-after", str(STUCK_AFTER), "--engine-patience", str(PATIENCE))
    with server(place / "two", *flags, "--frozen", "warn", scripted=False) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(process: Process) -> AsyncIterator[Fleet]:
    async with moving_fleet(process, ROBOTS) as moving:
        yield moving


async def until_held(fleet: Fleet, since: float, codes: set[str], within: float) -> None:
    """Wait until all robots are held for one of these reasons, within this many seconds."""
    while True:
        held = [(await fleet.session(name))["stats"]["hold_code"] for name in fleet.commands]
        if set(held) <= codes:
            break
        assert time.monotonic() < since + within + 5, held
    assert time.monotonic() - since <= within + fleet.meter.lost(since)


async def until_running(fleet: Fleet) -> None:
    async def are_running() -> bool:
        sessions = [await fleet.session(name) for name in fleet.commands]
        errors = [session["error_message"] for session in sessions if session["status"] != "running"]
        assert not errors
        return not any(session["stats"]["hold_code"] for session in sessions)

    await until(are_running, PATIENCE)
    await fleet.until_moving(PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_f26_lost_engine_holds_robots_until_another_runs(fleet: Fleet, number: signal.Signals) -> None:
    """Robots of a lost engine continue on the other engine. Without any engine, they are held with `engine_lost`.

    STOP is not delayed. A stopped process is detected when a request gets no response; the limit for slow inferences
    holds the robots first.
    """
    before, began = await fleet.engines(), time.monotonic()
    lost = [next(iter(before.values()))]
    os.kill(lost[0], number)
    while lost[0] in (await fleet.engines()).values():
        assert time.monotonic() < began + STUCK_AFTER + 5
        await asyncio.sleep(0.02)
    await until_running(fleet)
    if number is signal.SIGKILL:
        assert fleet.worst_gap(began) <= HELD + fleet.meter.worst(began, ways=2), "another engine was not used at once"
    lost += (await fleet.engines()).values()
    for process in lost[1:]:
        os.kill(process, number)
    lost_at = time.monotonic()
    if number is signal.SIGKILL:
        await until_held(fleet, lost_at, {"engine_lost"}, HELD)
    else:
        await until_held(fleet, lost_at, {"engine_lost", "inference_slow"}, STUCK_AFTER + 1)
    await until_running(fleet)
    after = before
    while len(after) < 2 or set(after.values()) & set(lost):
        assert time.monotonic() < lost_at + PATIENCE, after
        await asyncio.sleep(0.1)
        after = await fleet.engines()
    fleet.check_stops(began)


async def expect_engines_end_with_the_server(fleet: Fleet) -> None:
    """Only engines load JAX, and they end within a second after their server is killed."""
    mapped = Path(f"/proc/{fleet.process.pid}/maps").read_text()
    assert not [name for name in ("jaxlib", "tensorstore", "tokenizers") if name in mapped]
    engines = [Path(f"/proc/{process}") for process in (await fleet.engines()).values()]
    assert all("jaxlib" in (engine / "maps").read_text() for engine in engines)
    fleet.presses_stop.cancel()
    began = time.monotonic()
    fleet.process.kill()
    while any((engine / "maps").exists() and (engine / "maps").read_text() for engine in engines):
        assert time.monotonic() < began + 1 + fleet.meter.lost(began)
        await asyncio.sleep(0.01)


async def test_f27_jax_is_in_the_engines_which_end_with_a_killed_server(fleet: Fleet) -> None:
    await expect_engines_end_with_the_server(fleet)


async def test_f28_robot_that_waited_too_long_for_an_engine_needs_a_person(place: Path) -> None:
    with server(place / "patient", "--engine-patience", "0.5", "--frozen", "warn", scripted=False) as running:
        async with moving_fleet(running, 1) as fleet:
            (name,) = fleet.commands
            (engine,) = (await fleet.engines()).values()
            began = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            await until_held(fleet, began, {"engine_lost"}, HELD)
            while (session := await fleet.session(name))["status"] != "error":
                assert time.monotonic() < began + 5, session["stats"]["hold_code"]
                await asyncio.sleep(0.02)
            assert "engine_patience" in session["error_message"]
            while not any(one["batch_ms"] for one in (await fleet.call("GET", "/health"))["engine"]["devices"]):
                assert time.monotonic() < began + PATIENCE
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.2)
            late = [round(at - began, 1) for at in fleet.commands[name] if at > began + 1]
            assert fleet.commands[name][-1] < began + 2, (late, await fleet.session(name))
            await fleet.call("POST", f"/sessions/{name}/restart")
            await fleet.until_moving(PATIENCE)
            await expect_engines_end_with_the_server(fleet)

"""Faults F26 to F30 of engines: killed, stopped, and left behind by a server, while robots move and STOP is pressed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.faults.fleet import Fleet, moving_fleet
from tests.faults.processes import Process, server

ROBOTS = 3
HELD = 0.3  # seconds in which a robot is held when its engine is lost
STUCK_AFTER = 1.5
PATIENCE = 20.0
_numbers = count(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module", params=["cpu:0", "cpu:0,cpu:0"], ids=["one engine", "two engines"])
def process(place: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    flags = ("--devices", request.param, "--stuck-after", str(STUCK_AFTER), "--engine-patience", str(PATIENCE))
    with server(place / f"server{next(_numbers)}", *flags, "--frozen", "warn", scripted=False) as running:
        yield running


@pytest.fixture
async def fleet(process: Process) -> AsyncIterator[Fleet]:
    async with moving_fleet(process, ROBOTS) as moving:
        yield moving


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_f26_lost_engine_holds_robots_until_another_one_runs(fleet: Fleet, number: signal.Signals) -> None:
    """Robots of a lost engine are held with `engine_lost`, or go on with another engine, and STOP is not delayed.

    A stopped process is noticed when a request has no answer. The limit for slow inferences holds the robots first.
    """
    before = await fleet.engines()
    began = time.monotonic()
    os.kill(next(iter(before.values())), number)
    if len(before) == 1:
        lost_at, expected = None, {"engine_lost"} if number is signal.SIGKILL else {"engine_lost", "inference_slow"}
        while lost_at is None:
            held = [(await fleet.session(name))["stats"]["hold_code"] for name in fleet.commands]
            if set(held) <= expected:
                lost_at = time.monotonic()
            assert time.monotonic() < began + STUCK_AFTER + 5, held
        limit = HELD if number is signal.SIGKILL else STUCK_AFTER + 1
        assert lost_at - began <= limit + fleet.meter.lost(began)
    await fleet.until_moving(PATIENCE)
    for name in fleet.commands:
        session = await fleet.session(name)
        assert (session["status"], session["stats"]["hold_code"]) == ("running", None)
    after = before
    while len(after) < len(before) or len(set(after.values()) - set(before.values())) != 1:
        assert time.monotonic() < began + PATIENCE, after
        await asyncio.sleep(0.1)
        after = await fleet.engines()
    fleet.check_stops(began)
    if len(before) == 2 and number is signal.SIGKILL:
        assert fleet.worst_gap(began) <= HELD + fleet.meter.worst(began, ways=2), "another engine was not used at once"


async def test_f27_jax_is_in_the_engines_which_end_with_a_killed_server(fleet: Fleet) -> None:
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


async def test_f28_robot_that_waited_too_long_for_an_engine_needs_a_person(place: Path) -> None:
    with server(place / "patient", "--engine-patience", "0.5", "--frozen", "warn", scripted=False) as running:
        async with moving_fleet(running, 1) as fleet:
            (name,) = fleet.commands
            os.kill(next(iter((await fleet.engines()).values())), signal.SIGKILL)
            began = time.monotonic()
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

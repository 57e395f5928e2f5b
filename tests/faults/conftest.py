"""Servers for fault tests, and options to repeat them: ``pytest tests/faults --repeat 50 --seed 7``."""

import random
import signal
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.arm import Arm
from tests.faults.arm import arm as open_arm
from tests.faults.processes import Process, rooms, server
from tests.faults.script import Script

_numbers = count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, help="How often each fault happens.")
    parser.addoption("--seed", type=int, default=0, help="Seed of the moments at which faults happen.")


def pytest_report_header(config: pytest.Config) -> str:
    return f"faults: seed {config.getoption('--seed')}, each {config.getoption('--repeat')} times"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "moment" in metafunc.fixturenames:
        metafunc.parametrize("repeat", range(int(metafunc.config.getoption("--repeat") or 1)))


@pytest.fixture
def moment(request: pytest.FixtureRequest, repeat: int) -> random.Random:
    """Return a generator that chooses when the fault happens, seeded by the option, the test and the repeat."""
    name = request.function.__name__
    seed = zlib.crc32(f"{request.config.getoption('--seed')} {name} {repeat}".encode())
    print(f"{name}: seed {request.config.getoption('--seed')}, repeat {repeat}")  # noqa: T201
    return random.Random(seed)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def scripted(place: Path) -> Iterator[Process]:
    """Server whose policies follow scripts; all tests share it and create their own sessions."""
    with server(place / "scripted") as running:
        yield running


@pytest.fixture(scope="session")
def transport(place: Path) -> Iterator[Process]:
    """Server of rooms, which no test ends."""
    with rooms(place / "rooms") as running:
        yield running


@pytest.fixture(scope="module")
def mortal(place: Path) -> Iterator[Process]:
    """Server that tests end, kill and pause; each test leaves it running."""
    # A child process inherits an ignored SIGHUP (tests may run under nohup), but not a handler.
    kept = signal.signal(signal.SIGHUP, lambda number, frame: None)
    with server(place / "mortal") as running:
        yield running
    signal.signal(signal.SIGHUP, kept)


@pytest.fixture
def script(place: Path) -> Callable[..., Script]:
    return lambda **settings: Script(place / "policies" / f"policy{next(_numbers)}", **settings)


@pytest.fixture
def own() -> Iterator[ExitStack]:
    """Stack of processes that belong to one test; they end after its arms."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def arms(own: ExitStack) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that creates arms; their histories are checked at the end."""
    async with AsyncExitStack() as stack:

        async def make(server: Process, script: Script | None, name: str | None = None) -> Arm:
            opened: AbstractAsyncContextManager[Arm] = open_arm(server, script, name or f"arm{next(_numbers)}")
            return await stack.enter_async_context(opened)

        yield make


@pytest.fixture
async def arm(scripted: Process, script: Callable[..., Script], arms: Callable[..., Any]) -> Arm:
    return await arms(scripted, script())


@pytest.fixture
async def moving(arm: Arm) -> Arm:
    await arm.go()
    return arm

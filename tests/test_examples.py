"""Each exported name has an example that runs; examples of the client use a real server in a thread."""

import ast
import asyncio
import doctest
import inspect
import threading
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from robojax.client import Client
from tests.testing.rig import REAL, started
from tools import house

PACKAGES = ("robojax.client",)
# Packages whose examples need a server; ``ROBOJAX_SERVER`` has its URL.
NEEDS_SERVER = ("robojax", "robojax.client")
POLICY = "robojax/sim/policy"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server in a thread."""
    is_started = threading.Event()
    running: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with started(transport=REAL, load=REAL, state=str(tmp_path_factory.mktemp("state"))) as server:
            end = asyncio.Event()
            running.append((server.url, asyncio.get_running_loop(), end))
            is_started.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="server of examples")
    thread.start()
    assert is_started.wait(60)
    ((url, loop, end),) = running
    yield url
    loop.call_soon_threadsafe(end.set)
    thread.join(60)


@pytest.fixture
def empty_server(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server without sessions at ``ROBOJAX_SERVER``."""
    monkeypatch.setenv("ROBOJAX_SERVER", server)
    monkeypatch.delenv("ROBOJAX_KEY", raising=False)
    monkeypatch.chdir(house.ROOT)
    yield
    with Client(server) as client:
        for status in client.sessions():
            client.session(status.session_id).delete()


def docstrings(package: str, name: str) -> Iterator[str]:
    """Yield the docstring of an exported name, then the docstrings of a class's methods."""
    value = getattr(import_module(package), name)
    if not inspect.isclass(value) and not inspect.isroutine(value):
        yield docstring_of_alias(package, name)
        return
    yield inspect.cleandoc(value.__doc__ or "")
    if inspect.isclass(value):
        yield from (inspect.getdoc(method) or "" for method in vars(value).values() if inspect.isroutine(method))


def docstring_of_alias(package: str, name: str) -> str:
    """Return the string below the assignment of a type alias or a constant."""
    for module, path in house.modules().items():
        if module.startswith(package):
            body = ast.parse(path.read_text()).body
            for assignment, below in pairwise(body):
                match assignment, below:
                    case ast.Assign([ast.Name(id=assigned)]), ast.Expr(ast.Constant(str(text))) if assigned == name:
                        return text
    return ""


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PACKAGES for name in import_module(package).__all__]
)
def test_exported_names_have_examples_that_run(package: str, name: str, request: pytest.FixtureRequest) -> None:
    if package in NEEDS_SERVER:
        request.getfixturevalue("empty_server")
    module = import_module(package)
    first, *others = docstrings(package, name)
    assert ">>> " in first, f"{package}.{name} has no example: add `Example:` with lines of `>>>` to its docstring"
    for text in (first, *others):
        names: dict[str, Any] = {**vars(module), name: getattr(module, name), "asyncio": asyncio, "np": np}
        example = doctest.DocTestParser().get_doctest(text, names, name, package, 0)
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
        assert not report, "".join(report)

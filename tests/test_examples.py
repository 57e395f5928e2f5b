"""Each exported name has an example that runs; examples of the client use a real server in a thread."""

import ast
import asyncio
import doctest
import inspect
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from robojax.client import Client
from service.state import load_registry_token
from tests.testing.models import compilation as compilation
from tests.testing.rig import REAL, started
from tools import house

PACKAGES = (
    "hooks",
    "jaxmodels",
    "jaxmodels.data",
    "jaxmodels.samplers",
    "jaxmodels.training",
    "jaxmodels.transformer2d",
    "robojax",
    "robojax.client",
)
# Packages whose examples need a server; ``ROBOJAX_SERVER`` has its URL.
NEEDS_SERVER = ("hooks", "robojax", "robojax.client")
POLICY = "robojax/sim/policy"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of a server in a thread, and the token of its registry of webhooks."""
    state = tmp_path_factory.mktemp("state")
    is_started = threading.Event()
    running: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with started(
            transport=REAL, load=REAL, state=str(state), registry=True, registry_allow=["192.0.2.0/24"]
        ) as server:
            end = asyncio.Event()
            running.append((server.url, asyncio.get_running_loop(), end))
            is_started.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="server of examples")
    thread.start()
    assert is_started.wait(60)
    ((url, loop, end),) = running
    yield url, load_registry_token(state)[0]
    loop.call_soon_threadsafe(end.set)
    thread.join(60)


@pytest.fixture
def empty_server(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server without sessions at ``ROBOJAX_SERVER``, whose webhooks are those of ``HF_ENDPOINT``."""
    url, token = server
    monkeypatch.setenv("ROBOJAX_SERVER", url)
    monkeypatch.delenv("ROBOJAX_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "ENDPOINT", url)  # It was read from HF_ENDPOINT at the import.
    monkeypatch.chdir(house.ROOT)
    yield
    with Client(url) as client:
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


def exported_names() -> list[Any]:
    """Return package and name of each exported object; a package may export the names of another."""
    names = [(package, name) for package in reversed(PACKAGES) for name in import_module(package).__all__]
    unique = {id(getattr(import_module(package), name)): (package, name) for package, name in names}.values()
    # Clients control robots in real time.
    return [pytest.param(*each, marks=[pytest.mark.timed] * (each[0] in NEEDS_SERVER)) for each in unique]


@pytest.mark.parametrize(("package", "name"), exported_names())
def test_exported_names_have_examples_that_run(package: str, name: str, request: pytest.FixtureRequest) -> None:
    value = getattr(import_module(package), name)
    if not getattr(value, "__module__", package).startswith(house.PACKAGES):
        return  # huggingface_hub documents its own class.
    if package in NEEDS_SERVER:
        request.getfixturevalue("empty_server")
    module = import_module(package)
    first, *others = docstrings(package, name)
    assert ">>> " in first, f"{package}.{name} has no example: add `Example:` with lines of `>>>` to its docstring"
    for text in (first, *others):
        home = vars(sys.modules[getattr(value, "__module__", package)])
        names: dict[str, Any] = {**home, **vars(module), name: value, "asyncio": asyncio, "np": np}
        example = doctest.DocTestParser().get_doctest(text, names, name, package, 0)
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
        assert not report, "".join(report)

"""GET /ready and /health while things load."""

import asyncio
import re
import threading

import pytest


async def test_a_server_without_anything_to_load_is_ready(server) -> None:
    assert await server.call("GET", "/ready") == (200, {"ready": True, "waiting_for": [], "loading": []})


async def test_what_a_new_session_would_wait_for_is_said(server) -> None:
    importing = asyncio.get_running_loop().create_future()
    server.app.ctx.importing = importing
    status, found = await server.call("GET", "/ready")
    assert (status, found["ready"], found["waiting_for"]) == (503, False, ["JAX is being imported"])
    assert (found["code"], found["detail"]) == ("not_ready", "JAX is being imported")
    importing.set_result(None)
    assert (await server.call("GET", "/ready"))[0] == 200


async def test_a_failed_import_is_never_ready(server) -> None:
    importing = asyncio.get_running_loop().create_future()
    importing.set_exception(ImportError("/opt/secret/jax"))
    server.app.ctx.importing = importing
    status, found = await server.call("GET", "/ready")
    assert status == 503
    assert found["waiting_for"] == ["JAX cannot be imported; the server's log says more"]


@pytest.mark.parametrize("path", ["/ready", "/api/ready"])
async def test_what_is_being_loaded_is_listed_with_how_long_it_takes(server, path: str) -> None:
    server.load.gate = threading.Event()
    creating = asyncio.create_task(server.create())
    await server.until_loading()
    status, found = await server.call("GET", path)
    assert status == 200
    (loading,) = found["loading"]
    assert loading["progress"] in ("waiting", "reading", "compiling")
    assert loading["progress_s"] >= 0
    assert loading["progress_left_s"] is None, "nothing was measured here before"
    server.load.gate.set()
    assert (await creating)[0] == 200
    assert (await server.call("GET", path))[1]["loading"] == []
    # And the next one can be told.
    async with server.http.get("/metrics") as answer:
        text = await answer.text()
    assert re.search(r'robojax_prepare_seconds_count\{step="joining_rooms"\} 1.0', text)

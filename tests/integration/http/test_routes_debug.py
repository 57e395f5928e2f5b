import asyncio
import json
import logging
import re
import threading

import pytest

from service.engines.engine_set import EngineSet


async def test_root_reports_a_running_server(server):
    status, reply = await server.call("GET", "/")
    assert (status, set(reply), reply["status"]) == (200, {"message", "status"}, "healthy")


async def test_health_has_sessions_device_versions_and_uptime(server):
    status, reply = await server.call("GET", "/health")
    assert (status, reply["status"], reply["active_sessions"], reply["session_ids"]) == (200, "healthy", 0, [])
    assert reply["device"] is None
    assert reply["server_running"] is True
    assert {"python", "robojax", "jax", "sanic"} <= set(reply["versions"])
    assert 0 <= reply["uptime"] < 60
    await server.create()
    _, reply = await server.call("GET", "/health")
    assert (reply["active_sessions"], reply["session_ids"], reply["device"]) == (1, ["arm"], "scripted:0")
    (device,) = reply["engine"]["devices"]
    assert (device["device"], device["waiting"], device["batches"]) == ("scripted:0", 0, {})
    async with server.http.get("/metrics") as answer:
        assert 'robojax_device_load{device="scripted:0",lane="0"} 0.0' in await answer.text()


STOP_BODIES = {
    b"": "asked for over HTTP",
    b'{"reason": "cable caught"}': "cable caught",
    b'{"reason": "a\\nb"}': "a b",
    b'{"reason": 5}': "asked for over HTTP",
    b"[1]": "asked for over HTTP",
    b"{{{ not json": "asked for over HTTP",
    b"\xff\xfe": "asked for over HTTP",
    b"[" * 50_000: "asked for over HTTP",
    json.dumps({"reason": "x" * 5000}).encode(): "x" * 200,
}


async def test_emergency_stop_accepts_any_body(server):
    await server.create()
    for body, reason in STOP_BODIES.items():
        assert (await server.call("POST", "/sessions/arm/start"))[0] == 200
        status, reply = await server.call("POST", "/debug/emergency_stop", data=body)
        assert (status, reply["stopped"]) == (200, ["arm"])
        _, listed = await server.call("GET", "/sessions/arm")
        assert (listed["status"], listed["error_message"]) == ("stopped", reason)
        assert (await server.call("POST", "/debug/sessions/arm/reset"))[0] == 200


async def test_queue_of_a_session_is_shown(server):
    await server.create()
    status, reply = await server.call("GET", "/debug/sessions/arm/queue")
    assert (status, reply["session_id"], reply["queue_length"], reply["control_hz"]) == (200, "arm", 0, 20)


async def test_system_report_hides_folders_of_the_machine(serve, tmp_path):
    limits = tmp_path / "secret" / "limits.toml"
    limits.parent.mkdir()
    limits.write_text("[joints.Jaw]\nhigh = 90\n")
    folders = {name: f"/secret/{name}" for name in ("compile_cache", "policy_cache", "log_file", "recordings")}
    async with serve(policy_roots=("/secret/roots",), limits=str(limits), **folders) as server:
        status, reply = await server.call("GET", "/debug/system")
    assert (status, reply["sessions"], reply["embedded_rooms"]) == (200, {}, {"robotics": 0, "video": 0})
    assert reply["memory_mb"] > 10
    assert reply["settings"]["max_sessions"] == 64
    assert "/secret" not in str(reply)


async def test_logs_are_kept_without_secrets(server):
    log = logging.getLogger("a.test")
    log.warning("before")
    log.error("loading /home/me/models/act failed with Authorization: Bearer abcdefghijkl")
    _, reply = await server.call("GET", "/debug/logs?limit=1&level=warning")
    [line] = reply["logs"]
    assert (line["level"], line["logger"]) == ("ERROR", "a.test")
    assert line["message"] == "loading .../act failed with Authorization: ***"
    _, reply = await server.call("GET", "/debug/logs?limit=2")
    assert reply["logs"][0]["message"] == "before"
    assert reply["logs"][1] == line
    _, reply = await server.call("GET", f"/debug/logs?limit=1&level=warning&before={line['number']}")
    assert [line["message"] for line in reply["logs"]] == ["before"]


async def test_metrics_have_sessions_requests_and_latencies(server):
    await server.create()
    await server.call("POST", "/sessions/arm/start")
    await server.call("GET", "/sessions/nobody")
    async with server.http.get("/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = set((await answer.text()).splitlines())
    assert 'robojax_sessions{stage="running"} 1.0' in lines
    assert 'robojax_session_protocol{protocol="rooms",session="arm"} 1.0' in lines
    assert 'robojax_commands_sent_total{session="arm"} 0.0' in lines
    assert 'robojax_frames_received_total{camera="front",session="arm"} 0.0' in lines
    assert 'robojax_requests_total{method="GET",route="/sessions/{session_id}",status="404"} 1.0' in lines
    assert 'robojax_requests_total{method="POST",route="/sessions",status="200"} 1.0' in lines
    stages = {"frame_age", "queue", "to_device", "compute", "to_host", "inference", "answer"}
    counts = {line for line in lines if line.startswith("robojax_stage_seconds_count")}
    assert counts == {f'robojax_stage_seconds_count{{session="arm",stage="{stage}"}} 0.0' for stage in stages}


async def test_metrics_of_a_failed_session_can_be_read(server):
    server.load.failure = RuntimeError("x")
    await server.create()
    async with server.http.get("/metrics") as answer:
        assert answer.status == 200
        assert 'robojax_sessions{stage="error"} 1.0' in await answer.text()


async def test_server_without_anything_to_load_is_ready(server) -> None:
    assert await server.call("GET", "/ready") == (200, {"ready": True, "waiting_for": [], "loading": []})


@pytest.mark.parametrize("trouble", ["", "devices: there is no device tpu:0"])
async def test_server_without_an_engine_is_not_ready(server, trouble: str) -> None:
    server.app.ctx.engines = engines = EngineSet()
    engines.read_trouble = lambda: trouble
    status, found = await server.call("GET", "/ready")
    why = trouble or "an engine is being started"
    assert (status, found["ready"], found["waiting_for"]) == (503, False, [why])
    assert (found["code"], found["detail"]) == ("not_ready", why)


async def test_running_loads_are_listed_with_their_progress(server) -> None:
    server.load.gate = threading.Event()
    creating = asyncio.create_task(server.create())
    await server.until_loading()
    status, found = await server.call("GET", "/ready")
    assert status == 200
    (loading,) = found["loading"]
    assert loading["progress"] in ("waiting", "reading", "compiling")
    assert loading["progress_s"] >= 0
    assert loading["progress_left_s"] is None, "this server has no earlier measurement"
    server.load.gate.set()
    assert (await creating)[0] == 200
    assert (await server.call("GET", "/ready"))[1]["loading"] == []
    # The next load has an estimate.
    async with server.http.get("/metrics") as answer:
        text = await answer.text()
    assert re.search(r'robojax_prepare_seconds_count\{step="joining_rooms"\} 1.0', text)

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.auth.caller import Role
from service.recording import library
from service.recording.library import open_source
from service.recording.mcap_files import McapSource
from service.recording.recordings import run_process
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy
from tests.testing.rig import JOINTS, expect_refusal, show

GOLDEN = Path(__file__).parents[2] / "golden"


@asynccontextmanager
async def moving(server, by=None, **more):
    """Yield a session whose robot sends frames and joints and moves."""
    await server.create("arm", by, rate=50, **more)
    showing = asyncio.create_task(show(server.transport.link))
    await server.call("POST", "/sessions/arm/start", by)
    yield
    showing.cancel()


async def until(server, expected, path="/recordings", by=None):
    for _ in range(2400):
        _, found = await server.call("GET", path, by)
        if expected(found):
            return found
        await asyncio.sleep(0.025)
    raise AssertionError(found)


def recording(status):
    return status["stats"]["recording"]


async def test_recorded_session_becomes_a_file_and_a_dataset(serve, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    begun_in, begin = [], subprocess.Popen.__init__
    monkeypatch.setattr(
        subprocess.Popen,
        "__init__",
        lambda *how, **more: begun_in.append(threading.current_thread()) or begin(*how, **more),
    )
    async with serve(recordings=str(folder), recording_free=0) as server:
        await server.create("arm", record=True, rate=50, language_instruction="wave")
        feeding = asyncio.create_task(show(server.transport.link))
        _, waiting = await server.call("GET", "/sessions/arm")
        assert recording(waiting) == {
            **{"state": "on", "file": None, "seconds": 0, "bytes": 0, "dropped": 0},
            "reason": None,
        }
        assert not folder.exists()
        for _ in range(2):
            await server.call("POST", "/sessions/arm/start")
            sent = len(server.transport.link.sent)
            await until(server, lambda one, sent=sent: one["stats"]["commands_sent"] > sent + 5, "/sessions/arm")
            await server.call("POST", "/sessions/arm/stop")
        _, running = await server.call("GET", "/sessions/arm")
        assert recording(running)["state"] == "on"
        ((one,)) = (await server.call("GET", "/recordings"))[1]
        assert (one["state"], one["session_id"], one["dataset"]) == ("on", "arm", "none")
        expect_refusal(await server.call("DELETE", f"/recordings/{one['name']}"), 409, "recording_refused")
        await server.call("DELETE", "/sessions/arm")
        feeding.cancel()
        (one,) = await until(server, lambda found: found[0]["dataset"] == "ready")
        assert begun_in
        assert threading.main_thread() not in begun_in, "this would block the ticks of all robots"
        assert (one["state"], one["episodes"]) == ("off", 2)
        assert one["bytes"] > 1000
        assert str(tmp_path) not in json.dumps(one)
        source = McapSource(folder / f"{one['name']}.mcap")
        assert (source.header.task, source.header.rate, source.header.joints) == ("wave", 50, JOINTS)
        assert source.header.limits["mode"] == "clamp"
        assert source.header.limits["Jaw"]["high"] == source.header.high[5] == 100
        steps = list(open_source(folder / one["name"]).steps())
        assert {step.episode for step in steps} == {0, 1}
        assert len(steps) == len(list(source.steps()))
        assert (await server.call("DELETE", f"/recordings/{one['name']}"))[0] == 200
        assert not list(folder.iterdir())
        assert (await server.call("DELETE", f"/recordings/{one['name']}"))[0] == 404


async def test_recording_is_switched_during_motion(serve, tmp_path):
    settings = {"recordings": str(tmp_path), "recording_free": 0, "recording_datasets": False}
    async with serve(**settings) as server, moving(server):
        assert recording((await server.call("GET", "/sessions/arm"))[1])["state"] == "off"
        status, reply = await server.call("POST", "/sessions/arm/record", json={"on": True})
        assert (status, reply["recording"]["state"]) == (200, "on")
        await until(server, lambda one: recording(one)["seconds"] > 0.2, "/sessions/arm")
        await server.call("POST", "/sessions/arm/record", json={"on": False})
        (one,) = await until(server, lambda found: found and found[0]["state"] == "off")
        assert len(list(McapSource(tmp_path / f"{one['name']}.mcap").steps())) > 5
        status = (await server.call("GET", "/sessions/arm"))[1]
        assert (status["status"], recording(status)["state"]) == ("running", "off")


async def test_recording_is_visible_only_to_its_owner(serve, tmp_path):
    roles = {"ann": Role.OPERATOR, "bob": Role.OPERATOR}
    settings = {"recording_free": 0, "recording_datasets": False, "policy_owners": ("policies",)}
    async with serve(roles=roles, state=str(tmp_path), **settings) as server:
        async with moving(server, "ann", record=True):
            await until(server, lambda one: one["stats"]["commands_sent"] > 3, "/sessions/arm", "ann")
            await server.call("DELETE", "/sessions/arm", "ann")
        (one,) = await until(server, lambda found: found and found[0]["state"] == "off", by="ann")
        assert await server.call("GET", "/recordings", "bob") == (200, [])
        assert (await server.call("DELETE", f"/recordings/{one['name']}", "bob"))[0] == 404
        assert (await server.call("DELETE", f"/recordings/{one['name']}", "ann"))[0] == 200


async def test_server_shutdown_leaves_a_complete_recording(serve, tmp_path):
    async with serve(recordings=str(tmp_path), recording_free=0) as server, moving(server, record=True):
        await until(server, lambda one: one["stats"]["commands_sent"] > 5, "/sessions/arm")
    (path,) = tmp_path.glob("*.mcap")
    assert McapSource(path).outcome.state == "off"
    assert len(list(McapSource(path).steps())) > 4


async def test_recording_ends_with_a_failed_session(serve, tmp_path):
    policy = ScriptedPolicy()
    settings = {"recordings": str(tmp_path), "recording_free": 0, "recording_datasets": False}
    async with serve(load=ScriptedLoader(lambda: policy), **settings) as server, moving(server, record=True):
        await until(server, lambda one: one["stats"]["commands_sent"] > 3, "/sessions/arm")
        policy.failures = [ValueError("broken")] * 3
        await until(server, lambda one: one["status"] == "error", "/sessions/arm")
        await until(server, lambda found: found[0]["state"] == "off")


async def read_pages(server, path):
    """Follow the Link header of each page and return the pages."""
    pages, url = [], server.url + path
    while url:
        async with server.http.get(url) as answer:
            assert answer.status == 200
            pages.append(await answer.json())
            url = answer.links.get("next", {}).get("url")
    return pages


async def test_recordings_are_listed_in_pages(serve, tmp_path, monkeypatch):
    (golden,) = (GOLDEN / "files_of_0_1" / "recordings").glob("*.mcap")
    for number in range(5):
        shutil.copy(golden, tmp_path / f"arm-{number}.mcap")
    (tmp_path / "damaged.mcap").write_bytes(b"x")
    (tmp_path / "link.mcap").symlink_to(golden)
    read, read_header = [], library.read_header
    monkeypatch.setattr(library, "read_header", lambda path: read.append(path.stem) or read_header(path))
    async with serve(recordings=str(tmp_path)) as server:
        pages = await read_pages(server, "/recordings?limit=2")
        names = [[one["name"] for one in page] for page in pages]
        assert names == [["arm-4", "arm-3"], ["arm-2", "arm-1"], ["arm-0", "damaged"]]
        assert await read_pages(server, "/recordings") == [[*pages[0], *pages[1], *pages[2]]]
        assert len(read) == 6, "an unchanged file is read once"
        shutil.copy(golden, tmp_path / "damaged.mcap")
        (tmp_path / "arm-4.mcap").unlink()
        (listed,) = await read_pages(server, "/recordings")
        assert [one["name"] for one in listed] == ["damaged", "arm-3", "arm-2", "arm-1", "arm-0"]
        assert listed[0]["session_id"] == "demo-arm"
        for query, place in (("limit=0", "limit"), ("limit=501", "limit"), ("before=arm-4", "before")):
            status, reply = await server.call("GET", f"/recordings?{query}")
            assert (status, reply["detail"][0]["loc"]) == (422, ["query", place])


async def test_cached_list_of_recordings_shows_each_change(tmp_path, monkeypatch):
    (golden,) = (GOLDEN / "files_of_0_1" / "recordings").glob("*.mcap")
    shutil.copy(golden, tmp_path / "a.mcap")
    (tmp_path / "growing.mcap").write_bytes(b"")
    long_ago = time.time() - 60
    os.utime(tmp_path / "growing.mcap", (long_ago, long_ago))
    os.utime(tmp_path, (long_ago, long_ago))
    kept = library.RecordingLibrary(tmp_path)
    entries = kept.list_entries()
    assert kept.list_entries() is entries, "an unchanged folder is not read again"
    (tmp_path / "growing.mcap").write_bytes(golden.read_bytes())
    assert kept.list_entries() is entries
    assert kept.read_entry("growing").session_id == "demo-arm"
    shutil.copy(golden, tmp_path / "b.mcap")
    assert [entry.name for entry in kept.list_entries()] == ["growing", "b", "a"]
    (tmp_path / "b.mcap").unlink()
    assert [entry.name for entry in kept.list_entries()] == ["growing", "a"]


async def test_server_without_a_recording_folder_reports_it(server):
    status, refused = await server.create("arm", record=True)
    assert (status, refused["detail"][0]["loc"]) == (422, ["body", "record"])
    assert "--recordings" in refused["detail"][0]["msg"]
    await server.create("arm")
    expect_refusal(await server.call("POST", "/sessions/arm/record", json={"on": True}), 409, "recording_refused")
    assert await server.call("GET", "/recordings") == (200, [])


@pytest.mark.parametrize("name", ["nothing", "..%2F..%2Fetc%2Fpasswd", "%2e%2e", "a" * 200])
async def test_names_are_never_paths(serve, tmp_path, name):
    (tmp_path / "secret.mcap").write_text("keep me")
    async with serve(recordings=str(tmp_path / "kept")) as server, server.http.delete(f"/recordings/{name}") as answer:
        assert answer.status in (400, 404, 405)
    assert (tmp_path / "secret.mcap").exists()


@pytest.mark.parametrize("after", [0.0, 0.3])
async def test_cancelled_process_leaves_no_open_pipe(after):
    pipes, begin = [], subprocess.Popen.__init__

    def remember(self, *how, **more):
        begin(self, *how, **more)
        pipes.append(self.stderr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", remember)
        running = asyncio.create_task(run_process([sys.executable, "-c", "import time; time.sleep(60)"]))
        await asyncio.sleep(after)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [pipe.closed for pipe in pipes] == [True]

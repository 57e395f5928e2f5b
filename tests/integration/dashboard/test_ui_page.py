"""The page in one real browser for all of these tests, with the real server."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import playwright.async_api as playwright
import pytest
import pytest_asyncio

from jaxmodels.errors import CheckpointError
from service.auth.caller import Role
from service.dashboard.live import LiveSettings
from service.inference.replicas import MAX_FAILURES
from service.rollout.records import Record
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.peers import require_peers
from tests.testing.waiting import until

CHROMIUM = Path("/usr/bin/chromium")
require_peers("chromium")
pytestmark = [pytest.mark.needs_peers, pytest.mark.asyncio(loop_scope="module")]
WAIT = 30_000  # Milliseconds.
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 640}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator:
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def server(serve) -> AsyncIterator:
    async with serve() as server:
        yield server


@asynccontextmanager
async def opened(browser, server, viewport=DESK, *, troubles: tuple[str, ...] = (), is_live: bool = True, **more):
    """Yield the live page; afterwards, check that it contacted no other host and logged no unexpected message."""
    context = await browser.new_context(viewport=viewport, **more)
    page = await context.new_page()
    page.set_default_timeout(WAIT)
    logged, urls = [], []
    page.on("console", lambda message: logged.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("dialog", lambda dialog: logged.append(f"dialog {dialog.message}"))
    page.on("request", lambda request: urls.append(request.url))
    page.on("websocket", lambda socket: urls.append(socket.url))
    try:
        await page.goto(server.url + "/ui")
        if is_live:
            await page.wait_for_selector("#link[data-state=live]")
        yield page
        assert {urlsplit(url).netloc for url in urls if not url.startswith("blob:")} == {urlsplit(server.url).netloc}
        assert [text for text in logged if not any(trouble in text for trouble in troubles)] == []
    finally:
        await context.close()


async def choose_policy(page, path: str) -> None:
    """Fill the form of a new session and leave the policy field."""
    await page.click("#new")
    await page.fill("#new-session_id", "arm-1")
    await page.fill("#new-policy_path", path)
    await page.press("#new-policy_path", "Tab")


async def pressed_twice(page, selector: str) -> None:
    await page.click(f"{selector}:enabled")
    await page.click(f"{selector}.sure")


async def until_text(page, selector: str, text: str | re.Pattern[str]) -> None:
    await page.locator(selector, has_text=text).first.wait_for(timeout=WAIT)


async def until_so(page, claim: str, *arguments) -> None:
    """Poll a condition; Playwright's own wait evaluates strings, which the page's policy forbids."""
    async with asyncio.timeout(WAIT / 1000):
        while not await page.evaluate(claim, *arguments):  # noqa: ASYNC110 - a browser offers no event
            await asyncio.sleep(0.05)


async def test_session_is_controlled_from_creation_to_deletion(browser, server):
    async with opened(browser, server) as page:
        await until_text(page, "#none", "No session is there")
        await choose_policy(page, "policies/act")
        await until_text(page, "#new-found[data-tone=good]", "It fits. act: cameras front 48×64; 6 joints (Rotation")
        await page.click("text=Create session")
        await until_text(page, "#stage", "ready")
        assert await page.is_hidden("#create")
        arm = server.connect()

        await page.click("#start:enabled")
        await until_text(page, "#stage", "running")
        await until_so(page, "document.querySelector('figure img')?.naturalWidth === 64")
        first = await page.inner_text(".plot .over-plot")
        await until_so(page, "before => document.querySelector('.plot .over-plot').innerText !== before", first)
        await until_so(page, "Number(document.querySelector('#numbers dd').innerText) > 5")

        await page.click("#new")
        await page.fill("#new-session_id", "half a wor")
        await page.press("#new-session_id", "Escape")
        await until_text(page, "#report[data-state=done]", "1 session stopped and latched: arm-1")
        await until_text(page, "#report", "Latched as of now: 1 of 1.")
        assert await page.input_value("#new-session_id") == "half a wor"
        await until_text(page, "#stage", "stopped · latched")
        await until_text(page, "#reason", "STOP on the page")
        assert server.app.ctx.sessions.get("arm-1").is_latched
        await page.wait_for_selector("#start:disabled")
        sent = len(arm.link.sent)

        await pressed_twice(page, "#reset")
        await page.wait_for_selector("#reset", state="hidden")
        await until_text(page, "#stage", "stopped")
        assert len(arm.link.sent) <= sent + 4, "a reset does not move the arm; a stop repeats its hold"
        await page.click("#start:enabled")
        await until_text(page, "#stage", "running")
        await pressed_twice(page, "#delete")
        await until_text(page, "#none", "No session is there")
        assert (await server.call("GET", "/sessions"))[1] == []


async def test_ctrl_space_and_the_button_stop_all_sessions(browser, server):
    await server.create("a")
    await server.create("b")
    async with opened(browser, server) as page:
        await page.press("body", "Control+Space")
        await until_text(page, "#report[data-state=done]", "2 sessions stopped and latched: a, b")
        await page.click("text=Close")
        await page.click("#stop")
        await until_text(page, "#report[data-state=done]", "2 sessions stopped and latched: a, b")


async def test_policy_that_does_not_fit_is_not_sent(browser, server):
    async with opened(browser, server, troubles=("422",)) as page:
        await choose_policy(page, "policies/act")
        await page.fill("#new-camera_names", "front, top")
        await page.click("text=Create session")
        await until_text(page, "#new-found[data-tone=bad]", "It does not fit")
        await until_text(page, "#new-told", "Not sent")
        await page.fill("#new-policy_path", "policies/missing")
        await page.press("#new-policy_path", "Tab")
        await until_text(page, "#new-found[data-tone=bad]", "config.json: cannot be read")
    assert server.load.loads == []


async def test_instruction_is_set_at_creation_and_during_motion(browser, server):
    server.load.make = lambda: ScriptedPolicy(replace(SO100_REQUIREMENTS, language=True), unreadable="gibberish")
    async with opened(browser, server, troubles=("422",)) as page:
        await choose_policy(page, "policies/language")
        await until_text(page, "#new-found[data-tone=good]", "it does what the instruction says")
        assert await page.evaluate("document.querySelector('#new-language_instruction').required")
        await page.fill("#new-language_instruction", "lift")
        await page.click("text=Create session")
        await until_text(page, "#stage", "ready")
        server.connect()
        await page.click("#start:enabled")
        await until_so(page, "document.querySelector('#instruction').value === 'lift'")
        await page.fill("#instruction", "drop it")
        await page.press("#instruction", "Enter")
        await until_text(page, "#told", "adjusted")
        session = server.app.ctx.sessions.get("arm-1")
        assert session.new.language_instruction == "drop it"
        await page.fill("#instruction", "gibberish")
        await page.click("#tell")
        await until_text(page, "#told", "Instruction was refused")
        assert session.new.language_instruction == "drop it"


async def test_held_robot_shows_the_reason_and_no_old_picture_as_live(browser, server):
    arm = await server.create()
    async with opened(browser, server) as page:
        await page.click("#start:enabled")
        await page.wait_for_selector("figure img")  # A missing element counts as hidden.
        await page.wait_for_selector("figure .over", state="hidden")
        arm.is_seeing = False
        await until_text(page, "#reason[data-tone=warn]", "Held (camera_stale)")
        await until_text(page, "#reason", "camera 'front': frame is")
        await until_text(page, "figure .over", "not live:")


async def test_stop_is_repeated_over_a_lost_connection(browser, serve):
    troubles = ("Failed to load resource", "WebSocket connection")
    async with serve() as server:
        await server.create()
        port = urlsplit(server.url).port
        page_is_open = opened(browser, server, troubles=troubles)
        page = await page_is_open.__aenter__()
        await page.wait_for_selector("figure img")
        live = server.app.ctx.live
        live.settings = LiveSettings(viewers=0)
        for viewer in list(live.viewers):
            viewer.abort()
        await until_text(page, "#lost", "Connection lost")
        await until_text(page, "#link", "connection lost")
        assert await page.evaluate("document.body.classList.contains('lost')")
        await until_text(page, "figure .over", "connection lost: not live")
    await page.keyboard.press("Escape")
    await until_text(page, "#report[data-state=failed]", "NOT STOPPED: the server has not acknowledged the STOP")
    await until_text(page, "#report", "use the robot's own emergency stop")
    await until_text(page, "#report", re.compile(r"attempt ([2-9]|\d\d)"))
    async with serve(port=port) as server:
        await server.create("other")
        await until_text(page, "#report[data-state=done]", "Acknowledged by the server")
        await page.wait_for_selector("#link[data-state=live]")
        assert await page.is_hidden("#lost")
        await page_is_open.__aexit__(None, None, None)


async def test_text_of_servers_and_policies_is_shown_without_markup(browser, server):
    bad = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    server.load.failure = CheckpointError(bad)
    body = {"session_id": "arm", "policy_path": bad, "transport_server_url": "http://rooms.example"}
    await server.call("POST", "/sessions", json=body)
    async with opened(browser, server, troubles=("TrustedHTML",)) as page:
        await until_text(page, "#stage[data-tone=bad]", "error")
        await until_text(page, "#reason", bad)
        await until_text(page, ".facts", bad)
        assert await page.evaluate("document.querySelectorAll('#frame script, #frame img[src=x]').length") == 0
        refused = "try { document.body.innerHTML = '<b>x</b>'; 'taken' } catch (error) { error.name }"
        assert await page.evaluate(refused) == "TypeError", "the browser refuses HTML from a script"


async def test_recording_is_switched_and_quarantined_commit_released(browser, serve, tmp_path, monkeypatch):
    (tmp_path / "so100.toml").write_text("[joints.sholder_pan]\nlow = -60")
    settings = {"recordings": str(tmp_path), "recording_free": 0, "recording_datasets": False}
    async with serve(limits=str(tmp_path / "so100.toml"), **settings) as server:
        record = Record("lab/pick", None, "webhook", sha="c0ffee" * 7)
        record.end("rejected", "load", "a NaN")
        updates = server.app.ctx.updates
        await updates.quarantine.add(record.repo, "c0ffee" * 7, "load", "a NaN", None)
        monkeypatch.setattr(updates, "list", lambda session_id: [record])
        await server.create()
        async with opened(browser, server, PHONE, has_touch=True, is_mobile=True) as page:
            await until_text(page, "#detail table", "rejected: load: a NaN")
            assert await page.evaluate("innerWidth") == PHONE["width"], "a wide table must scroll in its card"
            await until_text(page, "#warned", "sholder_pan, which this session does not have")
            await page.click("#record:enabled")
            await until_text(page, "#recorded", "recording")
            assert (await server.call("GET", "/sessions/arm"))[1]["stats"]["recording"]["state"] == "on"
            await page.click("#record[aria-pressed=true]")
            await page.wait_for_selector("#recorded", state="hidden")
            await page.click("#quarantine > summary")
            await until_text(page, "#quarantine-list", "load: a NaN")
            await pressed_twice(page, "#quarantine-list button")
            await until_text(page, "#quarantine-list", "No commit is in it.")
        assert not updates.quarantine.list()


TOO_SMALL = """() => [...document.querySelectorAll('button, input, select, summary, label.check')]
  .filter((node) => node.checkVisibility() && node.type !== 'checkbox')
  .map((node) => [node.id || node.innerText, node.getBoundingClientRect()])
  .filter(([, box]) => box.height < 44 || box.width < 44).map(([name]) => name)"""


async def test_phone_has_large_targets_and_reset_next_to_stop(browser, server):
    await server.create("an-arm-with-a-rather-long-name-that-goes-on-and-on-and-on")
    async with opened(browser, server, PHONE, has_touch=True, is_mobile=True) as page:
        await page.wait_for_selector("#plots canvas")
        await page.click("#new")
        for y in (0, 10_000):
            await page.evaluate(f"scrollTo(0, {y})")
            assert await page.evaluate("document.documentElement.scrollWidth") == 390
            box = await page.locator("#stop").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
            assert 0 <= box["y"] <= box["y"] + box["height"] <= 640
            assert box["height"] >= 48
        await page.click("#new-more summary")
        assert await page.evaluate(TOO_SMALL) == []
        assert await page.is_hidden("#reset-near")
        await page.tap("#stop")
        await until_text(page, "#report[data-state=done]", "1 session stopped and latched")
        await page.wait_for_selector("#reset-near:visible")
        stop, reset = [await page.locator(name).bounding_box() for name in ("#stop", "#reset-near")]
        assert reset["y"] == stop["y"]
        await pressed_twice(page, "#reset-near")
        await page.wait_for_selector("#reset-near", state="hidden")
        await until_text(page, "#stage", "stopped")


async def test_absent_robot_is_named_and_start_is_disabled(browser, server):
    arm = await server.create("arm")
    async with opened(browser, server) as page:
        await page.wait_for_selector("#start:enabled")
        for task in server._living:
            task.cancel()
        await until_text(page, "#reason", "no picture and no joint value since")
        await page.wait_for_selector("#start:disabled")
        arm.step()
        await page.wait_for_selector("#start:enabled")


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    canvas.fillStyle = style.getPropertyValue('--' + name).trim();
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
      value /= 255;
      return value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
    });
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + .05) / (b + .05);
  };
  const pairs = [['text', 'card'], ['dim', 'card'], ['dim', 'back'], ['dim', 'sunk'], ['good', 'good-soft'],
    ['warn', 'warn-soft'], ['bad', 'bad-soft'], ['accent', 'info-soft'], ['card', 'accent'], ['card', 'bad']];
  return Object.fromEntries(pairs.map((pair) => [pair.join(' on '), ratio(...pair)]));
}"""


async def test_both_colour_schemes_are_readable_and_fields_have_labels(browser, server):
    async with opened(browser, server, color_scheme="dark") as page:
        backs = []
        for theme in ("auto", "light", "dark"):
            assert theme in await page.inner_text("#theme")
            assert {pair: ratio for pair, ratio in (await page.evaluate(CONTRAST)).items() if ratio < 4.5} == {}
            backs.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            await page.click("#theme")
        assert backs[0] == backs[2] != backs[1], "auto must follow the system setting"
        await page.click("#new")
        nameless = (
            "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length).map((one) => one.id)"
        )
        assert await page.evaluate(nameless) == []


async def test_viewer_signs_in_and_may_only_watch_and_stop(browser, serve, keys):
    async with serve(keys_file=str(keys.path), policy_owners=("policies",)) as server:
        mine = keys.create("mine", Role.OPERATOR, "me", time.time())
        watching = keys.create("watching", Role.VIEWER, "me", time.time())
        theirs = keys.create("theirs", Role.OPERATOR, "them", time.time())
        server.http.headers["x-api-key"] = theirs
        await server.create("their-arm")
        server.http.headers["x-api-key"] = mine
        await server.create("my-arm")
        troubles = ("401",)
        async with opened(browser, server, troubles=troubles, is_live=False) as page:
            await page.wait_for_selector("#sign-in")
            await page.fill("#key", "rjk_no_such_key")
            await page.keyboard.press("Enter")
            await until_text(page, "#sign-in-text", "The key was refused")
            await page.fill("#key", watching)
            await page.keyboard.press("Enter")
            await page.wait_for_selector("#link[data-state=live]")
            await until_text(page, "#who", "watching (viewer)")
            await until_text(page, "#sessions", "my-arm")
            assert "their-arm" not in await page.inner_text("body")
            for button in ("#start", "#halt", "#restart", "#delete", "#new"):
                assert await page.is_disabled(button)
            await page.keyboard.press("Escape")
            await until_text(page, "#report[data-state=done]", "2 sessions stopped and latched: my-arm and 1 of others")
            keys.revoke("watching")
            await page.wait_for_selector("#sign-in")
            stored = json.loads(await page.evaluate("JSON.stringify(localStorage)"))
            assert "robojax-key" not in stored


async def test_pressed_stop_reaches_the_robot_in_time(browser, server, pauses):
    arm = await server.create()
    async with opened(browser, server) as page:
        await page.click("#start:enabled")
        await until(lambda: arm.link.sent)
        pressed = time.monotonic()
        await page.keyboard.press("Escape")
        await until(lambda: server.app.ctx.sessions.get("arm").is_latched)
        assert pauses.running(pressed) < 0.5


async def test_devices_are_shown_with_load_and_failures_in_red(browser, serve):
    async with serve() as server:
        await server.create()
        await server.call("POST", "/sessions/arm/start")
        async with opened(browser, server) as page:
            await page.click("#devices > summary")
            await until_text(page, "#devices-list", "scripted:0")
            await until_text(page, "#devices-list", "of a device's time is promised")
            await page.wait_for_function("/1: [1-9]/.test(document.querySelector('#devices-list').innerText)")
            for _ in range(MAX_FAILURES):
                server.app.ctx.sessions.engine.devices.health.mark_failed("scripted:0", "it raises XlaRuntimeError")
            await until_text(page, "#devices-list .bad", "left out: it raises XlaRuntimeError")

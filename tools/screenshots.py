"""Take screenshots of the dashboard during the demo: ``python tools/screenshots.py FOLDER`` in the root folder."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
from playwright.async_api import Browser, Page, async_playwright

from robojax.sim.arm import CAMERA, JOINTS
from robojax.sim.demo import Demo, DemoRequest, serve_demo
from service.transport.client.robot import connect_robot
from service.transport.link import Rooms

CHROMIUM = "/usr/bin/chromium"
POLICY = "robojax/sim/policy"  # A relative path, because the screenshots show it.
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 740}
BLIND = "arm-2"


@asynccontextmanager
async def playing(running: Demo, request: DemoRequest) -> AsyncIterator[None]:
    """Let the arm of the demo pick up cubes."""

    async def watch() -> None:
        async for _ in running.views(request, seed=5000, episodes=0):
            pass

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


@asynccontextmanager
async def blind_arm(url: str, http: aiohttp.ClientSession) -> AsyncIterator[asyncio.Event]:
    """Run another session whose camera fails when the yielded event is set."""
    body = {"session_id": BLIND, "policy_path": POLICY, "transport_server_url": url, "camera_names": [CAMERA]}
    async with http.post(f"{url}/sessions", json=body) as answer:
        made = await answer.json()
    rooms = Rooms(
        made["workspace_id"], made["camera_room_ids"], made["joint_input_room_id"], made["joint_output_room_id"]
    )
    broken = asyncio.Event()
    async with connect_robot(url, rooms, on_command=lambda values, at: None) as robot:

        async def live() -> None:
            image = np.full((96, 96, 3), 90, np.uint8)
            while True:
                if not broken.is_set():
                    robot.show(CAMERA, image)
                robot.send_joints(dict.fromkeys(JOINTS, 0.0))
                await asyncio.sleep(0.04)

        task = asyncio.create_task(live())
        try:
            yield broken
        finally:
            task.cancel()


async def opened(browser: Browser, url: str, **how) -> Page:
    page = await (await browser.new_context(**how)).new_page()
    await page.goto(f"{url}/ui")
    await page.wait_for_selector("#link[data-state=live]")
    return page


async def take(folder: Path) -> None:
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
        serve_demo() as running,
        aiohttp.ClientSession(trust_env=False) as http,
    ):
        url = running.url
        page = await opened(browser, url, viewport=DESK)
        await page.screenshot(path=folder / "idle.png")
        request = await running.create_session(POLICY)
        async with playing(running, request):
            await page.locator("#stage", has_text="running").wait_for(timeout=60_000)
            await asyncio.sleep(3.4)
            await page.screenshot(path=folder / "running.png")
            dark = await opened(browser, url, viewport=DESK, color_scheme="dark")
            phone = await opened(browser, url, viewport=PHONE, is_mobile=True, device_scale_factor=2)
            await asyncio.sleep(6)
            await dark.screenshot(path=folder / "running-dark.png")
            await phone.screenshot(path=folder / "phone.png")
            await phone.locator("#plots").scroll_into_view_if_needed()
            await asyncio.sleep(0.5)
            await phone.screenshot(path=folder / "phone-plots.png")
            async with blind_arm(url, http) as broken:
                await page.click(f"text={BLIND}")
                await page.click("#start:enabled")
                await page.wait_for_selector("figure img:visible")
                await asyncio.sleep(4)
                broken.set()
                await asyncio.sleep(4)
                await page.screenshot(path=folder / "held.png")
                await page.keyboard.press("Escape")
                await page.wait_for_selector("#report[data-state=done]")
                await asyncio.sleep(1)
                await page.screenshot(path=folder / "stopped.png")
                await phone.evaluate("scrollTo(0, 0)")
                await phone.screenshot(path=folder / "phone-stopped.png")
                await dark.click("#new")
                await dark.fill("#new-session_id", "arm-3")
                await dark.fill("#new-policy_path", POLICY)
                await dark.fill("#new-camera_names", "wrist")
                await dark.press("#new-camera_names", "Tab")
                await dark.wait_for_selector("#new-found[data-tone=bad]")
                await dark.screenshot(path=folder / "create-dark.png")


if __name__ == "__main__":
    made = Path(sys.argv[1] if len(sys.argv) > 1 else "screenshots")
    made.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(made))

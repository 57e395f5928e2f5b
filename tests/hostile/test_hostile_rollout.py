"""Policies that fail on their probation, on a server that is loaded, killed, and pushed to again meanwhile."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.faults.arm import Arm, arm
from tests.faults.processes import Process, process

QUICK = {
    "ROBOJAX_UPDATE_QUIET": "0.2",
    "ROBOJAX_UPDATE_PROBATION": "6",  # what fails is to fail long before its end, however late this process gets to it
    "ROBOJAX_UPDATE_SLOW": "100",  # what a busy machine takes from an inference speaks against no policy here
    "ROBOJAX_UPDATE_POLL": "0",
    "ROBOJAX_STUCK_AFTER": "2",
}
BUSY = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: sum(range(10_000))"


class Pushed:
    """A policy's folder, and who pushes to it; what is pushed misbehaves once ``fail`` is called."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._serial = 0
        folder.mkdir()
        self.push()

    @property
    def _mark(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{self._serial}")

    def push(self, mode: str = "good") -> None:
        self._serial += 1
        script = {"serial": self._serial, "mode": mode, "times": None, "when": str(self._mark)}
        for name, content in (("model.safetensors", str(self._serial)), ("config.json", json.dumps(script))):
            fresh = self.folder / f".{name}"
            fresh.write_text(content)
            fresh.replace(self.folder / name)

    def fail(self) -> None:
        self._mark.touch()

    def recover(self) -> None:
        """End the misbehaviour, also an inference that hangs."""
        self._mark.unlink()


class Server:
    def __init__(self, running: Process, http: aiohttp.ClientSession):
        self.process, self._http = running, http

    async def call(self, method: str, path: str) -> tuple[int, Any]:
        async with self._http.request(method, self.process.url + path) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> Any:
        status, found = await self.call("GET", path)
        assert status == 200, found
        return found

    async def until(self, count: int, claim: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The deployment that is the ``count``-th, when the claim is true of it."""
        deadline = time.monotonic() + 60
        while True:
            found = await self.get("/deployments")
            if len(found) >= count and claim(found[-count]):
                return found[-count]
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)

    async def until_on_probation(self, count: int) -> dict[str, Any]:
        return await self.until(count, lambda one: one["result"] or one["stages"][-1]["name"] == "probation")

    async def until_ended(self, count: int) -> dict[str, Any]:
        return await self.until(count, lambda one: one["result"])


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    arguments = ("serve", "--port", "0", "--state", str(folder / "state"))
    with process(folder / "server.log", "tests.hostile.pushed_server", *arguments, env=QUICK) as running:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), trust_env=False) as http:
            yield Server(running, http)


@contextmanager
def busy() -> Iterator[None]:
    burning = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        burning.kill()
        burning.wait()


async def moving_arms(server: Server, stack: AsyncExitStack, policy: Pushed, modes: list[str]) -> list[Arm]:
    """Robots whose sessions have these modes of updates; the first session, which tries pushes, is the oldest."""
    arms = [await stack.enter_async_context(arm(server.process, None, f"arm{n}")) for n in range(len(modes))]
    goes = [
        one.go(2, policy=str(policy.folder), auto_update=mode, rate=25) for one, mode in zip(arms, modes, strict=True)
    ]
    await goes[0]
    await asyncio.gather(*goes[1:])
    return arms


async def test_rollback_under_load_costs_no_tick_and_precedes_next_push(tmp_path: Path) -> None:
    policy = Pushed(tmp_path / "policy")
    async with serving(tmp_path) as server, AsyncExitStack() as stack:
        arms = await moving_arms(server, stack, policy, ["swap", "swap", "off", "off"])

        async def figures(name: str) -> dict[str, int]:
            return {one.id: (await server.get(f"/sessions/{one.id}"))["stats"][name] for one in arms}

        first = (await figures("policy_commit"))["arm0"]
        with busy():
            missed = await figures("missed_ticks")
            policy.push("nan")
            bad = await server.until_on_probation(1)
            # At the moment at which it fails, what it came from goes away.
            policy.fail()
            gone = policy.folder.rename(tmp_path / "gone")
            bad = await server.until_ended(1)
            lost = {name: now - missed[name] for name, now in (await figures("missed_ticks")).items()}
        assert (bad["result"], bad["reason"], [*bad["figures"]]) == ("rolled_back", "not_finite", ["arm0"]), bad
        assert set((await figures("policy_commit")).values()) == {first}
        assert await figures("policy_changes") == {"arm0": 2, "arm1": 0, "arm2": 0, "arm3": 0}
        # All are on one machine; the one that was rolled back misses no more than those beside it.
        assert lost["arm0"] <= 2 * max(lost[one.id] for one in arms[1:]) + 3, lost
        gone.rename(policy.folder)
        # Two more are pushed, one while the other is taken back.
        policy.push("raise")
        worse = await server.until_on_probation(2)
        policy.fail()
        policy.push()
        worse = await server.until_ended(2)
        assert (worse["result"], worse["reason"], [*worse["figures"]]) == ("rolled_back", "policy_failed", ["arm0"])
        good = await server.until_ended(3)
        assert good["result"] == "swapped", good
        commits = await figures("policy_commit")
        assert commits == {"arm0": good["sha"], "arm1": good["sha"], "arm2": first, "arm3": first}
        kept_away = {one["sha"]: one["reason"] for one in await server.get("/quarantine")}
        assert kept_away == {bad["sha"]: "not_finite", worse["sha"]: "policy_failed"}
        for one in arms:
            await one.moves(2)


# How a policy begins to fail on its probation -> why it is taken back.
REASONS = {"wild": "wild", "jump": "jump", "late": "starved", "hang": "stuck"}


async def test_bad_policy_on_probation_is_removed_and_others_continue(tmp_path: Path) -> None:
    policy = Pushed(tmp_path / "policy")
    async with serving(tmp_path) as server, AsyncExitStack() as stack:
        trying, *others = await moving_arms(server, stack, policy, ["swap", "off", "off"])
        first = (await server.get("/sessions/arm0"))["stats"]["policy_commit"]
        expected = {}
        with busy():
            for count, (mode, reason) in enumerate(REASONS.items(), start=1):
                policy.push(mode)
                await server.until_on_probation(count)
                began = time.monotonic()
                before = {one.id: (await server.get(f"/sessions/{one.id}"))["stats"] for one in others}
                policy.fail()
                bad = await server.until_ended(count)
                assert (bad["result"], bad["reason"]) == ("rolled_back", reason), json.dumps(bad)
                expected[bad["sha"]] = reason
                assert (await server.get("/sessions/arm0"))["stats"]["policy_commit"] == first
                # Policies of this server run in its process. The process of an engine that hangs is replaced (F26).
                policy.recover()
                for one in others:
                    now = (await server.get(f"/sessions/{one.id}"))["stats"]
                    missed = now["missed_ticks"] - before[one.id]["missed_ticks"]
                    assert missed <= 25 * one.meter.lost(began) + 3, f"{mode}: {one.id} missed {missed} ticks"
                    await one.moves(2)
                if mode != "hang":
                    await trying.moves(2)
        assert {one["sha"]: one["reason"] for one in await server.get("/quarantine")} == expected
        # Nobody knows what a policy that hangs has done to its robot: it goes on when somebody says so.
        assert (await server.get("/sessions/arm0"))["status"] == "error"
        await trying.ask("restart")
        await trying.moves(2)
        assert (await server.get("/sessions/arm0"))["stats"]["policy_commit"] == first


async def test_kill_on_probation_does_not_keep_the_tried_policy(tmp_path: Path) -> None:
    policy = Pushed(tmp_path / "policy")
    async with serving(tmp_path) as server, aiohttp.ClientSession() as http:
        one = Arm(server.process, None, "arm0", http)
        try:
            await one.create(str(policy.folder), auto_update="swap", rate=25)
            await one.connect()
            await one.ask("start")
            await one.moves(2)
            policy.push("nan")
            tried = await server.until_on_probation(1)
            server.process.kill()
            await server.process.start_again()
            (kept_away,) = await server.get("/quarantine")
            assert (kept_away["sha"], kept_away["reason"]) == (tried["sha"], "interrupted")
            # It is in the folder still, and nothing would judge it.
            status, told = await server.call("POST", "/sessions/arm0/restart")
            assert status >= 400
            assert f"DELETE /quarantine/{tried['sha']}" in json.dumps(told)
            assert (await server.get("/sessions/arm0"))["status"] == "interrupted"
            policy.push()
            await one.ask("restart")
            assert (await server.get("/sessions/arm0"))["stats"]["policy_commit"] != tried["sha"]
            await one.ask("start")
            await one.moves(2)
        finally:
            await one.disconnect()

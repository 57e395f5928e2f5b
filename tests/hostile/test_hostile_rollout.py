"""Policies that fail during probation, on a server under load that is killed and receives more pushes."""

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
import pytest

from tests.faults.arm import Arm, arm
from tests.faults.processes import Process, process

QUICK = {
    "ROBOJAX_UPDATE_QUIET": "0.2",
    "ROBOJAX_UPDATE_PROBATION": "6",  # Long enough to fail before its end on a slow machine.
    "ROBOJAX_UPDATE_SLOW": "100",  # Slow inferences on a busy machine cause no rollback.
    "ROBOJAX_UPDATE_POLL": "0",
    "ROBOJAX_STUCK_AFTER": "2",
}
BUSY = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: sum(range(10_000))"


class Pushed:
    """Folder of a policy with pushes to it; a pushed policy misbehaves once ``fail`` is called."""

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
        """End the misbehaviour, including a hanging inference."""
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
        """Return the deployment number ``count`` as soon as ``claim`` holds for it."""
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
    """Start robots whose sessions use these update modes; the first session is the oldest and tries pushes."""
    arms = [await stack.enter_async_context(arm(server.process, None, f"arm{n}")) for n in range(len(modes))]
    goes = [
        one.go(2, policy=str(policy.folder), auto_update=mode, rate=25) for one, mode in zip(arms, modes, strict=True)
    ]
    await goes[0]
    await asyncio.gather(*goes[1:])
    return arms


@pytest.mark.alone  # It loads one core itself and controls four robots with the other.
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
            # The previous version is deleted at the moment of the failure.
            policy.fail()
            gone = policy.folder.rename(tmp_path / "gone")
            bad = await server.until_ended(1)
            lost = {name: now - missed[name] for name, now in (await figures("missed_ticks")).items()}
        assert (bad["result"], bad["reason"], [*bad["figures"]]) == ("rolled_back", "not_finite", ["arm0"]), bad
        assert set((await figures("policy_commit")).values()) == {first}
        assert await figures("policy_changes") == {"arm0": 2, "arm1": 0, "arm2": 0, "arm3": 0}
        # All sessions share one machine: the session with the rollback misses at most as many ticks as the others.
        assert lost["arm0"] <= 2 * max(lost[one.id] for one in arms[1:]) + 3, lost
        gone.rename(policy.folder)
        # Push twice more, the second time during a rollback.
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


# Failure mode during probation -> reason of the rollback.
REASONS = {"wild": "wild", "jump": "jump", "late": "starved", "hang": "stuck"}


@pytest.mark.alone  # It loads one core itself and controls three robots with the other.
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
                # Policies of this server run in its process. Fault F26 covers the replacement of an engine process.
                policy.recover()
                for one in others:
                    now = (await server.get(f"/sessions/{one.id}"))["stats"]
                    missed = now["missed_ticks"] - before[one.id]["missed_ticks"]
                    assert missed <= 25 * one.meter.lost(began) + 3, f"{mode}: {one.id} missed {missed} ticks"
                    await one.moves(2)
                if mode != "hang":
                    await trying.moves(2)
        assert {one["sha"]: one["reason"] for one in await server.get("/quarantine")} == expected
        # The effect of a hanging policy on its robot is unknown, so an operator must restart the session.
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
            # The policy is still in the folder, and no probation would judge it.
            status, reply = await server.call("POST", "/sessions/arm0/restart")
            assert status >= 400
            assert f"DELETE /quarantine/{tried['sha']}" in json.dumps(reply)
            assert (await server.get("/sessions/arm0"))["status"] == "interrupted"
            policy.push()
            await one.ask("restart")
            assert (await server.get("/sessions/arm0"))["stats"]["policy_commit"] != tried["sha"]
            await one.ask("start")
            await one.moves(2)
        finally:
            await one.disconnect()

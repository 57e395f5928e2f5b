"""A push to the Hub reaches a moving arm on the real stack: server, simulated arm and the stub Hub.

A valid push swaps the policy once without missed commands; invalid pushes change nothing.
"""

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import load, save

from robojax.sim.demo import read_server_url
from service.processes import Child, child
from tests.faults.meter import LOOK, PERIOD, Meter
from tests.testing.pauses import Pauses
from tests.testing.stub_hub import DeliveryPlan, StubHub
from tests.testing.waiting import until

POLICY = Path(__file__).parents[2] / "robojax" / "sim" / "policy"
REPO, SECRET, SESSION = "lab/pick", "a-secret-of-some-length", "demo-arm"
RATE = 25  # Ticks per second of the arm.
WITHHELD = 0.02  # Seconds without a core, within 0.05 s, that may delay a tick.


def policy_files(scale: float = 1.0) -> dict[str, bytes | str]:
    """Return the files of the shipped policy with scaled weights; 1.0001 makes an equivalent new policy."""
    files: dict[str, bytes | str] = {
        path.name: path.read_bytes() for path in POLICY.iterdir() if path.suffix in (".json", ".safetensors")
    }
    weights = load((POLICY / "model.safetensors").read_bytes())
    files["model.safetensors"] = save({name: np.float32(array * np.float32(scale)) for name, array in weights.items()})
    return files


@dataclass
class Stage:
    url: str
    http: aiohttp.ClientSession
    hub: StubHub
    arm: Child
    pauses: Pauses
    meter: Meter
    outcomes: list[dict[str, Any]] = field(default_factory=list)

    async def get(self, path: str) -> Any:
        async with self.http.get(f"{self.url}{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def stats(self) -> dict[str, Any]:
        return (await self.get(f"/sessions/{SESSION}"))["stats"]

    async def deployments(self) -> list[dict[str, Any]]:
        """Return the ended deployments, oldest first."""
        return [one for one in reversed(await self.get("/deployments")) if one["result"] is not None]

    def excused(self, since: float, until: float = math.inf) -> int:
        """Return the number of ticks missed because the machine paused or the server had no core."""
        until = min(until, time.monotonic())
        looks = [look for look in self.meter.waited if since <= look[0] <= until + PERIOD * LOOK]
        withheld = [later - earlier for (_, earlier), (_, later) in pairwise(looks) if later - earlier > WITHHELD]
        # Each pause may cost one more partial tick at its end.
        return sum(math.ceil(seconds * RATE) + 1 for seconds in (*self.pauses.all(since, until), *withheld))

    async def until_moving(self) -> None:
        async with asyncio.timeout(60):
            while not (await self.stats()).get("chunks"):  # noqa: ASYNC110 - another process moves the arm
                await asyncio.sleep(0.1)

    async def until(self, claim: Callable[[list[dict[str, Any]]], Any], within: float = 60.0) -> list[dict[str, Any]]:
        end = time.monotonic() + within
        while not claim(found := await self.deployments()):
            assert time.monotonic() < end, (found, await self.stats(), self.arm.read_stderr_tail())
            await asyncio.sleep(0.1)
        return found


@contextlib.asynccontextmanager
async def staged(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: Pauses) -> AsyncIterator[Stage]:
    for name, value in {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hub"),
        "WEBHOOK_SECRET": SECRET,
        "ROBOJAX_UPDATE_QUIET": "1",
        "ROBOJAX_UPDATE_PROBATION": "3",
        "ROBOJAX_UPDATE_SLOW": "100",  # A pause of this machine during the trial does not count.
        "ROBOJAX_UPDATE_POLL": "0",
        "ROBOJAX_STATE": str(tmp_path / "state"),
    }.items():
        monkeypatch.setenv(name, value)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), trust_env=False) as http,
        child("the server", "tests.testing.lenient_probation", "serve", "--port", "0") as server,
    ):
        url = await read_server_url(server)
        draining = asyncio.create_task(_drain(server))
        body: Mapping[str, Any] = {
            "session_id": SESSION,
            "policy_path": REPO,
            "transport_server_url": url,
            "camera_names": ["front"],
            "auto_update": "swap",
        }
        async with http.post(f"{url}/sessions", json=body) as answer:
            assert answer.status == 200, (await answer.text(), server.read_stderr_tail())
        arguments = ("--server", url, "--transport", url, "--session", SESSION, "--seed", "5000")
        async with child("the arm", "robojax.sim.robot", *arguments) as arm:
            meter = Meter(lambda: [server._process.pid])
            metering = asyncio.create_task(meter.run())
            stage = Stage(url, http, hub, arm, pauses, meter)
            listening = asyncio.create_task(_listen(stage))
            try:
                yield stage
            finally:
                metering.cancel()
                listening.cancel()
                draining.cancel()


async def _drain(process: Child) -> None:
    while await process.next_line() is not None:
        pass


async def _listen(stage: Stage) -> None:
    while (line := await stage.arm.next_line()) is not None:
        outcome = json.loads(line)
        if outcome["event"] in ("episode", "failed"):
            stage.outcomes.append(outcome | {"at": time.monotonic()})


@pytest.mark.alone  # Concurrent load would make a policy on probation slow.
@pytest.mark.timeout(600)
async def test_only_a_good_push_changes_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: Pauses) -> None:
    with StubHub() as hub:
        first = hub.push(REPO, policy_files(), deliver=False)
        async with staged(hub, tmp_path, monkeypatch, pauses) as stage:
            HfApi(endpoint=hub.url, token="hf_x").create_webhook(
                url=f"{stage.url}/webhooks/policies",
                watched=[{"type": "user", "name": "lab"}],
                domains=["repo"],
                secret=SECRET,
            )
            assert (await stage.stats())["policy_commit"] == first
            await stage.until_moving()

            # LeRobot publishes in four commits; each delivery arrives twice and in any order.
            before, began = await stage.stats(), time.monotonic()
            hub.deliveries.plan = DeliveryPlan(copies=2, reorder=4)
            files = policy_files(scale=1.0001)
            weights = files.pop("model.safetensors")
            hub.push(REPO, {"config.json": files["config.json"]})
            hub.push(REPO, {"model.safetensors": weights})
            hub.push(REPO, {name: content for name, content in files.items() if name != "config.json"})
            last = hub.push(REPO, {"README.md": "# pick"})
            (swap,) = await stage.until(lambda found: found)
            assert (swap["result"], swap["sha"], swap["trigger"]) == ("swapped", last, "webhook"), swap
            assert swap["webhook_id"] in hub.webhooks
            assert len(swap["delivery_ids"]) >= 1
            assert {"resolving", "loading", "checking", "swapping", "probation"} <= {s["name"] for s in swap["stages"]}
            after = await stage.stats()
            assert (after["policy_commit"], after["policy_before"], after["policy_changes"]) == (last, first, 1)
            cost = swap["figures"][SESSION]["swap"]
            assert cost["missed_ticks"] <= stage.excused(began), cost
            assert cost["starvations"] == 0, cost
            assert cost["late_actions_because"] == 0, cost
            assert after["missed_ticks"] - before["missed_ticks"] <= stage.excused(began)
            assert after["starvations"] - before["starvations"] <= 2 + stage.excused(began)

            # Two invalid pushes: the first cannot be loaded, the second would move the arm to other positions.
            hub.deliveries.plan = DeliveryPlan()
            poisoned = policy_files()
            numbers = load(bytes(poisoned["model.safetensors"]))  # type: ignore[arg-type]
            name = sorted(numbers)[0]
            numbers[name] = np.full_like(numbers[name], np.nan)
            hub.push(REPO, {"model.safetensors": save(numbers)})
            *_, refused = await stage.until(lambda found: len(found) >= 2)
            assert (refused["result"], refused["reason"]) == ("rejected", "load"), refused
            assert "NaN" in refused["text"], refused

            hub.push(REPO, policy_files(scale=1.5))
            *_, refused = await stage.until(lambda found: len(found) >= 3)
            assert (refused["result"], refused["sha"]) == ("rejected", hub.head(REPO)), refused
            assert refused["reason"] in ("differs", "out_of_range", "not_finite"), refused

            stats = await stage.stats()
            assert (stats["policy_commit"], stats["policy_changes"]) == (last, 1)
            assert stats["missed_ticks"] - before["missed_ticks"] <= stage.excused(began)
            played = len(stage.outcomes)
            await until(lambda: len(stage.outcomes) > played, within=120)
            assert all(outcome["event"] == "episode" for outcome in stage.outcomes), stage.outcomes
            # An arm that paused may miss its cube.
            ends = [began, *(outcome["at"] for outcome in stage.outcomes)]
            judged = [
                outcome
                for outcome, (begin, end) in zip(stage.outcomes, pairwise(ends), strict=True)
                if stage.excused(begin, end) <= 3
            ]
            assert sum(outcome["lifted"] for outcome in judged) >= len(judged) - 1, stage.outcomes
    assert os.listdir(tmp_path / "state")

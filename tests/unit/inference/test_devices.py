"""Policies on several devices: copies that share the load, and a policy that is sharded over all devices."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from service.inference.engine import Engine
from tests.testing.compiling import process_environment
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy
from tests.testing.rig import OBSERVATION
from tests.testing.waiting import until

ROOT = Path(__file__).parents[3]
# The script runs in a separate process because JAX fixes the number of devices at its start.
SCRIPT = """
import asyncio
import time
from itertools import pairwise

import numpy as np

from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.errors import ConfigError
from jaxmodels.types import ACTION, ENVIRONMENT_STATE, Feature
from jaxmodels.normalization import build_normalization
from jaxmodels.devices import name_devices
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.policy import Policy
from jaxmodels.weights import blueprint
from service.inference.engine import Engine
from tests.testing.pauses import Pauses

inputs, outputs = (Feature(ENVIRONMENT_STATE, "ENV", (4,)),), (Feature(ACTION, "ACTION", (6,)),)
small = dict(dim_model=128, n_heads=2, dim_feedforward=256, n_encoder_layers=1, n_decoder_layers=1, use_vae=False)
config = ActConfig(input_features=inputs, output_features=outputs, chunk_size=8, n_action_steps=8, **small)
shapes = blueprint(lambda rngs: Act(config, rngs=rngs)).shapes
rng = np.random.default_rng(0)
weights = {name: 0.1 * rng.standard_normal(leaf.shape).astype(np.float32) for name, leaf in shapes.items()}
stats = {ENVIRONMENT_STATE: dict(mean=np.zeros(4), std=np.ones(4)), ACTION: dict(mean=np.zeros(6), std=np.ones(6))}
normalization = build_normalization(inputs, outputs, config.normalization_mapping, stats)
policy = Policy(Checkpoint(config, weights, normalization), device="cpu:0")

observation = {ENVIRONMENT_STATE: np.ones((1, 4), np.float32)}
chunk = policy.act(observation)
everywhere = "+".join(f"cpu:{number}" for number in range(8))
same, copy, spread = policy.on("cpu:0"), policy.on("cpu:1"), policy.on(everywhere)
assert same._weights is policy._weights, "the weights are in memory once"
assert (same.device, copy.device, spread.device) == ("cpu:0", "cpu:1", everywhere)
assert {device.id for weight in copy._weights.arrays for device in weight.devices()} == {1}
assert np.array_equal(copy.act(observation), chunk)
assert np.abs(spread.act(observation) - chunk).max() < 1e-4
parts = [part for weight in spread._weights.arrays for part in weight.addressable_shards]
held = sum(part.data.nbytes for part in parts if part.device.id == 0)
assert held < 0.2 * sum(weight.nbytes for weight in policy._weights.arrays)
assert name_devices(["all"]) == tuple(everywhere.split("+"))
assert name_devices(["1", "cpu:0"]) == ("cpu:1", "cpu:0")
assert name_devices(["all"], together=True) == (everywhere,)
for names, together in ((["8"], False), (["all", "1"], True), (["nonsense"], False)):
    try:
        name_devices(names, together=together)
    except ConfigError:
        continue
    raise SystemExit(f"{names} was accepted")
for name in ("cpu:0+cpu:0", "cpu:8", "cpu:0+nonsense"):
    try:
        policy.on(name)
    except ConfigError:
        continue
    raise SystemExit(f"{name} was accepted")


async def robots() -> None:
    # Eight robots use eight devices. During the run, the weights on one device are deleted.
    engine = Engine(devices=everywhere.split("+"), batch_sizes=(1,))
    answered = {robot: [] for robot in range(8)}

    end = asyncio.Event()

    async def until(condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def run_robot(robot, served):
        caller = asyncio.Event()
        while not end.is_set():
            inference = await engine.infer(served, observation, due=time.monotonic() + 0.05, caller=caller)
            assert np.array_equal(inference.chunk, chunk)
            answered[robot].append(time.monotonic())
            await asyncio.sleep(0.02)

    async with engine.policy_cache.open_policy(lambda *_, **__: policy, "p", None, lambda word: None) as served:
        assert len(served.replicas) == 8
        robots = [asyncio.create_task(run_robot(robot, served)) for robot in range(8)]
        # Wait until each device has served a robot.
        await until(lambda: all(figures["batches"] for figures in engine.get_stats()["devices"]))
        for weight in served.replicas[3].policy._weights.arrays:
            weight.delete()
        await until(lambda: engine.get_stats()["devices_failed"])
        before = {robot: len(times) for robot, times in answered.items()}
        await until(lambda: all(len(times) > before[robot] + 20 for robot, times in answered.items()))
        end.set()
        await asyncio.gather(*robots)
        assert engine.get_stats()["devices_failed"] == ["cpu:3"]
        assert [replica.policy.device for replica in served.replicas] == [f"cpu:{n}" for n in range(8) if n != 3]
    await engine.close()
    gaps = [between for times in answered.values() for between in pairwise(times)]
    longest = max(pauses.running(*between) for between in gaps)
    assert longest < 2, longest


with Pauses() as pauses:
    asyncio.run(robots())
print("done")
"""


@pytest.mark.timeout(300)
def test_a_policy_is_copied_or_sharded_over_devices() -> None:
    environment = process_environment(devices=8, quick=True) | {"ROBOJAX_COMPILE_CACHE": "off"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert process.stdout.strip() == "done", process.stderr[-2000:]


async def test_the_least_busy_device_is_used() -> None:
    made: list[ScriptedPolicy] = []
    gate = threading.Event()

    class Copied(ScriptedPolicy):
        def on(self, device: str) -> ScriptedPolicy:
            made.append(other := super().on(device))
            return other

    def make() -> ScriptedPolicy:
        made.append(policy := Copied(device="a", failures=[gate]))
        return policy

    engine = Engine(devices=("a", "b"), batch_sizes=(1, 2))
    async with engine.policy_cache.open_policy(ScriptedLoader(make), "p", None, lambda word: None) as served:
        made[1].failures.clear()
        held = asyncio.create_task(engine.infer(served, OBSERVATION))
        await until(lambda: made[0].acted, within=30.0)
        for _ in range(3):
            await engine.infer(served, OBSERVATION)
        assert (made[0].acted, made[1].acted) == (1, 3)
        gate.set()
        await held
        assert [policy.threads for policy in made] == [{"device"}, {"device:1"}]
        devices = engine.get_stats()["devices"]
        assert [device["device"] for device in devices] == ["a", "b"]
        assert [device["batches"] for device in devices] == [{"1": 1}, {"1": 3}]
        assert all(0 <= device["load"] <= 1 and "1" in device["batch_ms"][0] for device in devices)
    await engine.close()


@pytest.mark.parametrize("devices", [(), ("a",), ("a", "a")])
async def test_any_number_of_devices_is_closed(devices: tuple[str, ...]) -> None:
    before = set(threading.enumerate())  # A thread of another test may still be busy.
    engine = Engine(devices=devices)
    assert len(set(threading.enumerate()) - before) == max(len(devices), 1)
    await engine.close()
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("device")]

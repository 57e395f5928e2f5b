"""``python -m tests.hostile.lerobot_flood PROTOCOL ADDRESS COMMAND SECONDS``: hostile robots of LeRobot.

They send pickles that run COMMAND where they are unpickled, and envelopes, as fast as they can. The process lowers its
priority. It prints a line when its robots have sessions, and begins after a line of input. At the end, it sends a valid
observation, and prints its counts and whether that was answered as a JSON object.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
import numpy as np
import zenoh

from robojax.robot.arm import JOINTS
from service.lerobot.messages import write_actions_message
from tests.hostile.flood import NICE
from tests.testing.waiting import until
from tests.testing.zenoh_robot import ZenohRobot, tensor
from tests.unit.lerobot import test_hostile_pickles as pickles

ROBOTS = 8
PIECE = 2 << 20  # Bytes of a piece of an observation, as of LeRobot's client.
BEGIN, MIDDLE, END = 1, 2, 3
SIDE = 96  # Pixels of the policy's pictures.
# Bytes of a message over Zenoh, which buffers a few messages of any size outside of the server's code.
LARGEST = 2 << 20
# Protobuf messages: lengths of 1 GB without data, endless integers, unknown tags, and pieces out of order.
MESSAGES = [
    b"\x0a" + b"\x80\x80\x80\x80\x04abc",
    b"\x08\x03\x12\x80\x80\x80\x80\x04abc",
    b"\xff" * 1000,
    b"\x08\x02\x12\x01a",
]
MESSAGES += [b"\x08\x01\x12\x01a", b"\x08\x03", b"\x08\x07\x12\x01a", b"\x0b" * 100, b"\x08\x03" * 10_000]
# MessagePack: 4 billion items, lengths of 1 GB, deep nesting, extensions, many values.
ENVELOPES = [head + b"\xff\xff\xff\xff" + b"\0" * 100 for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")]
ENVELOPES += [head + (1 << 30).to_bytes(4, "big") for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")]
ENVELOPES += [
    b"\x91" * 1_000_000,
    b"\x81\xa1a" * 300_000,
    b"\xdc\xff\xff" + b"\xc0" * 65535,
    b"\xc7\x08\x05" + bytes(8),
]
ENVELOPES += [b"", bytes(1), b"\x82\xa1a\x01\xa1a\x02"]


def hostile_pickles(command: str) -> Iterator[bytes]:
    """Yield all attacks and mutations of the unit tests; the attacks call ``command`` in a shell."""
    for _, data in pickles.attacks():
        changed = data.replace(pickles.text("echo"), pickles.text(command)).replace(b"echo", command.encode())
        yield changed if b"echo" in data else data
    for _, data in pickles.mutations():
        yield data


def cut(data: bytes, dice: random.Random) -> list[bytes]:
    """Return the messages of an observation; small observations are cut, too."""
    size = min(PIECE, max(len(data) // dice.randrange(1, 6), 1))
    parts = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
    states = [END] if len(parts) == 1 else [BEGIN, *[MIDDLE] * (len(parts) - 2), END]
    packed = (write_actions_message(part)[1:] or b"\0" for part in parts)
    return [b"\x08" + bytes([state]) + b"\x12" + rest for state, rest in zip(states, packed, strict=True)]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Return an envelope with other bytes, which is often cut."""
    changed = bytearray(data)
    for _ in range(dice.randrange(1, 9)):
        place = dice.choice((dice.randrange(min(len(changed), 600)), dice.randrange(len(changed))))
        changed[place] = dice.choice((0x80, 0x90, 0xC1, 0xC6, 0xC7, 0xDB, 0xDD, 0xDF, 0xFF, dice.randrange(256)))
    return bytes(changed[: dice.choice((len(changed), dice.randrange(1, len(changed))))])


class GrpcRobot:
    """Robot with a connection of its own; ``counts`` are the numbers of its calls by method and status."""

    def __init__(self, address: str, counts: Counter[str]):
        self.channel = grpc.aio.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),))
        self.counts = counts

    async def call(self, name: str, *messages: bytes) -> bytes:
        path = f"/transport.AsyncInference/{name}"
        try:
            if name == "SendObservations":
                answer = await self.channel.stream_unary(path)(iter(messages))
            else:
                answer = await self.channel.unary_unary(path)(messages[0])
            self.status = "OK"
        except grpc.aio.AioRpcError as error:
            answer, self.status = b"", error.code().name
        self.counts[f"{name} {self.status}"] += 1
        return answer

    async def start(self) -> None:
        """Request the shipped policy."""
        names = pickles.sequence(*(pickles.text(f"{joint}.pos") for joint in JOINTS))
        features = {"observation.state": pickles.mapping(names=names), "observation.images.front": pickles.EMPTY_DICT}
        path = pickles.text("robojax/sim/policy")
        data = pickles.config(pretrained_name_or_path=path, lerobot_features=pickles.mapping(**features))
        await self.call("SendPolicyInstructions", write_actions_message(data))

    async def observe(self, cases: Iterator[bytes], dice: random.Random) -> None:
        """Send hostile observations in a session, and a new request when that ends."""
        for data in cases:
            await self.call("SendObservations", *dice.choice((cut(data, dice), dice.choices(MESSAGES, k=3))))
            if self.status == "FAILED_PRECONDITION":
                await self.start()

    async def request(self, cases: Iterator[bytes], dice: random.Random) -> None:
        """Send hostile requests for policies, and data with a call that takes none."""
        for data in cases:
            await self.call("SendPolicyInstructions", dice.choice((write_actions_message(data), dice.choice(MESSAGES))))
            await self.call("Ready", data[:PIECE])

    async def poll(self, data: bytes) -> None:
        """Ask for actions with data."""
        while True:
            await self.call("GetActions", data)

    async def is_served(self) -> bool:
        """Return whether any of ten valid observations is answered with actions; some may wait for too long."""
        await self.start()
        image = pickles.array(pickles.shaped(SIDE, SIDE, 3), pickles.data(bytes(3 * SIDE * SIDE)))
        values = {f"{joint}.pos": pickles.real(5.0) for joint in JOINTS}
        observed = pickles.mapping(task=pickles.text("lift"), front=image, **values)
        for _ in range(10):
            await self.call("SendObservations", *cut(pickles.observation(observed), random.Random(0)))
            if len(await self.call("GetActions", b"")) > 100:
                return True
            if self.status == "FAILED_PRECONDITION":  # An overloaded machine gets no session.
                await self.start()
        return False


async def attack_grpc(address: str, command: str, seconds: float) -> dict[str, Any]:
    """Attack with eight connections, of which half have sessions; return what came of it."""
    counts, cases, work = Counter[str](), list(hostile_pickles(command)), []
    robots = [GrpcRobot(address, counts) for _ in range(ROBOTS)]
    for number, robot in enumerate(robots):
        dice = random.Random(number)
        mixed = cycle(dice.sample(cases, len(cases)))
        if number % 2:
            await robot.start()
        work += [
            robot.observe(mixed, dice) if number % 2 else robot.request(mixed, dice),
            robot.poll(next(mixed)[:PIECE]),
        ]
    await wait_for_begin()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*work)
    for robot in robots:
        await robot.channel.close()
    return {"counts": counts, "is_served": await GrpcRobot(address, counts).is_served()}


async def attack_zenoh(address: str, command: str, seconds: float) -> dict[str, Any]:
    """Attack with queries and puts of one connection, which has a session; return what came of it."""
    counts, dice, robot = Counter[str](), random.Random(0), ZenohRobot(address, asyncio.get_running_loop())
    cases = [data for data in hostile_pickles(command) if len(data) <= LARGEST]

    async def is_loaded() -> bool:
        return (await robot.describe())["ready"]

    await until(is_loaded)
    await robot.start()
    keys = {f"{robot.root}/describe": "describe", f"{robot.root}/instances/{robot.instance}/open": "open"}
    keys[f"{robot.key}/control"] = "control"

    def make(kind: str) -> bytes:
        body = {"observation": robot.observation, "open": robot.contract}.get(kind, dict)()
        valid = robot.pack(kind, {**body, "x": [tensor(np.ones(3)), 1.5, None]})
        return dice.choice((mutate(valid, dice), mutate(valid, dice), dice.choice(ENVELOPES), dice.choice(cases)))

    def put() -> None:
        while time.monotonic() < end:
            name, kind = dice.choice(
                (("obs", "observation"), ("obs", "observation"), ("language/request", "language_request"))
            )
            robot.zenoh.put(f"{robot.key}/{name}", make(kind), congestion_control=zenoh.CongestionControl.DROP)
            counts[f"put {name}"] += 1

    def query() -> None:
        while time.monotonic() < end:
            key, kind = dice.choice(list(keys.items()))
            replies = [reply.ok for reply in robot.zenoh.get(key, payload=make(kind), timeout=5)]
            counts[f"query {kind} {len(replies)}"] += 1

    await wait_for_begin()
    end = time.monotonic() + seconds
    await asyncio.gather(*(asyncio.to_thread(work) for work in (put, query, query, query)))
    await robot.close()
    last = ZenohRobot(address, asyncio.get_running_loop())
    await last.start()
    answers = [(await last.observe())["message_type"] for _ in range(10)]
    await last.close()
    return {"counts": counts, "is_served": "action" in answers}


async def wait_for_begin() -> None:
    """Report the sessions, and wait for a line."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    os.nice(NICE)
    protocol, address, command, seconds = sys.argv[1:]
    attack = {"grpc": attack_grpc, "zenoh": attack_zenoh}[protocol]
    sys.stdout.write(json.dumps(asyncio.run(attack(address, command, float(seconds)))) + "\n")

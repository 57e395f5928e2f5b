"""openpi's side, in a Python of its own: its client unmodified, and a server as its own one is.

    VENV/bin/python benchmarks/openpi_peer.py serve            # prints its port
    VENV/bin/python benchmarks/openpi_peer.py ask HOST PORT    # one request of figures per line on standard input
    VENV/bin/python benchmarks/openpi_peer.py relay HOST PORT  # observations in, answers out, for a simulated arm

Needs ``openpi-client`` 0.1.2 and ``typing_extensions``, which it forgets to ask for; it wants NumPy below 2, so it has
a venv of its own. openpi's server is not in that package and cannot be installed by itself: the stand-in makes the same
calls to the same libraries (``websockets.asyncio.server`` without compression or limit, its ``msgpack_numpy``,
the policy inline on the event loop, the same timings in the answer).
Source: Physical-Intelligence/openpi, src/openpi/serving/websocket_policy_server.py.
"""

# It runs in an interpreter of its own, which has openpi's client.
# pyright: reportMissingImports=false

import asyncio
import json
import struct
import sys
import time

import numpy as np
import websockets
import websockets.asyncio.server
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy

CHUNK, WIDTH, SIZE = 50, 7, 224


def say(**what):
    print(json.dumps(what), flush=True)


async def answer(socket):
    packer = msgpack_numpy.Packer()
    await socket.send(packer.pack({}))
    before = None
    while True:
        try:
            began = time.monotonic()
            msgpack_numpy.unpackb(await socket.recv())
            asked = time.monotonic()
            actions = np.zeros((CHUNK, WIDTH), np.float32)
            timing = {"infer_ms": (time.monotonic() - asked) * 1e3}
            if before is not None:
                timing["prev_total_ms"] = before * 1e3
            await socket.send(packer.pack({"actions": actions, "server_timing": timing}))
            before = time.monotonic() - began
        except websockets.ConnectionClosed:
            return


async def serve():
    async with websockets.asyncio.server.serve(answer, "127.0.0.1", 0, compression=None, max_size=None) as server:
        say(event="serves", port=server.sockets[0].getsockname()[1])
        await server.serve_forever()


def seen():
    random = np.random.default_rng(0)
    return {
        "observation/image": random.integers(0, 255, (SIZE, SIZE, 3), np.uint8),
        "observation/wrist_image": random.integers(0, 255, (SIZE, SIZE, 3), np.uint8),
        "observation/state": np.zeros(WIDTH),
        "prompt": "do nothing",
    }


def time_each(infer):
    for _ in range(10):
        infer()
    say(event="ready")
    for line in sys.stdin:
        taken, spent, answer = [], time.process_time(), {}
        for _ in range(json.loads(line)["count"]):
            began = time.perf_counter()
            answer = infer()
            taken.append(time.perf_counter() - began)
        assert answer["actions"].shape == (CHUNK, WIDTH), answer
        say(event="asked", seconds=taken, cpu=time.process_time() - spent)


def ask(host, port):
    client = WebsocketClientPolicy(host, int(port))
    observation = seen()
    time_each(lambda: client.infer(observation))


def relay(host, port, key=None):
    """Observations as openpi packs them, each after its length; the answers have the same form."""
    client = WebsocketClientPolicy(host, int(port), key)
    metadata = client.get_server_metadata()
    here, there = sys.stdin.buffer, sys.stdout.buffer

    def tell(message):
        packed = msgpack_numpy.packb(message)
        there.write(struct.pack(">I", len(packed)) + packed)
        there.flush()

    tell(metadata)
    while head := here.read(4):
        observation = msgpack_numpy.unpackb(here.read(*struct.unpack(">I", head)))
        try:
            tell(client.infer(observation))
        except RuntimeError as error:
            tell({"error": str(error)})
            return


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        {"ask": ask, "relay": relay}[sys.argv[1]](*sys.argv[2:])

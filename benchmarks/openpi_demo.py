"""Does openpi's own client, unmodified, pick up the cubes of the demo through our server?

    python -m benchmarks.openpi_demo --openpi-python VENV/bin/python [--episodes 20]

A server as users start it (``robojax serve --openpi-port``), a direct session with the shipped policy, and the
simulated arm, which the client's answers move: what is done of each chunk is what the policy was trained for. The arm
is in this process; ``openpi_client.websocket_client_policy.WebsocketClientPolicy`` is in a Python of its own.
"""

import argparse
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cold_start import free_port
from benchmarks.measured import RESULTS, SHIPPED, quietness, result, write
from benchmarks.processes import call, child
from robojax.sim.arm import CAMERA, FRAME, HORIZON, Arm
from service.streaming.codec import pack_openpi, unpack

PEER = Path(__file__).parent / "openpi_peer.py"
SEED = 5000


class Relay:
    """openpi's client in another process: observations go in, what its ``infer`` returns comes out."""

    def __init__(self, python: str, port: int):
        self._process = subprocess.Popen(
            [python, str(PEER), "relay", "127.0.0.1", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.metadata = self._read()

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """What the client got.

        Raises:
            RuntimeError: the server refused.
        """
        packed = pack_openpi(observation)
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack(">I", len(packed)) + packed)
        self._process.stdin.flush()
        told = self._read()
        if "error" in told:
            raise RuntimeError(told["error"])
        return told

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        head = self._process.stdout.read(4)
        if len(head) < 4:
            raise RuntimeError("openpi's client ended")
        return unpack(self._process.stdout.read(*struct.unpack(">I", head)))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def play(arm: Arm, client: Relay, seed: int) -> bool:
    """One episode; whether the cube is up at its end."""
    arm.reset(seed)
    steps, plan = client.metadata["action_steps"], np.zeros((0, 6))
    for tick in range(HORIZON):
        if tick % steps == 0:
            observation = {
                f"observation.images.{CAMERA}": arm.picture(CAMERA, *FRAME),
                "observation.state": arm.joints.astype(np.float32),
                "prompt": "lift the cube",
            }
            plan = client.infer(observation)["actions"]
        arm.step(plan[tick % steps])
    return arm.is_lifted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openpi-python", required=True, help="a Python with openpi-client 0.1.2")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS / "openpi_demo.json")
    options = parser.parse_args()
    quiet = quietness()
    port = free_port()
    command = ("-m", "robojax.cli", "serve", "--port", "0", "--openpi-port", str(port), "--state", "off")
    arm = Arm()
    with child(*command) as server:
        url = server.url()
        call(
            f"{url}/sessions",
            "POST",
            {"session_id": "arm", "policy_path": str(SHIPPED), "transport_server_url": "direct"},
        )
        client = Relay(options.openpi_python, port)
        lifted = []
        for number in range(options.episodes):
            lifted.append(play(arm, client, SEED + number))
            print(f"episode {number + 1}: {'lifted' if lifted[-1] else 'not lifted'}", flush=True)
        client.close()
        stats = call(f"{url}/sessions/arm")["stats"]
    arm.close()
    print(f"{sum(lifted)} of {len(lifted)} cubes lifted")
    write(
        options.output,
        result(
            "Does an unmodified openpi client pick up the demo's cubes?",
            f"python -m benchmarks.openpi_demo --openpi-python VENV/bin/python --episodes {options.episodes}",
            quiet,
            "msgpack",
            episodes=len(lifted),
            lifted=sum(lifted),
            clamped=stats["safety"]["clamped"],
        ),
    )


if __name__ == "__main__":
    main()

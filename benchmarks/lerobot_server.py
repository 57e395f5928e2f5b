"""LeRobot's policy server and client as measured by our benchmarks: run by a Python with lerobot[async] 0.4.4 or 0.6.1.

    LEROBOT_PYTHON benchmarks/lerobot_server.py serve --port 8080 [--policy none]
    LEROBOT_PYTHON benchmarks/lerobot_server.py ask --port 8080          # one order of JSON per line

``serve`` is LeRobot's own (``lerobot.async_inference.policy_server``) with the wait that it adds to every answer (33 ms
by default) set to 0, in its favour. ``--policy none`` answers a constant chunk in place of computing one.
``ask`` sends what LeRobot's robot client sends, pickled as there: an observation, then asks for its actions; every
observation "must go", because the server otherwise skips an observation that resembles the previous one.
"""

import argparse
import json
import logging
import os
import pickle
import sys
import tempfile
import time
from typing import Any

JOINTS = [f"joint_{number}.pos" for number in range(14)]


def serve(options: argparse.Namespace) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from lerobot.async_inference import policy_server  # pyright: ignore[reportMissingImports]
    from lerobot.async_inference.configs import PolicyServerConfig  # pyright: ignore[reportMissingImports]

    class Still(policy_server.PolicyServer):
        def _get_action_chunk(self, observation: Any) -> Any:
            return torch.zeros(1, self.actions_per_chunk, len(JOINTS))

    if options.policy == "none":
        policy_server.PolicyServer = Still
    logging.disable(logging.INFO)
    policy_server.serve(PolicyServerConfig(host="127.0.0.1", port=options.port, inference_latency=0.0))


def write(folder: str, cameras: int, height: int, width: int) -> None:
    """An ACT of LeRobot's default size with random weights, by LeRobot itself."""
    import torch  # pyright: ignore[reportMissingImports]
    from lerobot.configs.types import FeatureType, PolicyFeature  # pyright: ignore[reportMissingImports]
    from lerobot.policies.act.configuration_act import ACTConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.act.modeling_act import ACTPolicy  # pyright: ignore[reportMissingImports]
    from lerobot.policies.factory import make_pre_post_processors  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    inputs = {"observation.state": PolicyFeature(FeatureType.STATE, (len(JOINTS),))}
    inputs |= {
        f"observation.images.camera{i}": PolicyFeature(FeatureType.VISUAL, (3, height, width)) for i in range(cameras)
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (len(JOINTS),))}
    config = ACTConfig(
        input_features=inputs,
        output_features=outputs,
        device="cpu",
        pretrained_backbone_weights=None,
        push_to_hub=False,
    )
    sizes = {
        name: (3, 1, 1) if feature.type is FeatureType.VISUAL else feature.shape for name, feature in inputs.items()
    }
    sizes["action"] = (len(JOINTS),)
    stats = {name: {"mean": torch.full(size, 0.4), "std": torch.full(size, 0.25)} for name, size in sizes.items()}
    ACTPolicy(config).save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(folder)


class Client:
    """LeRobot's robot client, without a robot."""

    def __init__(self, port: int):
        import grpc  # pyright: ignore[reportMissingModuleSource]
        from lerobot.transport import services_pb2, services_pb2_grpc  # pyright: ignore[reportMissingImports]
        from lerobot.transport.utils import grpc_channel_options  # pyright: ignore[reportMissingImports]

        self._messages = services_pb2
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", grpc_channel_options())
        self._stub = services_pb2_grpc.AsyncInferenceStub(channel)
        self._number = 0
        self._raw: dict[str, Any] = {}

    def ready(self, within: float) -> float:
        """Seconds of waiting until the server answers at all."""
        began = time.monotonic()
        self._stub.Ready(self._messages.Empty(), wait_for_ready=True, timeout=within)
        return time.monotonic() - began

    def load(self, folder: str, cameras: int, height: int, width: int, actions: int) -> float:
        """Seconds until the policy is loaded."""
        import numpy as np
        from lerobot.async_inference.helpers import RemotePolicyConfig  # pyright: ignore[reportMissingImports]

        try:
            from lerobot.utils.feature_utils import hw_to_dataset_features  # pyright: ignore[reportMissingImports]
        except ImportError:  # LeRobot 0.4
            from lerobot.datasets.utils import hw_to_dataset_features  # pyright: ignore[reportMissingImports]

        names = [f"camera{i}" for i in range(cameras)]
        features: dict[str, Any] = dict.fromkeys(JOINTS, float) | dict.fromkeys(names, (height, width, 3))
        wanted = hw_to_dataset_features(features, "observation", use_video=False)
        rng = np.random.default_rng(0)
        self._raw = {joint: float(value) for joint, value in zip(JOINTS, rng.standard_normal(len(JOINTS)), strict=True)}
        self._raw |= {name: rng.integers(0, 256, (height, width, 3), np.uint8) for name in names} | {"task": ""}
        began = time.monotonic()
        setup = RemotePolicyConfig("act", folder, wanted, actions, "cpu")
        self._stub.SendPolicyInstructions(self._messages.PolicySetup(data=pickle.dumps(setup)))
        return time.monotonic() - began

    def act(self) -> int:
        """One observation, and the actions that belong to it: how many came."""
        from lerobot.async_inference.helpers import TimedObservation  # pyright: ignore[reportMissingImports]
        from lerobot.transport.utils import send_bytes_in_chunks  # pyright: ignore[reportMissingImports]

        self._number += 1
        seen = TimedObservation(time.time(), self._number, observation=self._raw, must_go=True)
        pieces = send_bytes_in_chunks(pickle.dumps(seen), self._messages.Observation, silent=True)
        self._stub.SendObservations(pieces)
        while not (answer := self._stub.GetActions(self._messages.Empty()).data):
            pass
        return len(pickle.loads(answer))  # From the server that this benchmark started.


def ask(options: argparse.Namespace) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # LeRobot prints while it loads
    client: Client | None = None
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "write":
                write(**order)
                found: dict[str, Any] = {}
            case "prepare":  # Slow imports are not part of any figure.
                import lerobot.async_inference.robot_client  # noqa: F401 # pyright: ignore[reportMissingImports]

                found = {}
            case "ready":
                client = Client(order.get("port", options.port))
                found = {"ready_s": client.ready(order["within"])}
            case "load":
                assert client is not None
                found = {"load_s": client.load(**order)}
            case _:
                assert client is not None
                seconds, actions = [], 0
                for _ in range(order["count"]):
                    began = time.perf_counter()
                    actions = client.act()
                    seconds.append(time.perf_counter() - began)
                found = {"seconds": seconds, "actions": actions}
        print(json.dumps(found), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["serve", "ask"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--policy", choices=["real", "none"], default="real")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # importing LeRobot's server makes a folder of logs
        (serve if options.role == "serve" else ask)(options)


if __name__ == "__main__":
    main()

"""LeRobot's side of benchmarks/act_latency.py: run by a Python that has lerobot 0.4.4, which ours never has.

Answers the same orders as `serve` there: load a policy folder, or measure some inferences, one line of JSON each.
"""

import json
import logging
import sys
import time
from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]


def observation(cameras: int, height: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    frames = {
        f"observation.images.camera{i}": rng.integers(0, 256, (1, height, width, 3), np.uint8) for i in range(cameras)
    }
    return {"observation.state": rng.standard_normal((1, 14)).astype(np.float32), **frames}


def load(folder: str, seen: dict[str, np.ndarray], *, is_compiled: bool) -> Callable[[], np.ndarray]:
    """Reads a policy; what it gives runs the path of LeRobot's robot client: frames in [0, 1], both processors."""
    from lerobot.policies.act.modeling_act import ACTPolicy  # pyright: ignore[reportMissingImports]
    from lerobot.processor import PolicyProcessorPipeline  # pyright: ignore[reportMissingImports]
    from lerobot.processor.converters import (  # pyright: ignore[reportMissingImports]
        policy_action_to_transition,
        transition_to_policy_action,
    )

    policy = ACTPolicy.from_pretrained(folder, strict=True).eval()
    before = PolicyProcessorPipeline.from_pretrained(folder, config_filename="policy_preprocessor.json")
    after = PolicyProcessorPipeline.from_pretrained(
        folder,
        config_filename="policy_postprocessor.json",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    if is_compiled:
        policy.model = torch.compile(policy.model)

    def act() -> np.ndarray:
        batch = {}
        for name, array in seen.items():
            tensor = torch.from_numpy(array)
            if tensor.dtype == torch.uint8:
                tensor = (tensor.type(torch.float32) / 255).permute(0, 3, 1, 2).contiguous()
            batch[name] = tensor
        with torch.inference_mode():
            return after(policy.predict_action_chunk(before(batch))).numpy()

    return act


def nothing_loaded() -> np.ndarray:
    raise SystemExit("the first order must be to load a policy")


def main() -> None:
    logging.disable(logging.WARNING)
    answers, sys.stdout = sys.stdout, sys.stderr  # LeRobot prints while it loads
    act = nothing_loaded
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "load":
            start = time.perf_counter()
            act = load(order["folder"], observation(*order["case"]), is_compiled="--compile" in sys.argv)
            loaded = time.perf_counter()
            chunk = act()
            answer = {"load_s": loaded - start, "compile_s": time.perf_counter() - loaded}
            answer["chunk"] = chunk[0, :, 0].tolist()
        else:
            seconds = []
            for _ in range(order["count"]):
                start = time.perf_counter()
                act()
                seconds.append(time.perf_counter() - start)
            answer = {"seconds": seconds}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

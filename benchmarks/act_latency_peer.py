"""LeRobot's side of act_latency.py; runs in a Python with lerobot 0.4.4."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import latency
from benchmarks.act_latency import CASES, observation


def load(folder: str, case: str) -> Callable[[], np.ndarray]:
    """Load a policy; the call takes the path of LeRobot's robot client: frames in [0, 1], both processors."""
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
    if "--compile" in sys.argv:
        policy.model = torch.compile(policy.model)

    seen = observation(*CASES[case])

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


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    latency.serve(load)

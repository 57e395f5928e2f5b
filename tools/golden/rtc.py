"""Record lerobot's real-time chunking of a small denoiser in tests/golden/rtc."""

import json
from pathlib import Path

import lerobot
import numpy as np
import torch
from lerobot.configs.types import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor

BATCH, CHUNK, ACTION = 2, 8, 3
MASKS = [(0, 8, 8), (2, 6, 8), (3, 8, 8), (5, 5, 8), (6, 4, 8), (0, 0, 8), (4, 10, 16), (1, 16, 16)]
CASES = [
    # Columns: steps, delay, length (lerobot's execution_horizon), bound, whether the gradient reaches the denoiser.
    (5, 2, 6, 5.0, True),
    (5, 2, 6, 5.0, False),
    (10, 4, 7, 10.0, True),
    (5, 0, 0, 5.0, True),
]


def main() -> None:
    draw = np.random.default_rng(0)
    arrays = {
        "across_time": draw.normal(size=(CHUNK, CHUNK)) / CHUNK**0.5,
        "across_joints": draw.normal(size=(ACTION, ACTION)) / ACTION**0.5,
        "noise": draw.normal(size=(BATCH, CHUNK, ACTION)),
        "plan": draw.uniform(-1, 1, size=(BATCH, CHUNK, ACTION)),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    time_mix, joint_mix = (torch.from_numpy(arrays[name]) for name in ("across_time", "across_joints"))

    def denoiser(x: torch.Tensor, sigma: float, *, connected: bool) -> torch.Tensor:
        if connected:  # lerobot 0.4.4 enables the gradient of x only after this call, which is too late.
            x.requires_grad_(True)
        return torch.tanh(torch.einsum("st,bta->bsa", time_mix, x) @ joint_mix + sigma) - 0.3 * x

    for index, (start, end, total) in enumerate(MASKS):
        processor = RTCProcessor(RTCConfig(prefix_attention_schedule=RTCAttentionSchedule.EXP))
        arrays[f"mask.{index}"] = processor.get_prefix_weights(start, end, total).numpy()
    for index, (steps, delay, length, bound, connected) in enumerate(CASES):
        config = RTCConfig(enabled=True, prefix_attention_schedule=RTCAttentionSchedule.EXP, max_guidance_weight=bound)
        processor = RTCProcessor(config)
        x = torch.from_numpy(arrays["noise"])
        for step in range(steps):  # The time decreases from 1 in equal steps, as in lerobot's pi0.
            sigma = torch.tensor(1 - step / steps)
            velocity = processor.denoise_step(
                x_t=x,
                prev_chunk_left_over=torch.from_numpy(arrays["plan"]),
                inference_delay=delay,
                time=sigma,
                original_denoise_step_partial=lambda x, s=sigma, c=connected: denoiser(x, float(s), connected=c),
                execution_horizon=length,
            ).detach()
            x = x - velocity / steps
        arrays[f"sample.{index}"] = x.numpy()
    here = Path(__file__).parents[2] / "tests" / "golden" / "rtc"
    keys = ("steps", "delay", "length", "bound", "connected")
    described = {
        "lerobot": lerobot.__version__,
        "torch": torch.__version__,
        "masks": MASKS,
        "cases": [dict(zip(keys, case, strict=True)) for case in CASES],
    }
    (here / "cases.json").write_text(json.dumps(described, indent=1) + "\n")
    np.savez_compressed(here / "cases.npz", **arrays)


if __name__ == "__main__":
    main()

"""LeRobot's side of vla_latency.py and vla_gpu.py; runs in a Python with lerobot 0.6.1."""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import latency

os.environ["HF_HUB_OFFLINE"] = "1"
PI = ("pi0", "pi05")  # Policies whose sizes are in LeRobot's code, and whose config has a dtype.


def load(
    folder: str,
    case: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    cameras: Sequence[str] | None = None,
    has_weights: bool = True,
    is_small: bool = True,
) -> Callable[..., np.ndarray]:
    """Read a policy; the result runs the path of LeRobot's robot client: frames in [0, 1], both processors.

    Args:
        dtype: bfloat16 is what the configs of pi0 and pi0.5 ask for; others use autocast, as LeRobot's `use_amp` does.
        cameras: two when None.
        has_weights: whether the folder has weights; without them, LeRobot draws the weights of a new policy.
        is_small: pi0 and pi0.5 have the sizes of `vla_latency.ARCHITECTURE`.
    """
    from lerobot.configs import PreTrainedConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.factory import (  # pyright: ignore[reportMissingImports]
        get_policy_class,
        make_pre_post_processors,
    )

    from benchmarks.act_latency import observation as observe_act
    from benchmarks.vla_latency import ARCHITECTURE, CAMERAS, FRAME, noise_of, observation

    if case in PI and is_small:
        use_sizes(case, ARCHITECTURE)

    os.chdir(folder)  # names of models in it are relative
    config = PreTrainedConfig.from_pretrained(folder)
    config.device = device
    if case in PI:
        config.dtype = dtype
    if has_weights:
        policy = get_policy_class(case).from_pretrained(folder, config=config, strict=False).eval()
    else:
        with torch.device(device):
            policy = get_policy_class(case)(config).to(device).eval()
    moved = {"device_processor": {"device": device}}
    before, after = make_pre_post_processors(config, pretrained_path=folder, preprocessor_overrides=moved)
    if "--compile" not in sys.argv:
        pass
    elif case == "act":
        policy.model.compile()
    elif case != "diffusion":
        policy.model.sample_actions = torch.compile(policy.model.sample_actions)
    else:
        policy.diffusion.unet = torch.compile(policy.diffusion.unet)
        encoders = policy.diffusion.rgb_encoder  # A list of an encoder per camera, or a shared encoder.
        for encoder in encoders if isinstance(encoders, torch.nn.ModuleList) else (encoders,):
            encoder.compile()
    if case == "act":
        seen: dict[str, Any] = observe_act(len(cameras or CAMERAS), *FRAME)
    else:
        seen = observation(case, cameras or CAMERAS)
    given = {"noise": torch.from_numpy(noise_of(case))} if has_weights and case != "act" else {}

    def prepare(array: Any, batch: int) -> Any:
        tensor = torch.from_numpy(np.repeat(array, batch, axis=0) if batch > 1 else array)
        if tensor.dtype == torch.uint8:
            tensor = (tensor.type(torch.float32) / 255).movedim(-1, -3).contiguous()
        return tensor

    def act(batch: int = 1) -> np.ndarray:
        is_mixed = dtype == "bfloat16" and case not in PI
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=is_mixed):
            batches = {name: value * batch if name == "task" else prepare(value, batch) for name, value in seen.items()}
            if case != "diffusion":
                return after(policy.predict_action_chunk(before(batches), **given)).float().numpy()
            batches = before(batches)
            images = [batches[key] for key in policy.config.image_features]
            batches["observation.images"] = torch.stack(images, dim=-4)
            return after(policy.diffusion.generate_actions(batches, **given)).numpy()

    return act


def use_sizes(case: str, sizes: dict[str, Any]) -> None:
    """Build pi0 or pi0.5 in sizes that LeRobot's code does not contain."""
    module: Any = importlib.import_module(f"lerobot.policies.{case}.modeling_{case}")
    build_paligemma = module.PaliGemmaForConditionalGenerationWithPiGemma
    build_expert = module.PiGemmaForCausalLM

    def paligemma(config: Any) -> Any:
        config.text_config.vocab_size = config._vocab_size = sizes["vocab_size"]
        config.image_token_index = sizes["vocab_size"] - 1
        for name, value in sizes["vision"].items():
            setattr(config.vision_config, name, value)
        config.vision_config.projection_dim = config.projection_dim = sizes["gemma_2b"]["width"]
        return build_paligemma(config=config)

    def expert(config: Any) -> Any:
        config.vocab_size = sizes["vocab_size"]
        return build_expert(config=config)

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = paligemma, expert
    module.get_gemma_config = lambda variant: module.GemmaConfig(**sizes[variant])


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    latency.serve(load)

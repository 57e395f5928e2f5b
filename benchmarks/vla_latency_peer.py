"""LeRobot's side of vla_latency.py and vla_gpu.py; runs in a Python with lerobot 0.6.1."""

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
    """Reads a policy; what it gives runs the path of LeRobot's robot client: frames in [0, 1], both processors.

    Args:
        dtype: bfloat16 is what pi0.5's config asks for, and for others autocast, as LeRobot's `use_amp` does it.
        cameras: two when None.
        has_weights: otherwise the folder has none, and the policy those that it begins a training with.
        is_small: pi0.5 has the sizes of `vla_latency.ARCHITECTURE`.
    """
    from lerobot.configs import PreTrainedConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.factory import (  # pyright: ignore[reportMissingImports]
        get_policy_class,
        make_pre_post_processors,
    )

    from benchmarks.act_latency import observation as observe_act
    from benchmarks.vla_latency import ARCHITECTURE, CAMERAS, FRAME, noise_of, observation

    if case == "pi05" and is_small:
        use_sizes(ARCHITECTURE)

    os.chdir(folder)  # names of models in it are relative
    config = PreTrainedConfig.from_pretrained(folder)
    config.device = device
    if case == "pi05":
        config.dtype = dtype
    if has_weights:
        policy = get_policy_class(case).from_pretrained(folder, config=config, strict=False).eval()
    else:
        with torch.device(device):
            policy = get_policy_class(case)(config).to(device).eval()
    moved = {"device_processor": {"device": device}}
    before, after = make_pre_post_processors(config, pretrained_path=folder, preprocessor_overrides=moved)
    if "--compile" in sys.argv and case != "diffusion":
        policy.model.sample_actions = torch.compile(policy.model.sample_actions)
    elif "--compile" in sys.argv:
        policy.diffusion.unet = torch.compile(policy.diffusion.unet)
        encoders = policy.diffusion.rgb_encoder  # one for each camera, or one for all
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
        is_mixed = dtype == "bfloat16" and case != "pi05"
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=is_mixed):
            batches = {name: value * batch if name == "task" else prepare(value, batch) for name, value in seen.items()}
            if case != "diffusion":
                return after(policy.predict_action_chunk(before(batches), **given)).float().numpy()
            batches = before(batches)
            images = [batches[key] for key in policy.config.image_features]
            batches["observation.images"] = torch.stack(images, dim=-4)
            return after(policy.diffusion.generate_actions(batches, **given)).numpy()

    return act


def use_sizes(sizes: dict[str, Any]) -> None:
    """Builds pi0.5 in sizes that LeRobot's code does not contain."""
    from lerobot.policies.pi05 import modeling_pi05 as module  # pyright: ignore[reportMissingImports]

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

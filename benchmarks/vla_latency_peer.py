"""LeRobot's side of benchmarks/vla_latency.py: run by a Python that has lerobot 0.6.1, which ours never has.

Answers the same orders as `serve` there: load a policy folder, or measure some inferences, one line of JSON each.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.vla_latency import time_calls

os.environ["HF_HUB_OFFLINE"] = "1"


def load(folder: str, case: str, *, is_compiled: bool) -> Callable[[], np.ndarray]:
    """Reads a policy; what it gives runs the path of LeRobot's robot client: frames in [0, 1], both processors."""
    from lerobot.configs import PreTrainedConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.factory import (  # pyright: ignore[reportMissingImports]
        get_policy_class,
        make_pre_post_processors,
    )

    from benchmarks.vla_latency import ARCHITECTURE, noise_of, observation

    if case == "pi05":
        use_sizes(ARCHITECTURE)

    os.chdir(folder)  # names of models in it are relative
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(case).from_pretrained(folder, config=config, strict=False).eval()
    before, after = make_pre_post_processors(config, pretrained_path=folder)
    if is_compiled and case != "diffusion":
        policy.model.sample_actions = torch.compile(policy.model.sample_actions)
    elif is_compiled:
        policy.diffusion.unet = torch.compile(policy.diffusion.unet)
        policy.diffusion.rgb_encoder = torch.compile(policy.diffusion.rgb_encoder)
    seen, noise = observation(case), torch.from_numpy(noise_of(case))

    def prepare(array: Any) -> Any:
        tensor = torch.from_numpy(array)
        if tensor.dtype == torch.uint8:
            tensor = (tensor.type(torch.float32) / 255).movedim(-1, -3).contiguous()
        return tensor

    def act() -> np.ndarray:
        with torch.inference_mode():
            batch = {name: value if name == "task" else prepare(value) for name, value in seen.items()}
            if case != "diffusion":
                return after(policy.predict_action_chunk(before(batch), noise=noise)).numpy()
            batch = before(batch)
            images = [batch[key] for key in policy.config.image_features]
            batch["observation.images"] = torch.stack(images, dim=-4)
            return after(policy.diffusion.generate_actions(batch, noise=noise)).numpy()

    return act


def use_sizes(sizes: dict[str, Any]) -> None:
    """Builds pi0.5 in other sizes than those that LeRobot has in its code."""
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
            act = load(order["folder"], order["case"], is_compiled="--compile" in sys.argv)
            loaded = time.perf_counter()
            chunk = act()
            answer = {"load_s": loaded - start, "compile_s": time.perf_counter() - loaded}
            answer["chunk"] = chunk[0].tolist()
        else:
            answer = time_calls(act, order["count"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

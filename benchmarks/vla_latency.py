"""How long do SmolVLA, Diffusion Policy and pi0.5 take from NumPy frames to NumPy actions, compared with torch?

    python -m benchmarks.vla_latency --lerobot-python VENV/bin/python --compiled-peer --rounds 5 --count 2

This takes 8 minutes on 2 quiet cores, most of it torch.compile; without --compiled-peer 4. The peer is a Python 3.12
with lerobot 0.6.1 and its extras smolvla, diffusion and pi (see vla_latency_peer.py). Without it, only this package is
measured. Sides take turns as in act_latency.py. Batch 1, float32, all cores, random weights in the sizes that people
run: SmolVLA's 450 million parameters with two cameras, Diffusion Policy at LeRobot's defaults with 10 steps of DDIM,
and pi0.5 at its full width with 2 of the 18 and 27 layers of its towers and with 1,024 words (the table of 257,152
words takes 2 GB).

Last figures: benchmarks/results/vla_latency.json (2 cores of a Xeon) and vla_latency_epyc.json (of an EPYC). SmolVLA on
the Xeon: 2.85 s; LeRobot eager 3.16 s.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import latency
from benchmarks.measured import RESULTS

if TYPE_CHECKING:
    from jaxmodels.policies.lerobot_folder import Checkpoint

CASES = ("smolvla", "diffusion", "pi05")
TASK = "pick up the red cube and place it in the box"
STATE = ACTION = 6
FRAME = (480, 640)
CAMERAS = ("camera1", "camera2")
# SmolVLM2-500M-Video-Instruct, as its config.json has it.
VLM = {
    "model_type": "smolvlm",
    "image_token_id": 49190,
    "pad_token_id": 2,
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "max_position_embeddings": 8192,
        "num_attention_heads": 15,
        "num_hidden_layers": 32,
        "num_key_value_heads": 5,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": False,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "image_size": 512,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-6,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 12,
        "patch_size": 16,
    },
}
GEMMA = {"depth": 2, "num_heads": 8, "num_kv_heads": 1, "head_dim": 256}
# pi0.5's sizes, which LeRobot has in its code, with fewer layers and words.
ARCHITECTURE = {
    "gemma_2b": GEMMA | {"width": 2048, "mlp_dim": 16_384},
    "gemma_300m": GEMMA | {"width": 1024, "mlp_dim": 4096},
    "vocab_size": 1024,
    "vision": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
}
PALIGEMMA, PALIGEMMA_WORDS = "google/paligemma-3b-pt-224", ("<pad>", "<eos>", "<bos>", "<unk>")
WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>")


def observation(case: str, cameras: Sequence[str] = CAMERAS) -> dict[str, Any]:
    """What a robot with these cameras sends, of one moment or of the two that Diffusion Policy looks at."""
    rng, time = np.random.default_rng(0), (2,) if case == "diffusion" else ()
    seen: dict[str, Any] = {
        f"observation.images.{name}": rng.integers(0, 256, (1, *time, *FRAME, 3), np.uint8) for name in cameras
    }
    seen["observation.state"] = rng.standard_normal((1, *time, STATE)).astype(np.float32)
    return seen | ({} if case == "diffusion" else {"task": [TASK]})


def shrink(vlm: dict[str, Any], parts: int) -> dict[str, Any]:
    """The same model at a part of its width, heads included."""
    text, vision = dict(vlm["text_config"]), dict(vlm["vision_config"])
    for sizes, names in (
        (text, ("head_dim", "hidden_size", "intermediate_size")),
        (vision, ("hidden_size", "intermediate_size")),
    ):
        sizes |= {name: sizes[name] // parts for name in names}
    return vlm | {"text_config": text, "vision_config": vision}


def write_policy(folder: Path, case: str) -> None:
    """Write a policy of the size that people run, with random weights, as LeRobot's files."""
    from jaxmodels.policies import lerobot_folder

    lerobot_folder.write_checkpoint(folder, build_checkpoint(folder, case))


def build_checkpoint(
    folder: Path,
    case: str,
    *,
    parts: int = 1,
    cameras: Sequence[str] = CAMERAS,
    architecture: Mapping[str, Any] = ARCHITECTURE,
    draw: Callable[[str, tuple[int, ...]], np.ndarray] | None = None,
) -> "Checkpoint":
    """A policy with random weights in memory.

    Args:
        folder: gets the files of tokenizer and vision-language model, which are read from there.
        architecture: sizes of pi0 and pi0.5 that are not those in LeRobot's code.
        draw: an array of weights by its name and shape; `_random` when None.
    """
    from jaxmodels.normalization import Normalization, Normalizer, ProcessorStep, build_normalization
    from jaxmodels.policies import get_policy_type
    from jaxmodels.policies.lerobot_folder import Checkpoint, model_blueprint

    shapes = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *FRAME]} for name in cameras}
    values: dict[str, Any] = {
        "type": case,
        "input_features": {"observation.state": {"type": "STATE", "shape": [STATE]}, **shapes},
        "output_features": {"action": {"type": "ACTION", "shape": [ACTION]}},
        "device": "cpu",
        "push_to_hub": False,
    }
    steps: tuple[ProcessorStep, ...] = ()
    if case == "smolvla":
        values |= {"vlm_model_name": "vlm", "vlm": shrink(VLM, parts)}
        tokenize = {
            "max_length": 48,
            "task_key": "task",
            "padding_side": "right",
            "padding": "longest",
            "truncation": True,
            "tokenizer_name": "vlm",
        }
        steps = (
            ProcessorStep("smolvla_new_line_processor", {}, comes_after=False),
            ProcessorStep("tokenizer_processor", tokenize, comes_after=False),
        )
    elif case in ("pi0", "pi05"):
        values |= {"architecture": dict(architecture), "dtype": "float32"}
        tokenize = {
            "max_length": 48 if case == "pi0" else 200,
            "task_key": "task",
            "padding_side": "right",
            "padding": "max_length",
            "truncation": True,
            "tokenizer_name": PALIGEMMA,
        }
        # The prompt of pi0.5 contains the normalised state.
        prepare = "pi0_new_line_processor" if case == "pi0" else "pi05_prepare_state_tokenizer_processor_step"
        steps = tuple(
            ProcessorStep(name, settings, comes_after=case == "pi05")
            for name, settings in ((prepare, {}), ("tokenizer_processor", tokenize))
        )
    else:
        values |= {"noise_scheduler_type": "DDIM", "num_inference_steps": 10, "pretrained_backbone_weights": None}
    config = get_policy_type(case).config(values)
    stats = {
        feature.name: {
            name: np.full((3, 1, 1) if feature.type == "VISUAL" else feature.shape, value, np.float32)
            for name, value in (("mean", 0.4), ("std", 0.25), ("min", -1.0), ("max", 1.0), ("q01", -1.0), ("q99", 1.0))
        }
        for feature in (*config.input_features, *config.output_features)
    }
    made = build_normalization(config.input_features, config.output_features, config.normalization_mapping, stats)
    inputs: Normalizer = made.inputs
    draw = draw or partial(_random, np.random.default_rng(0))
    weights = {name: draw(name, shape.shape) for name, shape in model_blueprint(config).shapes.items()}
    write_words = partial(_write_words, folder / PALIGEMMA)
    write_tokenizer = {"smolvla": lambda: _write_vlm(folder / "vlm"), "pi05": write_words, "pi0": write_words}
    tokenizer = write_tokenizer[case]() if case in write_tokenizer else None
    normalization = Normalization(inputs, made.outputs, {}, steps)
    return Checkpoint(config, weights, normalization, tokenizer=tokenizer)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep numbers within bounds through all layers."""
    if name.endswith("grid"):  # the keypoints' coordinates, no weights
        from jaxmodels.layers.vision import coordinates

        side = int(np.sqrt(shape[0] * FRAME[0] / FRAME[1]))
        return coordinates(side, shape[0] // side)[..., ::-1].reshape(shape)
    if len(shape) < 2:
        return np.full(shape, 1.0 if name.endswith(("scale", "variance")) else 0.0, np.float32)
    fan = shape[1] if name.endswith("weight") else int(np.prod(shape[:-1]))  # weights are (out, in)
    return rng.standard_normal(shape, np.float32) * np.float32(fan**-0.5)


def _write_bytes_tokenizer(folder: Path, special: Sequence[str]) -> bytes:
    """A tokenizer of bytes, in place of a model's own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*special, *alphabet])}, []))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_bytes()


def _write_words(folder: Path) -> bytes:
    """PaliGemma's tokenizer."""
    from jaxmodels.checkpoints.files import write_json

    tokenizer = _write_bytes_tokenizer(folder, PALIGEMMA_WORDS)
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), PALIGEMMA_WORDS, strict=True))
    write_json(folder / "tokenizer_config.json", names | {"tokenizer_class": "TokenizersBackend"}, indent=1)
    return tokenizer


def _write_vlm(folder: Path) -> bytes:
    """Files of SmolVLA's vision-language model other than its weights."""
    from jaxmodels.checkpoints.files import write_json

    written = _write_bytes_tokenizer(folder, (*WORDS, "<global-img>"))
    images = {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
    }
    write_json(
        folder / "processor_config.json",
        {
            "processor_class": "SmolVLMProcessor",
            "image_seq_len": 64,
            "image_processor": images,
            "video_processor": {**images, "video_processor_type": "SmolVLMVideoProcessor"},
        },
        indent=1,
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "backend": "tokenizers",
            "bos_token": WORDS[1],
            "eos_token": WORDS[3],
            "unk_token": WORDS[0],
            "pad_token": WORDS[2],
            "fake_image_token": WORDS[4],
            "image_token": WORDS[5],
            "global_image_token": "<global-img>",
            "end_of_utterance_token": WORDS[3],
            "processor_class": "SmolVLMProcessor",
            "tokenizer_class": "TokenizersBackend",
        },
        indent=1,
    )
    return written


def load(folder: str, case: str) -> Callable[[], np.ndarray]:
    """Load the policy in this process."""
    import jaxmodels

    policy, seen, noise = jaxmodels.load_policy(folder), observation(case), noise_of(case)
    return lambda: policy.act(seen, noise=noise)


def noise_of(case: str) -> np.ndarray:
    """The noise that both sides denoise into their chunk."""
    shape = (1, 64, ACTION) if case == "diffusion" else (1, 50, 32)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def main() -> None:
    output = RESULTS / "vla_latency.json"
    latency.run("vla_latency", __doc__, CASES, load, write_policy, lerobot="0.6.1", output=output)


if __name__ == "__main__":
    main()

"""How long do SmolVLA, Diffusion Policy and pi0.5 take from NumPy frames to NumPy actions, beside LeRobot's in torch?

    python benchmarks/vla_latency.py --lerobot-python /path/to/venv/bin/python --compiled-peer --batching --sharing

That takes 8 minutes on 2 quiet cores, most of it torch.compile (1 to 3 minutes a case); without --compiled-peer 4. The
peer is any Python 3.12 that can import lerobot 0.6.1 with its extras smolvla, diffusion and pi (see
benchmarks/vla_latency_peer.py); without it only this package is measured. Both run in processes of their own, never at
the same time, in alternating rounds, so that whatever else the machine does meets both alike; the ratio is the median
of the rounds' ratios, and processor seconds are counted too, as a busy machine spoils the others. Batch 1, float32,
every core, random weights in the sizes that people run: SmolVLA's 450 million parameters over two cameras, Diffusion
Policy at LeRobot's defaults with 10 steps of DDIM, and pi0.5 at its full width with 2 of the 18 and 27 layers of its
towers and with 1,024 words (the table of 257,152 is 2 GB, and only looked up in). Beside that, of this package alone:
how much memory loading takes over the size of the weights; (--sharing) memory of one and of eight sessions of one
policy in one engine, each of which was answered; (--batching) how many robots are answered a second, eight together
and one at a time, by a SmolVLA of a quarter of its width.

Last results: benchmarks/results/vla_latency.json (2 cores of a Xeon) and vla_latency_epyc.json (of an EPYC).
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measured import RESULTS, machine, write
from benchmarks.processes import Child, child

if TYPE_CHECKING:
    from jaxmodels.policies.lerobot_folder import Checkpoint

HERE = Path(__file__).parent
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


def write_policy(folder: Path, case: str, parts: int = 1) -> None:
    """A policy of the size that people run, or a part of its width, with random weights, as LeRobot's files."""
    from jaxmodels.policies import lerobot_folder

    lerobot_folder.write_checkpoint(folder, build_checkpoint(folder, case, parts=parts))


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
    elif case == "pi05":
        values |= {"architecture": dict(architecture), "dtype": "float32"}
        tokenize = {
            "max_length": 200,
            "task_key": "task",
            "padding_side": "right",
            "padding": "max_length",
            "truncation": True,
            "tokenizer_name": PALIGEMMA,
        }
        steps = (
            ProcessorStep("pi05_prepare_state_tokenizer_processor_step", {}, comes_after=True),
            ProcessorStep("tokenizer_processor", tokenize, comes_after=True),
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
    write_tokenizer = {"smolvla": lambda: _write_vlm(folder / "vlm"), "pi05": lambda: _write_words(folder / PALIGEMMA)}
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
    """Files of SmolVLA's vision-language model beside its weights."""
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


def load(folder: str, seen: dict[str, Any], noise: np.ndarray) -> Callable[[], np.ndarray]:
    import jaxmodels

    policy = jaxmodels.load_policy(folder)
    return lambda: policy.act(seen, noise=noise)


def noise_of(case: str) -> np.ndarray:
    """The noise that both sides make their chunk of."""
    shape = (1, 64, ACTION) if case == "diffusion" else (1, 50, 32)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def memory_bytes(field: str) -> int:
    """Of this process: ``VmRSS``, what it has, or ``VmHWM``, the most that it had since `forget_peak` (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """A process begins with its parent's peak; from now on it counts its own."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_batching(rounds: int) -> dict[str, float]:
    """Robots per second, eight together and one at a time, by a SmolVLA of a quarter of its width."""
    import jaxmodels

    with tempfile.TemporaryDirectory() as name:
        write_policy(Path(name), "smolvla", parts=4)
        policy = jaxmodels.load_policy(name)
        one = observation("smolvla")
        eight = {key: value * 8 if key == "task" else np.repeat(value, 8, axis=0) for key, value in one.items()}
        seconds: dict[int, list[float]] = {1: [], 8: []}
        for seen in (one, eight):
            policy.act(seen)
        for _ in range(rounds):
            for batch, seen in ((1, one), (8, eight)):
                for _ in range(8 // batch):
                    start = time.perf_counter()
                    policy.act(seen)
                    seconds[batch].append(time.perf_counter() - start)
    alone, together = (1 / float(np.median(seconds[1])), 8 / float(np.median(seconds[8])))
    return {"alone_per_s": round(alone, 3), "eight_per_s": round(together, 3), "ratio": round(together / alone, 3)}


class Session:
    """Whoever asks an engine."""


async def share(folder: str) -> list[int]:
    """Bytes of this process over its start with one session of a policy, with two, ... with eight, all answered."""
    import jaxmodels
    from service.inference.engine import Engine

    engine, seen, sessions, found = Engine(batch_sizes=(1,), stuck_after=600), observation("smolvla"), [], []
    before = memory_bytes("VmRSS")
    async with AsyncExitStack() as stack:
        for _ in range(8):
            sessions.append(Session())
            loaded = await stack.enter_async_context(
                engine.policy_cache.open_policy(
                    lambda path, *_, **__: jaxmodels.load_policy(path), folder, None, lambda _: None
                )
            )
            await engine.infer(loaded, seen, caller=sessions[-1])
            found.append(memory_bytes("VmRSS") - before)
    await engine.close()
    return found


def measure_sharing() -> dict[str, float]:
    """Memory of one session and of eight of one SmolVLA, in a process of its own."""
    with tempfile.TemporaryDirectory() as name, child(__file__, "--serve") as process:
        write_policy(Path(name), "smolvla")
        sizes = process.order(do="share", folder=name)["bytes"]
        weights = (Path(name) / "model.safetensors").stat().st_size
    megabytes = [round(size / 1e6, 1) for size in (weights, sizes[0], sizes[-1])]
    return dict(zip(("weights_mb", "one_session_mb", "eight_sessions_mb"), megabytes, strict=True))


def nothing_loaded() -> np.ndarray:
    raise SystemExit("the first order must be to load a policy")


def time_calls(act: Callable[[], object], count: int) -> dict[str, list[float]]:
    """Seconds of each call, by the clock and of processors."""
    found: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}
    for _ in range(count):
        start, used = time.perf_counter(), time.process_time()
        act()
        found["seconds"].append(time.perf_counter() - start)
        found["processor_seconds"].append(time.process_time() - used)
    return found


def serve() -> None:
    """The measured side: one line of JSON in, one out. The peer speaks the same."""
    act = nothing_loaded
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "load":
            import jaxmodels.policy

            assert jaxmodels.policy  # what importing takes is not loading's
            forget_peak()
            start, before = time.perf_counter(), memory_bytes("VmRSS")
            act = load(order["folder"], observation(order["case"]), noise_of(order["case"]))
            loaded, peak = time.perf_counter(), memory_bytes("VmHWM")
            chunk = act()
            answer = {"load_s": loaded - start, "compile_s": time.perf_counter() - loaded}
            size = (Path(order["folder"]) / "model.safetensors").stat().st_size
            answer["load_bytes_over_weights"] = round((peak - before) / size, 3)
            answer["chunk"] = chunk[0].tolist()
        elif order["do"] == "share":
            answer = {"bytes": asyncio.run(share(order["folder"]))}
        else:
            answer = time_calls(act, order["count"])
        print(json.dumps(answer), flush=True)


def measure(commands: dict[str, list[str]], case: str, rounds: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        folder.mkdir()
        write_policy(folder, case)
        results: dict[str, Any] = {}
        rounds_of: dict[str, list[dict[str, list[float]]]] = {side: [] for side in commands}
        chunks = {}
        # One after the other in each round, and both alive, so that no side ever starts cold.
        with ExitStack() as stack:
            sides: dict[str, Child] = {}
            for side, (python, *command) in commands.items():
                sides[side] = process = stack.enter_context(child(*command, python=python))
                results[side] = process.order(do="load", folder=str(folder), case=case)
                chunks[side] = np.array(results[side].pop("chunk"))
                process.order(do="measure", count=1)
            for _ in range(rounds):
                for side, process in sides.items():
                    rounds_of[side].append(process.order(do="measure", count=count))
    ours = chunks["robojax"]

    def collect(side: str, kind: str) -> np.ndarray:
        """Milliseconds (rounds, calls)."""
        return np.array([found[kind] for found in rounds_of[side]]) * 1e3

    for side in commands:
        milliseconds, processor = collect(side, "seconds"), collect(side, "processor_seconds")
        shares = np.median(collect("robojax", "seconds"), axis=1) / np.median(milliseconds, axis=1)
        results[side] |= {
            "p50_ms": round(float(np.percentile(milliseconds, 50)), 2),
            "min_ms": round(float(milliseconds.min()), 2),
            "processor_ms": round(float(np.median(processor)), 2),
            "count": milliseconds.size,
            "ours_over_it": round(float(np.median(shares)), 3),
            "ours_over_it_at_best": round(float(collect("robojax", "seconds").min() / milliseconds.min()), 3),
            "largest_difference": float(np.abs(chunks[side] - ours).max() / np.abs(ours).max()),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lerobot-python", type=Path, help="a Python that can import lerobot 0.6.1")
    parser.add_argument("--compiled-peer", action="store_true", help="also measure the peer under torch.compile")
    parser.add_argument("--batching", action="store_true", help="also measure eight robots together")
    parser.add_argument("--sharing", action="store_true", help="also measure memory of eight sessions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=2, help="inferences per round and side")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be given again")
    parser.add_argument("--output", type=Path, default=RESULTS / "vla_latency.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    commands = {"robojax": [sys.executable, __file__, "--serve"]}
    if options.lerobot_python:
        peer = [str(options.lerobot_python), str(HERE / "vla_latency_peer.py")]
        commands["lerobot eager"] = peer
        if options.compiled_peer:
            commands["lerobot torch.compile"] = [*peer, "--compile"]
    import jax

    result: dict[str, Any] = {"machine": machine() | {"device": str(jax.devices()[0])}, "cases": {}}
    for case in options.case or CASES:
        sides = measure(commands, case, options.rounds, options.count)
        result["cases"][case] = sides
        for side, figures in sides.items():
            print(
                f"{case:10} {side:22} p50 {figures['p50_ms']:8.1f} ms  min {figures['min_ms']:8.1f} ms  "
                f"processor {figures['processor_ms']:8.1f} ms  ours takes {figures['ours_over_it']:5.2f} of it "
                f"({figures['ours_over_it_at_best']:.2f} at best)  difference {figures['largest_difference']:.1e}",
                flush=True,
            )
    if options.batching:
        result["batching"] = figures = measure_batching(options.rounds)
        print(f"eight robots together: {figures['ratio']:.2f} times as many answers as one at a time")
    if options.sharing:
        result["sharing"] = figures = measure_sharing()
        print(
            f"memory: weights {figures['weights_mb']:.0f} MB, one session {figures['one_session_mb']:.0f} MB, "
            f"eight {figures['eight_sessions_mb']:.0f} MB"
        )
    write(options.output, result)


if __name__ == "__main__":
    main()

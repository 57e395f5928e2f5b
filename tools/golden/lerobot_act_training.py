"""Record 100 training steps of lerobot's ACT as golden files. The script needs lerobot.

``python tools/golden/lerobot_act_training.py [FOLDER [SEED]]`` changes the folder, and the weights and batches.
"""

import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lerobot
import numpy as np
import torch
from accelerate import Accelerator
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy, create_sinusoidal_pos_embedding
from lerobot.scripts.lerobot_train import update_policy

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "lerobot_act_training"
BATCH, BATCHES, STEPS = 4, 5, 100
CHUNK, STATE, ENVIRONMENT, ACTION, SIDE = 8, 6, 4, 5, 32
WHOLE = 1024  # Largest tensor that is recorded completely. A larger one has its norm and ENTRIES evenly spaced numbers.
ENTRIES = 64
CASES = {
    "vae": (False, True),
    "no_vae": (False, False),
    "camera_and_vae": (True, True),
}  # Whether the policy has a camera and a VAE.
RATES = {
    "preset": (1e-5, 1e-5),
    "fast": (1e-3, 1e-4),
}  # Learning rates of the policy and of the backbone. "preset" has LeRobot's values.


def make_policy(has_camera: bool, use_vae: bool, rates: tuple[float, float]) -> ACTPolicy:
    inputs = {"observation.state": PolicyFeature(FeatureType.STATE, (STATE,))}
    if has_camera:
        inputs["observation.images.front"] = PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE))
    else:
        inputs["observation.environment_state"] = PolicyFeature(FeatureType.ENV, (ENVIRONMENT,))
    config = ACTConfig(
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        device="cpu",
        pretrained_backbone_weights=None,
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        dim_model=8,
        n_heads=2,
        dim_feedforward=12,
        n_encoder_layers=1,
        n_decoder_layers=2,
        n_vae_encoder_layers=1,
        latent_dim=4,
        use_vae=use_vae,
        dropout=0.0,
        optimizer_lr=rates[0],
        optimizer_lr_backbone=rates[1],
    )
    return ACTPolicy(config)


def seeded(policy: ACTPolicy, seed: int) -> dict[str, list]:
    """Set weights by the rule of ../lerobot_act/README.md; return the names and shapes of the drawn weights."""
    fixed = create_sinusoidal_pos_embedding(CHUNK + 2, policy.config.dim_model)[None]
    weights, keys = {}, {}
    for name, tensor in policy.state_dict().items():
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        keys[name] = {"shape": list(tensor.shape)}
        if name == "model.vae_encoder_pos_enc":
            weights[name] = fixed
            continue
        if name.endswith("running_var"):
            values = np.float32(0.5 + generator.random(tensor.shape))
        else:
            values = generator.standard_normal(tensor.shape).astype(np.float32)
            if len(tensor.shape) > 1:
                values = values / np.float32(np.sqrt(np.prod(tensor.shape[1:])))
            else:
                values = np.float32(1) * name.endswith("weight") + np.float32(0.1) * values
        weights[name] = torch.from_numpy(values)
    policy.load_state_dict(weights)
    return keys


def draw_batches(has_camera: bool, seed: int) -> dict[str, np.ndarray]:
    """Draw normalised observations and actions. The last steps of some chunks are after the end of the episode."""
    draw = np.random.default_rng(seed)
    arrays = {
        "state": draw.normal(size=(BATCHES, BATCH, STATE)),
        "actions": draw.normal(size=(BATCHES, BATCH, CHUNK, ACTION)),
        "noise": draw.normal(size=(STEPS, BATCH, 4)),
    }
    if not has_camera:
        arrays["environment_state"] = draw.normal(size=(BATCHES, BATCH, ENVIRONMENT))
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    if has_camera:
        arrays["frames"] = draw.integers(0, 256, (BATCHES, BATCH, SIDE, SIDE, 3), dtype=np.uint8)
    lengths = draw.integers(CHUNK // 2, CHUNK + 3, (BATCHES, BATCH, 1))
    return {**arrays, "is_pad": np.arange(CHUNK) >= lengths}


def batch_of(arrays: dict[str, np.ndarray], number: int) -> dict[str, torch.Tensor]:
    index = number % BATCHES
    batch = {
        "observation.state": torch.from_numpy(arrays["state"][index]),
        "action": torch.from_numpy(arrays["actions"][index]),
        "action_is_pad": torch.from_numpy(arrays["is_pad"][index]),
    }
    if "frames" in arrays:
        images = torch.from_numpy(arrays["frames"][index]).permute(0, 3, 1, 2).contiguous()
        batch["observation.images.front"] = images.float() / 127.5 - 1
    else:
        batch["observation.environment_state"] = torch.from_numpy(arrays["environment_state"][index])
    return batch


def compact(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in tensors.items():
        values = tensor.detach().numpy().astype(np.float32)
        if values.size <= WHOLE:
            found[f"{prefix}.{name}"] = values
        else:
            indices = np.linspace(0, values.size - 1, ENTRIES).astype(int)
            found[f"{prefix}.{name}"] = values.reshape(-1)[indices]
            found[f"{prefix}_norm.{name}"] = np.float64(np.linalg.norm(values.astype(np.float64)))
    return found


def record(folder: Path, has_camera: bool, use_vae: bool, seed: int) -> None:
    arrays = draw_batches(has_camera, seed)
    found: dict[str, np.ndarray] = {}
    for run, rates in RATES.items():
        policy = make_policy(has_camera, use_vae, rates)
        keys = seeded(policy, seed)
        policy.train()
        preset = policy.config.get_optimizer_preset()
        optimizer = preset.build(policy.get_optim_params())
        accelerator, tracked = Accelerator(cpu=True), SimpleNamespace()
        losses, norms, parts = [], [], []
        for number in range(STEPS):
            batch, noise = batch_of(arrays, number), torch.from_numpy(arrays["noise"][number])
            with patch.object(torch, "randn_like", lambda like, noise=noise: noise):
                if run == "preset" and number == 0:
                    policy.forward(batch)[0].backward()
                    trained = {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}
                    found |= compact("gradient", trained)
                    optimizer.zero_grad()
                _, logged = update_policy(tracked, policy, batch, optimizer, preset.grad_clip_norm, accelerator)
            losses.append(tracked.loss)
            norms.append(tracked.grad_norm)
            parts.append([logged["l1_loss"], logged.get("kld_loss", 0.0)])
        found |= {f"{run}.loss": np.array(losses), f"{run}.gradient_norm": np.array(norms)}
        found[f"{run}.parts"] = np.array(parts)
        found |= compact(f"{run}.final", dict(policy.named_parameters()))
        if run == "preset":
            folder.mkdir(parents=True, exist_ok=True)
            policy.config.save_pretrained(folder)
    described = {
        "seed": seed,
        "lerobot": lerobot.__version__,
        "torch": torch.__version__,
        "optimizer": {"betas": list(preset.betas), "eps": preset.eps, "clip": preset.grad_clip_norm, "rates": RATES},
        "fixed": [name for name in keys if name == "model.vae_encoder_pos_enc"],
        "keys": keys,
    }
    (folder / "keys.json").write_text(json.dumps(described, indent=1) + "\n")
    np.savez_compressed(folder / "batches.npz", **arrays)
    np.savez_compressed(folder / "training.npz", **found)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for name, (has_camera, use_vae) in CASES.items():
        record(folder / name, has_camera, use_vae, seed)


if __name__ == "__main__":
    main()

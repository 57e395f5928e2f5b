"""Record the steps of diffusers' schedulers with fixed noise in tests/golden/samplers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers import schedulers

SHAPE = (2, 3, 4)
TOKENS, CLASSES = 10, 7  # The masked class is included.
TRAINED = {"num_train_timesteps": 100}
ZERO = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
DIFFUSION: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    # Each value is (scheduler, steps, eta, fields).
    "ddim_defaults": ("DDIM", 6, 0.0, {}),
    "ddim_stable_diffusion": (
        "DDIM",
        7,
        0.0,
        {
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
        },
    ),
    "ddim_policy": ("DDIM", 10, 0.0, {**TRAINED, "beta_schedule": "squaredcos_cap_v2"}),
    "ddim_sample_eta": ("DDIM", 5, 0.7, {**TRAINED, "prediction_type": "sample", "timestep_spacing": "linspace"}),
    "ddim_velocity_zero_snr": ("DDIM", 5, 0.0, {"prediction_type": "v_prediction", "clip_sample_range": 2.0, **ZERO}),
    "ddim_eta_one": ("DDIM", 8, 1.0, {**TRAINED, "timestep_spacing": "trailing", "clip_sample": False}),
    "ddpm_defaults": ("DDPM", 6, 0.0, {}),
    "ddpm_every_step": ("DDPM", 12, 0.0, {"num_train_timesteps": 12, "beta_schedule": "squaredcos_cap_v2"}),
    "ddpm_large_offset": ("DDPM", 5, 0.0, {"variance_type": "fixed_large", "steps_offset": 1, "clip_sample": False}),
    "ddpm_large": ("DDPM", 5, 0.0, {**TRAINED, "variance_type": "fixed_large"}),
    "ddpm_velocity_linspace": (
        "DDPM",
        7,
        0.0,
        {"prediction_type": "v_prediction", "timestep_spacing": "linspace", "beta_schedule": "scaled_linear"},
    ),
    "ddpm_sample_trailing": ("DDPM", 6, 0.0, {**TRAINED, "prediction_type": "sample", **ZERO}),
}
FLOWS: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    # Each value is (scheduler, steps, uniform sigmas, fields).
    "euler_defaults": ("Euler", 6, False, {}),
    "euler_shifted": ("Euler", 5, False, {"shift": 3.0}),
    "euler_uniform": ("Euler", 10, True, {}),
    "euler_uniform_shifted": ("Euler", 4, True, {"shift": 1.7, "num_train_timesteps": 500}),
    "euler_one_step": ("Euler", 1, False, {}),
    "heun_defaults": ("Heun", 5, False, {}),
    "heun_shifted": ("Heun", 4, False, {"shift": 2.5}),
    "heun_one_step": ("Heun", 1, False, {}),
}
MASKED: dict[str, tuple[int, Any, int, str]] = {
    # Each value is (steps, temperature, known tokens of the first element, masking).
    "amused_defaults": (8, (2, 0), 0, "cosine"),
    "amused_linear": (5, (1.5, 0.5), 0, "linear"),
    "amused_greedy": (12, (0, 0), 0, "cosine"),
    "amused_inpainting": (4, (2, 0), 4, "cosine"),
}


def record() -> dict[str, dict[str, Any]]:
    """Return the fields, inputs and outputs of every case by name."""
    cases: dict[str, dict[str, Any]] = {}
    for number, (name, case) in enumerate(DIFFUSION.items()):
        cases[name] = diffusion(np.random.default_rng(number), *case)
    for number, (name, flow_case) in enumerate(FLOWS.items()):
        cases[name] = flow(np.random.default_rng(100 + number), *flow_case)
    for number, (name, masked_case) in enumerate(MASKED.items()):
        cases[name] = masked(np.random.default_rng(200 + number), *masked_case)
    return cases


def diffusion(rng: np.random.Generator, kind: str, steps: int, eta: float, fields: dict[str, Any]) -> dict[str, Any]:
    scheduler = getattr(schedulers, f"{kind}Scheduler")(**fields)
    noise = normal(rng, steps, *SHAPE)
    draws = iter(noise)
    drawn = mock.Mock(side_effect=lambda *_, **__: torch.tensor(next(draws)))
    with mock.patch("diffusers.schedulers.scheduling_ddpm.randn_tensor", drawn):
        scheduler.set_timesteps(steps)
        predictions = normal(rng, steps, *SHAPE)
        x = [normal(rng, *SHAPE)]
        for k, t in enumerate(scheduler.timesteps):
            if kind == "DDPM" and t == 0:
                next(draws)  # diffusers draws no noise at the last step.
            options = {} if kind == "DDPM" else {"eta": eta, "variance_noise": torch.tensor(noise[k])}
            after = scheduler.step(torch.tensor(predictions[k]), t, torch.tensor(x[-1]), **options).prev_sample
            x.append(after.numpy())
    clean, extra = normal(rng, 5, 3), normal(rng, 5, 3)
    times = rng.integers(0, scheduler.config.num_train_timesteps, 5)
    arguments = (torch.tensor(clean), torch.tensor(extra), torch.tensor(times))
    return {
        "fields": fields,
        "eta": eta,
        "alphas": scheduler.alphas_cumprod.numpy(),
        "timesteps": scheduler.timesteps.numpy(),
        "predictions": predictions,
        "noise": noise,
        "x": np.stack(x),
        "training.clean": clean,
        "training.noise": extra,
        "training.timesteps": times,
        "training.noisy": scheduler.add_noise(*arguments).numpy(),
        "training.velocity": scheduler.get_velocity(*arguments).numpy(),
    }


def flow(rng: np.random.Generator, kind: str, steps: int, uniform: bool, fields: dict[str, Any]) -> dict[str, Any]:
    scheduler = getattr(schedulers, f"FlowMatch{kind}DiscreteScheduler")(**fields)
    if uniform:
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))
    else:
        scheduler.set_timesteps(steps)
    predictions = normal(rng, len(scheduler.timesteps), *SHAPE)
    x = [normal(rng, *SHAPE)]
    for velocity, t in zip(predictions, scheduler.timesteps, strict=True):
        x.append(scheduler.step(torch.tensor(velocity), t, torch.tensor(x[-1])).prev_sample.numpy())
    spacing = {"spacing": "uniform"} if uniform else {}
    timesteps = scheduler.timesteps.numpy()
    return {"fields": {**fields, **spacing}, "timesteps": timesteps, "predictions": predictions, "x": np.stack(x)}


def masked(rng: np.random.Generator, steps: int, temperature: Any, known: int, masking: str) -> dict[str, Any]:
    scheduler = schedulers.AmusedScheduler(mask_token_id=CLASSES - 1, masking_schedule=masking)
    scheduler.set_timesteps(steps, temperature)
    tokens = np.full((1 if known else 2, TOKENS), CLASSES - 1)
    tokens[0, :known] = rng.integers(0, CLASSES - 1, known)
    batch = len(tokens)
    logits = 2 * normal(rng, steps, batch, TOKENS, CLASSES - 1)
    class_gumbel = rng.gumbel(size=logits.shape).astype(np.float32)
    order_gumbel = rng.gumbel(size=(steps, batch, TOKENS)).astype(np.float32)
    x = [tokens]
    for k, t in enumerate(scheduler.timesteps):

        def multinomial(p: torch.Tensor, *_: Any, k: int = k, **__: Any) -> torch.Tensor:
            return (p.log() + torch.tensor(class_gumbel[k]).reshape(p.shape)).argmax(-1, keepdim=True)

        noise = mock.Mock(return_value=torch.tensor(order_gumbel[k]))
        with (
            mock.patch("torch.multinomial", multinomial),
            mock.patch("diffusers.schedulers.scheduling_amused.gumbel_noise", noise),
        ):
            share = float((tokens[0] == CLASSES - 1).mean())
            after = scheduler.step(torch.tensor(logits[k]), t, torch.tensor(x[-1]), starting_mask_ratio=share)
        x.append(after.prev_sample.numpy())
    fields = {"num_classes": CLASSES, "masking": masking, "temperature": list(temperature)}
    return {
        "fields": fields,
        "timesteps": scheduler.timesteps.numpy(),
        "logits": logits.swapaxes(2, 3),
        "class_gumbel": class_gumbel.swapaxes(2, 3),
        "order_gumbel": order_gumbel,
        "x": np.stack(x),
    }


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@contextmanager
def archive(path: Path) -> Iterator[dict[str, np.ndarray]]:
    """Yield a dictionary whose arrays are written to a compressed file."""
    arrays: dict[str, np.ndarray] = {}
    yield arrays
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def write(folder: Path) -> None:
    """Write arrays to ``cases.npz`` as ``{case}/{name}``, and fields and numbers to ``cases.json``."""
    numbers: dict[str, dict[str, Any]] = {}
    with archive(folder / "cases.npz") as arrays:
        for case, values in record().items():
            numbers[case] = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
            for name, value in values.items():
                if isinstance(value, np.ndarray):
                    small = value.astype(np.int32) if value.dtype.kind == "i" else value
                    arrays[f"{case}/{name}"] = small
    (folder / "cases.json").write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write(Path(__file__).parents[2] / "tests" / "golden" / "samplers")

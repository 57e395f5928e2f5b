"""Files of low-rank adapters (LoRA) for a 2D transformer: those of peft, of diffusers old and new, and of kohya.

An adapter adds ``up @ down`` to weights it names. Here both factors lie as the arrays they belong to do: stacked by
layer, queries, keys and values beside each other, zeros where an adapter has nothing.
Source: peft 0.21 (utils/save_and_load.py), diffusers 0.42.1 (loaders/peft.py, loaders/lora_conversion_utils.py).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints import diffusers_names
from jaxmodels.checkpoints.json_file import read_json
from jaxmodels.checkpoints.layouts import LINEAR, POINTWISE, Place, Shape
from jaxmodels.checkpoints.safetensors_file import Stored, find_floats, read_metadata
from jaxmodels.errors import CheckpointError, WeightsMismatch
from jaxmodels.memory import check_host
from jaxmodels.ranges import Range, is_number
from jaxmodels.transformer2d.config import Transformer2DConfig

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json")
SETTINGS = "adapter_config.json"
METADATA = "lora_adapter_metadata"  # key of a file's metadata, for the same settings
WRAPPERS = ("base_model.model.", "unet.", "transformer.")
OTHER_MODELS = ("text_encoder", "lora_te")
KOHYA = ("lora_unet_", "lora_transformer_")
FACTOR = re.compile(
    r"(?P<module>.+?)(?:\.lora_(?P<peft>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight"
    r"|(?:\.lora|\.lora_linear_layer|_lora)\.(?P<old>down|up)\.weight"
    r"|\.lora_(?P<kohya>down|up)\.weight|(?:_lora)?\.(?P<alpha>alpha))"
)
RANK = Range(1, 4096)
ALPHA = Range(-1e6, 1e6)
SIDES = {"A": "down", "B": "up"}


@dataclass
class _Factors:
    """What a file has for one weight."""

    down: Stored | None = None
    up: Stored | None = None
    alpha: Stored | None = None


def read(
    path: Path, config: Transformer2DConfig, *, prefix: str | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Down and up factors (float32) by the name of our layer, e.g. ``transformer_blocks.attn1.to_qkv``.

    The scale that the file states, alpha / rank, is part of the up factor. A kernel (layers, inputs, projections,
    outputs) has factors (layers, inputs, projections, rank) and (layers, rank, projections, outputs); where it has
    fewer axes, so have they. Smaller ranks than the largest are filled with zeros.

    Args:
        path: a safetensors file, or a folder with one of `FILES`.
        prefix: of the transformer inside a UNet, e.g. ``mid_block.attentions.0``; what the file has for other parts of
            the UNet is left alone. What it has for text encoders always is.

    Raises:
        CheckpointError: no such file, malformed, a kind of adapter that is not known, factors that are not finite, or
            (`WeightsMismatch`, all listed) that do not fit the model.
    """
    file = _find_file(path)
    stored = find_floats(file)
    weights = {
        place.theirs.removesuffix(".weight"): place
        for place in diffusers_names.places(config)
        if place.theirs.endswith(".weight") and place.layout in (LINEAR, POINTWISE)
    }
    factors, unknown = _sort(stored, weights, prefix)
    wrong = [f"{name} {list(stored[name].shape)}: the model has no such weight to adapt" for name in unknown]
    for module, found in factors.items():
        wrong += _misfits(module, found, weights[module])
    if wrong:
        raise WeightsMismatch(
            "\n".join([f"{file.name}: the adapter does not fit the model:", *map("  {}".format, wrong)])
        )
    if not factors:
        where = f" under {prefix!r}" if prefix else ""
        raise CheckpointError(f"{file.name}: no low-rank factors{where}; wanted names like '….to_q.lora_A.weight'")
    settings = _read_settings(file)
    patterns = {pattern: _ends(pattern) for pattern in settings.get("alpha_pattern") or {}}
    if unused := [name for name, end in patterns.items() if not any(f".{module}".endswith(end) for module in factors)]:
        raise CheckpointError(f"{file.name}: alpha_pattern has {', '.join(unused)}; wanted names of adapted weights")
    return _stack(file, factors, weights, settings)


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    names = [name for name in FILES if name.endswith(".safetensors")]
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{path.name}: no adapter; wanted a safetensors file, or a folder with {' or '.join(names)}"
        )
    return found[0]


def _sort(
    stored: Mapping[str, Stored], weights: Mapping[str, Place], prefix: str | None
) -> tuple[dict[str, _Factors], list[str]]:
    """Factors by diffusers' name of the weight, and the names of tensors that belong to none."""
    start = f"{prefix}." if prefix else ""
    # kohya writes dots as underscores, so that only a table leads back.
    flat = {(start + module).replace(".", "_"): module for module in weights}
    factors: dict[str, _Factors] = {}
    unknown: list[str] = []
    for name, tensor in stored.items():
        if name.startswith(OTHER_MODELS):
            continue
        bare = _unwrapped(name)
        is_kohya = name.startswith(KOHYA)
        if not bare.startswith(start.replace(".", "_") if is_kohya else start):
            continue
        match = FACTOR.fullmatch(bare)
        module = None if match is None else _module(match["module"], flat if is_kohya else None, start)
        if match is None or module is None or module not in weights:
            unknown.append(name)
            continue
        side = SIDES.get(match["peft"] or "") or match["old"] or match["kohya"] or match["alpha"]
        setattr(factors.setdefault(module, _Factors()), side, tensor)
    return factors, unknown


def _unwrapped(name: str) -> str:
    for wrapper in (*WRAPPERS, *KOHYA):
        name = name.removeprefix(wrapper)
    return name


def _module(found: str, flat: Mapping[str, str] | None, start: str) -> str | None:
    if flat is not None:
        return flat.get(found)
    # Older diffusers: the attention's processor held what belongs to its layers.
    module = found.removeprefix(start).replace(".processor.", ".")
    return f"{module}.0" if module.endswith(".to_out") else module


def _misfits(module: str, found: _Factors, place: Place) -> list[str]:
    if found.down is None or found.up is None:
        return [f"{module}: has {'no down (lora_A)' if found.down is None else 'no up (lora_B)'} factor"]
    down, up = _matrix(found.down.shape), _matrix(found.up.shape)
    rows, columns = place.shape[:2]
    if down is None or up is None or not down[0] or down[1] != columns or up[0] != rows or down[0] != up[1]:
        return [
            f"{module}: factors {list(found.down.shape)} and {list(found.up.shape)}; "
            f"wanted [rank, {columns}] and [{rows}, rank]"
        ]
    if down[0] not in RANK:
        return [f"{module}: rank {down[0]}; wanted {RANK.most:g} at most"]
    if found.alpha is not None and math.prod(found.alpha.shape) != 1:
        return [f"{module}: alpha has shape {list(found.alpha.shape)}; wanted one number"]
    return []


def _matrix(shape: Shape) -> Shape | None:
    """The shape of a linear layer's weight, or of a 1x1 convolution's."""
    return shape[:2] if len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)) else None


def _stack(
    file: Path, factors: Mapping[str, _Factors], weights: Mapping[str, Place], settings: Mapping[str, Any]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ranks: dict[str, int] = {}
    wholes: dict[str, tuple[Shape, int]] = {}
    for module, found in factors.items():
        place = weights[module]
        assert found.down is not None  # looked at before
        ours = place.ours.removesuffix(".kernel")
        ranks[ours] = max(ranks.get(ours, 0), found.down.shape[0])
        wholes[ours] = (place.whole, 1 if place.index else 0)
    # Layers without an adapter get zeros: few factors of a file can ask for many times their size.
    size = sum(
        4 * ranks[ours] * (math.prod(whole[:-1]) + math.prod(whole) // whole[at])
        for ours, (whole, at) in wholes.items()
    )
    check_host(size, f"the adapters of {file.name}")
    stacked = {
        ours: (
            np.zeros((*whole[:-1], ranks[ours]), np.float32),
            np.zeros((*whole[:inputs], ranks[ours], *whole[inputs + 1 :]), np.float32),
        )
        for ours, (whole, inputs) in wholes.items()
    }
    broken: list[str] = []
    for module, found in factors.items():
        place = weights[module]
        assert found.down is not None
        assert found.up is not None
        rank = found.down.shape[0]
        alpha = _alpha(module, rank, settings) if found.alpha is None else float(found.alpha.read().reshape(()))
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") is True else rank)
        down = found.down.read().astype(np.float32).reshape(rank, -1)
        up = found.up.read().astype(np.float32).reshape(-1, rank) * np.float32(scale)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            broken.append(module)
        downs, ups = stacked[place.ours.removesuffix(".kernel")]
        downs[place.index][:, :rank] = down.T
        ups[place.index][:rank] = up.T
    if broken:
        raise CheckpointError(f"{file.name}: factors hold a NaN or an infinity: {', '.join(sorted(broken))}")
    return stacked


def _read_settings(file: Path) -> Mapping[str, Any]:
    """What peft says of an adapter, in a file beside it or in its metadata; nothing in other files."""
    beside = file.parent / SETTINGS
    if beside.is_file():
        settings = read_json(beside)
    else:
        try:
            settings = json.loads(read_metadata(file).get(METADATA, "{}"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file.name}: its {METADATA} is malformed; wanted a JSON object") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{file.name}: its {METADATA} is no JSON object")
        # A pipeline's file says it for each of its models.
        settings = {key.removeprefix("transformer.").removeprefix("unet."): value for key, value in settings.items()}
    if settings.get("use_dora"):
        raise CheckpointError(f"{file.name}: a DoRA adapter, which changes more than a low-rank part; wanted LoRA")
    patterns = settings.get("alpha_pattern") or {}
    numbers = [settings.get("lora_alpha", 1), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(is_number(number, ALPHA) for number in numbers):
        raise CheckpointError(
            f"{file.name}: lora_alpha or alpha_pattern of its settings holds no number; wanted {ALPHA.words()}"
        )
    return settings


def _alpha(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """What the up factor is scaled by, times the rank."""
    patterns: Mapping[str, Any] = settings.get("alpha_pattern") or {}
    stated = [alpha for pattern, alpha in patterns.items() if f".{module}".endswith(_ends(pattern))]
    return float(stated[0] if stated else settings.get("lora_alpha", rank))


def _ends(pattern: str) -> str:
    """peft takes patterns for regular expressions, which strangers should not write; files have plain names."""
    return f".{pattern.removeprefix('^')}"

"""LoRA adapters of a 2D transformer: read from files of peft and diffusers, attached to or fused into the weights.

An adapter adds ``up @ down`` to stacked weights, with zeros for parts without an adapter.
Sources: peft 0.21 (utils/save_and_load.py, tuners/lora/layer.py), diffusers 0.42.1 (loaders/peft.py),
https://arxiv.org/abs/2106.09685.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.checkpoints.files import find_floats, read_json, read_metadata
from jaxmodels.checkpoints.tensor_layouts import LINEAR, POINTWISE, Shape, Stored, TensorTarget
from jaxmodels.errors import CheckpointError, ConfigError, InputError, WeightsMismatch
from jaxmodels.memory import check_host
from jaxmodels.ranges import Range, are_numbers
from jaxmodels.transformer2d import diffusers_folder
from jaxmodels.transformer2d.config import Transformer2DConfig

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json")
SETTINGS = "adapter_config.json"
METADATA = "lora_adapter_metadata"  # Key of the same settings in a file's metadata.
WRAPPERS = ("base_model.model.", "unet.", "transformer.")
TEXT_ENCODER = "text_encoder"
FACTOR = re.compile(r"(?P<module>.+?)\.lora_(?P<side>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight")
RANK = Range(1, 4096)
ALPHA = Range(-1e6, 1e6)

# Factors of one weight by side: "A" is down, "B" is up.
Factors: TypeAlias = dict[str, Stored]


def read(
    path: Path, config: Transformer2DConfig, *, prefix: str | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read down and up factors (float32) by the name of our layer, e.g. ``transformer_blocks.attn1.to_qkv``.

    The up factor includes the file's scale, alpha / rank. A kernel (layers, inputs, projections, outputs) has factors
    (layers, inputs, projections, rank) and (layers, rank, projections, outputs), each without the axes that the kernel
    lacks. Smaller ranks are padded with zeros.

    Args:
        path: a safetensors file, or a folder with a file of `FILES`.
        prefix: name of the transformer inside a UNet, e.g. ``mid_block.attentions.0``; factors of other parts and of
            text encoders are not read.

    Raises:
        CheckpointError: the file is missing or malformed, the kind of adapter is unknown, or factors are not finite.
            `WeightsMismatch` lists all factors that do not fit the model.
    """
    file = _find_file(path)
    stored = find_floats(file)
    weights = {
        target.theirs.removesuffix(".weight"): target
        for target in diffusers_folder.tensor_names(config)
        if target.theirs.endswith(".weight") and target.layout in (LINEAR, POINTWISE)
    }
    factors, unknown = _sort(stored, weights, prefix)
    wrong = [f"{name} {list(stored[name].shape)}: the model has no such weight to adapt" for name in unknown]
    for module, parts in factors.items():
        wrong += _find_misfits(module, parts, weights[module])
    if wrong:
        raise WeightsMismatch(
            "\n".join([f"{file.name}: the adapter does not fit the model:", *map("  {}".format, wrong)])
        )
    if not factors:
        where = f" under {prefix!r}" if prefix else ""
        raise CheckpointError(f"{file.name}: no low-rank factors{where}; wanted names like '….to_q.lora_A.weight'")
    settings = _read_settings(file)
    patterns = {pattern: _make_pattern(pattern) for pattern in settings.get("alpha_pattern") or {}}
    if unused := [name for name, end in patterns.items() if not any(f".{module}".endswith(end) for module in factors)]:
        raise CheckpointError(f"{file.name}: alpha_pattern has {', '.join(unused)}; wanted names of adapted weights")
    return _stack(file, factors, weights, settings)


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    names = [name for name in FILES if name.endswith(".safetensors")]
    existing = [path / name for name in names if (path / name).is_file()]
    if not existing:
        raise CheckpointError(
            f"{path.name}: no adapter; wanted a safetensors file, or a folder with {' or '.join(names)}"
        )
    return existing[0]


def _sort(
    stored: Mapping[str, Stored], weights: Mapping[str, TensorTarget], prefix: str | None
) -> tuple[dict[str, Factors], list[str]]:
    """Return the factors by diffusers' name of the weight, and the names of tensors that belong to no weight."""
    start = f"{prefix}." if prefix else ""
    factors: dict[str, Factors] = {}
    unknown: list[str] = []
    for name, tensor in stored.items():
        bare = reduce(str.removeprefix, WRAPPERS, name)
        if name.startswith(TEXT_ENCODER) or not bare.startswith(start):
            continue
        match = FACTOR.fullmatch(bare.removeprefix(start))
        if match is None or match["module"] not in weights:
            unknown.append(name)
        else:
            factors.setdefault(match["module"], {})[match["side"]] = tensor
    return factors, unknown


def _find_misfits(module: str, factors: Factors, target: TensorTarget) -> list[str]:
    if len(factors) < 2:
        return [f"{module}: has {'no up (lora_B)' if 'A' in factors else 'no down (lora_A)'} factor"]
    shapes = factors["A"].shape, factors["B"].shape
    down, up = map(_matrix, shapes)
    rows, columns = target.shape[:2]
    if down is None or up is None or not down[0] or down[1] != columns or up[0] != rows or down[0] != up[1]:
        return [
            f"{module}: factors {list(shapes[0])} and {list(shapes[1])}; wanted [rank, {columns}] and [{rows}, rank]"
        ]
    return [f"{module}: rank {down[0]}; wanted {RANK.maximum:g} at most"] if down[0] not in RANK else []


def _matrix(shape: Shape) -> Shape | None:
    """Return the shape of a linear layer's weight, or of a 1x1 convolution's."""
    return shape[:2] if len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)) else None


def _stack(
    file: Path, factors: Mapping[str, Factors], weights: Mapping[str, TensorTarget], settings: Mapping[str, Any]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ranks: dict[str, int] = {}
    wholes: dict[str, tuple[Shape, int]] = {}
    for module, parts in factors.items():
        target = weights[module]
        ours = target.ours.removesuffix(".kernel")
        ranks[ours] = max(ranks.get(ours, 0), parts["A"].shape[0])
        wholes[ours] = (target.whole, 1 if target.index else 0)
    # Layers without an adapter get zeros, so a few factors of a file can need many times their size.
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
    for module, parts in factors.items():
        target = weights[module]
        rank = parts["A"].shape[0]
        scale = _alpha(module, rank, settings) / (math.sqrt(rank) if settings.get("use_rslora") is True else rank)
        down = parts["A"].read().astype(np.float32).reshape(rank, -1)
        up = parts["B"].read().astype(np.float32).reshape(-1, rank) * np.float32(scale)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            broken.append(module)
        downs, ups = stacked[target.ours.removesuffix(".kernel")]
        downs[target.index][:, :rank] = down.T
        ups[target.index][:rank] = up.T
    if broken:
        raise CheckpointError(f"{file.name}: factors hold a NaN or an infinity: {', '.join(sorted(broken))}")
    return stacked


def _read_settings(file: Path) -> Mapping[str, Any]:
    """Return peft's settings from ``adapter_config.json`` in the same folder or from the metadata; empty without."""
    path = file.parent / SETTINGS
    if path.is_file():
        settings = read_json(path)
    else:
        try:
            settings = json.loads(read_metadata(file).get(METADATA, "{}"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file.name}: its {METADATA} is malformed; wanted a JSON object") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{file.name}: its {METADATA} is no JSON object")
        # A pipeline's file has settings for each of its models.
        settings = {key.removeprefix("transformer.").removeprefix("unet."): value for key, value in settings.items()}
    if settings.get("use_dora"):
        raise CheckpointError(f"{file.name}: a DoRA adapter, which changes more than a low-rank part; wanted LoRA")
    patterns = settings.get("alpha_pattern") or {}
    numbers = [settings.get("lora_alpha", 1), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not are_numbers(numbers, ALPHA):
        raise CheckpointError(
            f"{file.name}: lora_alpha or alpha_pattern of its settings holds no number; wanted {ALPHA.describe()}"
        )
    return settings


def _alpha(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Return the scale of the up factor times the rank."""
    patterns: Mapping[str, Any] = settings.get("alpha_pattern") or {}
    stated = [alpha for pattern, alpha in patterns.items() if f".{module}".endswith(_make_pattern(pattern))]
    return float(stated[0] if stated else settings.get("lora_alpha", rank))


def _make_pattern(pattern: str) -> str:
    """Return a pattern as the end of a name, because untrusted files must not contain regular expressions."""
    return f".{pattern.removeprefix('^')}"


DOWN, UP = "lora_down", "lora_up"


class AdaptedLinear(nnx.Linear):
    """Linear layer with a low-rank adapter."""

    lora_down: nnx.LoRAParam[Array]
    lora_up: nnx.LoRAParam[Array]

    def __call__(self, inputs: Float[Array, "*b c"], out_sharding: Any = None) -> Float[Array, "*b d"]:
        dtype = jnp.result_type(inputs) if self.dtype is None else self.dtype
        narrow = inputs.astype(dtype) @ self.lora_down[...].astype(dtype)
        return super().__call__(inputs, out_sharding) + narrow @ self.lora_up[...].astype(dtype)


class AdaptedProjections(nnx.LinearGeneral):
    """Linear layers of one input as one matrix, each with a low-rank adapter."""

    lora_down: nnx.LoRAParam[Array]
    lora_up: nnx.LoRAParam[Array]

    def __call__(self, inputs: Float[Array, "b n c"], out_sharding: Any = None) -> Float[Array, "b n p d"]:
        dtype = jnp.result_type(inputs) if self.dtype is None else self.dtype
        narrow = jnp.einsum("bnc,cpr->bnpr", inputs.astype(dtype), self.lora_down[...].astype(dtype))
        wide = jnp.einsum("bnpr,rpd->bnpd", narrow, self.lora_up[...].astype(dtype))
        return super().__call__(inputs, out_sharding) + wide


ADAPTED = {nnx.Linear: AdaptedLinear, nnx.LinearGeneral: AdaptedProjections}


def load(model: Any, path: str | Path, *, prefix: str | None = None) -> None:
    """Attach the adapter of a file to a `Transformer2DModel`, in the dtype of its weights.

    Calls and `prepare` then take ``cross_attention_kwargs={"scale": 0.5}``; the default scale is 1.
    ``nnx.state(model, nnx.LoRAParam)`` returns the factors, e.g. to train them.

    Args:
        path: a safetensors file of diffusers or peft, or a folder with one.
        prefix: name of the transformer inside a UNet, if the adapter is for the whole UNet.

    Raises:
        ConfigError: the model has an adapter already.
        CheckpointError: the file is missing, malformed, or does not fit the model. The model is unchanged.
    """
    if is_adapted(model):
        raise ConfigError("the model has an adapter already; lora.fuse or lora.detach it first")
    for name, (down, up) in read(Path(path), model.config, prefix=prefix).items():
        plain = reduce(getattr, name.split("."), model)
        layer = _change_class(plain, ADAPTED[type(plain)])
        dtype, axes = layer.kernel.dtype, layer.kernel.get_metadata().get("axes")
        down_axes, up_axes = (None, None) if axes is None else ((*axes[:-1], None), (None, *axes[1:]))
        layer.lora_down = nnx.LoRAParam(jnp.asarray(down).astype(dtype), axes=down_axes)
        layer.lora_up = nnx.LoRAParam(jnp.asarray(up).astype(dtype), axes=up_axes)
        _replace(model, name, layer)


def fuse(model: nnx.Module, *, scale: float = 1.0) -> None:
    """Add the adapters to their weights and remove them, so that calls become as fast as without adapters."""
    for _, layer in _iterate_adapted(model):
        axes = {2: "cr,rd->cd", 3: "lcr,lrd->lcd", 4: "lcpr,lrpd->lcpd"}[layer.kernel.ndim]
        down, up = (factor[...].astype(jnp.float32) for factor in (layer.lora_down, layer.lora_up))
        kernel = layer.kernel[...]
        fused = (kernel.astype(jnp.float32) + scale * jnp.einsum(axes, down, up)).astype(kernel.dtype)
        layer.kernel = layer.kernel.replace(fused)  # Replaced, because other modules may share this variable.
    detach(model)


def detach(model: nnx.Module) -> None:
    """Remove all adapters."""
    for name, layer in list(_iterate_adapted(model)):
        plain = next(kind for kind, adapted in ADAPTED.items() if isinstance(layer, adapted))
        bare = _change_class(layer, plain)
        del bare.lora_down, bare.lora_up
        _replace(model, name, bare)


def is_adapted(model: nnx.Module) -> bool:
    """Return whether a model has an adapter."""
    return next(_iterate_adapted(model), None) is not None


def scale_adapters(state: Any, scale: Float[Array, ""]) -> Any:
    """Return a model's state with adapters scaled by `scale`; raises InputError if there are none."""
    flat = [(path, variable) for path, variable in nnx.to_flat_state(state)]
    if not any(path[-1] == UP for path, _ in flat):
        raise InputError("cross_attention_kwargs has 'scale', but the model has no adapter; lora.load puts one in")

    def multiply(path: tuple[Any, ...], variable: Any) -> Any:
        factor = variable.get_value()
        # `CompiledTransformer2D` scales the parts of a divided stack.
        is_up = path[-1] == UP and isinstance(factor, jax.Array)
        return variable.replace(factor * scale.astype(factor.dtype)) if is_up else variable

    return nnx.from_flat_state([(path, multiply(path, variable)) for path, variable in flat])


def _replace(model: nnx.Module, name: str, layer: nnx.Module) -> None:
    *parents, last = name.split(".")
    setattr(reduce(getattr, parents, model), last, layer)


def _iterate_adapted(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, node in nnx.iter_modules(model):
        if isinstance(node, tuple(ADAPTED.values())):
            yield ".".join(map(str, path)), node


def _change_class(layer: Any, kind: type[Any]) -> Any:
    """Return the layer, over the same variables, as an object of another class."""
    other = object.__new__(kind)
    vars(other).update(vars(layer))
    return other

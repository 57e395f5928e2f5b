"""LoRA: reading of adapter files, and adapters beside or fused into a model's weights.

An adapter adds ``up @ down`` to weights it names. Here both factors lie as the arrays they belong to do: stacked by
layer, queries, keys and values beside each other, zeros where an adapter has nothing.
Source: peft 0.21 (utils/save_and_load.py), diffusers 0.42.1 (loaders/peft.py, loaders/lora_conversion_utils.py).
Layers: https://arxiv.org/abs/2106.09685; peft 0.21, tuners/lora/layer.py.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.checkpoints.files import Stored, find_floats, read_json, read_metadata
from jaxmodels.checkpoints.tensor_layouts import LINEAR, POINTWISE, Shape, TensorTarget
from jaxmodels.errors import CheckpointError, ConfigError, InputError, WeightsMismatch
from jaxmodels.memory import check_host
from jaxmodels.ranges import Range, is_number
from jaxmodels.transformer2d import diffusers_folder
from jaxmodels.transformer2d.attention import Projections
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
    """Low-rank factors that a file has for one weight."""

    down: Stored | None = None
    up: Stored | None = None
    alpha: Stored | None = None


def read(
    path: Path, config: Transformer2DConfig, *, prefix: str | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read down and up factors (float32) by the name of our layer, e.g. ``transformer_blocks.attn1.to_qkv``.

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
        bare = _strip_wrapper(name)
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


def _strip_wrapper(name: str) -> str:
    for wrapper in (*WRAPPERS, *KOHYA):
        name = name.removeprefix(wrapper)
    return name


def _module(name: str, flat: Mapping[str, str] | None, start: str) -> str | None:
    if flat is not None:
        return flat.get(name)
    # Older diffusers: the attention's processor held what belongs to its layers.
    module = name.removeprefix(start).replace(".processor.", ".")
    return f"{module}.0" if module.endswith(".to_out") else module


def _find_misfits(module: str, factors: _Factors, target: TensorTarget) -> list[str]:
    if factors.down is None or factors.up is None:
        return [f"{module}: has {'no down (lora_A)' if factors.down is None else 'no up (lora_B)'} factor"]
    down, up = _matrix(factors.down.shape), _matrix(factors.up.shape)
    rows, columns = target.shape[:2]
    if down is None or up is None or not down[0] or down[1] != columns or up[0] != rows or down[0] != up[1]:
        return [
            f"{module}: factors {list(factors.down.shape)} and {list(factors.up.shape)}; "
            f"wanted [rank, {columns}] and [{rows}, rank]"
        ]
    if down[0] not in RANK:
        return [f"{module}: rank {down[0]}; wanted {RANK.maximum:g} at most"]
    if factors.alpha is not None and math.prod(factors.alpha.shape) != 1:
        return [f"{module}: alpha has shape {list(factors.alpha.shape)}; wanted one number"]
    return []


def _matrix(shape: Shape) -> Shape | None:
    """The shape of a linear layer's weight, or of a 1x1 convolution's."""
    return shape[:2] if len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)) else None


def _stack(
    file: Path, factors: Mapping[str, _Factors], weights: Mapping[str, TensorTarget], settings: Mapping[str, Any]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ranks: dict[str, int] = {}
    wholes: dict[str, tuple[Shape, int]] = {}
    for module, parts in factors.items():
        target = weights[module]
        assert parts.down is not None  # looked at before
        ours = target.ours.removesuffix(".kernel")
        ranks[ours] = max(ranks.get(ours, 0), parts.down.shape[0])
        wholes[ours] = (target.whole, 1 if target.index else 0)
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
    for module, parts in factors.items():
        target = weights[module]
        assert parts.down is not None
        assert parts.up is not None
        rank = parts.down.shape[0]
        alpha = _alpha(module, rank, settings) if parts.alpha is None else float(parts.alpha.read().reshape(()))
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") is True else rank)
        down = parts.down.read().astype(np.float32).reshape(rank, -1)
        up = parts.up.read().astype(np.float32).reshape(-1, rank) * np.float32(scale)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            broken.append(module)
        downs, ups = stacked[target.ours.removesuffix(".kernel")]
        downs[target.index][:, :rank] = down.T
        ups[target.index][:rank] = up.T
    if broken:
        raise CheckpointError(f"{file.name}: factors hold a NaN or an infinity: {', '.join(sorted(broken))}")
    return stacked


def _read_settings(file: Path) -> Mapping[str, Any]:
    """Settings of peft's adapters, from a file beside it or its metadata; empty for other files."""
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
            f"{file.name}: lora_alpha or alpha_pattern of its settings holds no number; wanted {ALPHA.describe()}"
        )
    return settings


def _alpha(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Scale of the up factor times the rank."""
    patterns: Mapping[str, Any] = settings.get("alpha_pattern") or {}
    stated = [alpha for pattern, alpha in patterns.items() if f".{module}".endswith(_make_pattern(pattern))]
    return float(stated[0] if stated else settings.get("lora_alpha", rank))


def _make_pattern(pattern: str) -> str:
    """peft takes patterns for regular expressions, which strangers should not write; files have plain names."""
    return f".{pattern.removeprefix('^')}"


DOWN, UP = "lora_down", "lora_up"


class AdaptedLinear(nnx.Linear):
    """Linear layer with a low-rank adapter beside it."""

    lora_down: nnx.LoRAParam[Array]
    lora_up: nnx.LoRAParam[Array]

    def __call__(self, inputs: Float[Array, "*b c"], out_sharding: Any = None) -> Float[Array, "*b d"]:
        dtype = jnp.result_type(inputs) if self.dtype is None else self.dtype
        narrow = inputs.astype(dtype) @ self.lora_down[...].astype(dtype)
        return super().__call__(inputs, out_sharding) + narrow @ self.lora_up[...].astype(dtype)


class AdaptedProjections(Projections):
    """Several linear layers of one input, each with a low-rank adapter beside it."""

    lora_down: nnx.LoRAParam[Array]
    lora_up: nnx.LoRAParam[Array]

    def __call__(self, x: Float[Array, "b n c"]) -> tuple[Float[Array, "b n d"], ...]:
        narrow = jnp.einsum("bnc,cpr->bnpr", x.astype(self.dtype), self.lora_down[...].astype(self.dtype))
        wide = jnp.einsum("bnpr,rpd->bnpd", narrow, self.lora_up[...].astype(self.dtype))
        return tuple(part + wide[:, :, index] for index, part in enumerate(super().__call__(x)))


ADAPTED = {nnx.Linear: AdaptedLinear, Projections: AdaptedProjections}


def load(model: Any, path: str | Path, *, prefix: str | None = None, scale: float = 1.0) -> None:
    """Attach the adapter of a file to a `Transformer2DModel`; see `attach`.

    Args:
        path: a safetensors file of diffusers, peft or kohya, or a folder of one.
        prefix: of a transformer inside a UNet, when the adapter is for the whole of it.

    Raises:
        CheckpointError: the file is missing, malformed, or does not fit the model.
    """
    config: Transformer2DConfig = model.config
    attach(model, read(Path(path), config, prefix=prefix), scale=scale)


def attach(model: nnx.Module, factors: Mapping[str, tuple[Any, Any]], *, scale: float = 1.0) -> None:
    """Attach low-rank factors to weights, in their dtype; a second adapter adds to the first.

    From then on a call takes ``cross_attention_kwargs={"scale": 0.5}``, as does `prepare`; without it the scale is 1.
    ``nnx.state(model, nnx.LoRAParam)`` is the factors alone, e.g. to train them.

    Args:
        factors: down and up by the name of a layer (`jaxmodels.transformer2d.lora.read`).
        scale: of this adapter.

    Raises:
        ConfigError: there is no such layer, or it has other shapes; nothing has been changed then.
    """
    wrong = [text for name, (down, up) in factors.items() if (text := _describe_misfit(model, name, down, up))]
    if wrong:
        raise ConfigError("the adapter does not fit the model: " + "; ".join(wrong))
    for name, (down, up) in factors.items():
        layer = _find(model, name)
        dtype, axes = layer.kernel.dtype, layer.kernel.get_metadata().get("axes")
        down, up = jnp.asarray(down).astype(dtype), (jnp.asarray(up) * jnp.asarray(scale, up.dtype)).astype(dtype)
        inputs = _inputs(layer)
        if type(layer) not in ADAPTED:  # adapted already
            down = jnp.concatenate((layer.lora_down[...], down), axis=-1)
            up = jnp.concatenate((layer.lora_up[...], up), axis=inputs)
        else:
            layer = _change_class(layer, ADAPTED[type(layer)])
            _replace(model, name, layer)
        layer.lora_down = nnx.LoRAParam(down, axes=None if axes is None else (*axes[:-1], None))
        layer.lora_up = nnx.LoRAParam(up, axes=None if axes is None else (None, *axes[1:]))


def fuse(model: nnx.Module, *, scale: float = 1.0) -> None:
    """Add the adapters to their weights and remove them: calls cost nothing more from then on."""
    for _, layer in _iterate_adapted(model):
        axes = {2: "cr,rd->cd", 3: "lcr,lrd->lcd", 4: "lcpr,lrpd->lcpd"}[layer.kernel.ndim]
        down, up = (factor[...].astype(jnp.float32) for factor in (layer.lora_down, layer.lora_up))
        kernel = layer.kernel[...]
        fused = (kernel.astype(jnp.float32) + scale * jnp.einsum(axes, down, up)).astype(kernel.dtype)
        layer.kernel = layer.kernel.replace(fused)  # not in place: other modules may have this variable, too
    detach(model)


def detach(model: nnx.Module) -> None:
    """Remove all adapters."""
    for name, layer in list(_iterate_adapted(model)):
        plain = next(kind for kind, adapted in ADAPTED.items() if isinstance(layer, adapted))
        bare = _change_class(layer, plain)
        del bare.lora_down, bare.lora_up
        _replace(model, name, bare)


def is_adapted(model: nnx.Module) -> bool:
    return next(_iterate_adapted(model), None) is not None


def scale_adapters(state: Any, scale: Float[Array, ""]) -> Any:
    """State of a model (or a part of it) whose adapters are scaled by `scale`.

    Raises:
        InputError: there are none.
    """
    flat = [(path, variable) for path, variable in nnx.to_flat_state(state)]
    if not any(path[-1] == UP for path, _ in flat):
        raise InputError("cross_attention_kwargs has 'scale', but the model has no adapter; lora.load puts one in")

    def multiply(path: tuple[Any, ...], variable: Any) -> Any:
        factor = variable.get_value()
        # A stack that was taken apart is scaled by its parts.
        is_up = path[-1] == UP and isinstance(factor, jax.Array)
        return variable.replace(factor * scale.astype(factor.dtype)) if is_up else variable

    return nnx.from_flat_state([(path, multiply(path, variable)) for path, variable in flat])


def _find(model: nnx.Module, name: str) -> Any:
    """The layer of a name; None when there is none that could have an adapter."""
    layer = reduce(lambda module, part: getattr(module, part, None), name.split("."), model)
    return layer if isinstance(layer, nnx.Linear | Projections) else None


def _replace(model: nnx.Module, name: str, layer: nnx.Module) -> None:
    *parents, last = name.split(".")
    setattr(reduce(getattr, parents, model), last, layer)


def _iterate_adapted(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, node in nnx.iter_modules(model):
        if isinstance(node, tuple(ADAPTED.values())):
            yield ".".join(map(str, path)), node


def _change_class(layer: Any, kind: type[Any]) -> Any:
    """The same layer, over the same variables, as an object of another class."""
    other = object.__new__(kind)
    vars(other).update(vars(layer))
    return other


def _inputs(layer: Any) -> int:
    """The axis of a kernel that its inputs have; axes of layers come before."""
    return layer.kernel.ndim - (3 if isinstance(layer, Projections) else 2)


def _describe_misfit(model: nnx.Module, name: str, down: Any, up: Any) -> str | None:
    layer = _find(model, name)
    if layer is None:
        return f"{name}: no linear layer of that name"
    whole, inputs = list(layer.kernel.shape), _inputs(layer)
    rank = jnp.shape(down)[-1] if jnp.ndim(down) else 0
    expected = [*whole[:-1], rank], [*whole[:inputs], rank, *whole[inputs + 1 :]]
    actual = list(jnp.shape(down)), list(jnp.shape(up))
    if rank < 1 or actual != expected:
        return f"{name}: factors {actual[0]} and {actual[1]}; wanted {expected[0]} and {expected[1]} with any rank"
    return None

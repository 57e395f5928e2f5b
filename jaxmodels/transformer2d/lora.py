"""Low-rank adapters (LoRA) beside the weights of a 2D transformer, with a scale that each call may choose.

Source: https://arxiv.org/abs/2106.09685; peft 0.21, tuners/lora/layer.py.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.checkpoints import lora as files
from jaxmodels.errors import ConfigError, InputError
from jaxmodels.transformer2d.attention import Projections
from jaxmodels.transformer2d.config import Transformer2DConfig

DOWN, UP = "lora_down", "lora_up"


class AdaptedLinear(nnx.Linear):
    """A linear layer, and a way around it through fewer channels."""

    lora_down: nnx.LoRAParam[Array]
    lora_up: nnx.LoRAParam[Array]

    def __call__(self, inputs: Float[Array, "*b c"], out_sharding: Any = None) -> Float[Array, "*b d"]:
        dtype = jnp.result_type(inputs) if self.dtype is None else self.dtype
        narrow = inputs.astype(dtype) @ self.lora_down[...].astype(dtype)
        return super().__call__(inputs, out_sharding) + narrow @ self.lora_up[...].astype(dtype)


class AdaptedProjections(Projections):
    """Several linear maps of one input, and a way around each through fewer channels."""

    lora_down: nnx.LoRAParam[Array]
    lora_up: nnx.LoRAParam[Array]

    def __call__(self, x: Float[Array, "b n c"]) -> tuple[Float[Array, "b n d"], ...]:
        narrow = jnp.einsum("bnc,cpr->bnpr", x.astype(self.dtype), self.lora_down[...].astype(self.dtype))
        wide = jnp.einsum("bnpr,rpd->bnpd", narrow, self.lora_up[...].astype(self.dtype))
        return tuple(part + wide[:, :, place] for place, part in enumerate(super().__call__(x)))


ADAPTED = {nnx.Linear: AdaptedLinear, Projections: AdaptedProjections}


def load(model: Any, path: str | Path, *, prefix: str | None = None, scale: float = 1.0) -> None:
    """Puts the adapter of a file beside the weights of a `Transformer2DModel`; see `attach`.

    Args:
        path: a safetensors file of diffusers, peft or kohya, or a folder of one.
        prefix: of a transformer inside a UNet, when the adapter is for the whole of it.

    Raises:
        CheckpointError: the file is missing, malformed, or does not fit the model.
    """
    config: Transformer2DConfig = model.config
    attach(model, files.read(Path(path), config, prefix=prefix), scale=scale)


def attach(model: nnx.Module, factors: Mapping[str, tuple[Any, Any]], *, scale: float = 1.0) -> None:
    """Puts low-rank factors beside weights, in the dtype of these; a second adapter adds to the first.

    From then on a call takes ``cross_attention_kwargs={"scale": 0.5}``, as does `prepare`; without it the scale is 1.
    ``nnx.state(model, nnx.LoRAParam)`` is the factors alone, e.g. to train them.

    Args:
        factors: down and up by the name of a layer (`jaxmodels.checkpoints.lora.read`).
        scale: of this adapter.

    Raises:
        ConfigError: there is no such layer, or it has other shapes; nothing has been changed then.
    """
    wrong = [text for name, (down, up) in factors.items() if (text := _misfit(model, name, down, up))]
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
            layer = _retyped(layer, ADAPTED[type(layer)])
            _replace(model, name, layer)
        layer.lora_down = nnx.LoRAParam(down, axes=None if axes is None else (*axes[:-1], None))
        layer.lora_up = nnx.LoRAParam(up, axes=None if axes is None else (None, *axes[1:]))


def fuse(model: nnx.Module, *, scale: float = 1.0) -> None:
    """Adds the adapters to the weights they are beside, and takes them away: calls cost nothing more from then on."""
    for _, layer in _adapted(model):
        axes = {2: "cr,rd->cd", 3: "lcr,lrd->lcd", 4: "lcpr,lrpd->lcpd"}[layer.kernel.ndim]
        down, up = (factor[...].astype(jnp.float32) for factor in (layer.lora_down, layer.lora_up))
        kernel = layer.kernel[...]
        fused = (kernel.astype(jnp.float32) + scale * jnp.einsum(axes, down, up)).astype(kernel.dtype)
        layer.kernel = layer.kernel.replace(fused)  # not in place: other modules may have this variable, too
    detach(model)


def detach(model: nnx.Module) -> None:
    """Takes all adapters away."""
    for name, layer in list(_adapted(model)):
        plain = next(kind for kind, adapted in ADAPTED.items() if isinstance(layer, adapted))
        bare = _retyped(layer, plain)
        del bare.lora_down, bare.lora_up
        _replace(model, name, bare)


def is_adapted(model: nnx.Module) -> bool:
    return next(_adapted(model), None) is not None


def scaled(state: Any, scale: Float[Array, ""]) -> Any:
    """A state of a model (or of a part of it) whose adapters count `scale` times as much.

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


def _adapted(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, node in nnx.iter_modules(model):
        if isinstance(node, tuple(ADAPTED.values())):
            yield ".".join(map(str, path)), node


def _retyped(layer: Any, kind: type[Any]) -> Any:
    """The same layer, over the same variables, as another class."""
    other = object.__new__(kind)
    vars(other).update(vars(layer))
    return other


def _inputs(layer: Any) -> int:
    """The axis of a kernel that its inputs have; axes of layers come before."""
    return layer.kernel.ndim - (3 if isinstance(layer, Projections) else 2)


def _misfit(model: nnx.Module, name: str, down: Any, up: Any) -> str | None:
    layer = _find(model, name)
    if layer is None:
        return f"{name}: no linear layer of that name"
    whole, inputs = list(layer.kernel.shape), _inputs(layer)
    rank = jnp.shape(down)[-1] if jnp.ndim(down) else 0
    wanted = [*whole[:-1], rank], [*whole[:inputs], rank, *whole[inputs + 1 :]]
    found = list(jnp.shape(down)), list(jnp.shape(up))
    if rank < 1 or found != wanted:
        return f"{name}: factors {found[0]} and {found[1]}; wanted {wanted[0]} and {wanted[1]} with any rank"
    return None

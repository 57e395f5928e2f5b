"""Strict reader and writer of diffusers' folders: files and config must have exactly the same tensors.

Files have separate layers, queries, keys and values, which are slices of our stacked arrays.
Source: diffusers 0.42.1, models/transformers/transformer_2d.py, models/attention.py, models/normalization.py.
"""

import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxmodels.checkpoints.files import (
    FLOATS,
    SHARD_BYTES,
    STEM,
    Stored,
    find_shards,
    list_shard_patterns,
    read_json,
    write_json,
    write_shards,
)
from jaxmodels.checkpoints.folder import empty_aligned
from jaxmodels.checkpoints.tensor_layouts import CONVOLUTION, EVERY, LINEAR, POINTWISE, TensorLayout, TensorTarget
from jaxmodels.errors import CheckpointError
from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS
from jaxmodels.memory import check_host
from jaxmodels.transformer2d import diffusers_config
from jaxmodels.transformer2d.config import TIME_CHANNELS, Transformer2DConfig
from jaxmodels.weights import check_fit

BLOCKS = "transformer_blocks"


def tensor_names(config: Transformer2DConfig) -> tuple[TensorTarget, ...]:
    """Return diffusers' tensors of a model, and the slices of our arrays that they hold."""
    return (*_inputs(config), *_blocks(config), *_outputs(config))


def _inputs(config: Transformer2DConfig) -> Iterator[TensorTarget]:
    width, channels, patch = config.inner_dim, config.in_channels or 0, config.patch_size or 1
    if config.kind == "continuous":
        yield from _norm("norm", channels)
        yield from _linear("proj_in", channels, width, layout=LINEAR if config.use_linear_projection else POINTWISE)
    elif config.kind == "discrete":
        side = config.sample_size or 0
        yield from _table("latent_image_embedding.emb", config.num_vector_embeds or 0, width)
        yield from _table("latent_image_embedding.height_emb", side, width)
        yield from _table("latent_image_embedding.width_emb", side, width)
    else:
        yield TensorTarget(
            "pos_embed.proj.weight", "pos_embed.proj.kernel", (patch, patch, channels, width), (), CONVOLUTION
        )
        yield TensorTarget("pos_embed.proj.bias", "pos_embed.proj.bias", (width,))
        if config.norm_type == "ada_norm_single":
            yield from _mlp("adaln_single.emb.timestep_embedder", TIME_CHANNELS, width)
            for condition in ("resolution", "aspect_ratio") if config.has_conditions else ():
                yield from _mlp(f"adaln_single.emb.{condition}_embedder", TIME_CHANNELS, width // 3)
            yield from _linear("adaln_single.linear", width, 6 * width)
        if config.caption_channels is not None:
            yield from _mlp("caption_projection", config.caption_channels, width)


def _outputs(config: Transformer2DConfig) -> Iterator[TensorTarget]:
    width, channels = config.inner_dim, config.outputs or 0
    pixels = (config.patch_size or 1) ** 2 * channels
    if config.kind == "continuous":
        yield from _linear("proj_out", width, channels, layout=LINEAR if config.use_linear_projection else POINTWISE)
    elif config.kind == "discrete":
        yield from _norm("norm_out", width)
        yield from _linear("out", width, (config.num_vector_embeds or 0) - 1)
    elif config.norm_type == "ada_norm_single":
        yield TensorTarget("scale_shift_table", "scale_shift_table", (2, width))
        yield from _linear("proj_out", width, pixels)
    else:
        yield from _linear("proj_out_1", width, 2 * width)
        yield from _linear("proj_out_2", width, pixels)


def _blocks(config: Transformer2DConfig) -> Iterator[TensorTarget]:
    layers = config.num_layers
    block = tuple(_block(config))
    for layer in range(layers):
        for target in block:
            yield replace(
                target,
                theirs=f"{BLOCKS}.{layer}.{target.theirs}",
                ours=f"{BLOCKS}.{target.ours}",
                whole=(layers, *target.whole),
                index=(layer, *target.index),
            )


def _block(config: Transformer2DConfig) -> Iterator[TensorTarget]:
    width, norm, affine = config.inner_dim, config.block_norm, config.norm_elementwise_affine
    embeddings, is_single = config.num_embeds_ada_norm or 0, norm == "ada_norm_single"
    plain = (lambda name: _norm(name, width)) if affine else (lambda name: iter(()))
    if norm == "ada_norm":
        yield from _time_norm("norm1", embeddings, width)
    elif norm == "ada_norm_zero":
        yield from _mlp("norm1.emb.timestep_embedder", TIME_CHANNELS, width)
        yield from _table("norm1.emb.class_embedder.embedding_table", embeddings + 1, width)
        yield from _linear("norm1.linear", width, 6 * width)
    else:
        yield from plain("norm1")
    yield from _attention("attn1", width, config.first_context, bias=config.attention_bias)
    if config.has_cross_attention and norm == "ada_norm":
        yield from _time_norm("norm2", embeddings, width)
    elif config.has_cross_attention or is_single:
        yield from plain("norm2")
    if config.has_cross_attention:
        yield from _attention("attn2", width, config.second_context, bias=config.attention_bias)
    if not is_single:
        yield from plain("norm3")
    yield from _feed_forward("ff", width, DIFFUSERS_ACTIVATIONS[config.activation_fn].inputs)
    if is_single:
        yield TensorTarget("scale_shift_table", "scale_shift_table", (6, width))
    if config.has_fuser:
        yield TensorTarget("fuser.alpha_attn", "fuser.alpha_attn", ())
        yield TensorTarget("fuser.alpha_dense", "fuser.alpha_dense", ())
        yield from _linear("fuser.linear", config.cross_attention_dim or 0, width)
        yield from _attention("fuser.attn", width, None, bias=False)
        yield from _feed_forward("fuser.ff", width, DIFFUSERS_ACTIVATIONS["geglu"].inputs)
        yield from _norm("fuser.norm1", width)
        yield from _norm("fuser.norm2", width)


def _attention(name: str, width: int, context: int | None, *, bias: bool) -> Iterator[TensorTarget]:
    """List an attention's tensors; `context` is the width of the tokens of keys and values, None for self-attention."""
    if context is None:
        yield from _joint(name, "to_qkv", ("to_q", "to_k", "to_v"), width, width, bias=bias)
    else:
        yield from _linear(f"{name}.to_q", width, width, bias=bias)
        yield from _joint(name, "to_kv", ("to_k", "to_v"), context, width, bias=bias)
    yield from _linear(f"{name}.to_out.0", width, width, ours=f"{name}.to_out")


def _joint(
    name: str, ours: str, parts: tuple[str, ...], inputs: int, width: int, *, bias: bool
) -> Iterator[TensorTarget]:
    whole = (inputs, len(parts), width)
    for part, theirs in enumerate(parts):
        yield TensorTarget(f"{name}.{theirs}.weight", f"{name}.{ours}.kernel", whole, (EVERY, part), LINEAR)
        if bias:
            yield TensorTarget(f"{name}.{theirs}.bias", f"{name}.{ours}.bias", whole[1:], (part,))


def _feed_forward(name: str, width: int, inputs: int) -> Iterator[TensorTarget]:
    yield from _linear(f"{name}.net.0.proj", width, 4 * width * inputs, ours=f"{name}.up")
    yield from _linear(f"{name}.net.2", 4 * width, width, ours=f"{name}.down")


def _time_norm(name: str, embeddings: int, width: int) -> Iterator[TensorTarget]:
    yield from _table(f"{name}.emb", embeddings, width)
    yield from _linear(f"{name}.linear", width, 2 * width)


def _mlp(name: str, inputs: int, width: int) -> Iterator[TensorTarget]:
    yield from _linear(f"{name}.linear_1", inputs, width)
    yield from _linear(f"{name}.linear_2", width, width)


def _linear(
    theirs: str, inputs: int, outputs: int, *, ours: str | None = None, bias: bool = True, layout: TensorLayout = LINEAR
) -> Iterator[TensorTarget]:
    ours = theirs if ours is None else ours
    yield TensorTarget(f"{theirs}.weight", f"{ours}.kernel", (inputs, outputs), (), layout)
    if bias:
        yield TensorTarget(f"{theirs}.bias", f"{ours}.bias", (outputs,))


def _norm(name: str, width: int) -> Iterator[TensorTarget]:
    yield TensorTarget(f"{name}.weight", f"{name}.scale", (width,))
    yield TensorTarget(f"{name}.bias", f"{name}.bias", (width,))


def _table(name: str, rows: int, width: int) -> Iterator[TensorTarget]:
    yield TensorTarget(f"{name}.weight", f"{name}.embedding", (rows, width))


CONFIG, PIPELINE = "config.json", "model_index.json"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # Excludes patterns and paths that lead out of the folder.
NEVER_USED = ("pos_embed.pos_embed",)  # Fixed positions in older files, which the config determines.


def files(*, subfolder: str | None = None, variant: str | None = None) -> tuple[str, ...]:
    """Return the files of a repository that `read` needs."""
    if subfolder and not all(PART.fullmatch(part) for part in subfolder.split("/")):
        raise CheckpointError(f"subfolder {subfolder!r} is no folder of a repo; wanted e.g. 'transformer'")
    start = f"{subfolder}/" if subfolder else ""
    return (PIPELINE, *(f"{start}{name}" for name in (CONFIG, *list_shard_patterns(variant))))


def read(
    folder: Path,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    prefix: str | None = None,
    config: Transformer2DConfig | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[Transformer2DConfig, dict[str, np.ndarray]]:
    """Read a model's config, and its weights by our names (jaxmodels/weights.py).

    Args:
        subfolder: folder in a pipeline's folder, e.g. ``transformer``.
        variant: e.g. ``fp16`` for ``diffusion_pytorch_model.fp16.safetensors``.
        prefix: read only one transformer of a larger model, e.g. ``down_blocks.0.attentions.1`` of a UNet.
        config: replaces the folder's config.
        dtype: dtype that weights are converted to; None for the files' dtype (float64 becomes float32).

    Raises:
        ConfigError: the config is of another model, or has values that make no sense.
        CheckpointError: a file is missing or malformed, there is no such prefix, a weight is not finite, or the files
            do not fit the config (`WeightsMismatch`, all misfits in one message, by diffusers' names).
    """
    folder = find_folder(folder, subfolder)
    if config is None:
        values = read_json(folder / CONFIG)
        if prefix is None:
            config = diffusers_config.read_model_config(values)
        else:
            config = diffusers_config.read_block_config(values, prefix)
    stored = _find(folder, variant, prefix)
    table = tensor_names(config)
    where = f"{folder.name}" + (f" under {prefix}" if prefix else "")
    check_fit(
        {name: tensor.shape for name, tensor in stored.items()},
        {target.theirs: target.shape for target in table},
        where=where,
    )
    size = sum(math.prod(target.shape) * _item_bytes(stored[target.theirs].dtype, dtype) for target in table)
    check_host(size, f"the weights of {where}, {len(table)} tensors")
    return config, _read_arrays(table, stored, None if dtype is None else np.dtype(dtype), where)


def write(
    folder: Path,
    config: Transformer2DConfig,
    weights: Mapping[str, Any],
    *,
    variant: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a folder that diffusers loads; existing files of the same variant are replaced when all are written.

    Args:
        weights: by our names; float32, float16 and bfloat16 are kept.
        max_shard_bytes: larger models are split; 10 GB, as in diffusers, when None.

    Raises:
        WeightsMismatch: the weights do not fit the config.
        OSError: it cannot be written, e.g. because the disk is full; existing files stay unchanged.
    """
    table = tensor_names(config)
    check_fit(
        {name: tuple(np.shape(array)) for name, array in weights.items()},
        {target.ours: target.whole for target in table},
        where="weights to be written",
    )
    dtypes = {name: np.dtype(array.dtype) for name, array in weights.items()}
    if wrong := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in FLOATS.values()]:
        raise CheckpointError(f"weights to be written have other dtypes than floats: {', '.join(wrong)}")
    by_name = {target.theirs: target for target in table}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        draft = Path(temporary) / "draft"  # A folder inside, because only the owner may read a temporary folder.
        draft.mkdir()
        write_json(draft / CONFIG, diffusers_config.dump_model_config(config), indent=2, end="\n")
        write_shards(
            draft,
            {target.theirs: (dtypes[target.ours], target.shape) for target in table},
            lambda name: by_name[name].take(np.asarray(weights[by_name[name].ours])),
            variant=variant,
            max_bytes=SHARD_BYTES if max_shard_bytes is None else max_shard_bytes,
        )
        _publish(draft, folder, variant)


def _find(folder: Path, variant: str | None, prefix: str | None) -> dict[str, Stored]:
    """Return the tensors of the model by diffusers' names."""
    if prefix is None:
        return find_shards(folder, variant, lambda name: name not in NEVER_USED)
    start = f"{prefix}."
    stored = find_shards(folder, variant, lambda name: name.startswith(start))
    if not stored:
        end = f".{BLOCKS}.0.attn1.to_out.0.bias"
        available = [name.removesuffix(end) for name in find_shards(folder, variant, lambda name: name.endswith(end))]
        raise CheckpointError(
            f"{folder.name}: no tensor under {prefix!r}; transformers there: {', '.join(sorted(available)) or 'none'}"
        )
    return {name.removeprefix(start): tensor for name, tensor in stored.items()}


def _read_arrays(
    table: Sequence[TensorTarget], stored: Mapping[str, Stored], dtype: np.dtype[Any] | None, where: str
) -> dict[str, np.ndarray]:
    dtypes: dict[str, set[np.dtype[Any]]] = {}
    for target in table:
        dtypes.setdefault(target.ours, set()).add(stored[target.theirs].dtype)
    arrays: dict[str, np.ndarray] = {}
    for name, whole in {target.ours: target.whole for target in table}.items():
        kind = _common_dtype(dtypes[name]) if dtype is None else dtype
        arrays[name] = empty_aligned(math.prod(whole) * kind.itemsize).view(kind).reshape(whole)
    broken: list[str] = []
    for target in sorted(table, key=lambda target: (stored[target.theirs].path.name, stored[target.theirs].start)):
        with np.errstate(over="ignore"):  # A number too large for a narrower dtype becomes an infinity, reported below.
            tensor = stored[target.theirs].read().astype(arrays[target.ours].dtype, copy=False)
        if not np.isfinite(tensor).all():
            broken.append(target.theirs)
        target.put(tensor, arrays)
    if broken:
        as_what = "" if dtype is None else f" (as {dtype})"
        names = ", ".join(sorted(broken))
        raise CheckpointError(f"{where}: weights hold a NaN or an infinity{as_what}: {names}")
    return arrays


def _item_bytes(stored: np.dtype[Any], dtype: DTypeLike | None) -> int:
    """Return the bytes of a number in memory of a tensor that is stored in another dtype."""
    return min(stored.itemsize, 4) if dtype is None else np.dtype(dtype).itemsize


def _common_dtype(dtypes: set[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the narrowest dtype that holds all layers of an array; at most float32."""
    return dtypes.pop() if len(dtypes) == 1 and not dtypes & {np.dtype(np.float64)} else np.dtype(np.float32)


def _publish(draft: Path, folder: Path, variant: str | None) -> None:
    new = {path.name for path in draft.iterdir()}
    if not folder.exists():
        draft.rename(folder)
        return
    # Readers look for an index first: it is written after its shards, and an old index is removed before its shards.
    for name in sorted(new, key=lambda name: (name == CONFIG, name.endswith(".json"))):
        os.replace(draft / name, folder / name)
    patterns = list_shard_patterns(variant)
    weights = [path for path in folder.iterdir() if any(fnmatchcase(path.name, pattern) for pattern in patterns)]
    old = [path for path in weights if path.name not in new]
    for path in sorted(old, key=lambda path: not path.name.endswith(".json")):
        path.unlink()


def find_folder(folder: Path, subfolder: str | None) -> Path:
    """Return the folder with the model's config."""
    inside = folder / subfolder if subfolder else folder
    if not inside.is_dir():
        raise CheckpointError(f"{inside.name}: no such folder; wanted one with {CONFIG} and {STEM}.safetensors")
    if not (inside / CONFIG).is_file() and (inside / PIPELINE).is_file():
        parts = sorted(path.parent.name for path in inside.glob(f"*/{CONFIG}"))
        raise CheckpointError(
            f"{inside.name}: a pipeline, not a model; give the subfolder of its 2D transformer, one of: "
            f"{', '.join(parts) or 'none is there'}"
        )
    return inside

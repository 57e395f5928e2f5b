"""Reader of openpi's checkpoint trees of pi0 and pi0.5; their robots: jaxmodels/policies/openpi_configs.py.

A tree stacks its layers on one axis and has axes for heads. Low-rank updates (LoRA) are added to their weights.

Sources: openpi/models/{gemma,siglip,pi0,lora,model}.py (https://github.com/Physical-Intelligence/openpi).
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxmodels.checkpoints import orbax
from jaxmodels.checkpoints.tensor_layouts import Shape, align_array
from jaxmodels.errors import CheckpointError, WeightsMismatch
from jaxmodels.policies import get_policy_type
from jaxmodels.policies.pi0.config import GemmaSizes, PaliGemmaSizes, Pi0Config, SiglipSizes
from jaxmodels.weights import blueprint_of, check_fit

VALUE = "/value"  # Suffix of names that openpi's training adds.
_ROOT = "params/"
_LANGUAGE, _VISION = "PaliGemma/llm", "PaliGemma/img"
_LAYERS, _BLOCKS = f"{_LANGUAGE}/layers", f"{_VISION}/Transformer/encoderblock"
_ATTENTION = f"{_BLOCKS}/MultiHeadDotProductAttention_0"
_UNUSED = f"{_LANGUAGE}/final_norm/scale"
# openpi's variants gemma_2b_lora and gemma_300m_lora have alpha = rank, so that the factor of their updates is 1.
LORA_RANKS = {"": 16, "_1": 32}
_LORA = ("lora_a", "lora_b")


@dataclass(frozen=True)
class TreeSource:
    """Path `theirs` and `index` of our array in openpi's tree.

    Attributes:
        has_heads_first: whether the axis of heads is before the axis of inputs.
        is_transposed: whether ours is (out, in) and theirs is (in, out), with heads after inputs.
    """

    theirs: str
    index: tuple[int, ...] = ()
    has_heads_first: bool = False
    is_transposed: bool = False

    def take(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Return our array from theirs, float32."""
        part = array[self.index]
        if self.has_heads_first:
            part = part.transpose(1, 0, 2)
        return align_array(part.reshape(shape[::-1]).T if self.is_transposed else part.reshape(shape))


def complete_config(tree: Path, config: Pi0Config) -> Pi0Config:
    """Return the config with a tree's sizes; raises CheckpointError, listing differences, if both do not agree."""
    shapes = {name: tuple(shape.shape) for name, shape in _list_arrays(tree).items()}
    kind = "pi05" if "time_mlp_in/kernel" in shapes else "pi0"
    sizes, side, width = _derive_sizes(tree.name, shapes)
    found = {"model": kind, "action_dim": width, "image_size": side}
    wanted = {"model": config.type, "action_dim": config.max_action_dim, "image_size": config.image_resolution[0]}
    wrong = [f"{name} {found[name]}, wanted {wanted[name]}" for name in found if found[name] != wanted[name]]
    if config.sizes not in (PaliGemmaSizes(), sizes):
        wrong.append(f"sizes {sizes.to_json()}, wanted architecture.json's: {config.sizes.to_json()}")
    if wrong:
        raise CheckpointError(f"{tree.name}: does not fit the config in robojax.json: found {'; '.join(wrong)}")
    return replace(config, sizes=sizes)


def read_weights(tree: Path, config: Pi0Config) -> dict[str, np.ndarray]:
    """Read our weights from a tree, float32.

    Raises:
        CheckpointError: files are unreadable.
        WeightsMismatch: an array is missing, left over or of another shape (all listed).
    """
    stored = _list_arrays(tree)
    plan = blueprint_of(get_policy_type(config.type).model, config)
    ours = {name: tuple(shape.shape) for name, shape in plan.shapes.items()}
    sources = {name: find_source(name, config.type) for name in ours}
    expected, updates = _list_shapes(config, ours, sources), _find_updates(stored)
    check_fit({name: shape.shape for name, shape in stored.items() if name not in updates}, expected, where=tree.name)
    kept = _read_updates(tree, config, updates, expected)
    by_array: dict[str, dict[str, TreeSource]] = {}
    for name, source in sources.items():
        by_array.setdefault(source.theirs, {})[name] = source
    weights: dict[str, np.ndarray] = {}
    for theirs, array in _restore(tree, by_array):
        if theirs in kept:
            array = np.asarray(array, np.float32) + kept.pop(theirs)
        weights |= {name: source.take(array, ours[name]) for name, source in by_array[theirs].items()}
        del array  # Freed before the next array is read.
    return {name: weights[name] for name in ours}


def _list_arrays(tree: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the arrays of a tree, by names without openpi's prefix and suffix."""
    return {_get_plain_name(name): shape for name, shape in orbax.float_shapes(tree).items()}


def _get_plain_name(name: str) -> str:
    return name.removeprefix(_ROOT).removesuffix(VALUE)


def _restore(tree: Path, wanted: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of these names, without openpi's prefix and suffix."""
    shapes = orbax.float_shapes(tree)
    for batch in orbax.restore_parts(tree, {name: x for name, x in shapes.items() if _get_plain_name(name) in wanted}):
        for name in list(batch):
            yield _get_plain_name(name), batch.pop(name)


def _find_updates(stored: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[str, str]]:
    """Return the names of low-rank factors to the updated weight and the kind of factor."""
    updates = {}
    for name in stored:
        for factor in _LORA:
            if name.startswith(f"{_LAYERS}/attn/") and name.endswith(f"/{factor}"):
                updates[name] = (f"{name.removesuffix(factor)}w", factor)
            elif name.startswith(f"{_LAYERS}/mlp") and name.endswith(f"_{factor}"):
                updates[name] = (name.removesuffix(f"_{factor}"), factor)
    return updates


def _read_updates(
    tree: Path,
    config: Pi0Config,
    updates: Mapping[str, tuple[str, str]],
    expected: Mapping[str, Shape],
) -> dict[str, np.ndarray]:
    """Return the low-rank updates by the names of their weights."""
    factors: dict[str, dict[str, np.ndarray]] = {}
    for name, array in _restore(tree, updates) if updates else ():
        base, factor = updates[name]
        factors.setdefault(base, {})[factor] = np.asarray(array, np.float32)
    added: dict[str, np.ndarray] = {}
    for base, pair in factors.items():
        shape = expected.get(base)
        down, up = pair.get("lora_a"), pair.get("lora_b")
        if shape is None or down is None or up is None or down.shape[:-1] != shape[:-1]:
            raise WeightsMismatch(f"{tree.name}: {base} has no low-rank update that fits; found {sorted(pair)}")
        if up.shape != (*shape[:-2], down.shape[-1], shape[-1]):
            raise WeightsMismatch(
                f"{tree.name}: factors of {base} are {list(down.shape)} and {list(up.shape)}; wanted "
                f"{[*shape[:-2], down.shape[-1], shape[-1]]} for the second"
            )
        added[base] = merge_update(base, down, up, _find_scale(tree.name, config, base, down.shape[-1]))
    return added


def _find_scale(where: str, config: Pi0Config, base: str, rank: int) -> float:
    """Return the factor of an update: openpi's feed-forward layers have no scale, and files have no ``alpha``."""
    if base.startswith(f"{_LAYERS}/mlp"):
        return 1.0
    assert config.openpi is not None
    if config.openpi.lora_scale is not None:
        return config.openpi.lora_scale
    if rank != LORA_RANKS["_1" if base.endswith("_1/w") else ""]:
        raise CheckpointError(
            f"{where}: the low-rank update of {base} is of rank {rank}, which is none of openpi's variants, and files "
            'do not contain its alpha; write "lora_scale": alpha / rank into the object of openpi in robojax.json'
        )
    return 1.0


def merge_update(base: str, down: np.ndarray, up: np.ndarray, scale: float) -> np.ndarray:
    """Return the low-rank update of a weight: the product of its factors over the last two axes.

    In openpi's einsum of attention outputs both factors are summed over the heads, so each head gets the sum of all
    second factors.
    """
    if "/attn_vec_einsum" in base:
        up = up.sum(axis=-3, keepdims=True)
    return np.matmul(down, up) * np.float32(scale)


def find_source(name: str, kind: str) -> TreeSource:
    """Return the place of a weight of `Pi0Model` or `Pi05Model` in openpi's tree."""
    part, _, inside = name.partition(".")
    if part == "expert":
        return _find_in_gemma(inside, "_1")
    if part != "paligemma":
        time = "time_mlp" if kind == "pi05" else "action_time_mlp"
        place = {"action_in": "action_in_proj", "action_out": "action_out_proj", "state_in": "state_proj"}
        place |= {"time_in": f"{time}_in", "time_out": f"{time}_out"}
        return TreeSource(f"{place[part]}/{inside}")
    first, _, rest = inside.partition(".")
    match first:
        case "embedding":
            return TreeSource(f"{_LANGUAGE}/embedder/input_embedding")
        case "projector":
            return TreeSource(f"{_VISION}/head/{rest}")
        case "vision":
            return _find_in_vision(rest)
    return _find_in_gemma(inside, "")


def _find_in_gemma(inside: str, expert: str) -> TreeSource:
    stack, _, rest = inside.partition(".")
    if stack == "norm":
        return TreeSource(f"{_LANGUAGE}/final_norm{expert}/{_name_norm(rest)}")
    number, part, leaf = rest.split(".", 2)
    layer = int(number)
    match part, leaf.removesuffix(".weight"):
        case "attention", "query":
            return TreeSource(f"{_LAYERS}/attn/q_einsum{expert}/w", (layer,), has_heads_first=True, is_transposed=True)
        case "attention", "key" | "value" as which:
            index = (layer, ("key", "value").index(which))
            return TreeSource(f"{_LAYERS}/attn/kv_einsum{expert}/w", index, has_heads_first=True, is_transposed=True)
        case "attention", _:
            return TreeSource(f"{_LAYERS}/attn/attn_vec_einsum{expert}/w", (layer,), is_transposed=True)
        case "feed_forward", "down":
            return TreeSource(f"{_LAYERS}/mlp{expert}/linear", (layer,), is_transposed=True)
        case "feed_forward", which:
            index = (layer, ("gate", "up").index(which))
            return TreeSource(f"{_LAYERS}/mlp{expert}/gating_einsum", index, is_transposed=True)
    norm = "pre_attention_norm" if part == "attention_norm" else "pre_ffw_norm"
    return TreeSource(f"{_LAYERS}/{norm}{expert}/{_name_norm(leaf)}", (layer,))


def _name_norm(leaf: str) -> str:
    return leaf.replace("dense.", "Dense_0/")


def _find_in_vision(inside: str) -> TreeSource:
    first, _, rest = inside.partition(".")
    match first:
        case "kernel" | "bias":
            return TreeSource(f"{_VISION}/embedding/{first}")
        case "positions":
            return TreeSource(f"{_VISION}/pos_embedding")
        case "norm":
            return TreeSource(f"{_VISION}/Transformer/encoder_norm/{rest}")
    number, part, leaf = rest.split(".", 2)
    place = {"attention_norm": "LayerNorm_0", "feed_forward_norm": "LayerNorm_1"}
    if part in place:
        return TreeSource(f"{_BLOCKS}/{place[part]}/{leaf}", (int(number),))
    if part == "attention":
        return TreeSource(f"{_ATTENTION}/{leaf.replace('.', '/')}", (int(number),))
    which, _, leaf = leaf.partition(".")
    return TreeSource(f"{_BLOCKS}/MlpBlock_0/Dense_{0 if which == 'up' else 1}/{leaf}", (int(number),))


def _derive_sizes(where: str, shapes: Mapping[str, Shape]) -> tuple[PaliGemmaSizes, int, int]:
    """Return sizes of the networks, pixels of an image's side, and the width of actions from the shapes of a tree."""

    def size(name: str, axes: int) -> Shape:
        if len(shapes.get(name, ())) != axes:
            found = f"has {len(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(f"{where}: {name} {found}; wanted an array of {axes} axes, as pi0 and pi0.5 have")
        return shapes[name]

    def gemma(expert: str) -> GemmaSizes:
        depth, heads, width, head = size(f"{_LAYERS}/attn/q_einsum{expert}/w", 4)
        kv_heads = size(f"{_LAYERS}/attn/kv_einsum{expert}/w", 5)[2]
        return GemmaSizes(width, depth, size(f"{_LAYERS}/mlp{expert}/linear", 3)[1], heads, kv_heads, head)

    patch, _, _, width = size(f"{_VISION}/embedding/kernel", 4)
    layers, _, heads, _ = size(f"{_ATTENTION}/query/kernel", 4)
    hidden = size(f"{_BLOCKS}/MlpBlock_0/Dense_0/kernel", 3)[2]
    sizes = PaliGemmaSizes(
        gemma_2b=gemma(""),
        gemma_300m=gemma("_1"),
        vocab_size=size(f"{_LANGUAGE}/embedder/input_embedding", 2)[0],
        vision=SiglipSizes(width, hidden, layers, heads, patch),
    )
    side = patch * math.isqrt(size(f"{_VISION}/pos_embedding", 3)[1])
    return sizes, side, size("action_in_proj/kernel", 2)[0]


def _list_shapes(config: Pi0Config, ours: Mapping[str, Shape], sources: Mapping[str, TreeSource]) -> dict[str, Shape]:
    """Return the shapes of openpi's arrays for the config."""
    vision = config.sizes.vision
    head = vision.hidden_size // vision.num_attention_heads
    shapes: dict[str, Shape] = {_UNUSED: (config.vlm.width,)}
    for name, source in sources.items():
        shape, theirs = ours[name][::-1] if source.is_transposed else ours[name], source.theirs
        sizes = config.expert if name.startswith("expert.") else config.vlm
        if theirs.startswith(_ATTENTION):
            heads = (vision.num_attention_heads, head)
            is_out = "/out/" in theirs
            if theirs.endswith("kernel"):
                shape = (*heads, shape[1]) if is_out else (shape[0], *heads)
            elif not is_out:
                shape = heads
        elif theirs.startswith(f"{_LAYERS}/attn/"):
            if source.has_heads_first:
                shape = (shape[1] // sizes.head_dim, shape[0], sizes.head_dim)
            else:
                shape = (sizes.num_heads, sizes.head_dim, shape[1])
        elif theirs == f"{_VISION}/pos_embedding":
            shape = (1, *shape)
        layers = vision.num_hidden_layers if theirs.startswith(_BLOCKS) else sizes.depth
        shapes[theirs] = (*((layers, 2)[: len(source.index)]), *shape)
    return shapes

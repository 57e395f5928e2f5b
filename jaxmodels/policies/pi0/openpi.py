"""Checkpoints of openpi's own: pi0 and pi0.5 as Orbax trees, and their statistics.

A folder has ``params``, a tree whose layers lie on one axis, and ``assets/ID/norm_stats.json``. What the tree does not
say, openpi has in its code: three cameras, and how many actions a chunk has.

Sources: openpi/models/{gemma,siglip,pi0,model}.py, openpi/shared/normalize.py, openpi/transforms.py
(https://github.com/Physical-Intelligence/openpi).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmodels.checkpoints import orbax
from jaxmodels.checkpoints.files import read_json
from jaxmodels.checkpoints.tensor_layouts import Shape
from jaxmodels.errors import CheckpointError
from jaxmodels.normalization import Normalization, Normalizer
from jaxmodels.policies import get_policy_type
from jaxmodels.policies.pi0.config import GemmaSizes, Pi0Config
from jaxmodels.types import ACTION, IMAGES, STATE
from jaxmodels.weights import blueprint, check_fit, not_finite

PARAMS, ASSETS, STATISTICS = "params", "assets", "norm_stats.json"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PROMPTS = {"pi0": 48, "pi05": 200}  # tokens
EPSILON = np.float32(1e-6)  # openpi adds it to every spread and range, in both directions
VALUE = "/value"  # how names end that openpi's own training saved
_LANGUAGE, _VISION = "PaliGemma/llm", "PaliGemma/img"
_LAYERS, _BLOCKS = f"{_LANGUAGE}/layers", f"{_VISION}/Transformer/encoderblock"
_ATTENTION = f"{_BLOCKS}/MultiHeadDotProductAttention_0"
_UNUSED = f"{_LANGUAGE}/final_norm/scale"


@dataclass(frozen=True)
class Source:
    """Where an array of ours lies in openpi's tree.

    Attributes:
        theirs: the path of the array there.
        index: where in it ours lies.
        has_heads_first: whether its axis of heads comes before that of its inputs.
        is_transposed: whether ours is (out, in); theirs is (in, out), once its heads are behind its inputs.
    """

    theirs: str
    index: tuple[int, ...] = ()
    has_heads_first: bool = False
    is_transposed: bool = False

    def take(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Our array out of theirs, float32."""
        part = array[self.index]
        if self.has_heads_first:
            part = part.transpose(1, 0, 2)
        part = part.reshape(shape[::-1]).T if self.is_transposed else part.reshape(shape)
        return np.ascontiguousarray(part, np.float32)


def read_openpi(
    folder: Path, *, chunk_size: int = 50, asset: str | None = None
) -> tuple[Pi0Config, dict[str, np.ndarray], Normalization]:
    """Read a checkpoint of openpi: its config, our weights and its normalization.

    Args:
        chunk_size: actions of a chunk, openpi's ``action_horizon``, which its files do not say.
        asset: the statistics' name, where the folder has those of several robots.

    Raises:
        CheckpointError: a file is missing or unreadable, or an array is not what pi0 or pi0.5 have (all listed).
        ConfigError: sizes make no sense.
    """
    stored = orbax.float_shapes(folder / PARAMS)
    names = {_simplify(name): name for name in stored}
    shapes = {name: tuple(stored[theirs].shape) for name, theirs in names.items()}
    kind = "pi05" if "time_mlp_in/kernel" in shapes else "pi0"
    statistics = _read_statistics(folder, asset)
    config = get_policy_type(kind).config(_derive_config(folder.name, kind, shapes, statistics, chunk_size))
    ours = {
        name: tuple(shape.shape)
        for name, shape in blueprint(lambda rngs: get_policy_type(kind).model(config, rngs=rngs)).shapes.items()
    }
    sources = {name: find_source(name, kind) for name in ours}
    check_fit(shapes, _list_shapes(config, ours, sources), where=f"{folder.name}/{PARAMS}")

    # Onto the host: the device may have no room for all of it in float32.
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host) for name, x in stored.items()}
    arrays = orbax.restore(folder / PARAMS, target, is_nested=True)
    weights: dict[str, np.ndarray] = {}
    for theirs in dict.fromkeys(source.theirs for source in sources.values()):
        array = np.asarray(arrays.pop(names[theirs]))  # popped: their arrays go as ours come
        weights |= {name: source.take(array, ours[name]) for name, source in sources.items() if source.theirs == theirs}
    if wrong := not_finite(weights):
        raise CheckpointError(f"{folder.name}: weights hold a NaN or an infinity: {', '.join(sorted(wrong))}")
    return config, {name: weights[name] for name in ours}, _make_normalization(config, statistics)


def find_source(name: str, kind: str) -> Source:
    """Where a weight of `Pi0Model` or `Pi05Model` lies in openpi's tree."""
    part, _, inside = name.partition(".")
    if part == "expert":
        return _find_in_gemma(inside, "_1")
    if part != "paligemma":
        module, _, leaf = name.partition(".")
        time = "time_mlp" if kind == "pi05" else "action_time_mlp"
        place = {"action_in": "action_in_proj", "action_out": "action_out_proj", "state_in": "state_proj"}
        place |= {"time_in": f"{time}_in", "time_out": f"{time}_out"}
        return Source(f"{place[module]}/{leaf}")
    first, _, rest = inside.partition(".")
    match first:
        case "embedding":
            return Source(f"{_LANGUAGE}/embedder/input_embedding")
        case "projector":
            return Source(f"{_VISION}/head/{rest}")
        case "vision":
            return _find_in_vision(rest)
    return _find_in_gemma(inside, "")


def _find_in_gemma(inside: str, expert: str) -> Source:
    stack, _, rest = inside.partition(".")
    if stack == "norm":
        return Source(f"{_LANGUAGE}/final_norm{expert}/{_name_norm(rest)}")
    number, part, leaf = rest.split(".", 2)
    layer = int(number)
    match part, leaf.removesuffix(".weight"):
        case "attention", "query":
            return Source(f"{_LAYERS}/attn/q_einsum{expert}/w", (layer,), has_heads_first=True, is_transposed=True)
        case "attention", "key" | "value" as which:
            index = (layer, ("key", "value").index(which))
            return Source(f"{_LAYERS}/attn/kv_einsum{expert}/w", index, has_heads_first=True, is_transposed=True)
        case "attention", _:
            return Source(f"{_LAYERS}/attn/attn_vec_einsum{expert}/w", (layer,), is_transposed=True)
        case "feed_forward", "down":
            return Source(f"{_LAYERS}/mlp{expert}/linear", (layer,), is_transposed=True)
        case "feed_forward", which:
            index = (layer, ("gate", "up").index(which))
            return Source(f"{_LAYERS}/mlp{expert}/gating_einsum", index, is_transposed=True)
    norm = "pre_attention_norm" if part == "attention_norm" else "pre_ffw_norm"
    return Source(f"{_LAYERS}/{norm}{expert}/{_name_norm(leaf)}", (layer,))


def _name_norm(leaf: str) -> str:
    return leaf.replace("dense.", "Dense_0/")


def _find_in_vision(inside: str) -> Source:
    first, _, rest = inside.partition(".")
    match first:
        case "kernel" | "bias":
            return Source(f"{_VISION}/embedding/{first}")
        case "positions":
            return Source(f"{_VISION}/pos_embedding")
        case "norm":
            return Source(f"{_VISION}/Transformer/encoder_norm/{rest}")
    number, part, leaf = rest.split(".", 2)
    place = {"attention_norm": "LayerNorm_0", "feed_forward_norm": "LayerNorm_1"}
    if part in place:
        return Source(f"{_BLOCKS}/{place[part]}/{leaf}", (int(number),))
    if part == "attention":
        return Source(f"{_ATTENTION}/{leaf.replace('.', '/')}", (int(number),))
    which, _, leaf = leaf.partition(".")
    return Source(f"{_BLOCKS}/MlpBlock_0/Dense_{0 if which == 'up' else 1}/{leaf}", (int(number),))


def _simplify(name: str) -> str:
    return name.removeprefix(f"{PARAMS}/").removesuffix(VALUE)


def _derive_config(
    where: str, kind: str, shapes: Mapping[str, Shape], statistics: Mapping[str, Any], chunk_size: int
) -> dict[str, Any]:
    """Fields of a ``config.json``, and an ``architecture.json``, out of the shapes of a tree."""

    def size(name: str, axes: int) -> Shape:
        if len(shapes.get(name, ())) != axes:
            found = f"has {len(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(f"{where}: {name} {found}; wanted an array of {axes} axes, as pi0 and pi0.5 have")
        return shapes[name]

    def gemma(expert: str) -> dict[str, int]:
        depth, heads, width, head = size(f"{_LAYERS}/attn/q_einsum{expert}/w", 4)
        kv_heads, hidden = (
            size(f"{_LAYERS}/attn/kv_einsum{expert}/w", 5)[2],
            size(f"{_LAYERS}/mlp{expert}/linear", 3)[1],
        )
        return vars(GemmaSizes(width, depth, hidden, heads, kv_heads, head))

    patch, _, _, width = size(f"{_VISION}/embedding/kernel", 4)
    layers, _, heads, _ = size(f"{_ATTENTION}/query/kernel", 4)
    side = patch * math.isqrt(size(f"{_VISION}/pos_embedding", 3)[1])
    actions = size("action_in_proj/kernel", 2)[0]
    mode = "QUANTILES" if kind == "pi05" else "MEAN_STD"
    return {
        "type": kind,
        "input_features": {
            **{f"{IMAGES}{camera}": {"type": "VISUAL", "shape": [3, side, side]} for camera in CAMERAS},
            STATE: {"type": "STATE", "shape": [len(statistics["state"]["mean"])]},
        },
        "output_features": {ACTION: {"type": "ACTION", "shape": [len(statistics["actions"]["mean"])]}},
        "chunk_size": chunk_size,
        "n_action_steps": chunk_size,
        "max_state_dim": actions,
        "max_action_dim": actions,
        "image_resolution": [side, side],
        "tokenizer_max_length": PROMPTS[kind],
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "architecture": {
            "gemma_2b": gemma(""),
            "gemma_300m": gemma("_1"),
            "vocab_size": size(f"{_LANGUAGE}/embedder/input_embedding", 2)[0],
            "vision": {
                "hidden_size": width,
                "intermediate_size": size(f"{_BLOCKS}/MlpBlock_0/Dense_0/kernel", 3)[2],
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "patch_size": patch,
            },
        },
    }


def _list_shapes(config: Pi0Config, ours: Mapping[str, Shape], sources: Mapping[str, Source]) -> dict[str, Shape]:
    """Shapes of openpi's arrays that fit the config."""
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


def _read_statistics(folder: Path, asset: str | None) -> dict[str, dict[str, np.ndarray]]:
    """Statistics of ``state`` and ``actions``."""
    found = sorted(path.parent.relative_to(folder / ASSETS).as_posix() for path in (folder / ASSETS).rglob(STATISTICS))
    if asset is None and len(found) == 1:
        asset = found[0]
    if asset not in found:
        wanted = f"asset {asset!r}" if asset else "one asset, or the name of one"
        raise CheckpointError(
            f"{folder.name}: {ASSETS} has {STATISTICS} of {', '.join(found)[:400] or 'nothing'}; wanted {wanted}"
        )
    where = f"{ASSETS}/{asset}/{STATISTICS}"
    values = read_json(folder / ASSETS / asset / STATISTICS).get("norm_stats")
    statistics: dict[str, dict[str, np.ndarray]] = {}
    for name in ("state", "actions"):
        entry = values.get(name) if isinstance(values, Mapping) else None
        if not isinstance(entry, Mapping) or not {"mean", "std"} <= set(entry):
            raise CheckpointError(f"{where}: has no mean and std of {name!r}")
        try:
            arrays = {key: np.asarray(array, np.float32) for key, array in entry.items() if array is not None}
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{where}: {name} holds something else than lists of numbers") from error
        if len({array.shape for array in arrays.values()}) != 1 or arrays["mean"].ndim != 1:
            raise CheckpointError(f"{where}: statistics of {name} have several lengths; wanted one")
        statistics[name] = arrays
    return statistics


def _make_normalization(config: Pi0Config, statistics: Mapping[str, Mapping[str, np.ndarray]]) -> Normalization:
    """The statistics as LeRobot's steps take them; spreads and ranges are wider by openpi's epsilon."""
    wider = {
        feature: {key: array + EPSILON if key in ("std", "q99") else array for key, array in arrays.items()}
        for feature, arrays in ((STATE, statistics["state"]), (ACTION, statistics["actions"]))
    }
    normalizer = Normalizer((*config.input_features, *config.output_features), config.normalization_mapping, wider)
    return Normalization(normalizer, normalizer)

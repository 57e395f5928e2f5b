"""The network of pi0, and its parts that pi0.5 shares: PaliGemma encodes, an expert denoises a chunk of actions."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.checkpoints.tensor_layouts import SAME, Shape, Tensor, module_tensor
from jaxmodels.errors import ObservationError
from jaxmodels.layers.embeddings import flow_time_sinusoid
from jaxmodels.layers.images import resize_as_pillow, resize_with_padding
from jaxmodels.policies.pi0.config import GemmaSizes, Pi0Config
from jaxmodels.policies.vla import Chunk, Terms, VlaModel, apply_linear, read_linear
from jaxmodels.types import Observation
from jaxmodels.vlm.decoder import DecoderSizes, PrefixCache
from jaxmodels.vlm.gemma import EPSILON, Expert, PaliGemma, gemma_tensor
from jaxmodels.vlm.siglip import VisionSizes, vision_tensor

StateToken: TypeAlias = Float[Array, "b 1 d"]


def decoder_sizes(sizes: GemmaSizes) -> DecoderSizes:
    """Return the sizes of a Gemma for its layers."""
    return DecoderSizes(
        width=sizes.width,
        hidden=sizes.mlp_dim,
        layers=sizes.depth,
        heads=sizes.num_heads,
        kv_heads=sizes.num_kv_heads,
        head_width=sizes.head_dim,
        epsilon=EPSILON,
    )


def vision_sizes(config: Pi0Config) -> VisionSizes:
    """Return the sizes of the vision tower."""
    sizes = config.sizes.vision
    return VisionSizes(
        width=sizes.hidden_size,
        hidden=sizes.intermediate_size,
        layers=sizes.num_hidden_layers,
        heads=sizes.num_attention_heads,
        image_size=config.image_resolution[0],
        patch_size=sizes.patch_size,
    )


def fit_into_square(config: Pi0Config, frames: Float[Array, "b h w 3"]) -> Float[Array, "b s s 3"]:
    """Convert pixels of [0, 1] to squares of [-1, 1], padded on both sides."""
    frames = frames.astype(jnp.float32)
    if config.openpi is not None:
        return 2 * resize_as_pillow(frames, config.image_resolution) - 1
    if frames.shape[1:3] != config.image_resolution:
        padded = resize_with_padding(frames, config.image_resolution, place="center", value=config.image_padding)
        frames = jnp.clip(padded, min(config.image_padding, 0.0), 1.0)
    return 2 * frames - 1


class PiModel(VlaModel):
    """Base of pi0 and pi0.5, which differ in how the expert reads the state and the time."""

    has_state_token: ClassVar[bool]

    def __init__(self, config: Pi0Config, *, rngs: nnx.Rngs):
        self.config = config
        width = config.expert.width
        self.paligemma = PaliGemma(vision_sizes(config), decoder_sizes(config.vlm), config.vocabulary, rngs=rngs)
        self.action_in = nnx.Linear(config.max_action_dim, width, rngs=rngs)
        self.action_out = nnx.Linear(width, config.max_action_dim, rngs=rngs)

    def embed_images(self, observation: Observation) -> Float[Array, "n m d"]:
        """Return tokens of the present cameras' images as one batch; raises ObservationError without any (traced)."""
        present = [frames for frames in observation.images if frames is not None]
        if not present:
            raise ObservationError(f"all {len(observation.images)} cameras are absent; wanted one or more")
        return self.paligemma.embed_images(jnp.concatenate(present))

    def encode(self, observation: Observation, seen: Float[Array, "n m d"]) -> PrefixCache:
        images, masks = observation.images, observation.image_masks
        present = [camera for camera, frames in enumerate(images) if frames is not None]
        language = observation.language
        assert language is not None
        batch = language.tokens.shape[0]
        words = self.paligemma.embed_words(language.tokens)
        tokens = jnp.concatenate([*jnp.split(seen, len(present)), words.astype(seen.dtype)], axis=1)
        each = seen.shape[1]
        is_seen = jnp.ones((batch, len(present)), bool) if masks is None else masks[:, np.asarray(present)]
        is_valid = jnp.concatenate((jnp.repeat(is_seen, each, axis=1), language.mask), axis=1)
        # The cache is as long for short prompts as for long ones, so the expert needs one program.
        length = tokens.shape[1] + self.config.prompt_length - words.shape[1]
        return self.paligemma.compute_cache(tokens, is_valid, self.config.chunk_size + self.has_state_token, length)

    def embed_times(self, times: Float[np.ndarray, " s"]) -> Float[Array, "s d"]:
        config = self.config
        return jnp.asarray(flow_time_sinusoid(times, config.expert.width, config.min_period, config.max_period))


class Pi0Model(PiModel):
    """pi0: the expert sees the state as a token and the time in actions' tokens (arXiv 2410.24164; openpi's pi0.py)."""

    has_state_token = True

    def __init__(self, config: Pi0Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.expert.width
        self.expert = Expert(decoder_sizes(config.expert), rngs=rngs)
        self.state_in = nnx.Linear(config.max_state_dim, width, rngs=rngs)
        self.time_in = nnx.Linear(2 * width, width, rngs=rngs)
        self.time_out = nnx.Linear(width, width, rngs=rngs)

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> Terms:
        # One layer reads actions and time; the term of the time is the same for all actions.
        kernel, bias = read_linear(self.time_in)
        return {"hidden": self.embed_times(times) @ kernel[self.config.expert.width :] + bias}

    def embed_state(self, state: Float[Array, "b s"]) -> StateToken:
        padded = jnp.pad(state, ((0, 0), (0, self.config.max_state_dim - state.shape[1])))
        return apply_linear(self.state_in, padded)[:, None]

    def denoise(self, prefix: PrefixCache, state: StateToken | None, x: Chunk, step: Terms) -> Chunk:
        assert state is not None
        # In float32, as in LeRobot.
        actions = apply_linear(self.action_in, x)
        hidden = actions @ read_linear(self.time_in)[0][: actions.shape[-1]] + step["hidden"]
        actions = apply_linear(self.time_out, jax.nn.silu(hidden))
        tokens = jnp.concatenate((state, actions), axis=1)
        # The state sees no action, and the actions see each other.
        starts = np.arange(1 + x.shape[1]) < 2
        out = self.expert(tokens, prefix, starts)
        return apply_linear(self.action_out, out[:, 1:])


# Tensors of pi0 and pi0.5 by LeRobot's names.
ROOT = "model."
_BOTH = f"{ROOT}paligemma_with_expert."
_PALIGEMMA, _EXPERT = f"{_BOTH}paligemma.", f"{_BOTH}gemma_expert."
_WORDS = f"{_PALIGEMMA}model.language_model."
EMBEDDING, HEAD = f"{_WORDS}embed_tokens.weight", f"{_PALIGEMMA}lm_head.weight"
_LINEARS = {
    "action_in": "action_in_proj",
    "action_out": "action_out_proj",
    "state_in": "state_proj",
    "paligemma.projector": "paligemma_with_expert.paligemma.model.multi_modal_projector.linear",
}
# A file may contain the embedding of words only as the weight of the head; if it has both, the embedding counts.
TIED = {EMBEDDING: HEAD}
TIMES = {
    "pi0": {"time_in": "action_time_mlp_in", "time_out": "action_time_mlp_out"},
    "pi05": {"time_in": "time_mlp_in", "time_out": "time_mlp_out"},
}


def tensors(names: Iterable[str], *, kind: str = "pi0") -> tuple[Tensor, ...]:
    """Return the table for the weights of one config, from our names."""
    return tuple(_tensor(name, _LINEARS | TIMES[kind]) for name in names)


def _tensor(name: str, linears: Mapping[str, str]) -> Tensor:
    part, _, inside = name.partition(".")
    if part == "expert":
        return gemma_tensor(inside, ours="expert.", theirs=f"{_EXPERT}model.")
    if part == "paligemma":
        first, _, rest = inside.partition(".")
        if first == "vision":
            return vision_tensor(rest, ours=f"{part}.vision.", theirs=f"{_PALIGEMMA}model.vision_tower.vision_model.")
        if first == "layers":
            return gemma_tensor(inside, ours=f"{part}.", theirs=_WORDS)
        if first == "embedding":
            return Tensor(EMBEDDING, (name,), SAME)
    return module_tensor(f"{ROOT}{linears[name.rpartition('.')[0]]}", name)


def rename(name: str) -> str:
    """Return the table's name of a tensor; files that were converted from openpi's lack the prefix ``model.``."""
    return name if name.startswith(ROOT) else f"{ROOT}{name}"


def find_unused(config: Pi0Config) -> dict[str, Shape]:
    """Return the shapes of the tensors of LeRobot's files that no action depends on."""
    words, actions = config.vlm.width, config.expert.width
    return {
        HEAD: (config.vocabulary, words),
        f"{_EXPERT}lm_head.weight": (config.vocabulary, actions),
        f"{_WORDS}norm.weight": (words,),
    }

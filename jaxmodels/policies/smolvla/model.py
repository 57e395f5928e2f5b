"""SmolVLA's network: images, words and state as keys and values, and an action expert that attends to them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmodels.checkpoints.tensor_layouts import SAME, Shape, Tensor, module_tensor, their_shapes
from jaxmodels.errors import InputError
from jaxmodels.layers.embeddings import flow_time_sinusoid
from jaxmodels.layers.grouped_attention import compute_rotation, mask_after_prefix, pad_keys, pad_mask
from jaxmodels.layers.images import resize_with_padding
from jaxmodels.layers.norm import RMSNorm
from jaxmodels.policies import vla
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.policies.vla import Chunk, Terms, VlaModel, apply_linear
from jaxmodels.samplers import begin_with
from jaxmodels.types import Observation
from jaxmodels.vlm.decoder import DecoderLayer, PrefixCache, decoder_tensor
from jaxmodels.vlm.siglip import vision_tensor
from jaxmodels.vlm.smolvlm import PrefixTokens, SmolVlm
from jaxmodels.weights import blueprint


class SmolVlaModel(VlaModel):
    """Network that predicts the velocity of a noisy chunk for a normalised observation."""

    def __init__(self, config: SmolVlaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        del dtype  # The weights determine it.
        text, expert, steps = config.vlm.text, config.expert, config.expert_steps
        self.config = config
        self.vlm = SmolVlm(config.vlm, steps[-1].vlm_layer + 1, rngs=rngs)
        self.state_in = nnx.Linear(config.max_state_dim, text.width, rngs=rngs)
        self.action_in = nnx.Linear(config.max_action_dim, expert.width, rngs=rngs)
        self.time_in = nnx.Linear(2 * expert.width, expert.width, rngs=rngs)
        self.time_out = nnx.Linear(expert.width, expert.width, rngs=rngs)
        keys = text.kv_heads * text.head_width
        self.layers = nnx.List(
            [DecoderLayer(expert, context_width=keys if step.has_context else None, rngs=rngs) for step in steps]
        )
        self.norm = RMSNorm(expert.width, epsilon=expert.epsilon)
        self.action_out = nnx.Linear(expert.width, config.max_action_dim, rngs=rngs)

    @property
    def dtype(self) -> Any:
        """Dtype of the weights and of most arithmetic."""
        return self.action_in.kernel.dtype

    def encode(self, observation: Observation, seen: Sequence[PrefixTokens]) -> PrefixCache:
        """Encode images, words and state, once per chunk.

        Args:
            seen: result of `embed_images`.

        Raises:
            InputError: the observation has no language.
        """
        if observation.language is None:
            raise InputError("the observation has no language; SmolVLA needs the tokens of an instruction")
        ids, mask = observation.language
        parts = [*seen, PrefixTokens(self.vlm.embed_words(ids) * self.config.vlm.text.width**0.5, mask)]
        state = observation.state
        state = (read_aloha_state(state) if self.config.adapt_to_pi_aloha else state).astype(self.dtype)
        padded = jnp.pad(state, ((0, 0), (0, self.config.max_state_dim - state.shape[1])))
        one = jnp.ones((state.shape[0], 1), bool)
        parts.append(PrefixTokens(self.state_in(padded)[:, None], one))
        tokens = PrefixTokens(*(jnp.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))
        # Images and words do not see the state.
        starts = np.arange(tokens.is_valid.shape[1]) == tokens.is_valid.shape[1] - 1
        cache = self.vlm.compute_cache(tokens, starts)
        context = []
        for layer, step in zip(self.layers, self.config.expert_steps, strict=True):
            own = cache[step.vlm_layer]
            # Without cross-attention, actions also attend to their own keys.
            behind = 0 if step.is_cross else self.config.chunk_size
            context.append(pad_keys(layer.attention.project_again(own) if step.is_cross else own, behind))
        return PrefixCache(tuple(context), tokens.is_valid)

    def embed_images(self, observation: Observation) -> list[PrefixTokens]:
        """Return the tokens of each present camera, in the config's order.

        At most `empty_cameras` absent cameras have special tokens. Raises InputError if all cameras are absent.
        """
        config = self.config
        present = [(i, image) for i, image in enumerate(observation.images) if image is not None]
        if not present:
            raise InputError("the observation has no image; SmolVLA needs one camera or more")
        batch, parts = present[0][1].shape[0], []
        prepared = [image for _, image in present]
        if len({image.shape for image in prepared}) == 1:
            together = self.vlm.embed_images(jnp.concatenate(prepared))
            embedded = list(jnp.split(together, len(prepared)))
        else:
            embedded = [self.vlm.embed_images(image) for image in prepared]
        masks = observation.image_masks
        for (i, _), tokens in zip(present, embedded, strict=True):
            is_there = jnp.ones(batch, bool) if masks is None else masks[:, i]
            parts.append(PrefixTokens(tokens, jnp.broadcast_to(is_there[:, None], tokens.shape[:2])))
        if not config.add_image_special_tokens:
            return parts
        before, after = self._special_tokens(batch)
        missing = min(len(observation.images) - len(present), config.empty_cameras)
        return [token for part in parts for token in (before, part, after)] + [before, after] * missing

    def _special_tokens(self, batch: int) -> tuple[PrefixTokens, PrefixTokens]:
        """Return the tokens before and after each image, which unlike words are not scaled."""
        around, before = self.config.vlm.around_image, self.config.vlm.before_image
        assert around is not None  # The config checks this.
        assert before is not None

        def embed(*ids: int) -> PrefixTokens:
            values = self.vlm.embed_words(jnp.asarray([ids]))
            return PrefixTokens(jnp.broadcast_to(values, (batch, *values.shape[1:])), jnp.ones((batch, len(ids)), bool))

        return embed(around, before), embed(around)

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> Terms:
        """Return the term ``hidden`` that each time adds to the actions' tokens."""
        config, width = self.config, self.config.expert.width
        waves = jnp.asarray(flow_time_sinusoid(times, width, config.min_period, config.max_period), self.dtype)
        bias = self.time_in.bias
        assert bias is not None
        return {"hidden": waves @ self.time_in.kernel[...][width:] + bias[...]}

    def denoise(self, prefix: PrefixCache, state: Any, x: Chunk, step: Terms) -> Chunk:
        del state  # The prefix contains it.
        config, width = self.config, self.config.expert.width
        count = x.shape[1]
        actions = self.action_in(x.astype(self.dtype)) @ self.time_in.kernel[...][:width]
        actions = actions + step["hidden"].astype(self.dtype)
        tokens = self.time_out(jax.nn.silu(actions))
        own = jnp.arange(count, dtype=jnp.int32)[None]
        first = jnp.sum(prefix.is_valid, axis=1, dtype=jnp.int32)[:, None]
        behind, alone = (compute_rotation(at, config.expert.head_width) for at in (first + own, own))
        for layer, seen, plan in zip(self.layers, prefix.layers, config.expert_steps, strict=True):
            is_valid = pad_mask(prefix.is_valid, seen)
            if plan.is_cross:
                tokens = layer.cross_attend(tokens, alone, seen, is_valid[:, None])
            else:
                # An action sees the actions before it.
                causal = mask_after_prefix(is_valid, np.ones(count, bool))
                tokens, _ = layer(tokens, behind, causal, seen)
        # In float32, like the integration that follows.
        return apply_linear(self.action_out, self.norm(tokens))


def fit_image(config: SmolVlaConfig, image: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 3"]:
    """Return an image for the vision tower, in [-1, 1]; raises InputError if its patches make no square of tokens."""
    size = config.resize_imgs_with_padding
    if size is not None:
        image = resize_with_padding(image.astype(jnp.float32), (size[1], size[0]), place="bottom right")
    height, width = image.shape[1:3]
    if config.vlm.count_image_tokens(height, width) is None:
        raise InputError(
            f"an image is {height}x{width}, and its patches make no square of whole tokens; the policy does not "
            f"resize images: send them in the sizes of its config, {list(config.frames)}"
        )
    return image.astype(jnp.float32) * 2 - 1


def sample(
    network: type[VlaModel],
    config: SmolVlaConfig,
    weights: Mapping[str, Array],
    observation: Observation,
    prefix: PrefixCache,
) -> Chunk:
    """Return a normalised chunk as `vla.sample`; with `adapt_to_pi_aloha`, for ALOHA's joints."""
    plan = observation.prefix
    if not config.adapt_to_pi_aloha:
        return vla.sample(network, config, weights, observation, prefix)
    if plan is not None:
        observation = observation._replace(prefix=plan._replace(actions=write_aloha_actions(plan.actions)))
    chunk = read_aloha_actions(vla.sample(network, config, weights, observation, prefix))
    return chunk if plan is None else begin_with(plan, chunk)


# LeRobot's `adapt_to_pi_aloha` reverses joints and converts gripper openings to angles (modeling_smolvla.py).
FLIPPED, GRIPPERS = (1, 2, 8, 9), (6, 13)
_OPENING = (0.01844, 0.058)
_ANGLE = (0.4, 1.5)
_JOINT = (-0.6213, 1.4910)
_ARM, _HORN = 0.036, 0.022  # Metres of the gripper's linkage.


def _flip(width: int) -> Float[np.ndarray, " {width}"]:
    return np.where(np.isin(np.arange(width), FLIPPED), np.float32(-1), np.float32(1))


def _is_gripper(width: int) -> np.ndarray:
    return np.isin(np.arange(width), GRIPPERS)


def read_aloha_state(state: Float[Array, "b s"]) -> Float[Array, "b s"]:
    """Convert ALOHA's state to the network's."""
    flipped = state * _flip(state.shape[-1])
    opening = flipped * (_OPENING[1] - _OPENING[0]) + _OPENING[0]
    opening = jnp.where(_is_gripper(state.shape[-1]), opening, _OPENING[1])  # Other joints have no angle.
    angle = jnp.arcsin(jnp.clip((_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening), -1, 1))
    return jnp.where(_is_gripper(state.shape[-1]), (angle - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0]), flipped)


def read_aloha_actions(actions: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
    """Convert the network's actions to ALOHA's."""
    flipped = actions * _flip(actions.shape[-1])
    angle = flipped * (_ANGLE[1] - _ANGLE[0]) + _ANGLE[0]
    return jnp.where(_is_gripper(actions.shape[-1]), (angle - _JOINT[0]) / (_JOINT[1] - _JOINT[0]), flipped)


def write_aloha_actions(actions: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
    """Convert ALOHA's actions to the network's."""
    joint = actions * (_JOINT[1] - _JOINT[0]) + _JOINT[0]
    angle = (joint - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0])
    return jnp.where(_is_gripper(actions.shape[-1]), angle, actions) * _flip(actions.shape[-1])


_BOTH = "model.vlm_with_expert."
_VLM, _EXPERT = f"{_BOTH}vlm.model.", f"{_BOTH}lm_expert."
_TEXT = f"{_VLM}text_model."
EMBEDDING, HEAD = f"{_TEXT}embed_tokens.weight", f"{_BOTH}vlm.lm_head.weight"
# A file may have the embedding of words only as the weight of the head.
TIED = {EMBEDDING: HEAD}
_LINEARS = {
    "state_in": "model.state_proj",
    "action_in": "model.action_in_proj",
    "action_out": "model.action_out_proj",
    "time_in": "model.action_time_mlp_in",
    "time_out": "model.action_time_mlp_out",
    "vlm.connector": f"{_VLM}connector.modality_projection.proj",
}


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """Return the table for the weights of one config, from our names."""
    names = tuple(names)
    last = sum(name.startswith("vlm.layers.") and name.endswith("attention.key.weight") for name in names)
    return tuple(_tensor(name, last) for name in names)


def _tensor(name: str, last: int) -> Tensor:
    """Return the tensor of a weight; `last` is the number of the language model's last layer."""
    match name.split(".", 3):
        case ["vlm", "vision", *_]:
            return vision_tensor(name.removeprefix("vlm.vision."), ours="vlm.vision.", theirs=f"{_VLM}vision_model.")
        case ["vlm", "embedding"]:
            return Tensor(EMBEDDING, (name,), SAME)
        case ["vlm", "layers", number, inside]:
            return decoder_tensor(inside, ours=f"vlm.layers.{number}.", theirs=f"{_TEXT}layers.{number}.")
        case ["vlm", "last", *_]:
            return decoder_tensor(name.removeprefix("vlm.last."), ours="vlm.last.", theirs=f"{_TEXT}layers.{last}.")
        case ["layers", number, *_]:
            ours = f"layers.{number}."
            return decoder_tensor(name.removeprefix(ours), ours=ours, theirs=f"{_EXPERT}{ours}")
        case ["norm", _]:
            return Tensor(f"{_EXPERT}norm.weight", (name,), SAME)
    return module_tensor(_LINEARS[name.rpartition(".")[0]], name)


def find_unused(config: SmolVlaConfig) -> dict[str, Shape]:
    """Return the shapes of unused tensors of LeRobot's files.

    They are the language model's head, its last norm, and everything after the keys and values of the last layer that
    the action expert attends to.
    """
    text, last = config.vlm.text, config.expert_steps[-1].vlm_layer
    unused: dict[str, Shape] = {HEAD: (config.vocabulary, text.width), f"{_TEXT}norm.weight": (text.width,)}
    layer = {name: shape.shape for name, shape in blueprint(lambda rngs: DecoderLayer(text, rngs=rngs)).shapes.items()}
    shapes = their_shapes([decoder_tensor(name, ours="", theirs="") for name in layer], layer)
    for number in range(last, config.vlm_layers):
        for name, shape in shapes.items():
            if number > last or not name.startswith(("input_layernorm", "self_attn.k_proj", "self_attn.v_proj")):
                unused[f"{_TEXT}layers.{number}.{name}"] = shape
    return unused

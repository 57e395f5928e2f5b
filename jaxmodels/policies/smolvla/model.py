"""SmolVLA's network: images, words and state as keys and values, and an action expert that looks at them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmodels.errors import InputError
from jaxmodels.layers.embeddings import flow_time_sinusoid
from jaxmodels.layers.grouped_attention import KeyValues, compute_rotation, mask_after_prefix, pad_keys, pad_mask
from jaxmodels.layers.images import resize_with_padding
from jaxmodels.layers.norm import RMSNorm
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.types import Language, Observation
from jaxmodels.vlm.decoder import DecoderLayer
from jaxmodels.vlm.smolvlm import SmolVlm, Tokens


class Encoded(NamedTuple):
    """What was seen and said, for all steps of one chunk.

    Attributes:
        key_values: what each layer of the action expert looks at: the language model's keys and values, or for
            cross-attention what the layer makes of them; maybe with zeros behind them (`pad_keys`).
        is_valid: which of their tokens count.
    """

    key_values: tuple[KeyValues, ...]
    is_valid: Bool[Array, "b m"]


class SmolVlaModel(nnx.Module):
    """The velocity of a noisy chunk, for a normalised observation."""

    def __init__(self, config: SmolVlaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        del dtype  # of the weights that it is assembled over
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
        """Of the weights, and so of the arithmetic where it is not float32 anyway."""
        return self.action_in.kernel.dtype

    def encode(self, observation: Observation, images: Sequence[Tokens] | None = None) -> Encoded:
        """What is seen and said, once per chunk.

        Args:
            images: what `embed_images` gave for the observation; None to ask it.

        Raises:
            InputError: the observation has no language, no image, or images that make no square of tokens.
        """
        if observation.language is None:
            raise InputError("the observation has no language; SmolVLA wants the tokens of an instruction")
        seen = self.embed_images(observation) if images is None else images
        parts = [*seen, self._embed_words(observation.language)]
        state = observation.state.astype(self.dtype)
        padded = jnp.pad(state, ((0, 0), (0, self.config.max_state_dim - state.shape[1])))
        one = jnp.ones((state.shape[0], 1), bool)
        parts.append(Tokens(self.state_in(padded)[:, None], one))
        tokens = Tokens(*(jnp.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))
        # Only the state is behind the rest: images and words do not see it.
        starts = np.arange(tokens.is_valid.shape[1]) == tokens.is_valid.shape[1] - 1
        cache = self.vlm.compute_cache(tokens, starts)
        context = []
        for layer, step in zip(self.layers, self.config.expert_steps, strict=True):
            own = cache[step.vlm_layer]
            # Actions look at their own keys, too, where they do not look at others only.
            behind = 0 if step.is_cross else self.config.chunk_size
            context.append(pad_keys(layer.attention.project_again(own) if step.is_cross else own, behind))
        return Encoded(tuple(context), tokens.is_valid)

    def _embed_words(self, language: Language) -> Tokens:
        return Tokens(self.vlm.embed_words(language.tokens) * self.config.vlm.text.width**0.5, language.mask)

    def embed_images(self, observation: Observation) -> list[Tokens]:
        """Tokens of each camera that is there, in the config's order.

        Cameras that are not there are not looked at: nobody would see their tokens. Special tokens count for as many
        of them as `empty_cameras` says.
        """
        config = self.config
        present = [(i, image) for i, image in enumerate(observation.images) if image is not None]
        if not present:
            raise InputError("the observation has no image; SmolVLA looks at one camera at least")
        batch, parts = present[0][1].shape[0], []
        prepared = [self._prepare(image) for _, image in present]
        if len({image.shape for image in prepared}) == 1:
            together = self.vlm.embed_images(jnp.concatenate(prepared))
            embedded = list(jnp.split(together, len(prepared)))
        else:
            embedded = [self.vlm.embed_images(image) for image in prepared]
        masks = observation.image_masks
        for (i, _), tokens in zip(present, embedded, strict=True):
            is_there = jnp.ones(batch, bool) if masks is None else masks[:, i]
            parts.append(Tokens(tokens, jnp.broadcast_to(is_there[:, None], tokens.shape[:2])))
        if not config.add_image_special_tokens:
            return parts
        before, after = self._special_tokens(batch)
        missing = min(len(observation.images) - len(present), config.empty_cameras)
        return [token for part in parts for token in (before, part, after)] + [before, after] * missing

    def _special_tokens(self, batch: int) -> tuple[Tokens, Tokens]:
        """Those before and after each image, which unlike words are not scaled."""
        around, before = self.config.vlm.around_image, self.config.vlm.before_image
        assert around is not None  # checked by the config
        assert before is not None

        def embed(*ids: int) -> Tokens:
            values = self.vlm.embed_words(jnp.asarray([ids]))
            return Tokens(jnp.broadcast_to(values, (batch, *values.shape[1:])), jnp.ones((batch, len(ids)), bool))

        return embed(around, before), embed(around)

    def _prepare(self, image: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 3"]:
        """An image as the vision tower wants it, in [-1, 1]."""
        size = self.config.resize_imgs_with_padding
        if size is not None:
            image = resize_with_padding(image.astype(jnp.float32), (size[1], size[0]), place="bottom right")
        height, width = image.shape[1:3]
        if self.config.vlm.count_image_tokens(height, width) is None:
            raise InputError(
                f"an image is {height}x{width}, and its patches make no square of whole tokens; the policy does not "
                f"resize images: send them in the sizes of its config, {list(self.config.frames)}"
            )
        return (image.astype(jnp.float32) * 2 - 1).astype(self.dtype)

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> Float[Array, "s d"]:
        """What each time adds to the actions' tokens, for all steps at once."""
        config, width = self.config, self.config.expert.width
        waves = jnp.asarray(flow_time_sinusoid(times, width, config.min_period, config.max_period), self.dtype)
        bias = self.time_in.bias
        assert bias is not None  # nnx.Linear's default
        return waves @ self.time_in.kernel[...][width:] + bias[...]

    def denoise(self, encoded: Encoded, x: Float[Array, "b t a"], step: Float[Array, " d"]) -> Float[Array, "b t a"]:
        """The velocity, float32, of a noisy chunk at one step of `prepare_steps`."""
        config, width = self.config, self.config.expert.width
        count = x.shape[1]
        actions = self.action_in(x.astype(self.dtype)) @ self.time_in.kernel[...][:width] + step
        tokens = self.time_out(jax.nn.silu(actions))
        own = jnp.arange(count, dtype=jnp.int32)[None]
        first = jnp.sum(encoded.is_valid, axis=1, dtype=jnp.int32)[:, None]
        behind, alone = (compute_rotation(at, config.expert.head_width) for at in (first + own, own))
        for layer, seen, plan in zip(self.layers, encoded.key_values, config.expert_steps, strict=True):
            is_valid = pad_mask(encoded.is_valid, seen)
            if plan.is_cross:
                tokens = layer.cross_attend(tokens, alone, seen, is_valid[:, None])
            else:
                # An action sees those before it in the chunk.
                causal = mask_after_prefix(is_valid, np.ones(count, bool))
                tokens, _ = layer(tokens, behind, causal, seen)
        # In float32 whatever the weights are, like the integration that follows.
        kernel, bias = self.action_out.kernel, self.action_out.bias
        assert bias is not None  # nnx.Linear's default
        return self.norm(tokens).astype(jnp.float32) @ kernel[...].astype(jnp.float32) + bias[...].astype(jnp.float32)

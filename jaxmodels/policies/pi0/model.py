"""The network of pi0, and its parts that pi0.5 shares: PaliGemma encodes, an expert denoises a chunk of actions."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.errors import ObservationError
from jaxmodels.layers.embeddings import flow_time_sinusoid
from jaxmodels.layers.images import resize_as_pillow, resize_with_padding
from jaxmodels.policies import ActStage
from jaxmodels.policies.pi0.config import GemmaSizes, Pi0Config
from jaxmodels.samplers import begin_with, continuing, flow_euler, given
from jaxmodels.types import Observation
from jaxmodels.vlm.decoder import DecoderSizes
from jaxmodels.vlm.gemma import EPSILON, Expert, PaliGemma, PrefixCache
from jaxmodels.vlm.siglip import VisionSizes
from jaxmodels.weights import blueprint_of

Chunk: TypeAlias = Float[Array, "b t a"]
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


class StepInputs(NamedTuple):
    """Terms of the time of a step: `hidden`, added before the actions' SiLU (pi0), or `modulations` (pi0.5).

    A leading axis is the steps of a sampler.
    """

    hidden: Float[Array, "*s d"] | None
    modulations: Float[Array, "*s norms 3 d"] | None


def fit_into_square(config: Pi0Config, frames: Float[Array, "b h w 3"]) -> Float[Array, "b s s 3"]:
    """Convert pixels of [0, 1] to squares of [-1, 1], padded on both sides."""
    frames = frames.astype(jnp.float32)
    if config.openpi is not None:
        return 2 * resize_as_pillow(frames, config.image_resolution) - 1
    if frames.shape[1:3] != config.image_resolution:
        padded = resize_with_padding(frames, config.image_resolution, place="center", value=config.image_padding)
        frames = jnp.clip(padded, min(config.image_padding, 0.0), 1.0)
    return 2 * frames - 1


class PiModel(nnx.Module):
    """Base of pi0 and pi0.5: images and words become keys and values once per chunk."""

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
        return self.paligemma.embed_images(
            jnp.concatenate([fit_into_square(self.config, frames) for frames in present])
        )

    def encode(self, observation: Observation, seen: Float[Array, "n m d"] | None = None) -> PrefixCache:
        """Return keys and values of images and words, once per chunk; `seen` is `embed_images`' result, if known."""
        seen = self.embed_images(observation) if seen is None else seen
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
        return self.paligemma.compute_cache(tokens, is_valid, self.config.chunk_size + self.has_state_token)

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> StepInputs:
        """Return the terms of times, for all steps of a sampler at once; in float32."""
        raise NotImplementedError

    def embed_state(self, state: Float[Array, "b s"]) -> StateToken | None:
        """Return the token of a normalised state; None without a state token."""
        raise NotImplementedError

    def denoise(self, prefix: PrefixCache, state: StateToken | None, x: Chunk, step: StepInputs) -> Chunk:
        """Return the velocity (noise - actions) at a noisy chunk, float32."""
        raise NotImplementedError

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

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> StepInputs:
        # One layer reads actions and time; the term of the time is the same for all actions.
        kernel, bias = read_linear(self.time_in)
        return StepInputs(self.embed_times(times) @ kernel[self.config.expert.width :] + bias, None)

    def embed_state(self, state: Float[Array, "b s"]) -> StateToken:
        padded = jnp.pad(state, ((0, 0), (0, self.config.max_state_dim - state.shape[1])))
        return apply_linear(self.state_in, padded)[:, None]

    def denoise(self, prefix: PrefixCache, state: StateToken | None, x: Chunk, step: StepInputs) -> Chunk:
        assert state is not None
        assert step.hidden is not None
        # In float32, as in LeRobot.
        actions = apply_linear(self.action_in, x)
        hidden = actions @ read_linear(self.time_in)[0][: actions.shape[-1]] + step.hidden
        actions = apply_linear(self.time_out, jax.nn.silu(hidden))
        tokens = jnp.concatenate((state, actions), axis=1)
        # The state sees no action, and the actions see each other.
        starts = np.arange(1 + x.shape[1]) < 2
        out = self.expert(tokens, prefix, starts)
        return apply_linear(self.action_out, out[:, 1:])


def read_linear(linear: nnx.Linear) -> tuple[Float[Array, "d e"], Float[Array, " e"]]:
    """Return kernel and bias in float32."""
    bias = linear.bias
    assert bias is not None
    return linear.kernel[...].astype(jnp.float32), bias[...].astype(jnp.float32)


def apply_linear(linear: nnx.Linear, x: Float[Array, "... d"]) -> Float[Array, "... e"]:
    """Apply a linear layer in float32."""
    kernel, bias = read_linear(linear)
    return x.astype(jnp.float32) @ kernel + bias


def act(
    config: Pi0Config, weights: Mapping[str, Array], observation: Observation, *, network: type[PiModel] = Pi0Model
) -> Chunk:
    """Return a normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    model = assemble(network, config, weights)
    prefix = model.encode(observation)
    schedule, steps, action = config.schedule, config.num_inference_steps, config.action.shape[0]
    key, noise = jax.random.key(config.noise_seed), config.make_noise(observation)
    predict = Partial(denoise, model, prefix, model.embed_state(observation.state))
    plan = observation.prefix
    if plan is not None and config.trained_delay:
        # Longer delays do not occur in training.
        width = config.max_action_dim - plan.actions.shape[-1]
        padded = jnp.pad(plan.actions.astype(jnp.float32), ((0, 0), (0, 0), (0, width)))
        begun = plan._replace(actions=padded, delay=jnp.minimum(plan.delay, config.trained_delay))
        still = jax.tree.map(lambda array: array[0], model.prepare_steps(np.zeros(1, np.float32)))
        predict = given(Partial(denoise_behind, model, prefix, still), begun, schedule)
    elif plan is not None:
        predict = continuing(predict, plan, schedule)
    extras = model.prepare_steps(schedule.euler_rows(steps).sigma)
    chunk = flow_euler(predict, noise.shape, key, schedule, steps=steps, extras=extras, start=noise)[..., :action]
    return chunk if plan is None else begin_with(plan, chunk)


def assemble(network: type[PiModel], config: Pi0Config, weights: Mapping[str, Array]) -> PiModel:
    """Return the network over serving weights."""
    return blueprint_of(network, config).assemble(weights)


def denoise(model: PiModel, prefix: PrefixCache, state: StateToken | None, x: Chunk, t: Any, step: StepInputs) -> Chunk:
    """Return the velocity of a noisy chunk at one step."""
    del t  # `step` contains the time.
    return model.denoise(prefix, state, x, step)


def list_stages(network: type[PiModel] = Pi0Model) -> tuple[ActStage, ...]:
    """Return parts of `act` that can be timed separately."""

    def look(
        config: Pi0Config, weights: Mapping[str, Array], observation: Observation, given: None
    ) -> Float[Array, "n m d"]:
        return assemble(network, config, weights).embed_images(observation)

    def read(
        config: Pi0Config, weights: Mapping[str, Array], observation: Observation, given: Float[Array, "n m d"]
    ) -> PrefixCache:
        return assemble(network, config, weights).encode(observation, given)

    def take_step(
        config: Pi0Config, weights: Mapping[str, Array], observation: Observation, given: PrefixCache
    ) -> Chunk:
        model = assemble(network, config, weights)
        times = config.schedule.euler_rows(config.num_inference_steps).sigma[:1]
        step = jax.tree.map(lambda rows: rows[0], model.prepare_steps(times))
        return model.denoise(given, model.embed_state(observation.state), config.make_noise(observation), step)

    return (
        ActStage("vision", look),
        ActStage("prefix", read),
        ActStage("denoise", take_step, count=lambda config: config.num_inference_steps),
    )


def denoise_behind(
    model: PiModel, prefix: PrefixCache, still: StepInputs, x: Chunk, t: Float[Array, "b t"], step: StepInputs
) -> Chunk:
    """Return the velocity of a chunk of pi0.5 whose first actions have no noise; `still` are the terms of time 0."""
    step = jax.tree.map(
        lambda noisy, clean: jnp.where((t == 0).reshape(*t.shape, *(1,) * noisy.ndim), clean, noisy), step, still
    )
    return model.denoise(prefix, None, x, step)

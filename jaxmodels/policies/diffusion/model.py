"""Diffusion Policy's model: encoders that make one condition, and a U-Net over time that it modulates (FiLM)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.tree_util import Partial
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.checkpoints.backbones import backbone_tensor
from jaxmodels.checkpoints.tensor_layouts import (
    POINTWISE,
    SAME,
    TIME_CONVOLUTION,
    UPSAMPLE,
    Tensor,
    module_tensor,
)
from jaxmodels.devices import use_exact_products
from jaxmodels.layers.norm import BatchNorm, GroupNorm
from jaxmodels.layers.vision import ResNet, SpatialSoftmax, assemble_resnets, measure_feature_map, prepare_resnets
from jaxmodels.policies import CONSTANTS, ActStage
from jaxmodels.policies.diffusion.config import CHANNELS_PER_GROUP, STEP_GROUPS, DiffusionConfig
from jaxmodels.quantization import multiply
from jaxmodels.samplers import ddim, ddpm
from jaxmodels.samplers.sampling import draw_for_each
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint_of

Chunk: TypeAlias = Float[Array, "b t a"]
Films: TypeAlias = Float[Array, "b f"]  # FiLM terms of all blocks, one after the other.
TEMPERATURE = 10_000
EVALUATION = 0  # Seed of the noise of an evaluation.


class ImageEncoder(nnx.Module):
    """Normalised images to vectors: crop, ResNet, keypoints, linear layer."""

    def __init__(self, config: DiffusionConfig, *, rngs: nnx.Rngs):
        self.config = config

        def group_norm(width: int) -> GroupNorm:
            return GroupNorm(width, width // CHANNELS_PER_GROUP)

        norm = group_norm if config.use_group_norm else BatchNorm
        self.backbone = ResNet(config.vision_backbone, norm=norm, rngs=rngs)
        count = config.spatial_softmax_num_keypoints
        rows = measure_feature_map(config.vision_backbone, config.encoder_size)
        self.pool = SpatialSoftmax(rows, self.backbone.width, count, rngs=rngs)
        self.out = nnx.Linear(2 * count, 2 * count, rngs=rngs)

    def __call__(self, images: Float[Array, "b h w 3"], crop: PRNGKeyArray | None = None) -> Float[Array, "b d"]:
        """Encode images; `crop` draws one place to crop all images, as in LeRobot, None crops the middle."""
        keypoints = self.pool(self.backbone(self.resize_and_crop(images, crop)))
        return jax.nn.relu(self.out(rearrange(keypoints, "b k xy -> b (k xy)")))

    def resize_and_crop(
        self, images: Float[Array, "b h w 3"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "b h2 w2 3"]:
        """Resize images with antialiasing, and crop them, as the config says."""
        size, crop = self.config.resize_shape, self.config.crop
        if size is not None and images.shape[1:3] != size:
            images = jax.image.resize(images, (images.shape[0], *size, 3), "linear")
        if crop is None:
            return images
        if key is not None and self.config.crop_is_random:
            room = jnp.asarray(images.shape[1:3]) - jnp.asarray(crop)
            top, left = jax.random.randint(key, (2,), 0, room + 1)
            return jax.lax.dynamic_slice(images, (0, top, left, 0), (images.shape[0], *crop, 3))
        # Halves are rounded to the even number, as in torchvision's CenterCrop.
        top, left = (round((whole - cut) / 2) for whole, cut in zip(images.shape[1:3], crop, strict=True))
        return images[:, top : top + crop[0], left : left + crop[1]]


def shift_time(x: Float[Array, "b t c"], size: int, stride: int = 1) -> Float[Array, "b t2 k_c"]:
    """Return the inputs of a convolution over time: ``size`` actions around each action, zeros beyond the ends."""
    pad, steps = size // 2, x.shape[1]
    x = jnp.pad(x, ((0, 0), (pad, pad), (0, 0)))
    return jnp.concatenate([x[:, i : i + steps : stride] for i in range(size)], axis=-1)


class TimeConvolution(nnx.Module):
    """Convolution over time as one product, padded so that the length stays except for the stride."""

    def __init__(self, inputs: int, outputs: int, size: int, *, stride: int = 1, rngs: nnx.Rngs):
        self.size, self.stride = size, stride
        bound = 1 / math.sqrt(inputs * size)  # torch's default initialization.
        self.kernel = nnx.Param(jax.random.uniform(rngs.params(), (size, inputs, outputs), minval=-bound, maxval=bound))
        self.bias = nnx.Param(jax.random.uniform(rngs.params(), (outputs,), minval=-bound, maxval=bound))

    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b t2 d"]:
        return multiply(shift_time(x, self.size, self.stride), self.kernel[...], 0) + self.bias[...]


class Upsample(nnx.Module):
    """Transposed convolution of size four that doubles the number of steps."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        bound = 1 / math.sqrt(4 * width)
        self.kernel = nnx.Param(jax.random.uniform(rngs.params(), (4, width, width), minval=-bound, maxval=bound))
        self.bias = nnx.Param(jax.random.uniform(rngs.params(), (width,), minval=-bound, maxval=bound))

    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b t2 c"]:
        around = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        before, after = around[:, :-2], around[:, 2:]
        # One product for each part of the kernel: slices of the kernel would be copied in each step.
        parts = jnp.einsum("kbtc,kcd->kbtd", jnp.stack((after, x, x, before)), self.kernel[...])
        both = jnp.stack((parts[1] + parts[3], parts[2] + parts[0]), axis=2)
        return rearrange(both, "b t two c -> b (t two) c") + self.bias[...]


class ConvolutionBlock(nnx.Module):
    """A convolution over time, a group norm and Mish."""

    def __init__(self, inputs: int, outputs: int, size: int, groups: int, *, rngs: nnx.Rngs):
        self.convolution = TimeConvolution(inputs, outputs, size, rngs=rngs)
        self.norm = GroupNorm(outputs, groups)

    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b t d"]:
        return jax.nn.mish(self.norm(self.convolution(x)[:, :, None])[:, :, 0])


class ResidualBlock(nnx.Module):
    """Two convolution blocks around a skip connection; between them the condition scales and shifts each channel."""

    def __init__(self, config: DiffusionConfig, inputs: int, outputs: int, condition: int, *, rngs: nnx.Rngs):
        self.has_scale = config.use_film_scale_modulation
        self.first = ConvolutionBlock(inputs, outputs, config.kernel_size, config.n_groups, rngs=rngs)
        self.film = nnx.Linear(condition, outputs * (2 if self.has_scale else 1), rngs=rngs)
        self.second = ConvolutionBlock(outputs, outputs, config.kernel_size, config.n_groups, rngs=rngs)
        self.skip = None if inputs == outputs else TimeConvolution(inputs, outputs, 1, rngs=rngs)

    def __call__(self, x: Float[Array, "b t c"], film: Float[Array, "b f"]) -> Float[Array, "b t d"]:
        """``film``: the block's terms of the step and the condition."""
        out = self.first(x)
        if self.has_scale:
            scale, shift = jnp.split(film[:, None], 2, axis=-1)
            out = out * scale + shift
        else:
            out = out + film[:, None]
        return self.second(out) + (x if self.skip is None else self.skip(x))


class Level(nnx.Module):
    """Two residual blocks, and a change of the length of the time axis for the next level."""

    def __init__(
        self,
        config: DiffusionConfig,
        inputs: int,
        outputs: int,
        condition: int,
        change: "TimeConvolution | Upsample | None",
        *,
        rngs: nnx.Rngs,
    ):
        self.first = ResidualBlock(config, inputs, outputs, condition, rngs=rngs)
        self.second = ResidualBlock(config, outputs, outputs, condition, rngs=rngs)
        self.change = change

    def __call__(self, x: Float[Array, "b t c"], films: Sequence[Float[Array, "b _"]]) -> Float[Array, "b t d"]:
        return self.second(self.first(x, films[0]), films[1])


class UNet(nnx.Module):
    """A noisy chunk, its timestep and a condition to the prediction: the noise, or the clean chunk."""

    def __init__(self, config: DiffusionConfig, condition: int, *, rngs: nnx.Rngs):
        width, widths, action = config.diffusion_step_embed_dim, config.down_dims, config.action.shape[0]
        self.step_width = width
        self.step_up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.step_down = nnx.Linear(4 * width, width, rngs=rngs)
        together = width + condition
        down = []
        for i, (before, after) in enumerate(zip((action, *widths[:-1]), widths, strict=True)):
            is_last = i == len(widths) - 1
            change = None if is_last else TimeConvolution(after, after, 3, stride=2, rngs=rngs)
            down.append(Level(config, before, after, together, change, rngs=rngs))
        self.down = nnx.List(down)
        self.middle = nnx.List([ResidualBlock(config, widths[-1], widths[-1], together, rngs=rngs) for _ in range(2)])
        self.up = nnx.List(
            [
                Level(config, 2 * after, before, together, Upsample(before, rngs=rngs), rngs=rngs)
                for before, after in reversed(list(pairwise(widths)))
            ]
        )
        self.last = ConvolutionBlock(widths[0], widths[0], config.kernel_size, STEP_GROUPS, rngs=rngs)
        self.out = TimeConvolution(widths[0], action, 1, rngs=rngs)

    @property
    def blocks(self) -> list[ResidualBlock]:
        """Residual blocks in the order of the forward pass."""
        down = [block for level in self.down for block in (level.first, level.second)]
        up = [block for level in self.up for block in (level.first, level.second)]
        return [*down, *self.middle, *up]

    def embed_steps(self, timesteps: Int[Array, " n"]) -> Float[Array, "n f"]:
        """Return the FiLM terms of timesteps; a block uses their sum with the terms of the condition."""
        half, terms = self.step_width // 2, []
        frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(TEMPERATURE) / (half - 1)))
        angle = timesteps[:, None].astype(jnp.float32) * frequencies
        waves = jnp.concatenate((jnp.sin(angle), jnp.cos(angle)), axis=-1).astype(self.out.kernel[...].dtype)
        steps = jax.nn.mish(self.step_down(jax.nn.mish(self.step_up(waves))))
        for block in self.blocks:
            assert block.film.bias is not None
            terms.append(steps @ block.film.kernel[...][: self.step_width] + block.film.bias[...])
        return jnp.concatenate(terms, axis=-1)

    def embed_condition(self, condition: Float[Array, "b c"]) -> Films:
        """Return the FiLM terms of the condition, whose rows are the last of a kernel, and all in serving weights."""
        activated, width = jax.nn.mish(condition), condition.shape[-1]
        return jnp.concatenate([activated @ block.film.kernel[...][-width:] for block in self.blocks], axis=-1)

    def __call__(self, x: Chunk, films: Films) -> Chunk:
        """Run the U-Net with the sum of the FiLM terms of the step and of the condition."""
        widths = [block.film.kernel.shape[1] for block in self.blocks]
        left, skips = iter(jnp.split(films, np.cumsum(widths)[:-1], axis=-1)), []
        for level in self.down:
            x = level(x, [next(left), next(left)])
            skips.append(x)
            x = x if level.change is None else level.change(x)
        for block in self.middle:
            x = block(x, next(left))
        for level in self.up:
            x = level(jnp.concatenate((x, skips.pop()), axis=-1), [next(left), next(left)])
            assert level.change is not None  # Every level upwards has a change.
            x = level.change(x)
        return self.out(self.last(x))


class DiffusionPolicyModel(nnx.Module):
    """Noise (or the chunk itself) in a noisy chunk, for a normalised observation."""

    def __init__(self, config: DiffusionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        del dtype  # The weights determine it.
        self.config = config
        cameras = len(config.cameras)
        if cameras and config.use_separate_rgb_encoder_per_camera:
            self.encoders = nnx.List([ImageEncoder(config, rngs=rngs) for _ in range(cameras)])
        elif cameras:
            self.encoder = ImageEncoder(config, rngs=rngs)
        self.unet = UNet(config, condition_width(config), rngs=rngs)

    def condition(self, observation: Observation, crop: PRNGKeyArray | None = None) -> Float[Array, "b c"]:
        """Return state, camera features and environment state of all observation steps as one vector.

        Args:
            crop: draws the place to crop, for each encoder; None crops the middle.
        """

        def with_time(x: Array) -> Array:
            return x[:, None] if self.config.n_obs_steps == 1 else x

        parts = [with_time(observation.state), *self._images([with_time(image) for image in observation.images], crop)]
        if observation.environment_state is not None:
            parts.append(with_time(observation.environment_state))
        return rearrange(jnp.concatenate(parts, axis=-1), "b o c -> b (o c)")

    def _images(
        self, images: list[Float[Array, "b o h w 3"]], crop: PRNGKeyArray | None
    ) -> list[Float[Array, "b o d"]]:
        if not images:
            return []
        batch, steps = images[0].shape[:2]
        if self.config.use_separate_rgb_encoder_per_camera:
            flat = [rearrange(image, "b o h w c -> (b o) h w c") for image in images]
            keys = [None] * len(flat) if crop is None else list(jax.random.split(crop, len(flat)))
            vectors = [encoder(image, key) for encoder, image, key in zip(self.encoders, flat, keys, strict=True)]
            return [rearrange(vector, "(b o) d -> b o d", b=batch) for vector in vectors]
        together = rearrange(jnp.stack(images), "n b o h w c -> (n b o) h w c")
        return list(rearrange(self.encoder(together, crop), "(n b o) d -> n b o d", b=batch, o=steps))

    def loss(
        self,
        observation: Observation,
        actions: Chunk,
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
        *,
        noise: Chunk | None = None,
        timesteps: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the training loss of LeRobot 0.6.1 and its parts: the mean squared error of the prediction.

        With `do_mask_loss_for_padding` the mean is over steps without padding.

        Args:
            actions: normalised, `horizon` steps from the oldest observation on.
            rngs: stream ``noise``, in training mode. None evaluates with crops in the middle, running statistics, and
                fixed noise and timesteps.
            noise, timesteps: replace the drawn ones.
        """
        batch, schedule = actions.shape[0], self.config.schedule
        crop = None
        if rngs is None:
            noise_key, spread = jax.random.key(EVALUATION), (jnp.arange(batch, dtype=jnp.float32) + 0.5) / batch
            drawn = jnp.floor(spread * schedule.num_train_timesteps).astype(jnp.int32)
        else:
            self.train()
            noise_key, crop = rngs.noise(), rngs.noise()
            drawn = jax.random.randint(rngs.noise(), (batch,), 0, schedule.num_train_timesteps)
        timesteps = drawn if timesteps is None else timesteps
        if noise is None:
            noise = jax.random.normal(noise_key, actions.shape, jnp.float32)
        films = self.unet.embed_steps(timesteps) + self.unet.embed_condition(self.condition(observation, crop))
        prediction = self.unet(schedule.add_noise(actions, noise, timesteps).astype(films.dtype), films)
        error = jnp.square(prediction.astype(jnp.float32) - schedule.target(actions, noise, timesteps))
        if not self.config.do_mask_loss_for_padding:
            value = error.mean()
        else:
            counts = jnp.where(is_pad, 0.0, 1.0)[..., None]
            value = (error * counts).sum() / jnp.maximum(counts.sum() * actions.shape[2], 1.0)
        return value, {"mse": value}


def condition_width(config: DiffusionConfig) -> int:
    """Return the width of the condition."""
    vectors = [part.shape[0] for part in (config.state, config.environment_state) if part is not None]
    return config.n_obs_steps * (sum(vectors) + 2 * config.spatial_softmax_num_keypoints * len(config.cameras))


STEP_FILMS = f"{CONSTANTS}step_films"  # FiLM terms of the sampler's steps in serving weights.


def prepare(config: DiffusionConfig, weights: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return the weights for serving on a platform of JAX, with ResNets of `prepare_resnets`.

    The FiLM terms of the sampler's steps are constants of a checkpoint, and replace the weights that only they read.
    """
    serving = {
        name: array[config.diffusion_step_embed_dim :] if name.endswith("film.kernel") else array
        for name, array in prepare_resnets(weights, platform).items()
        if not name.endswith("film.bias") and not name.startswith("unet.step_")
    }
    with use_exact_products(np.float32):
        return serving | {STEP_FILMS: _embed_steps(config.architecture(), dict(weights))}


@partial(jax.jit, static_argnums=0)  # It leaves out the weights that are not read.
def _embed_steps(config: DiffusionConfig, weights: Mapping[str, Array]) -> Float[Array, "n f"]:
    return assemble(config, weights).unet.embed_steps(jnp.asarray(config.schedule.timesteps(config.steps)))


def assemble(config: DiffusionConfig, weights: Mapping[str, Array]) -> DiffusionPolicyModel:
    """Return the network over serving weights."""
    return assemble_resnets(blueprint_of(DiffusionPolicyModel, config), weights)


def _encode(config: DiffusionConfig, weights: Mapping[str, Array], observation: Observation, given: None) -> Films:
    """Return the FiLM terms of the observation, once per chunk."""
    model = assemble(config, weights)
    return model.unet.embed_condition(model.condition(observation))


def _denoise(config: DiffusionConfig, weights: Mapping[str, Array], observation: Observation, given: Films) -> Chunk:
    """Return a normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    schedule, steps = config.schedule, config.steps
    key, noise, step_noise = jax.random.key(config.noise_seed), observation.noise, observation.step_noise
    first, each = jax.random.split(key)
    if noise is None:
        noise = draw_for_each(first, config.noise, given.shape[0])
    shape = noise.shape
    predict = Partial(_predict, assemble(config, weights).unet, given)
    of_steps = weights[STEP_FILMS] if STEP_FILMS in weights else _embed_steps(config, weights)
    options: dict[str, Any] = {"steps": steps, "start": noise, "extras": of_steps}
    if config.noise_scheduler_type == "DDIM":
        chunk = ddim(predict, shape, key, schedule, **options)
    else:
        if step_noise is None and steps > 1:
            step_noise = jax.random.normal(each, (steps - 1, 1, *config.noise), jnp.float32)
        chunk = ddpm(predict, shape, key, schedule, noise=step_noise, **options)
    start = config.n_obs_steps - 1
    return chunk[:, start : start + config.n_action_steps]


STAGES = (ActStage("encode", _encode), ActStage("denoise", _denoise, count=lambda config: config.steps))


def _predict(unet: UNet, of_condition: Films, x: Chunk, t: Any, of_step: Float[Array, " f"]) -> Chunk:
    """Return the U-Net's prediction for a noisy chunk at the step of ``of_step``."""
    del t  # `of_step` contains the time.
    films = (of_step.astype(jnp.float32) + of_condition.astype(jnp.float32)).astype(of_condition.dtype)
    return unet(x.astype(films.dtype), films)


# Parts of a ResNet in torch's Sequential.
PARTS = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}
BLOCKS = {"first": "0", "second": "1", "change": "2"}


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """Return the table for the weights of one config, from our names."""
    return tuple(_image_encoder(name) if name.startswith("encoder") else _unet(name) for name in names)


def _image_encoder(name: str) -> Tensor:
    """Return an encoder's tensor; all cameras share ``encoder.``, and ``encoders.0.`` belongs to the first camera."""
    first, _, rest = name.partition(".")
    ours, theirs = "encoder.", "diffusion.rgb_encoder."
    if first == "encoders":
        camera, _, rest = rest.partition(".")
        ours, theirs = f"encoders.{camera}.", f"diffusion.rgb_encoder.{camera}."
    part, _, inside = rest.partition(".")
    match part, inside:
        case "backbone", _:
            tensor = backbone_tensor(inside, ours=f"{ours}backbone.")
            head, _, tail = tensor.theirs.partition(".")
            return Tensor(f"{theirs}backbone.{PARTS[head]}.{tail}", tensor.ours, tensor.layout)
        case "pool", "grid":
            return Tensor(f"{theirs}pool.pos_grid", (name,), SAME)
        case "pool", _:
            return module_tensor(f"{theirs}pool.nets", name, POINTWISE)
    return module_tensor(f"{theirs}out", name)


def _unet(name: str) -> Tensor:
    stack, _, rest = name.removeprefix("unet.").partition(".")
    match stack:
        case "step_up" | "step_down":
            return module_tensor(f"diffusion.unet.diffusion_step_encoder.{1 if stack == 'step_up' else 3}", name)
        case "last":
            return _block("diffusion.unet.final_conv.0.block", name, rest)
        case "out":
            return module_tensor("diffusion.unet.final_conv.1", name, TIME_CONVOLUTION)
        case "middle":
            block, _, rest = rest.partition(".")
            return _residual(f"diffusion.unet.mid_modules.{block}", name, rest)
    level, part, rest = rest.split(".", 2)
    theirs = f"diffusion.unet.{stack}_modules.{level}.{BLOCKS[part]}"
    if part != "change":
        return _residual(theirs, name, rest)
    return module_tensor(theirs, name, UPSAMPLE if stack == "up" else TIME_CONVOLUTION)


def _residual(theirs: str, name: str, rest: str) -> Tensor:
    part, _, inside = rest.partition(".")
    if part == "film":
        return module_tensor(f"{theirs}.cond_encoder.1", name)
    if part == "skip":
        return module_tensor(f"{theirs}.residual_conv", name, TIME_CONVOLUTION)
    return _block(f"{theirs}.conv{1 if part == 'first' else 2}.block", name, inside)


def _block(theirs: str, name: str, rest: str) -> Tensor:
    """Return a tensor of a convolution or its group norm."""
    return module_tensor(f"{theirs}.{0 if rest.startswith('convolution.') else 1}", name, TIME_CONVOLUTION)

"""ACT's forward pass for serving, over folded weights (jaxmodels/policies/act/weights.py)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers import vision
from jaxmodels.layers.attention import attend
from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS
from jaxmodels.layers.norm import EPSILON, standardize
from jaxmodels.layers.vision import RESNETS, SmallCnn, max_pool, plan_blocks
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint

STACKED_PIXELS = 480 * 640


class Serving:
    """ACT's forward pass with config and weights as attributes."""

    def __init__(self, config: ActConfig, weights: Mapping[str, Array]):
        self._config = config
        self._weights = weights

    def __call__(self, observation: Observation) -> Float[Array, "b t a"]:
        """A normalised chunk for a normalised observation."""
        config, weights = self._config, self._weights
        x = self._tokens(observation)
        for i in range(config.n_encoder_layers):
            x = self._encoder_layer(f"encoder.layers.{i}", x)
        memory = self._norm("encoder.norm", x) if config.pre_norm else x
        batch = memory.shape[0]
        x = jnp.broadcast_to(weights["start"], (batch, config.chunk_size, config.dim_model))
        for i in range(config.n_decoder_layers):
            x = self._decoder_layer(f"decoder.layers.{i}", x, memory, is_first=i == 0)
        return self._linear("action_out", self._norm("decoder.norm", x))

    def _tokens(self, observation: Observation) -> Float[Array, "b n d"]:
        first = observation.images[0] if observation.images else observation.environment_state
        tokens = [jnp.broadcast_to(self._weights["latent"], (first.shape[0], 1, self._config.dim_model))]
        if observation.state is not None:
            tokens.append(self._linear("state_in", observation.state)[:, None])
        if observation.environment_state is not None:
            tokens.append(self._linear("environment_in", observation.environment_state)[:, None])
        return jnp.concatenate((*tokens, *self._image_tokens(observation.images)), axis=1)

    def _image_tokens(self, images: tuple[Float[Array, "b _ _ 3"], ...]) -> list[Float[Array, "b _ d"]]:
        """Tokens of each camera, (b, m, d) with an m of its own; cameras of one size go through the backbone together.

        Small frames as one batch, which reads the kernels once. Large ones on a CPU one after the other in a loop,
        whose body is compiled once: side by side their intermediates would not fit the cache. Accelerators take all as
        one batch: a loop is a row of small programs to them.
        """

        def look(together: Float[Array, "k b h w 3"]) -> Float[Array, "k b h2 w2 c"]:
            features = self._backbone(rearrange(together, "k b h w c -> (k b) h w c"))
            return rearrange(features, "(k b) h w c -> k b h w c", b=together.shape[1])

        def look_one_by_one(together: Float[Array, "k b h w 3"]) -> Float[Array, "k b h2 w2 c"]:
            return lax.map(self._backbone, together)

        tokens: dict[int, Array] = {}
        for size in dict.fromkeys(image.shape for image in images):
            indices = [i for i, image in enumerate(images) if image.shape == size]
            _, height, width = size[:3]
            together = jnp.stack([images[i] for i in indices])
            if len(indices) * height * width <= STACKED_PIXELS:
                features = look(together)
            else:
                features = lax.platform_dependent(together, cpu=look_one_by_one, default=look)
            flat = rearrange(features, "k b h w c -> k b (h w) c")
            tokens |= dict(zip(indices, self._linear("image_in", flat), strict=True))
        return [tokens[i] for i in range(len(images))]

    def _encoder_layer(self, layer: str, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        x = self._self_attention(f"{layer}.attention", f"{layer}.norm1", x)
        return self._feed_forward(f"{layer}.feed_forward", f"{layer}.norm2", x)

    def _decoder_layer(
        self, layer: str, x: Float[Array, "b t d"], memory: Float[Array, "b n d"], *, is_first: bool
    ) -> Float[Array, "b t d"]:
        weights, pre_norm = self._weights, self._config.pre_norm
        cross = f"{layer}.cross_attention"
        query = weights[f"{cross}.query.table"][None]
        if is_first:
            query = jnp.broadcast_to(query, (x.shape[0], *query.shape[1:]))
        else:
            x = self._self_attention(f"{layer}.self_attention", f"{layer}.norm1", x)
            normed = self._norm(f"{layer}.norm2", x) if pre_norm else x
            query = normed @ weights[f"{cross}.query.kernel"] + query
        key, value = jnp.split(
            memory @ weights[f"{cross}.memory.kernel"] + weights[f"{cross}.memory.table"], 2, axis=-1
        )
        x = x + self._linear(f"{cross}.out", self._attend(query, key, value))
        if not pre_norm:
            x = self._norm(f"{layer}.norm2", x)
        return self._feed_forward(f"{layer}.feed_forward", f"{layer}.norm3", x)

    def _self_attention(self, name: str, norm: str, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        weights, pre_norm = self._weights, self._config.pre_norm
        normed = self._norm(norm, x) if pre_norm else x
        query, key, value = jnp.split(
            normed @ weights[f"{name}.joint.kernel"] + weights[f"{name}.joint.table"], 3, axis=-1
        )
        x = x + self._linear(f"{name}.out", self._attend(query, key, value))
        return x if pre_norm else self._norm(norm, x)

    def _attend(
        self, query: Float[Array, "b n d"], key: Float[Array, "b m d"], value: Float[Array, "b m d"]
    ) -> Float[Array, "b n d"]:
        q, k, v = (rearrange(x, "b n (h k) -> b n h k", h=self._config.n_heads) for x in (query, key, value))
        return attend(q, k, v, scale=1.0).reshape(query.shape)  # the scale is folded into the weights

    def _feed_forward(self, name: str, norm: str, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        activation = LEROBOT_ACTIVATIONS[self._config.feedforward_activation].function
        normed = self._norm(norm, x) if self._config.pre_norm else x
        x = x + self._linear(f"{name}.down", activation(self._linear(f"{name}.up", normed)))
        return x if self._config.pre_norm else self._norm(norm, x)

    def _linear(self, name: str, x: Float[Array, "... c"]) -> Float[Array, "... d"]:
        return x @ self._weights[f"{name}.kernel"] + self._weights[f"{name}.bias"]

    def _norm(self, name: str, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        normal = standardize(x, EPSILON)
        return normal.astype(x.dtype) * self._weights[f"{name}.scale"] + self._weights[f"{name}.bias"]

    def _backbone(self, image: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 c"]:
        name, dilate = self._config.vision_backbone, self._config.replace_final_stride_with_dilation
        if name not in RESNETS:
            plan = blueprint(lambda rngs: SmallCnn(rngs=rngs))
            return plan.assemble({key: self._weights[f"backbone.{key}"] for key in plan.shapes})(image)
        x = max_pool(jax.nn.relu(self._convolve("backbone.stem", image, stride=2)))
        for block in plan_blocks(name, dilate):
            prefix = f"backbone.stages.{block.stage}.{block.position}"
            skip = self._convolve(f"{prefix}.skip", x, stride=block.stride) if block.projects else x
            last = len(block.convolutions) - 1
            for i, (_, _, stride, dilation) in enumerate(block.convolutions):
                x = self._convolve(f"{prefix}.convolutions.{i}", x, stride=stride, dilation=dilation)
                x = jax.nn.relu(x + skip if i == last else x)
        return x

    def _convolve(
        self, name: str, x: Float[Array, "b h w c"], *, stride: int = 1, dilation: int = 1
    ) -> Float[Array, "b h2 w2 c2"]:
        kernel, bias = self._weights[f"{name}.kernel"], self._weights[f"{name}.bias"]
        if kernel.ndim == 3:  # prepared for Winograd
            return vision.convolve_winograd(x, kernel) + bias
        return vision.convolve(x, kernel, stride, dilation) + bias


def act(config: ActConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """Compute a normalised chunk from a normalised observation with folded weights."""
    return Serving(config, weights)(observation)

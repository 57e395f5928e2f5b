"""The layers of a 2D transformer, and the pass through them: what JAX traces.

Source: diffusers 0.42.1, models/transformers/transformer_2d.py.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.layers.feed_forward import tanh_gelu
from jaxmodels.layers.norm import LayerNorm
from jaxmodels.transformer2d import lora
from jaxmodels.transformer2d.arguments import Arguments, Timing
from jaxmodels.transformer2d.attention import Dtypes, linear
from jaxmodels.transformer2d.block import Biases, Seen
from jaxmodels.transformer2d.conditioning import Conditioning, Modulations, spread_context
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.ends import (
    LatentEmbedding,
    PatchEmbedding,
    from_patches,
    input_norm,
    log_probabilities,
    patch_output,
)
from jaxmodels.transformer2d.masks import to_bias
from jaxmodels.transformer2d.modulation import CLASS_DROPOUT, Affine, Mlp, Modulation, TimeSingle
from jaxmodels.transformer2d.stack import (
    Execution,
    embed_in_first_layer,
    head_affine,
    look_at,
    modulate_by_class,
    modulate_by_table,
    modulate_by_time,
    run_blocks,
    stack_blocks,
)


class Network(nnx.Module):
    """Weights, and passes over arguments that were checked already (`Transformer2DModel` is what callers use)."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, execution: Execution, *, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtypes.compute
        self.execution = execution
        self._build_ends(dtypes, rngs)
        self.transformer_blocks = stack_blocks(config, dtypes, rngs)

    def _build_ends(self, dtypes: Dtypes, rngs: nnx.Rngs) -> None:
        config, width = self.config, self.config.inner_dim
        if config.kind == "continuous":
            self.norm = input_norm(config, dtypes)
            self.proj_in = linear(config.in_channels or 0, width, ("channels", "embed"), dtypes, rngs=rngs)
            self.proj_out = linear(width, config.outputs or 0, ("embed", "channels"), dtypes, rngs=rngs)
        elif config.kind == "discrete":
            self.latent_image_embedding = LatentEmbedding(config, dtypes, rngs=rngs)
            self.norm_out = LayerNorm(width, param_dtype=dtypes.parameters)
            classes = (config.num_vector_embeds or 0) - 1
            self.out = linear(width, classes, ("embed", "vocabulary"), dtypes, rngs=rngs)
        else:
            self._build_patches(dtypes, rngs)

    def _build_patches(self, dtypes: Dtypes, rngs: nnx.Rngs) -> None:
        config, width = self.config, self.config.inner_dim
        self.pos_embed = PatchEmbedding(config, dtypes, rngs=rngs)
        if config.norm_type == "ada_norm_single":
            self.adaln_single = TimeSingle(width, config.has_conditions, dtypes, rngs=rngs)
            table = nnx.initializers.normal(width**-0.5)(rngs.params(), (2, width), dtypes.parameters)
            self.scale_shift_table = nnx.Param(table, axes=(None, "embed"))
            self.proj_out = patch_output(config, dtypes, rngs=rngs)
        else:
            self.proj_out_1 = linear(width, 2 * width, ("embed", "mlp"), dtypes, rngs=rngs)
            self.proj_out_2 = patch_output(config, dtypes, rngs=rngs)
        if config.caption_channels is not None:
            self.caption_projection = Mlp(config.caption_channels, width, dtypes, rngs=rngs)

    def forward(
        self,
        arguments: Arguments,
        conditioning: Conditioning | None = None,
        key: Array | None = None,
        layers: Sequence[Any] | None = None,
    ) -> Float[Array, "..."]:
        """The pass.

        Args:
            layers: each block's weights by itself, when they do not lie in one array each.
        """
        if arguments.scale is not None:
            layers = None if layers is None else [lora.scaled(layer, arguments.scale) for layer in layers]
            return self._scaled(arguments.scale).forward(arguments._replace(scale=None), conditioning, key, layers)
        hidden = arguments.hidden_states
        timing = Timing(arguments.timestep, arguments.class_labels, arguments.conditions)
        keys = (None, None) if key is None else jax.random.split(key)
        if conditioning is None:
            modulations, seen = self.modulate(timing, keys[0]), Seen()
            context = arguments.encoder_hidden_states
            context = None if context is None else self._project_captions(context)
        else:
            seen = spread_context(conditioning.context, hidden.shape[0])
            modulations, context = conditioning.modulations, None
        biases = Biases(
            *(
                None if mask is None else to_bias(mask, hidden.shape[0], self.config.num_attention_heads)
                for mask in (arguments.attention_mask, arguments.encoder_attention_mask)
            )
        )
        x = self._read_input(hidden)
        x = run_blocks(
            self.transformer_blocks,
            x,
            modulations.blocks,
            seen,
            biases,
            self.execution,
            context=context,
            objects=arguments.objects,
            key=keys[1],
            layers=layers,
        )
        return self._write_output(x, modulations.head, hidden)

    def _read_input(self, x: Array) -> Float[Array, "b n d"]:
        if self.config.kind == "continuous":
            pixels = self.norm(x.transpose(0, 2, 3, 1))
            return self.proj_in(pixels.reshape(x.shape[0], -1, x.shape[1]))
        return self.latent_image_embedding(x) if self.config.kind == "discrete" else self.pos_embed(x)

    def _write_output(self, x: Float[Array, "b n d"], head: Affine | None, hidden: Array) -> Float[Array, "..."]:
        if self.config.kind == "continuous":
            pixels = self.proj_out(x).swapaxes(1, 2)
            return pixels.reshape(*pixels.shape[:2], *hidden.shape[2:]) + hidden
        if self.config.kind == "discrete":
            return log_probabilities(x, self.norm_out, self.out)
        assert head is not None  # patches have a norm type that makes one
        out = self.proj_out if self.config.norm_type == "ada_norm_single" else self.proj_out_2
        patch = self.config.patch_size or 1
        return from_patches(x, head, out, patch, hidden.shape[2] // patch)

    def _project_captions(self, context: Float[Array, "..."]) -> Float[Array, "b m c"]:
        """encoder_hidden_states as the blocks want them: captions are projected, and may have an axis too many."""
        if self.config.kind != "patches" or self.config.caption_channels is None:
            return context
        projected = self.caption_projection(context, tanh_gelu)
        return projected.reshape(projected.shape[0], -1, projected.shape[-1])

    def _scaled(self, scale: Array) -> "Network":
        """This model with adapters that count `scale` times as much."""
        graph, state = nnx.split(self)
        return nnx.merge(graph, lora.scaled(state, scale))

    def look_at(self, context: Array, scale: Array | None = None) -> Seen:
        if scale is not None:
            return self._scaled(scale).look_at(context)
        return look_at(self.transformer_blocks, self._project_captions(context))

    def modulate(self, timing: Timing, key: Array | None = None, scale: Array | None = None) -> Modulations:
        if scale is not None:
            return self._scaled(scale).modulate(timing, key)
        blocks, config = self.transformer_blocks, self.config
        if timing.timestep is None:
            return Modulations(Modulation())
        if config.block_norm == "ada_norm":
            return Modulations(modulate_by_time(blocks, timing))
        if config.block_norm == "ada_norm_zero":
            timing = timing if key is None else self._drop_labels(timing, key)
            modulation = modulate_by_class(blocks, timing)
            if config.kind != "patches":
                return Modulations(modulation)
            parts = self.proj_out_1(jax.nn.silu(embed_in_first_layer(blocks, timing)))
            return Modulations(modulation, head_affine(parts.reshape(parts.shape[0], 2, -1)))
        if config.kind != "patches":
            return Modulations(modulate_by_table(blocks, timing.timestep))
        parts, embedded = self.adaln_single(timing.timestep, timing.conditions)
        head = self.scale_shift_table[...].astype(jnp.float32) + embedded[:, None]
        return Modulations(modulate_by_table(blocks, parts), head_affine(head))

    def _drop_labels(self, timing: Timing, key: Array) -> Timing:
        """Some labels become the null class; once per element, where diffusers rolls the dice again in every block."""
        labels = timing.class_labels
        assert labels is not None
        drops = jax.random.bernoulli(key, CLASS_DROPOUT, labels.shape)
        null = jnp.asarray(self.config.num_embeds_ada_norm, labels.dtype)
        return timing._replace(class_labels=jnp.where(drops, null, labels))

"""Transformer2DModel: diffusers' 2D transformer for continuous, discrete and patched input.

`Transformer2DConfig` (config.py) declares the constructor arguments, which every other module of this package reads.
Source: diffusers 0.42.1, models/transformers/transformer_2d.py.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmodels.devices import find_device, read_dtype, use_exact_products
from jaxmodels.errors import ConfigError
from jaxmodels.hub import fetch
from jaxmodels.layers.feed_forward import tanh_gelu
from jaxmodels.layers.norm import GroupNorm, LayerNorm, standardize
from jaxmodels.transformer2d import diffusers_folder, lora
from jaxmodels.transformer2d.arguments import (
    Arguments,
    ArrayLike,
    Timing,
    check_context,
    check_no_context,
    read_arguments,
    read_scale,
    read_timing,
)
from jaxmodels.transformer2d.attention import Dtypes, linear, to_bias
from jaxmodels.transformer2d.block import (
    CLASS_DROPOUT,
    Biases,
    BlockAffine,
    BlockKeyValues,
    BlockModulation,
    Conditioning,
    Execution,
    Modulations,
    TimeAndClassNorm,
    TimeNorm,
    TimeSingle,
    for_each_layer,
    modulate_by_table,
    run_blocks,
    spread_context,
    stack_blocks,
)
from jaxmodels.transformer2d.compiled import CompiledTransformer2D
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.embeddings import LatentEmbedding, Mlp, PatchEmbedding
from jaxmodels.weights import blueprint, flatten

CONTINUOUS_EPSILON = 1e-6  # Epsilon of the group norm of continuous input.
HEAD_EPSILON = 1e-6  # Epsilon of the norm before a patched output.


class Transformer2DModelOutput(NamedTuple):
    """Output of the model: attribute ``sample``, also as ``output["sample"]`` and ``output[0]``.

    Attributes:
        sample: (batch, channel, height, width), or for discrete input the log-probabilities
            (batch, classes - 1, latent pixels) of every class but the masked one.

    Example:
        >>> output = Transformer2DModelOutput(jnp.zeros((1, 4, 8, 8)))
        >>> output["sample"].shape
        (1, 4, 8, 8)
    """

    sample: Float[Array, "..."]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self._fields.index(key) if isinstance(key, str) else key)


class Transformer2DModel(nnx.Module):
    """The 2D transformer with diffusers' arguments and numbers, compiled.

    Weights of all layers are stacked on a leading axis. Queries, keys and values share one matrix. Every array has
    logical names of its axes (``nnx.Variable`` metadata ``axes``; see `jaxmodels.devices`).

    The model differs from diffusers where diffusers crashes or computes garbage: with ada_norm each element may have
    its own timestep; patched images may have any shape; masks of one element broadcast over the batch; training drops
    the class label of an element once, not independently in each block.

    Args:
        arguments, named: fields of `Transformer2DConfig`, in the same order or by name.
        dtype: dtype of the computation. Norms, softmax and modulations are always float32.
        param_dtype: dtype of the weights; `dtype` when None. Use float32 for training in bfloat16.
        scan_layers: run one compiled block over all layers, so that compile time does not grow with their number.
        remat: recompute each block in the backward pass instead of keeping its activations.
        rngs: random numbers for the initial weights; seed 0 when None.

    Raises:
        ConfigError: the arguments contradict each other.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxmodels import Transformer2DModel
        >>> model = Transformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=8, norm_num_groups=2)
        >>> model(jnp.zeros((1, 8, 4, 4))).sample.shape
        (1, 8, 4, 4)
    """

    def __init__(
        self,
        *arguments: Any,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike | None = None,
        scan_layers: bool = True,
        remat: bool = False,
        rngs: nnx.Rngs | None = None,
        **named: Any,
    ):
        self.config = config = Transformer2DConfig(*arguments, **named)
        dtypes = Dtypes(read_dtype(dtype), read_dtype(dtype if param_dtype is None else param_dtype))
        self.dtype = dtypes.compute
        self.execution = Execution(scan_layers, remat)
        rngs = nnx.Rngs(0) if rngs is None else rngs
        width = config.inner_dim
        if config.kind == "continuous":
            channels, groups = config.in_channels or 0, config.norm_num_groups
            self.norm = GroupNorm(channels, groups, epsilon=CONTINUOUS_EPSILON, param_dtype=dtypes.parameters)
            self.proj_in = linear(channels, width, ("channels", "embed"), dtypes, rngs=rngs)
            self.proj_out = linear(width, config.outputs or 0, ("embed", "channels"), dtypes, rngs=rngs)
        elif config.kind == "discrete":
            self.latent_image_embedding = LatentEmbedding(config, dtypes, rngs=rngs)
            self.norm_out = LayerNorm(width, param_dtype=dtypes.parameters)
            classes = (config.num_vector_embeds or 0) - 1
            self.out = linear(width, classes, ("embed", "vocabulary"), dtypes, rngs=rngs)
        else:
            pixels = (config.patch_size or 1) ** 2 * (config.outputs or 0)
            self.pos_embed = PatchEmbedding(config, dtypes, rngs=rngs)
            if config.norm_type == "ada_norm_single":
                self.adaln_single = TimeSingle(width, config.has_conditions, dtypes, rngs=rngs)
                table = nnx.initializers.normal(width**-0.5)(rngs.params(), (2, width), dtypes.parameters)
                self.scale_shift_table = nnx.Param(table, axes=(None, "embed"))
                self.proj_out = linear(width, pixels, ("embed", "channels"), dtypes, rngs=rngs)
            else:
                self.proj_out_1 = linear(width, 2 * width, ("embed", "mlp"), dtypes, rngs=rngs)
                self.proj_out_2 = linear(width, pixels, ("embed", "channels"), dtypes, rngs=rngs)
            if config.caption_channels is not None:
                self.caption_projection = Mlp(config.caption_channels, width, dtypes, rngs=rngs)
        self.transformer_blocks = stack_blocks(config, dtypes, rngs)

    def __call__(
        self,
        hidden_states: ArrayLike,
        encoder_hidden_states: ArrayLike = None,
        timestep: ArrayLike = None,
        added_cond_kwargs: Mapping[str, ArrayLike] | None = None,
        class_labels: ArrayLike = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        attention_mask: ArrayLike = None,
        encoder_attention_mask: ArrayLike = None,
        return_dict: bool = True,
        *,
        conditioning: Conditioning | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Transformer2DModelOutput | tuple[Array]:
        """Run a forward pass.

        Values are checked on the host, then one program per set of shapes runs, which is compiled at its first call.
        Values cannot be checked inside a ``jit`` or ``grad`` of the caller: JAX clips indices that are out of range.

        Args:
            hidden_states: floats (batch, channel, height, width); discrete: integers (batch, latent pixels).
            encoder_hidden_states: (batch, tokens, cross_attention_dim), or captions; without them cross-attention is
                self-attention. A model without cross-attention ignores them, like diffusers.
            timestep: with ada_norm an integer below num_embeds_ada_norm; with ada_norm_zero and ada_norm_single any
                number; scalar or (batch,). Continuous or discrete input with ada_norm_single takes the embedded
                timestep (batch, 6 inner_dim).
            added_cond_kwargs: {"resolution": (batch, 2), "aspect_ratio": (batch, 1)}, if the model has them.
            class_labels: integers (batch,), for ada_norm_zero; num_embeds_ada_norm itself means no class.
            cross_attention_kwargs: {"gligen": {"objs": (batch, objects, cross_attention_dim)}} for gated models;
                {"scale": number} for models with low-rank adapters (jaxmodels/transformer2d/lora.py), default 1.
            attention_mask: for the first attention of each block, whose keys are the tokens of `hidden_states` (with
                only_cross_attention of `encoder_hidden_states`). (batch, keys): 1 keeps, 0 adds -10000 to the scores.
                (batch, 1 or tokens, keys) and (batch, heads, tokens, keys): added to the scores; booleans keep true.
            encoder_attention_mask: the same for the second attention, whose keys are `encoder_hidden_states`.
            return_dict: return a `Transformer2DModelOutput` instead of a tuple.
            conditioning: result of `prepare`, which replaces the arguments of `prepare`.
            rngs: enables dropout; its stream ``dropout`` is used.

        Returns:
            The sample. Discrete input gives log-probabilities in float32.

        Raises:
            InputError: an argument has the wrong shape, dtype or value.
        """
        arguments = read_arguments(
            self.config,
            self.dtype,
            hidden_states,
            encoder_hidden_states,
            timestep,
            added_cond_kwargs,
            class_labels,
            cross_attention_kwargs,
            attention_mask,
            encoder_attention_mask,
            conditioning,
        )
        key = None if rngs is None else rngs.dropout()
        sample = self._run(arguments.scale, "forward", arguments, conditioning, key)
        return Transformer2DModelOutput(sample) if return_dict else (sample,)

    def forward(
        self,
        arguments: Arguments,
        conditioning: Conditioning | None = None,
        key: Array | None = None,
        layers: Sequence[Any] | None = None,
    ) -> Float[Array, "..."]:
        """Run the forward pass over checked arguments.

        Args:
            key: enables dropout.
            layers: weights of each block, if they are not stacked.
        """
        batch, heads = arguments.hidden_states.shape[0], self.config.num_attention_heads
        keys = (None, None) if key is None else jax.random.split(key)
        # 1. Embed the input.
        x = self._embed(arguments.hidden_states)
        # 2. Compute modulations by timesteps and classes, unless `prepare` did.
        if conditioning is None:
            timing = Timing(arguments.timestep, arguments.class_labels, arguments.conditions)
            modulations, key_values = self.modulate(timing, keys[0]), BlockKeyValues()
            context = arguments.encoder_hidden_states
            context = None if context is None else self._project_captions(context)
        else:
            modulations, context = conditioning.modulations, None
            key_values = spread_context(conditioning.context, batch)
        masks = (arguments.attention_mask, arguments.encoder_attention_mask)
        biases = Biases(*(None if mask is None else to_bias(mask, batch, heads) for mask in masks))
        # 3. Run the blocks.
        x = run_blocks(
            self.transformer_blocks,
            x,
            modulations.blocks,
            key_values,
            biases,
            self.execution,
            context=context,
            objects=arguments.objects,
            key=keys[1],
            layers=layers,
        )
        # 4. Convert the tokens to the output.
        return self._write_output(x, modulations.head, arguments.hidden_states)

    def _embed(self, x: Array) -> Float[Array, "b n d"]:
        if self.config.kind == "continuous":
            pixels = self.norm(x.transpose(0, 2, 3, 1))
            return self.proj_in(pixels.reshape(x.shape[0], -1, x.shape[1]))
        return self.latent_image_embedding(x) if self.config.kind == "discrete" else self.pos_embed(x)

    def _write_output(self, x: Float[Array, "b n d"], head: BlockAffine | None, hidden: Array) -> Float[Array, "..."]:
        if self.config.kind == "continuous":
            pixels = self.proj_out(x).swapaxes(1, 2)
            return pixels.reshape(*pixels.shape[:2], *hidden.shape[2:]) + hidden
        if self.config.kind == "discrete":
            logits = self.out(self.norm_out(x)).astype(jnp.float32)
            return jax.nn.log_softmax(logits, axis=-1).swapaxes(1, 2)
        assert head is not None  # The norm types of patches always have a head.
        out = self.proj_out if self.config.norm_type == "ada_norm_single" else self.proj_out_2
        patch = self.config.patch_size or 1
        pixels = out(head(standardize(x, HEAD_EPSILON)).astype(x.dtype))
        rows = hidden.shape[2] // patch
        return rearrange(pixels, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=patch, q=patch)

    def _project_captions(self, context: Float[Array, "..."]) -> Float[Array, "b m c"]:
        """Return encoder_hidden_states for the blocks: captions are projected."""
        if self.config.kind != "patches" or self.config.caption_channels is None:
            return context
        projected = self.caption_projection(context, tanh_gelu)
        return projected.reshape(projected.shape[0], -1, projected.shape[-1])

    def scale_adapters(self, scale: Array | None) -> "Transformer2DModel":
        """Return this model with its low-rank adapters multiplied by `scale`; None leaves them as they are."""
        if scale is None:
            return self
        graph, state = nnx.split(self)
        return nnx.merge(graph, lora.scale_adapters(state, scale))

    def prepare(
        self,
        encoder_hidden_states: ArrayLike = None,
        timestep: ArrayLike = None,
        added_cond_kwargs: Mapping[str, ArrayLike] | None = None,
        class_labels: ArrayLike = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Conditioning:
        """Compute the conditioning, which does not depend on `hidden_states`; arguments as in a call.

        A sampler computes the context once, ``model.prepare_context(text)``, and the modulations of all its steps
        before its loop, ``jax.jit(jax.vmap(model.prepare_modulations))(timesteps)``. A conditioning of one element
        serves all elements of a batch.
        """
        return Conditioning(
            self.prepare_context(encoder_hidden_states, cross_attention_kwargs),
            self.prepare_modulations(timestep, class_labels, added_cond_kwargs, cross_attention_kwargs),
        )

    def prepare_context(
        self, encoder_hidden_states: ArrayLike = None, cross_attention_kwargs: Mapping[str, Any] | None = None
    ) -> BlockKeyValues:
        """Return keys and values of `encoder_hidden_states` in every layer; captions are projected first."""
        if encoder_hidden_states is None:
            check_no_context(self.config)
            return BlockKeyValues()
        if not (self.config.has_cross_attention or self.config.only_cross_attention):
            return BlockKeyValues()
        context = jnp.asarray(encoder_hidden_states)
        check_context(self.config, context)
        return self._run(read_scale(cross_attention_kwargs), "project_context", context.astype(self.dtype))

    def prepare_modulations(
        self,
        timestep: ArrayLike = None,
        class_labels: ArrayLike = None,
        added_cond_kwargs: Mapping[str, ArrayLike] | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Modulations:
        """Return modulations of all layers by timesteps, classes and conditions; arguments as in a call."""
        timing = read_timing(self.config, None, timestep, class_labels, added_cond_kwargs)
        return self._run(read_scale(cross_attention_kwargs), "modulate", timing)

    def project_context(self, context: Array) -> BlockKeyValues:
        """Return keys and values of a checked context in each layer."""
        context = self._project_captions(context)
        graph, stacked = nnx.split(self.transformer_blocks)
        # One layer at a time, because a product with a batch of matrices is slower on a CPU.
        return lax.map(lambda weights: nnx.merge(graph, weights).project_context(context), stacked)

    def modulate(self, timing: Timing, key: Array | None = None) -> Modulations:
        """Return modulations of all layers; `key` enables the dropout of class labels."""
        blocks, config = self.transformer_blocks, self.config
        if timing.timestep is None:
            return Modulations(BlockModulation())
        if isinstance(blocks.norm1, TimeNorm):
            second = for_each_layer(blocks.norm2, timing.timestep) if isinstance(blocks.norm2, TimeNorm) else None
            return Modulations(BlockModulation(for_each_layer(blocks.norm1, timing.timestep), None, second))
        if isinstance(blocks.norm1, TimeAndClassNorm):
            timing = timing if key is None else self._drop_labels(timing, key)
            modulation = for_each_layer(blocks.norm1, timing.timestep, timing.class_labels)
            if config.kind != "patches":
                return Modulations(modulation)
            # The head uses the embedding of the first layer.
            embedded = for_each_layer(blocks.norm1.emb, timing.timestep, timing.class_labels, count=1)[0]
            parts = self.proj_out_1(jax.nn.silu(embedded))
            return Modulations(modulation, head_affine(parts.reshape(parts.shape[0], 2, -1)))
        if config.kind != "patches":
            return Modulations(modulate_by_table(blocks, timing.timestep))
        parts, embedded = self.adaln_single(timing.timestep, timing.conditions)
        head = self.scale_shift_table[...].astype(jnp.float32) + embedded[:, None]
        return Modulations(modulate_by_table(blocks, parts), head_affine(head))

    def _drop_labels(self, timing: Timing, key: Array) -> Timing:
        """Replace some labels by the null class, once per element; diffusers draws again in each block."""
        labels = timing.class_labels
        assert labels is not None
        drops = jax.random.bernoulli(key, CLASS_DROPOUT, labels.shape)
        null = jnp.asarray(self.config.num_embeds_ada_norm, labels.dtype)
        return timing._replace(class_labels=jnp.where(drops, null, labels))

    def compile(self, hidden_states: ArrayLike, **others: Any) -> CompiledTransformer2D:
        """Compile the forward pass ahead of time, over the model's current weights.

        Args:
            hidden_states: an array, or a `jax.ShapeDtypeStruct`; only its shape and dtype matter.
            others: the other arguments of the calls, or their shapes.
        """
        compiled = CompiledTransformer2D(self)
        compiled.compile(hidden_states, **others)
        return compiled

    @classmethod
    def from_config(cls, config: Transformer2DConfig | Mapping[str, Any], **options: Any) -> "Transformer2DModel":
        """Return a model with random weights from a config, or from a parsed ``config.json``.

        Args:
            options: keyword arguments of the class that are not in the config, such as ``dtype``.
        """
        known = config if isinstance(config, Transformer2DConfig) else Transformer2DConfig.from_json(config)
        return cls(**known.to_json(), **options)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        subfolder: str | None = None,
        revision: str | None = None,
        dtype: DTypeLike | None = None,
        *,
        variant: str | None = None,
        prefix: str | None = None,
        config: Transformer2DConfig | None = None,
        device: str | None = None,
        param_dtype: DTypeLike | None = None,
        on_progress: Callable[[str], None] | None = None,
        inspect: Callable[[Path], None] = lambda folder: None,
        **options: Any,
    ) -> "Transformer2DModel":
        """Load a diffusers checkpoint: ``config.json`` and ``diffusion_pytorch_model.safetensors``, whole or in shards.

        Folders of `DiTTransformer2DModel` and `PixArtTransformer2DModel` are also read.

        Args:
            path_or_repo: folder, or repo id like ``owner/name``.
            subfolder: folder of the model in a pipeline's folder, e.g. ``transformer``.
            revision: branch, tag or commit of a repo.
            dtype: dtype of the computation and of the weights: float32 (when None), bfloat16 or float16.
            variant: variant of the files, e.g. ``fp16``.
            prefix: name of a transformer in a Stable Diffusion UNet, e.g. ``down_blocks.0.attentions.1``.
            config: replaces the folder's config, e.g. for a prefix of an unsupported model.
            device: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``; JAX's first choice when None.
            param_dtype: see the class.
            on_progress: receives ``downloading``, ``reading``, ``ready``.
            inspect: called with the folder of the model before it is read; raises CheckpointError to refuse it.
            options: ``scan_layers`` and ``remat``, see the class.

        Raises:
            HubError: the repo cannot be fetched.
            ConfigError: the config, dtype or device is not valid.
            CheckpointError: files are missing or malformed, or do not fit the config (`WeightsMismatch`).
        """
        dtype, stored = read_dtype(dtype), read_dtype(dtype if param_dtype is None else param_dtype)
        report = on_progress or (lambda stage: None)
        where = find_device(device)
        folder = Path(os.path.expanduser(path_or_repo))
        if not str(path_or_repo) or not folder.is_dir():
            files = diffusers_folder.files(subfolder=subfolder, variant=variant)
            folder = fetch(str(path_or_repo), revision, files=files, on_progress=report, subfolder=subfolder)
        elif revision is not None:
            raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
        report("reading")
        inspect(diffusers_folder.find_folder(folder, subfolder))
        config, weights = diffusers_folder.read(
            folder, subfolder=subfolder, variant=variant, prefix=prefix, config=config, dtype=stored
        )
        on_device = {name: jax.device_put(weights.pop(name), where) for name in list(weights)}
        report("ready")
        options |= {"dtype": dtype, "param_dtype": stored}
        plan = blueprint(lambda rngs: cls.from_config(config, **options, rngs=rngs))
        return plan.assemble(on_device)

    def save_pretrained(
        self, folder: str | Path, *, variant: str | None = None, max_shard_bytes: int | None = None
    ) -> None:
        """Write a folder that diffusers loads, in the dtype of the weights.

        Args:
            max_shard_bytes: larger models are written in shards; 10 GB, as in diffusers, when None.

        Raises:
            ConfigError: the model has low-rank adapters.
            OSError: it cannot be written; existing files stay unchanged.
        """
        if lora.is_adapted(self):
            raise ConfigError("the model has adapters, which diffusers keeps apart; lora.fuse or lora.detach them")
        weights = flatten(self)
        diffusers_folder.write(Path(folder), self.config, weights, variant=variant, max_shard_bytes=max_shard_bytes)

    def _run(self, scale: Array | None, method: str, *arguments: Any) -> Any:
        """Call a method with adapters multiplied by `scale`, as one compiled program unless the caller is traced."""
        graph, state = nnx.split(self)
        leaves = jax.tree.leaves((state, scale, arguments))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return getattr(self.scale_adapters(scale), method)(*arguments)
        return _run_compiled(graph, method, state, scale, *arguments)


def head_affine(parts: Float[Array, "b 2 d"]) -> BlockAffine:
    """Return shift and scale of a patched model's head; the parts have the shift first, as in diffusers' files."""
    shift, scale = jnp.split(parts.astype(jnp.float32), 2, axis=1)
    return BlockAffine(scale, shift)


@partial(jax.jit, static_argnums=(0, 1))
def _run_compiled(
    graph: nnx.GraphDef[Transformer2DModel], method: str, state: Any, scale: Array | None, *arguments: Any
) -> Any:
    model = nnx.merge(graph, state).scale_adapters(scale)
    with use_exact_products(model.dtype):
        return getattr(model, method)(*arguments)

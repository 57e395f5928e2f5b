"""Transformer2DModel: diffusers' interface of the 2D transformer."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmodels.devices import find_device, read_dtype, use_exact_products
from jaxmodels.errors import ConfigError
from jaxmodels.hub import fetch
from jaxmodels.transformer2d import diffusers_folder, lora
from jaxmodels.transformer2d.arguments import (
    ArrayLike,
    check_context,
    check_no_context,
    read_arguments,
    read_scale,
    read_timing,
)
from jaxmodels.transformer2d.attention import Dtypes
from jaxmodels.transformer2d.block import BlockKeyValues, Conditioning, Modulations
from jaxmodels.transformer2d.compiled import CompiledTransformer2D
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.network import Execution, Network
from jaxmodels.weights import blueprint, flatten


class Transformer2DModelOutput(NamedTuple):
    """Output of the model: attribute ``sample``, also as ``output["sample"]`` and ``output[0]``.

    Attributes:
        sample: (batch, channel, height, width), or for discrete input the log-probabilities
            (batch, classes - 1, latent pixels) of every class but the masked one.
    """

    sample: Float[Array, "..."]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self._fields.index(key) if isinstance(key, str) else key)


class Transformer2DModel(Network):
    """The 2D transformer with diffusers' arguments and numbers, compiled.

    Args:
        arguments, named: the arguments of `Transformer2DConfig`, in the same order or by name.
        dtype: dtype of the computation; norms, softmax and modulations are always float32.
        param_dtype: dtype of the weights; `dtype` when None. Use float32 for training in bfloat16.
        scan_layers: run one compiled block over all layers, so that compile time does not grow with their number.
        remat: recompute each block in the backward pass instead of keeping its activations.
        rngs: random numbers for the initial weights; seed 0 when None.

    Weights of all layers are stacked on a leading axis; queries, keys and values share one matrix. Every array has
    logical names of its axes (``nnx.Variable`` metadata ``axes``; see `jaxmodels.devices`).

    Differences from diffusers, where diffusers crashes or computes garbage: timesteps may be one per element with
    ada_norm; patched images may be of any shape; masks of one element broadcast over the batch; class labels are
    dropped once per element in training, not independently in each block.

    Raises:
        ConfigError: the arguments make no sense together.

    Source: diffusers 0.42.1, models/transformers/transformer_2d.py.
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
        config = Transformer2DConfig(*arguments, **named)
        dtypes = Dtypes(read_dtype(dtype), read_dtype(dtype if param_dtype is None else param_dtype))
        super().__init__(config, dtypes, Execution(scan_layers, remat), rngs=nnx.Rngs(0) if rngs is None else rngs)

    @classmethod
    def from_config(cls, config: Transformer2DConfig | Mapping[str, Any], **options: Any) -> "Transformer2DModel":
        """Return a model with random weights from a config, or from a parsed ``config.json``.

        Args:
            options: keyword arguments of the class that are not in the config, e.g. ``dtype``.
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

        Folders of `DiTTransformer2DModel` and `PixArtTransformer2DModel` are read, too.

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
            CheckpointError: files are missing or malformed, or do not fit the config (`WeightsMismatch`, all of it).
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
            return_dict: return a `Transformer2DModelOutput` rather than a tuple of one.
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
        sample = self._run("forward", arguments, conditioning, key)
        return Transformer2DModelOutput(sample) if return_dict else (sample,)

    def prepare(
        self,
        encoder_hidden_states: ArrayLike = None,
        timestep: ArrayLike = None,
        added_cond_kwargs: Mapping[str, ArrayLike] | None = None,
        class_labels: ArrayLike = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Conditioning:
        """Compute ahead what does not depend on `hidden_states`; arguments as in a call.

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
        return self._run("project_context", context.astype(self.dtype), read_scale(cross_attention_kwargs))

    def prepare_modulations(
        self,
        timestep: ArrayLike = None,
        class_labels: ArrayLike = None,
        added_cond_kwargs: Mapping[str, ArrayLike] | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Modulations:
        """Return modulations of all layers by timesteps, classes and conditions; arguments as in a call."""
        timing = read_timing(self.config, None, timestep, class_labels, added_cond_kwargs)
        return self._run("modulate", timing, None, read_scale(cross_attention_kwargs))

    def compile(self, hidden_states: ArrayLike, **others: Any) -> CompiledTransformer2D:
        """Compile the forward pass ahead of time, over the model's current weights.

        Args:
            hidden_states: an array, or a `jax.ShapeDtypeStruct`; only its shape and dtype matter.
            others: the other arguments of the calls, or their shapes.
        """
        compiled = CompiledTransformer2D(self)
        compiled.compile(hidden_states, **others)
        return compiled

    def _run(self, method: str, *arguments: Any) -> Any:
        graph, state = nnx.split(self)
        leaves = jax.tree.leaves((state, arguments))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return getattr(self, method)(*arguments)
        return _run_compiled(graph, method, state, *arguments)


@partial(jax.jit, static_argnums=(0, 1))
def _run_compiled(graph: nnx.GraphDef["Transformer2DModel"], method: str, state: Any, *arguments: Any) -> Any:
    model = nnx.merge(graph, state)
    with use_exact_products(model.dtype):
        return getattr(model, method)(*arguments)

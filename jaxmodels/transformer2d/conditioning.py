"""What of a forward pass does not depend on `hidden_states`, prepared once for many passes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmodels.errors import InputError
from jaxmodels.transformer2d.block import Seen
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.modulation import Affine, Modulation


class Modulations(NamedTuple):
    """What timesteps, classes and conditions do: to every layer (leading axis), and to the head of a patched model."""

    blocks: Modulation
    head: Affine | None = None


class Conditioning(NamedTuple):
    """A pytree of what `Transformer2DModel.prepare` makes.

    Attributes:
        context: keys and values of `encoder_hidden_states` for every layer; the same for all steps of a sampler.
        modulations: what the timestep does; another one for each step.
    """

    context: Seen
    modulations: Modulations

    @property
    def keys(self) -> int | None:
        """How many tokens the context has; None when there is none."""
        found = self.context.first if self.context.second is None else self.context.second
        return None if found is None else found.key.shape[-2]


def check_conditioning(config: Transformer2DConfig, conditioning: Conditioning, batch: int) -> None:
    """Whether it was prepared for one element, which then counts for all, or for as many as there are.

    Raises:
        InputError: it is something else, or of another model or batch.
    """
    if not isinstance(conditioning, Conditioning):
        raise InputError(
            f"conditioning is a {type(conditioning).__name__}; wanted what model.prepare gives, or "
            "Conditioning(model.prepare_context(...), model.prepare_modulations(...))"
        )
    blocks, head = conditioning.modulations
    if (blocks.first is None) != (config.block_norm == "layer_norm") or (head is None) != (config.kind != "patches"):
        raise InputError(
            f"conditioning's modulations are of another kind of model; {config.kind} input with {config.block_norm} "
            "wants those that its own prepare makes (of a timestep, where it has one)"
        )
    for what, part, axes in (
        ("context", conditioning.context, 4),
        ("modulations", blocks, 4),
        ("head's modulation", head, 3),
    ):
        for array in jax.tree.leaves(part):
            if array.ndim != axes:
                raise InputError(
                    f"conditioning's {what} has shape {list(array.shape)}; wanted {axes} axes, those of one step (of "
                    "what was prepared for many steps, give one step's: a sampler's extras do)"
                )
            if axes == 4 and array.shape[0] != config.num_layers:
                raise InputError(
                    f"conditioning's {what} is of {array.shape[0]} layers; this model has {config.num_layers}"
                )
            if array.shape[axes - 3] not in (1, batch):
                raise InputError(
                    f"conditioning's {what} was prepared for {array.shape[axes - 3]} elements, and hidden_states has "
                    f"{batch}; prepare it for {batch}, or for one that counts for all"
                )


def spread_context(seen: Seen, batch: int) -> Seen:
    """Keys and values of one element as those of all."""
    return jax.tree.map(lambda array: jnp.broadcast_to(array, (array.shape[0], batch, *array.shape[2:])), seen)

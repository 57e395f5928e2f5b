"""What of a forward pass does not depend on `hidden_states`, prepared once for many passes."""

from typing import NamedTuple

from jaxmodels.transformer2d.block import Seen
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

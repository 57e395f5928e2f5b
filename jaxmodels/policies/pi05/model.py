"""The network of pi0.5, as far as it differs from that of pi0."""

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.policies.pi0.model import PiModel, StepInputs, apply_linear, decoder_sizes
from jaxmodels.policies.pi05.config import Pi05Config
from jaxmodels.vlm.gemma import AdaptiveExpert, PrefixCache


class Pi05Model(PiModel):
    """pi0.5: the expert is told the time by its norms, and the state by the prompt.

    Source: https://arxiv.org/abs/2504.16054; openpi/models/pi0.py.
    """

    has_state_token = False

    def __init__(self, config: Pi05Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.expert.width
        self.expert = AdaptiveExpert(decoder_sizes(config.expert), rngs=rngs)
        self.time_in = nnx.Linear(width, width, rngs=rngs)
        self.time_out = nnx.Linear(width, width, rngs=rngs)

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> StepInputs:
        hidden = jax.nn.silu(apply_linear(self.time_in, self.embed_times(times)))
        condition = jax.nn.silu(apply_linear(self.time_out, hidden))
        return StepInputs(None, self.expert.modulate(condition.astype(self.expert.norm.dense.kernel.dtype)))

    def embed_state(self, state: Float[Array, "b s"]) -> None:
        del state

    def denoise(
        self, prefix: PrefixCache, state: Float[Array, "b 1 d"] | None, x: Float[Array, "b t a"], step: StepInputs
    ) -> Float[Array, "b t a"]:
        del state
        assert step.modulations is not None
        actions = apply_linear(self.action_in, x)
        starts = np.arange(x.shape[1]) < 1
        return apply_linear(self.action_out, self.expert(actions, prefix, starts, step.modulations))

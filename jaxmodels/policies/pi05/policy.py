"""pi0.5, as LeRobot and openpi define it: pi0 with the time in its norms and the state in its prompt.

Sources: https://arxiv.org/abs/2504.16054; lerobot/policies/pi05 (https://github.com/huggingface/lerobot, 0.6.1).
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.policies.pi0.config import PROMPT, Pi0Config, clean_task
from jaxmodels.policies.pi0.model import PiModel, decoder_sizes, tensors
from jaxmodels.policies.pi0.policy import POLICY as PI0
from jaxmodels.policies.vla import Chunk, Terms, apply_linear, list_stages, prepare
from jaxmodels.ranges import CHUNK, Range
from jaxmodels.vlm.decoder import PrefixCache
from jaxmodels.vlm.gemma import AdaptiveExpert

BINS = np.linspace(-1, 1, 257)[:-1]  # Lower edges of the 256 bins of a normalised state.
MEMORIES = ("use_visual_memory", "use_proprioceptive_memory")
# Fields of LeRobot after 0.6.1. A default is not written, because LeRobot 0.6.1 refuses a file with such a field.
NEWER_FIELDS = (
    *MEMORIES,
    "memory_frames",
    "memory_stride",
    "memory_temporal_attention_every",
    "rtc_training_max_delay",
)


@dataclass(frozen=True)
class Pi05Config(Pi0Config):
    """LeRobot's `PI05Config`, field by field (lerobot/policies/pi05/configuration_pi05.py, 0.6.1).

    It has the attributes and errors of `Pi0Config`, and fields of LeRobot after 0.6.1:

    Attributes:
        rtc_training_max_delay: maximum number of first actions without noise in training
            (https://github.com/huggingface/lerobot/pull/4056). Such a policy continues a plan without guidance.
        use_visual_memory, use_proprioceptive_memory: whether the policy reads earlier observations, which is refused.
        memory_frames, memory_stride, memory_temporal_attention_every: settings of that memory, unused without it.
    """

    type: ClassVar[str] = "pi05"
    processor_steps: ClassVar[frozenset[str]] = frozenset(
        {
            "tokenizer_processor",
            "pi05_prepare_state_tokenizer_processor_step",
            "relative_actions_processor",
            "absolute_actions_processor",
        }
    )

    indifferent: ClassVar[tuple[str, ...]] = (*Pi0Config.indifferent, "memory_")

    tokenizer_max_length: Annotated[int, PROMPT] = 200
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "IDENTITY"),
        ("STATE", "QUANTILES"),
        ("ACTION", "QUANTILES"),
    )
    rtc_training_max_delay: Annotated[int, Range(0, CHUNK)] = 0
    use_visual_memory: bool = False
    use_proprioceptive_memory: bool = False
    memory_frames: Annotated[int, Range(0, CHUNK)] = 6
    memory_stride: Annotated[int, Range(0, CHUNK)] = 30
    memory_temporal_attention_every: Annotated[int, Range(0, CHUNK)] = 4

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.rtc_training_max_delay >= self.chunk_size:
            wrong.append(
                f"rtc_training_max_delay is {self.rtc_training_max_delay}; wanted less than chunk_size "
                f"{self.chunk_size}"
            )
        wrong += [
            f"{name} is true; the memory of earlier observations (LeRobot after 0.6.1) is not supported, and the "
            f"policy acts differently without it: run the policy with LeRobot, or train it with {name} false"
            for name in MEMORIES
            if getattr(self, name)
        ]
        return wrong

    @property
    def trained_delay(self) -> int:
        return self.rtc_training_max_delay

    def to_json(self) -> dict[str, Any]:
        values, defaults = super().to_json(), {entry.name: entry.default for entry in fields(self)}
        return {name: value for name, value in values.items() if name not in NEWER_FIELDS or value != defaults[name]}

    @property
    def prompt_reads_state(self) -> bool:
        return self.openpi is None or self.openpi.reads_state_in_prompt

    def format_prompt(self, task: str, state: np.ndarray | None = None) -> str:
        """Return the prompt: the task, and -1 to 255 for each number of the normalised state (s,) of one robot."""
        if not self.prompt_reads_state:
            return super().format_prompt(task)
        assert state is not None, "the prompt of pi0.5 contains the state"
        if self.lerobot == "0.4":
            state = np.pad(state, (0, self.max_state_dim - len(state)))
        numbers = " ".join(str(number) for number in np.digitize(state, BINS) - 1)
        return f"Task: {clean_task(task)}, State: {numbers};\nAction: "


class Pi05Model(PiModel):
    """pi0.5: norms get the time, and the prompt contains the state (arXiv 2504.16054; openpi/models/pi0.py)."""

    has_state_token = False
    only_for_times = ("time_in.", "time_out.", ".dense.")

    def __init__(self, config: Pi05Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.expert.width
        self.expert = AdaptiveExpert(decoder_sizes(config.expert), rngs=rngs)
        self.time_in = nnx.Linear(width, width, rngs=rngs)
        self.time_out = nnx.Linear(width, width, rngs=rngs)

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> Terms:
        hidden = jax.nn.silu(apply_linear(self.time_in, self.embed_times(times)))
        condition = jax.nn.silu(apply_linear(self.time_out, hidden))
        return {"modulations": self.expert.modulate(condition.astype(self.expert.norm.dense.kernel.dtype))}

    def denoise(self, prefix: PrefixCache, state: Float[Array, "b 1 d"] | None, x: Chunk, step: Terms) -> Chunk:
        del state
        actions = apply_linear(self.action_in, x)
        starts = np.arange(x.shape[1]) < 1
        return apply_linear(self.action_out, self.expert(actions, prefix, starts, step["modulations"]))


POLICY = replace(
    PI0,
    config=Pi05Config.from_json,
    model=Pi05Model,
    tensors=partial(tensors, kind=Pi05Config.type),
    stages=list_stages(Pi05Model),
    prepare=partial(prepare, Pi05Model),
)

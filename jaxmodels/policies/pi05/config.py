"""Pi05Config: every field of LeRobot's configuration of pi0.5, and its prompt, which says the state."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from jaxmodels.policies.pi0.config import PROMPT, Pi0Config, clean_task
from jaxmodels.ranges import CHUNK, Range

BINS = np.linspace(-1, 1, 257)[:-1]  # where each of 256 numbers for a normalised state begins


@dataclass(frozen=True)
class Pi05Config(Pi0Config):
    """LeRobot's `PI05Config`, field by field (lerobot/policies/pi05/configuration_pi05.py, 0.6.1).

    Attributes and errors as of `Pi0Config`, whose fields these are, and:

    Attributes:
        rtc_training_max_delay: of LeRobot after 0.6.1 (https://github.com/huggingface/lerobot/pull/4056): how many of a
            chunk's first actions were left without noise in training, at most. Such a policy begins its chunks with
            what is being executed, without guidance.
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

    tokenizer_max_length: Annotated[int, PROMPT] = 200
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "IDENTITY"),
        ("STATE", "QUANTILES"),
        ("ACTION", "QUANTILES"),
    )
    rtc_training_max_delay: Annotated[int, Range(0, CHUNK)] = 0

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.rtc_training_max_delay >= self.chunk_size:
            wrong.append(
                f"rtc_training_max_delay is {self.rtc_training_max_delay}; wanted less than chunk_size "
                f"{self.chunk_size}"
            )
        return wrong

    @property
    def trained_delay(self) -> int:
        return self.rtc_training_max_delay

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        if not self.rtc_training_max_delay:
            del values["rtc_training_max_delay"]  # which LeRobot 0.6.1 does not know
        return values

    @property
    def prompt_reads_state(self) -> bool:
        return self.openpi is None or self.openpi.reads_state_in_prompt

    def format_prompt(self, task: str, state: np.ndarray | None = None) -> str:
        """The text that is tokenized: the task, and a number for each of the normalised state's, -1 to 255.

        Args:
            state: (s,), of one robot.
        """
        if not self.prompt_reads_state:
            return super().format_prompt(task)
        assert state is not None, "the prompt of pi0.5 says the state"
        if self.lerobot == "0.4":
            state = np.pad(state, (0, self.max_state_dim - len(state)))
        numbers = " ".join(str(number) for number in np.digitize(state, BINS) - 1)
        return f"Task: {clean_task(task)}, State: {numbers};\nAction: "

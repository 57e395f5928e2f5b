"""Pi05Config: every field of LeRobot's configuration of pi0.5, and its prompt, which says the state."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from jaxmodels.policies.pi0.config import PROMPT, Pi0Config, clean_task

BINS = np.linspace(-1, 1, 257)[:-1]  # where each of 256 numbers for a normalised state begins


@dataclass(frozen=True)
class Pi05Config(Pi0Config):
    """LeRobot's `PI05Config`, field by field (lerobot/policies/pi05/configuration_pi05.py, 0.6.1).

    Attributes and errors as of `Pi0Config`, whose fields these are.
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

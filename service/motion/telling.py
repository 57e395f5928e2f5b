"""What a policy is told and shown: an instruction as a part of an observation, and the parts that a policy reads."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from jaxmodels import Requirements
from jaxmodels.types import TASK

# Characters of an instruction, as the API takes them: one width for all, so that robots with different ones can be
# inferred for together.
LONGEST = 4096
STATE = "observation.state"


def told(instruction: str | None) -> dict[str, np.ndarray]:
    """An instruction as the observation of one robot has it; nothing when there is none.

    Args:
        instruction: of at most ``LONGEST`` characters.
    """
    return {} if instruction is None else {TASK: _written(instruction)}


@lru_cache(maxsize=64)
def _written(instruction: str) -> np.ndarray:
    """(1,) of 16 KiB, which nobody may write to: robots are told the same over and over."""
    text = np.array([instruction], f"<U{LONGEST}")
    text.flags.writeable = False
    return text


def readable(needs: Requirements, seen: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What this policy reads of it; pictures are compared elsewhere."""
    unread = (None if needs.state is not None else STATE, None if needs.language else TASK)
    return {name: value for name, value in seen.items() if name not in unread}


def complaint(needs: Requirements, instruction: str | None) -> str | None:
    """Why this policy cannot be told that; None when it can, or reads no language."""
    if not needs.language:
        return None
    if instruction is None or not instruction.strip():
        return "the policy does what it is told, in words; send language_instruction, e.g. 'pick up the red cube'"
    return None

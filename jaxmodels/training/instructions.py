"""What a dataset's tasks say, as the policy that is trained reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from jaxmodels.errors import DatasetError
from jaxmodels.text import tokenizer
from jaxmodels.types import Language
from jaxmodels.weights import Blueprint

AHEAD = 64  # tasks that are read at a time


@dataclass(frozen=True)
class Instructions:
    """The tokens of every task of a dataset.

    Attributes:
        ids, mask: of the tasks, in their order.
        language: what a frozen text encoder makes of them; None for one that is trained.
    """

    ids: Int[Any, "k n"]
    mask: Bool[Any, "k n"]
    language: Language | None = None

    def of(self, model: Any, tasks: Int[Array, " b"], dtype: DTypeLike) -> Language:
        """What the model's text encoder makes of each example's task."""
        if self.language is not None:
            language = jax.tree.map(lambda x: x[tasks], self.language)
        elif len(self.ids) <= len(tasks):  # each task once, however many examples have it
            language = jax.tree.map(lambda x: x[tasks], model.read(self.ids, self.mask))
        else:
            language = model.read(self.ids[tasks], self.mask[tasks])
        return Language(language.tokens.astype(dtype), language.mask)

    def read_ahead(self, plan: Blueprint[Any], weights: Mapping[str, Any], place: NamedSharding) -> "Instructions":
        """With `language`, so that a frozen text encoder runs once and not in every step."""

        @partial(jax.jit, out_shardings=place)
        def read(weights: Mapping[str, Any], ids: Array, mask: Array) -> Language:
            return plan.assemble(weights).read(ids, mask)

        rows = [
            read(dict(weights), self.ids[i : i + AHEAD], self.mask[i : i + AHEAD])
            for i in range(0, len(self.ids), AHEAD)
        ]
        return replace(self, language=jax.tree.map(lambda *parts: np.concatenate(parts), *rows))


jax.tree_util.register_dataclass(Instructions, data_fields=["ids", "mask", "language"], meta_fields=[])


def read_instructions(policy: Any, tasks: Sequence[str], file: bytes | None) -> Instructions | None:
    """The tasks of a dataset for a policy; None for one that reads no instructions.

    Args:
        file: the policy's ``tokenizer.json``, if it has one.

    Raises:
        DatasetError: the dataset says of no episode, or not of every one, what is being done.
    """
    config = getattr(policy, "text_encoder", None)
    if config is None:
        return None
    if not tasks or any(not task.strip() for task in tasks):
        raise DatasetError(
            f"the policy reads instructions, but the dataset's tasks are {list(tasks)}; record it with a task for "
            "every episode, or train without them (--policy.text_encoder=null)"
        )
    ids, mask = tokenizer(config, file)(tasks)
    return Instructions(np.asarray(ids), np.asarray(mask))

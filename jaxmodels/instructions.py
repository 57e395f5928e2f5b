"""Instructions of a policy: their texts in an observation, and their tokens or encodings, which are cached."""

import logging
import re
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmodels.devices import Placement
from jaxmodels.errors import ObservationError
from jaxmodels.normalization import Affine
from jaxmodels.ranges import shorten_value
from jaxmodels.text import PromptTokenizer, Tokenizer
from jaxmodels.types import CUT_AS_LEROBOT, CUT_TASK, PROMPT_CUT, PROMPT_CUTS, TASK, Language, describe_cut

logger = logging.getLogger(__name__)

Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_CACHED_TEXTS = 64  # A long CLIP text has 0.2 MB.
MAX_CACHED_BATCHES = 32
# A prompt with room for fewer tokens of an instruction is cut as LeRobot cuts it.
MIN_TASK_TOKENS = 8


def read_texts(observation: Mapping[str, Any], batch: int) -> tuple[str, ...]:
    """Return the instruction of each member of a batch; raises ObservationError for missing or blank texts."""
    advice = f"wanted {batch} text{'s' if batch > 1 else ''}, e.g. {TASK!r}: {['pick up the cube'] * min(batch, 2)}"
    if TASK not in observation:
        raise ObservationError(f"{TASK} is missing, and this policy reads an instruction; {advice}")
    given = observation[TASK]
    if isinstance(given, str):
        raise ObservationError(f"{TASK} is one text without a batch axis; {advice}")
    texts = given.tolist() if isinstance(given, np.ndarray) and given.ndim == 1 else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ObservationError(f"{TASK} is {shorten_value(given)}; {advice}")
    if len(texts) != batch:
        raise ObservationError(f"{TASK} has {len(texts)} texts and the other features {batch} members; {advice}")
    for member, text in enumerate(texts):
        if not text.strip():
            raise ObservationError(f"{TASK} is blank for member {member}; this policy reads an instruction in words")
    return tuple(texts)


def read_prompt_cuts(observation: Mapping[str, Any], batch: int) -> tuple[str, ...] | None:
    """Return each member's `PROMPT_CUTS` value, None if not given; raises ObservationError for other values."""
    if PROMPT_CUT not in observation:
        return None
    given = observation[PROMPT_CUT]
    cuts = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(cuts, list | tuple) or len(cuts) != batch or any(cut not in PROMPT_CUTS for cut in cuts):
        raise ObservationError(
            f"{PROMPT_CUT} is {shorten_value(cuts)}; wanted a list with one of {', '.join(PROMPT_CUTS)} for each of "
            f"the {batch} members of the batch"
        )
    return tuple(cuts)


class Instructions:
    """Thread-safe cache and encoder of instructions; `encode` maps tokens (1, n) and their mask to `Language`."""

    def __init__(
        self, tokenizer: Tokenizer, encode: Callable[[np.ndarray, np.ndarray], Language], placement: Placement
    ):
        self._tokenizer = tokenizer
        self._encode = encode
        self._placement = placement
        self._read = lru_cache(MAX_CACHED_TEXTS)(self._encode_text)
        self._read_batch = lru_cache(MAX_CACHED_BATCHES)(self._encode_batch)

    def __call__(self, texts: tuple[str, ...]) -> Language:
        """Return (b, n, d) on the policy's devices, for one text per member; raises ObservationError for bad texts."""
        return self._read_batch(texts)

    def _encode_batch(self, texts: tuple[str, ...]) -> Language:
        members = [self._read(text) for text in texts]
        together = Language(*(np.concatenate(parts) for parts in zip(*members, strict=True)))
        return jax.device_put(together, self._placement.replicated)

    def _encode_text(self, text: str) -> Language:
        return Language(*map(np.asarray, self._encode(*self._tokenizer([text]))))


class Prompts:
    """Thread-safe cache and tokenizer of instructions that a policy's program embeds itself.

    Args:
        config: the policy's config, which formats the prompt.
        state: normalization of the state.
        tokenizer: content of the policy's ``tokenizer.json``.
        prompt_cut: default of `PROMPT_CUTS`; `Prompts.cuts` lists the possible values.
    """

    def __init__(self, config: Any, state: Affine | None, tokenizer: bytes, prompt_cut: str = CUT_TASK):
        self._config = config
        self._state = state if config.prompt_reads_state else None
        self._tokenizer = PromptTokenizer(tokenizer, config.prompt_length, config.vocabulary)
        self._prompt_cut = prompt_cut
        self._prompts: OrderedDict[tuple[str, str], tuple[np.ndarray, np.ndarray, int]] = OrderedDict()
        self._short: OrderedDict[str, str] = OrderedDict()
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()
        self.cuts = self._list_cuts()

    def _list_cuts(self) -> tuple[str, ...]:
        if self._state is None:
            return ()
        _, _, length = self._tokenizer(self._config.format_prompt("", np.zeros(self._config.state.shape, np.float32)))
        return PROMPT_CUTS if length + MIN_TASK_TOKENS <= self._config.prompt_length else (CUT_AS_LEROBOT,)

    def __call__(
        self, texts: Sequence[str], state: np.ndarray | None, cuts: Sequence[str | None] | None = None
    ) -> Language:
        """Tokenize instructions.

        Args:
            texts: instruction of each member of the batch.
            state: raw states (b, s).
            cuts: `PROMPT_CUTS` value of each member; None for the policy's own.

        Returns:
            tokens (b, n) and their mask, with the smallest n of `PolicyConfig.short_prompts` that suffices, or the
            policy's own.

        Raises:
            ObservationError: not even the beginning of an instruction fits.
        """
        states: list[Any] = [None] * len(texts)
        if self._state is not None and state is not None:
            joints = self._config.joint_map
            own = state if joints is None else joints.read_state(state)
            states = list(np.asarray(self._state.normalize(own), np.float32))
        members = zip(texts, states, cuts or [None] * len(texts), strict=True)
        rows = [self._tokenize(text, part, cut or self._prompt_cut, is_logged=True) for text, part, cut in members]
        ids, masks = (np.stack(parts) for parts in list(zip(*rows, strict=True))[:2])
        needed = int(np.flatnonzero(masks.any(axis=0))[-1]) + 1
        length = next((length for length in self._config.short_prompts if length >= needed), masks.shape[1])
        return Language(ids[:, :length], masks[:, :length])

    def count_cut(self, text: str, width: int | None, cut: str | None = None) -> int:
        """Count the tokens of an instruction that do not fit with a state of `width` zeros; raises ObservationError."""
        state = None if self._state is None else np.zeros(width or 0, np.float32)
        return self._tokenize(text, state, cut or self._prompt_cut)[2]

    def _tokenize(
        self, text: str, state: np.ndarray | None, cut: str, *, is_logged: bool = False
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the tokens of an instruction's prompt, their mask, and how many tokens are left out."""
        prompt = self._config.format_prompt(text, state)
        key = (prompt, cut)
        found = self._prompts.get(key)  # Without the lock: robots do not wait while a new instruction is encoded.
        if found is None:
            with self._lock:
                ids, mask, length = self._tokenizer(prompt)
                kept = min(length, len(ids))
                if kept < length and cut == CUT_TASK and cut in self.cuts:
                    ids, mask, kept = self._tokenizer(self._config.format_prompt(self._shorten(text, state), state))
                found = ids, mask, length - kept
                _put_newest(self._prompts, key, found, MAX_CACHED_TEXTS)
        ids, mask, left_out = found
        # A state in the prompt makes a new prompt for each chunk: log once per instruction.
        if left_out and is_logged and (text, cut) not in self._logged:
            _put_newest(self._logged, (text, cut), None, MAX_CACHED_TEXTS)
            self._log_cut(left_out, len(ids), cut)
        return ids, mask, left_out

    def _log_cut(self, left_out: int, length: int, cut: str) -> None:
        if not self.cuts:
            logger.warning(
                "an instruction has %d tokens and the policy reads %d; its end is cut off", length + left_out, length
            )
        else:
            logger.warning("%s", describe_cut(left_out, cuts=self.cuts, prompt_cut=cut))

    def _shorten(self, text: str, state: Any) -> str:
        """Return the beginning of an instruction that fits into the prompt together with a state.

        It leaves room for a long state, so that the instruction does not change from state to state.
        """
        if text not in self._short:
            _put_newest(self._short, text, self._find_longest(text, np.zeros_like(state)), MAX_CACHED_TEXTS)
        short = self._short[text]
        return short if self._fits(short, state) else self._find_longest(short, state)

    def _find_longest(self, text: str, state: Any) -> str:
        """Return the longest fitting beginning, in words or characters; raises ObservationError if there is none."""
        words = [word.end() for word in re.finditer(r"[^\s_]+", text)]
        for ends in (words, range(1, len(text) + 1)):
            count = bisect_left(ends, True, key=lambda end: not self._fits(text[:end], state))
            if count and text[: ends[count - 1]].strip():
                return text[: ends[count - 1]]
        raise ObservationError(f"{TASK} {text[:40]!r} does not fit into the prompt with the state; use other words")

    def _fits(self, text: str, state: Any) -> bool:
        ids, _, length = self._tokenizer(self._config.format_prompt(text, state))
        return length <= len(ids)


def _put_newest(cache: "OrderedDict[Key, Value]", key: Key, value: Value, max_entries: int) -> None:
    """Add an entry to a cache, and remove the oldest one when there are too many."""
    cache[key] = value
    if len(cache) > max_entries:
        cache.popitem(last=False)

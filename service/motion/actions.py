"""Actions with the time each is due; late ones are dropped by arithmetic."""

import math

import numpy as np


class ActionQueue:
    """One chunk at a time: action i is due at ``seen_at + i * period``, and a new chunk replaces the rest of the old.

    A tick takes the action due nearest to it, so an action is at most half a period early; one that
    is more than a period late when its turn comes is never given out. When ticks come at another
    rate than actions, a tick takes the point on the line between the two actions around it: the
    motion keeps the speed it was trained with.

    Attributes:
        period: seconds from one action to the next.
        is_between: whether ticks take points between two actions.
        consumed: actions of this chunk that were given out.
        late: actions dropped because their time was over, of all chunks.
    """

    def __init__(self, period: float, tick_period: float | None = None):
        self.period = period
        self.consumed = 0
        self.late = 0
        self.is_between = tick_period is not None and not math.isclose(tick_period, period, rel_tol=1e-6)
        self._chunk = np.zeros((0, 0), np.float32)
        self._seen_at = 0.0
        self._next = 0

    def __len__(self) -> int:
        """Actions left."""
        return len(self._chunk) - self._next

    def push(self, chunk: np.ndarray, seen_at: float, now: float) -> int:
        """Take a chunk (t, a) whose first action belongs to ``seen_at``; returns how many are still usable.

        It replaces what is left; what of it is already past is counted as late.
        """
        self._chunk, self._seen_at, self.consumed = chunk, seen_at, 0
        self._next = 0
        self._next = min(max(math.floor(self._place(now) + 0.5), 0), len(chunk))
        self.late += self._next
        return len(self)

    def faded(self, chunk: np.ndarray, seen_at: float, now: float, steps: int) -> np.ndarray:
        """The chunk, but its next ``steps`` actions lead over from what is left of the old one.

        For a chunk of another policy: two that mean the same may still differ by a jolt. With nothing left to lead
        over from, the chunk as it is.
        """
        shift = math.floor((seen_at - self._seen_at) / self.period + 0.5) if len(self) else -1
        old = self._chunk[shift:] if shift >= 0 else self._chunk[:0]
        first = max(math.ceil((now - seen_at) / self.period), 0)
        steps = min(steps, len(old) - first, len(chunk) - first)
        if steps <= 0:
            return chunk
        weight = np.linspace(0, 1, steps + 2, dtype=np.float32)[1:-1, None]
        faded = np.array(chunk, np.float32)
        faded[:first] = old[:first]
        faded[first : first + steps] += (1 - weight) * (old[first : first + steps] - chunk[first : first + steps])
        return faded

    def take(self, deadline: float, now: float) -> np.ndarray | None:
        """The action for this tick; those before it that no tick took are counted as late."""
        last = len(self._chunk) - 1
        if last < 0:
            return None
        place, present = self._place(deadline), (now - self._seen_at) / self.period
        if present > place + 1:
            # This tick itself runs so late that its own action is over: do the one that belongs to now.
            place = self._place(now)
        if place > last and (not self.is_between or present > last + 1):
            self._drop_until(last + 1)
            return None
        place = min(max(place, 0.0), float(last))
        index = math.floor(place + 0.5)
        if index < self._next and not (self.is_between and self.consumed):
            return None
        self._drop_until(index)
        if index == self._next:
            self._next += 1
            self.consumed += 1
        return self._between(place) if self.is_between else self._chunk[index]

    def first_after(self, moment: float, seen_at: float) -> tuple[int, float]:
        """Which action of a chunk comes next after this moment, and how much of a period lies between them (0..1]."""
        place = (moment - seen_at) / self.period
        if self.is_between:
            first = math.floor(place) + 1
            return (first, first - place) if first > 0 else (0, 1.0)
        # As `_place` does: halfway between two actions it is the one before that a tick took.
        return max(math.floor(place + 0.499) + 1, 0), 1.0

    def clear(self) -> None:
        """Forget all that is left; it does not count as late."""
        self._chunk = self._chunk[:0]
        self._next = 0
        self.consumed = 0

    def due(self, index: int) -> float:
        """When action ``index`` of this chunk is due."""
        return self._seen_at + index * self.period

    def due_times(self) -> list[float]:
        """When each action left is due."""
        return [self.due(index) for index in range(self._next, len(self._chunk))]

    def _place(self, moment: float) -> float:
        """Where a moment lies in the chunk, in actions: whole ones, unless ticks take points between them."""
        place = (moment - self._seen_at) / self.period
        if self.is_between:
            return place
        # When ticks fall halfway between two actions, the last bits of a float must not decide at each tick anew.
        return float(self._next) if abs(place - self._next) < 0.501 else math.floor(place + 0.5)

    def _drop_until(self, index: int) -> None:
        index = min(index, len(self._chunk))
        if index > self._next:
            # Ticks slower than actions pass over some of them on purpose.
            self.late += 0 if self.is_between else index - self._next
            self._next = index

    def _between(self, place: float) -> np.ndarray:
        before = int(place)
        after = min(before + 1, len(self._chunk) - 1)
        return self._chunk[before] + (place - before) * (self._chunk[after] - self._chunk[before])


class EnsembledActions(ActionQueue):
    """Overlapping chunks averaged over time, as LeRobot's ACTTemporalEnsembler does, but aligned by due time.

    Of the predictions for one moment the oldest weighs 1 and the k-th weighs exp(-coefficient * k). With
    a new chunk at every tick this is LeRobot's recurrence to the letter; when inference takes longer
    than a tick, a moment simply has fewer predictions.
    Source: lerobot/policies/act/modeling_act.py, ACTTemporalEnsembler; Zhao et al., arXiv 2304.13705, algorithm 2.
    """

    def __init__(self, period: float, coefficient: float, tick_period: float | None = None):
        super().__init__(period, tick_period)
        self._coefficient = coefficient
        self._counts = np.zeros(0, np.int64)

    def push(self, chunk: np.ndarray, seen_at: float, now: float) -> int:
        """Average the chunk into what is there."""
        # Whole actions between the first of the old chunk and the first of the new one.
        shift = max(math.floor((seen_at - self._seen_at) / self.period + 0.5), 0) if len(self._chunk) else 0
        old, counts = self._chunk[shift:], self._counts[shift:]
        overlap = min(len(old), len(chunk))
        merged = np.array(chunk, np.float32)
        new_counts = np.ones(len(chunk), np.int64)
        if overlap:
            seen = counts[:overlap]
            weight = np.exp(-self._coefficient * seen)
            before = self._summed(seen)
            merged[:overlap] = (old[:overlap] * before[:, None] + chunk[:overlap] * weight[:, None]) / (
                before + weight
            )[:, None]
            new_counts[:overlap] = seen + 1
        self._counts = new_counts
        return super().push(merged, seen_at, now)

    def clear(self) -> None:
        """Forget all predictions."""
        super().clear()
        self._counts = self._counts[:0]

    def _summed(self, counts: np.ndarray) -> np.ndarray:
        """Sum of the first ``counts`` weights of the series exp(-coefficient * k)."""
        if self._coefficient == 0:
            return counts.astype(np.float64)
        ratio = math.exp(-self._coefficient)
        return (1 - ratio**counts) / (1 - ratio)

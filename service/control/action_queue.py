"""Queue of actions by due time: drops late actions, and joins new chunks with the rest of the plan."""

import math
from collections import deque

import numpy as np

from service.control.aggregation import REPLACE, Aggregation

_WHOLE = 0.02  # Distance from a whole number of actions that counts as whole.
_REMEMBERED = 2048  # Number of remembered actions, more than are executed during an inference.


class ActionQueue:
    """Plan of one robot: action i of a chunk is due at ``observed_at + i * period``.

    After a rest, the plan is timed from the tick that takes its first action. A tick takes the nearest action, at most
    half a period early and a period late. If ticks and actions have different rates, ticks interpolate.

    Attributes:
        period: seconds from one action to the next.
        is_between: whether ticks interpolate between two actions.
        aggregation: how a new chunk is joined with the rest of the plan.
        left: number of remaining actions.
        consumed: number of actions of this chunk that were taken, or skipped by slower ticks.
        late: number of dropped late actions of all chunks.
        observed_at: monotonic time of the newest chunk's frames; invalid without remaining actions.
        begun_at: monotonic time of the first action after the robot's last rest.
    """

    def __init__(self, period: float, tick_period: float | None = None, aggregation: Aggregation = REPLACE):
        self.period = period
        self.aggregation = aggregation
        self.consumed = 0
        self.late = 0
        self.is_between = tick_period is not None and not math.isclose(tick_period, period, rel_tol=1e-6)
        self._chunk = np.zeros((0, 0), np.float32)
        self._counts = np.zeros(0, np.int64)  # Number of predictions in each action.
        self._taken: deque[float] = deque(maxlen=_REMEMBERED)
        self.observed_at = self._starts_at = 0.0
        self.begun_at = -math.inf
        self._waits_for_tick = False
        self.left = 0

    def set_aggregation(self, aggregation: Aggregation) -> None:
        """Change how the next chunks are joined; the rest of the plan then counts as one prediction."""
        self.aggregation = aggregation
        self._counts = np.ones(len(self._chunk), np.int64)

    def remaining(self, observed_at: float, length: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the rest of the plan from ``observed_at`` on, interpolated to the moments of a new chunk.

        Returns:
            The first index of such a chunk with a planned action, the planned actions (n, a) from there on, and the
            number of predictions (n,) in each of them. n is 0 without a plan.
        """
        if not self.left:
            return 0, self._chunk[:0], self._counts[:0]
        position = (self._align(observed_at) - self._starts_at) / self.period
        whole = math.floor(position + 0.5)
        position = float(whole) if abs(position - whole) < _WHOLE else position
        skipped = max(math.ceil(-position), 0)
        begin, share = math.floor(position) + skipped, position - math.floor(position)
        count = max(min(length - skipped, math.floor(len(self._chunk) - 1 - position) + 1 - skipped), 0)
        counts = self._counts[begin : begin + count]
        before = self._chunk[begin : begin + count]
        if not share or not count:
            return skipped, before, counts
        after = self._chunk[begin + 1 : begin + 1 + count]
        return skipped, before + np.float32(share) * (after - before), counts

    def aggregate(self, chunk: np.ndarray, observed_at: float, first_usable: int = 0) -> np.ndarray:
        """Return the chunk (t, a) with each action joined with the action that is planned for the same moment.

        Args:
            first_usable: index of the first action that can still be executed.
        """
        if not self.left:
            return chunk
        first, planned, counts = self.remaining(observed_at, len(chunk))
        if not len(planned):
            return chunk
        after = np.arange(first, first + len(planned)) - first_usable + 1
        old_share = 1 - np.asarray(self.aggregation.new_weights(counts, after), np.float64)
        if not old_share.any():
            return chunk
        result = np.array(chunk, np.float32)
        part = result[first : first + len(planned)]
        part += old_share.reshape(-1, 1) * (planned - part)
        return result

    def push(self, chunk: np.ndarray, observed_at: float, now: float, executed: int | None = None) -> int:
        """Replace the rest of the plan by a chunk (t, a), after ``aggregate`` joined them.

        Args:
            observed_at: time of the chunk's frames. Actions whose time is over at ``now`` count as late.
            executed: number of actions that a resting robot executed since ``observed_at``; the next tick takes the
                next action. None for a moving robot.

        Returns:
            The number of usable actions.
        """
        made_of = np.ones(len(chunk), np.int64)
        if self.left:
            first, planned, counts = self.remaining(observed_at, len(chunk))
            made_of[first : first + len(planned)] += counts
        self._chunk, self._counts, self.observed_at, self.consumed = chunk, made_of, observed_at, 0
        self._waits_for_tick = executed is not None
        self._starts_at = self._align(observed_at) if executed is None else now - executed * self.period
        over = math.floor(self._position(now, 0) + 0.5) if executed is None else executed
        over = min(max(over, 0), len(chunk))
        self.left = len(chunk) - over
        self.late += over
        return self.left

    def crossfade(self, chunk: np.ndarray, observed_at: float, now: float, steps: int) -> np.ndarray:
        """Return the chunk (t, a) of another policy with its next ``steps`` actions blended with the old chunk."""
        skipped, old, _ = self.remaining(observed_at, len(chunk))
        first = max(math.ceil((now - self._align(observed_at)) / self.period), 0)
        steps = min(steps, len(old) - first)
        if steps <= 0 or skipped:
            return chunk
        weight = np.linspace(0, 1, steps + 2, dtype=np.float32)[1:-1, None]
        result = np.array(chunk, np.float32)
        result[:first] = old[:first]
        result[first : first + steps] += (1 - weight) * (old[first : first + steps] - chunk[first : first + steps])
        return result

    def take(self, deadline: float, now: float) -> np.ndarray | None:
        """Return the action (a,) for the tick of this deadline; skipped earlier actions count as late."""
        last = len(self._chunk) - 1
        if last < 0:
            return None
        before = len(self._chunk) - self.left
        if self._waits_for_tick:
            # The robot rested until this tick, even if the tick is late.
            self._waits_for_tick = False
            self.begun_at, self._starts_at = deadline, deadline - before * self.period
            position = present = float(before)
        else:
            position, present = self._position(deadline, before), (now - self._starts_at) / self.period
        if present > position + 1:
            # The action of this late tick is over, so take the present action.
            position = self._position(now, before)
        is_over = position > last and (not self.is_between or present > last + 1)
        position = min(max(position, 0.0), float(last))
        index = last + 1 if is_over else math.floor(position + 0.5)
        if index < before and not (self.is_between and self.consumed):
            return None
        if index > before:
            # Ticks that are slower than actions skip some actions.
            self.late += 0 if self.is_between else index - before
            self.left = len(self._chunk) - index
        if is_over:
            return None
        if index >= before:
            self.left -= 1
            done = index + 1 - before if self.is_between and self.consumed else 1
            self.consumed += done
            self._taken.extend([deadline] * done)
        return self._interpolate(position) if self.is_between else self._chunk[index]

    def first_after(self, moment: float, observed_at: float) -> tuple[int, float]:
        """Return the index of a chunk's next action after this moment, and the share of a period (0..1] until then."""
        position = (moment - self._align(observed_at)) / self.period
        if self.is_between:
            first = math.floor(position) + 1
            return (first, first - position) if first > 0 else (0, 1.0)
        # Halfway between two actions, a tick takes the earlier action, as in `_position`.
        return max(math.floor(position + 0.499) + 1, 0), 1.0

    def clear(self) -> None:
        """Drop the rest of the plan, which does not count as late."""
        self._chunk, self._counts = self._chunk[:0], self._counts[:0]
        self.left = self.consumed = 0
        self._waits_for_tick = False

    def due(self, index: int) -> float:
        """Return the monotonic due time of action ``index`` of this chunk."""
        return self._starts_at + index * self.period

    @property
    def dry_at(self) -> float:
        """Monotonic time at which the last action of this chunk ends."""
        return self.due(len(self._chunk))

    def count_taken_since(self, moment: float) -> int:
        """Return the number of actions of all chunks that ticks took from this moment on."""
        count = 0
        for deadline in reversed(self._taken):
            if deadline < moment - 1e-6:
                break
            count += 1
        return count

    def due_times(self) -> list[float]:
        """Return the monotonic due times of the remaining actions."""
        return [self.due(index) for index in range(len(self._chunk) - self.left, len(self._chunk))]

    def _align(self, observed_at: float) -> float:
        """Return the due time of a chunk's action 0, which is not before the start of the motion."""
        return max(observed_at, self.begun_at)

    def _position(self, moment: float, following: int) -> float:
        """Return the index of a moment in the chunk, a whole number unless ticks interpolate.

        Args:
            following: index of the next action.
        """
        position = (moment - self._starts_at) / self.period
        if self.is_between:
            return position
        # If ticks are halfway between two actions, rounding errors must not select the action.
        return float(following) if abs(position - following) < 0.501 else math.floor(position + 0.5)

    def _interpolate(self, position: float) -> np.ndarray:
        before = int(position)
        after = min(before + 1, len(self._chunk) - 1)
        return self._chunk[before] + (position - before) * (self._chunk[after] - self._chunk[before])

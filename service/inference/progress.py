"""Stages of preparing a session, with estimated time left."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

log = logging.getLogger(__name__)

# The steps of a session that is made, in order; a policy on disk skips the first.
STEPS = ("downloading", "reading", "compiling", "joining rooms")
KEPT = 5  # newest durations of each step of each policy
POLICIES = 200  # policies whose durations are kept


class Durations:
    """How long each step took for each policy, newest last; remembered in a file when there is one.

    Guesses are made of measured times only: of the same policy when it was loaded here before, else of the others.
    """

    def __init__(self, file: Path | None = None, heard: Callable[[Mapping[str, float]], None] | None = None):
        """``heard`` is told the steps of every preparation."""
        self._file = file
        self._heard = heard
        self._seconds: dict[str, dict[str, list[float]]] = {}
        if file is not None:
            self._seconds = _read(file)

    def add(self, policy: str, steps: Mapping[str, float]) -> None:
        """Remember one preparation; its steps in seconds. In memory only, see ``keep``."""
        if self._heard is not None:
            self._heard(steps)
        kept = self._seconds.pop(policy, {})
        for step, seconds in steps.items():
            kept[step] = [*kept.get(step, []), round(seconds, 3)][-KEPT:]
        self._seconds[policy] = kept
        for oldest in list(self._seconds)[: max(len(self._seconds) - POLICIES, 0)]:
            del self._seconds[oldest]

    def keep(self) -> None:
        """Write the file; blocks. A disk that is full costs a guess, nothing more."""
        if self._file is None:
            return
        text = json.dumps(self._seconds)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_suffix(".new")
            fresh.write_text(text)
            fresh.replace(self._file)
        except OSError as error:
            log.warning("durations of loading are not remembered: %s", error.strerror)

    def usual(self, policy: str, step: str) -> float | None:
        """Seconds that a step usually takes, or None when none was ever measured."""
        own = self._seconds.get(policy, {}).get(step)
        if own:
            return median(own)
        others = [median(steps[step]) for steps in self._seconds.values() if steps.get(step)]
        return median(others) if others else None


class Progress:
    """One session's way to being ready. ``tell`` may be called from any thread.

    Attributes:
        word: what it does now, e.g. ``compiling``.
    """

    def __init__(self, policy: str, durations: Durations, clock: Callable[[], float] = time.monotonic):
        """``policy`` is the name under which durations are remembered: path and revision."""
        self.word = "waiting"
        self._policy = policy
        self._durations = durations
        self._clock = clock
        self._since = clock()
        self._took: dict[str, float] = {}
        self._part: float | None = None

    def tell(self, word: str) -> None:
        """It does this now. Of a download (``jaxmodels.hub.Downloading``) it is also heard how far it is."""
        done, total = getattr(word, "done", 0), getattr(word, "total", 0)
        self._part = done / total if total else None
        # A loader's "ready" is about the files: compiling and the rooms come after it.
        if word not in (self.word, "ready"):
            self._turn_to(str(word))

    def _turn_to(self, word: str) -> None:
        now = self._clock()
        if self.word in STEPS:
            self._took[self.word] = self._took.get(self.word, 0.0) + now - self._since
        self.word, self._since = word, now

    def finish(self) -> Mapping[str, float]:
        """It is ready: what it took is remembered, and given back, in seconds per step."""
        self._turn_to("ready")
        self._durations.add(self._policy, self._took)
        return self._took

    def seconds(self) -> float:
        """How long it has been doing this."""
        return self._clock() - self._since

    def percent(self) -> int | None:
        """How much of a download is there, where the sizes are known."""
        return None if self._part is None else round(100 * self._part)

    def left(self) -> float | None:
        """Seconds until it is ready, or None: it is over, or nothing of the kind was ever measured here."""
        if self.word not in STEPS:
            return None
        now, *later = STEPS[STEPS.index(self.word) :]
        spent = self.seconds()
        if self._part and spent > 1:
            rest = spent * (1 - self._part) / self._part
        else:
            usual = self._durations.usual(self._policy, now)
            if usual is None:
                return None
            rest = max(usual - spent, 0.0)
        # What was never measured here is not guessed: the time left is at least this.
        return rest + sum(self._durations.usual(self._policy, step) or 0.0 for step in later)


def _read(file: Path) -> dict[str, dict[str, list[float]]]:
    try:
        found = json.loads(file.read_text())
        return {
            str(policy): {str(step): [float(one) for one in seconds] for step, seconds in steps.items()}
            for policy, steps in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("%s cannot be read; durations of loading are measured anew", file.name)
        return {}

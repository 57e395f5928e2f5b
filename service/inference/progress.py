"""Progress of preparing a session, by stage, with the estimated time left."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

log = logging.getLogger(__name__)

# The steps of a session that is made, in order; a policy on disk skips the first.
STEPS = ("downloading", "reading", "compiling", "joining rooms")
MAX_SAMPLES = 5  # newest durations of each step of each policy
MAX_POLICIES = 200  # policies whose durations are kept


class LoadDurations:
    """Seconds of each step by policy, newest last, optionally in a file. Estimates use the same policy, else others."""

    def __init__(self, file: Path | None = None, on_finished: Callable[[Mapping[str, float]], None] | None = None):
        """Read the file; ``on_finished`` is called with the steps of every preparation."""
        self._file = file
        self._on_finished = on_finished
        self._seconds: dict[str, dict[str, list[float]]] = {}
        if file is not None:
            self._seconds = _read(file)

    def add(self, policy: str, steps: Mapping[str, float]) -> None:
        """Add one preparation, with its steps in seconds. In memory only, see ``save``."""
        if self._on_finished is not None:
            self._on_finished(steps)
        kept = self._seconds.pop(policy, {})
        for step, seconds in steps.items():
            kept[step] = [*kept.get(step, []), round(seconds, 3)][-MAX_SAMPLES:]
        self._seconds[policy] = kept
        for oldest in list(self._seconds)[: max(len(self._seconds) - MAX_POLICIES, 0)]:
            del self._seconds[oldest]

    def save(self) -> None:
        """Write the file; blocks. A full disk costs an estimate, nothing more."""
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

    def estimate(self, policy: str, step: str) -> float | None:
        """Return the seconds that a step usually takes, or None when it was never measured."""
        own = self._seconds.get(policy, {}).get(step)
        if own:
            return median(own)
        others = [median(steps[step]) for steps in self._seconds.values() if steps.get(step)]
        return median(others) if others else None


class LoadProgress:
    """Progress of one session until it is ready, at ``stage``; ``report`` may be called from any thread."""

    def __init__(self, policy: str, durations: LoadDurations, clock: Callable[[], float] = time.monotonic):
        """Start as waiting; ``policy`` is the name under which durations are kept: path and revision."""
        self.stage = "waiting"
        self._policy = policy
        self._durations = durations
        self._clock = clock
        self._since = clock()
        self._step_seconds: dict[str, float] = {}
        self._fraction: float | None = None

    def report(self, stage: str) -> None:
        """Enter a stage. A download (``jaxmodels.hub.Downloading``) also carries how far it is."""
        done, total = getattr(stage, "done", 0), getattr(stage, "total", 0)
        self._fraction = done / total if total else None
        # A loader's "ready" is about the files: compiling and the rooms come after it.
        if stage not in (self.stage, "ready"):
            self._enter_stage(str(stage))

    def _enter_stage(self, stage: str) -> None:
        now = self._clock()
        if self.stage in STEPS:
            self._step_seconds[self.stage] = self._step_seconds.get(self.stage, 0.0) + now - self._since
        self.stage, self._since = stage, now

    def finish(self) -> Mapping[str, float]:
        """Enter the last stage; the seconds per step are recorded, and returned."""
        self._enter_stage("ready")
        self._durations.add(self._policy, self._step_seconds)
        return self._step_seconds

    def elapsed(self) -> float:
        """Return the seconds spent in this stage."""
        return self._clock() - self._since

    def percent(self) -> int | None:
        """Return how much of a download is done; None if its size is unknown."""
        return None if self._fraction is None else round(100 * self._fraction)

    def estimate_remaining(self) -> float | None:
        """Return the seconds until the session is ready, or None when that is over or was never measured here."""
        if self.stage not in STEPS:
            return None
        now, *later = STEPS[STEPS.index(self.stage) :]
        spent = self.elapsed()
        if self._fraction and spent > 1:
            rest = spent * (1 - self._fraction) / self._fraction
        else:
            usual = self._durations.estimate(self._policy, now)
            if usual is None:
                return None
            rest = max(usual - spent, 0.0)
        # What was never measured here is not guessed: the time left is at least this.
        return rest + sum(self._durations.estimate(self._policy, step) or 0.0 for step in later)


def _read(file: Path) -> dict[str, dict[str, list[float]]]:
    try:
        durations = json.loads(file.read_text())
        return {
            str(policy): {str(step): [float(one) for one in seconds] for step, seconds in steps.items()}
            for policy, steps in durations.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("%s cannot be read; durations of loading are measured again", file.name)
        return {}

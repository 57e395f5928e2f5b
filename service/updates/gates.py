"""Whether a policy may take over from another: its answers to what the robot saw lately, judged away from the robot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.motion.joints import JointTable


@dataclass(frozen=True)
class Verdict:
    """What came of looking at a policy.

    Attributes:
        reason: None when nothing speaks against it, else a stable code, e.g. ``not_finite``.
        text: for people.
        figures: what was measured, JSON-ready.
    """

    reason: str | None = None
    text: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What is let through.

    Attributes:
        difference: how far an action may be from what the running policy would do, as a part of its joint's range.
        margin: how far an action may be outside its joint's range (where it would be clamped), likewise.
        slow: how much of the time that a chunk is executed in an inference may take.
    """

    difference: float = 0.25
    margin: float = 0.1
    slow: float = 0.5


@dataclass(frozen=True)
class Trial:
    """What a policy answered.

    Attributes:
        chunks: (t, a) each.
        references: what the running policy answered to the same observations; None where that is not known.
        seconds: how long each inference took.
        executed: actions of a chunk that are done before the next one takes over.
        budget: seconds in which those are done.
        usual: seconds that the running policy's inferences take, or None.
    """

    chunks: Sequence[np.ndarray]
    references: Sequence[np.ndarray | None]
    seconds: Sequence[float]
    executed: int
    budget: float
    usual: float | None = None


def judge(trial: Trial, table: JointTable, limits: Limits) -> Verdict:
    """Every gate, the first that closes decides; figures hold what was measured until then."""
    figures: dict[str, object] = {"observations": len(trial.chunks)}
    bad = sum(int((~np.isfinite(chunk)).sum()) for chunk in trial.chunks)
    if bad:
        total = sum(chunk.size for chunk in trial.chunks)
        return Verdict("not_finite", f"{bad} of {total} values of its actions are not finite", figures)
    # The difference of two finite numbers of float32 need not be one.
    chunks = [chunk[: trial.executed].astype(np.float64) for chunk in trial.chunks]
    widths = ranges(table, [chunk for chunk in trial.references if chunk is not None])

    outside, joint = _worst([_outside(chunk, table) / widths for chunk in chunks], table)
    figures["outside_range"] = round(outside, 4)
    if outside > limits.margin:
        text = (
            f"joint {joint!r}: an action is outside its range by {outside:.0%} of it, allowed are {limits.margin:.0%}"
        )
        return Verdict("out_of_range", text, figures)

    median, slowest = float(np.median(trial.seconds)), float(np.percentile(trial.seconds, 90))
    allowed = max(limits.slow * trial.budget, 1.2 * (trial.usual or 0.0))
    figures |= {"inference_ms": round(median * 1e3, 2), "inference_p90_ms": round(slowest * 1e3, 2)}
    figures["allowed_ms"] = round(allowed * 1e3, 2)
    if slowest > allowed:
        text = f"an inference takes {slowest * 1e3:.0f} ms (p90), allowed are {allowed * 1e3:.0f} ms"
        return Verdict("slow", text, figures)

    pairs = [(chunk, old) for chunk, old in zip(chunks, trial.references, strict=True) if old is not None]
    figures["compared"] = len(pairs)
    if pairs:
        difference, joint = _worst([np.abs(chunk - old[: trial.executed]) / widths for chunk, old in pairs], table)
        figures["difference"] = round(difference, 4)
        if not difference <= limits.difference:  # no number is no passport
            text = (
                f"joint {joint!r}: differs from the running policy by {difference:.0%} of its range on what the robot "
                f"saw lately, allowed are {limits.difference:.0%}"
            )
            return Verdict("differs", text, figures)
        return Verdict(None, f"differs by {difference:.1%} at most on {len(pairs)} recent observations", figures)
    return Verdict(None, "not compared with the running policy: it has not seen anything lately", figures)


def ranges(table: JointTable, seen: Sequence[np.ndarray]) -> np.ndarray:
    """(a,) the width of each joint's range; of a joint without one, what the running policy makes of it."""
    widths = np.array([joint.high - joint.low for joint in table.joints], np.float64)
    if not seen:
        # Plain units: better a gate that is too narrow than none.
        return np.where(np.isfinite(widths), widths, 1.0)
    values = np.concatenate(seen).astype(np.float64)
    # A joint that stood still lately has a range too; joints of one robot have one unit.
    least = 0.1 * np.abs(values[:, ~np.isfinite(widths)]).max(initial=1e-5)
    return np.where(np.isfinite(widths), widths, np.maximum(np.ptp(values, axis=0), least))


def _outside(chunk: np.ndarray, table: JointTable) -> np.ndarray:
    low = np.array([joint.low for joint in table.joints])
    high = np.array([joint.high for joint in table.joints])
    return np.maximum(np.maximum(low - chunk, chunk - high), 0.0)


def _worst(parts: Sequence[np.ndarray], table: JointTable) -> tuple[float, str]:
    by_joint = np.concatenate(parts).max(axis=0)
    joint = int(by_joint.argmax())
    return float(by_joint[joint]), table.names[joint]

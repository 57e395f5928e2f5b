"""What the page shows of sessions: a line of each ten times a second, everything of the one looked at once a second."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from service.sessions.sessions import Listed

# Upper edges in milliseconds; the last bin is open.
EDGES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SPLIT = np.array((0.0, *EDGES, np.inf))


def line_of(session: Listed) -> dict[str, Any]:
    """One session in the list. Cheap: no percentile is taken of a session that is driven."""
    drive, new = session.drive, session.new
    line: dict[str, Any] = {
        "id": session.id,
        "stage": str(session.stage),
        "reason": session.reason,
        "latched": session.is_latched,
        "policy": new.policy_path,
        "owner": new.owner,
        "dry_run": new.dry_run,
        "hold": None,
        "hold_code": None,
    }
    if drive is None:
        # Nothing is measured yet, so this costs little; how far it is stands there.
        stats = session.status().stats
        return line | {name: value for name, value in stats.items() if name.startswith("progress")}
    hold = drive.control.hold
    if hold is not None:
        line |= {"hold": hold.text, "hold_code": hold.code}
    return line


def detail_of(session: Listed) -> dict[str, Any]:
    """Everything of one session: its status as the API tells it, its joints, and how times are spread."""
    drive = session.drive
    detail: dict[str, Any] = {"status": vars(session.status()), "joints": [], "edges_ms": EDGES, "spread": {}}
    if drive is not None:
        detail["joints"] = [
            {"name": joint.name, "low": _finite(joint.low), "high": _finite(joint.high)} for joint in drive.table.joints
        ]
        spread: Mapping[str, np.ndarray] = {
            "inference": drive.thinking.seconds["total"].samples,
            "lateness": drive.control.lateness.samples,
        }
        detail["spread"] = {name: np.histogram(samples * 1e3, _SPLIT)[0].tolist() for name, samples in spread.items()}
    return detail


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None

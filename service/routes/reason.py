"""Why somebody asks for an emergency stop; nothing that is wrong with a body may keep robots moving."""

import json

from service.routes.body import LARGEST
from service.words import printable

# No types: nothing that is sent is refused.
REASON = {"properties": {"reason": {"title": "Reason", "description": "Text that each session's status then shows."}}}


def reason_of(body: bytes) -> str:
    """The printable text of ``{"reason": "..."}``, or what stands in for it."""
    try:
        found = json.loads(body) if 0 < len(body) <= LARGEST else None
    except (ValueError, RecursionError):
        found = None
    reason = found.get("reason") if isinstance(found, dict) else None
    if not isinstance(reason, str) or not reason.strip():
        return "asked for over HTTP"
    return printable(reason)

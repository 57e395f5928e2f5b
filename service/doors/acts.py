"""An act as a message: what a client asks, and what it is told."""

from collections.abc import Mapping
from typing import Any

from service.doors import observation
from service.doors.consultation import Consultation, Thought
from service.errors import InvalidRequest

_WHOLE = 1 << 63


async def act(consultation: Consultation, message: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to an act; ``docs/direct.md`` has the fields.

    Raises:
        InvalidRequest: something of it cannot be used.
        ServiceError: as ``Consultation.think``.
    """
    is_new = message.get("reset", False)
    if not isinstance(is_new, bool):
        raise InvalidRequest("reset: wanted true or false", ("body", "reset"))
    drive = consultation.open()[1] if is_new else consultation.check()[1]
    want = message.get("want", "chunk")
    if not isinstance(want, str) or want not in ("chunk", "action"):
        raise InvalidRequest("want: wanted chunk or action", ("body", "want"))
    executed, number = (whole(message, name) for name in ("executed", "number"))
    seen = observation.read(message, consultation.wanted(), is_whole=True)
    told: dict[str, Any] = {} if number is None else {"number": number}
    thought: Thought | None
    if is_new:
        consultation.begin_anew()
    if want == "action":
        action, left, thought = await consultation.next(seen)
        told |= {"action": action, "left": left}
    else:
        thought = await consultation.think(seen, executed)
        told |= {"actions": thought.actions}
    pace = drive.control.pace
    told |= {
        "joint_names": list(drive.table.names),
        "action_rate": pace.action_rate,
        "action_steps": pace.action_steps,
        "clamped": list(thought.clamped) if thought else [],
    }
    if thought is not None:
        told["timings_ms"] = thought.timings()
        if thought.odd:
            told["warnings"] = [
                f"far outside of its range: {name}; is it told in another unit?" for name in thought.odd
            ]
    return told


def whole(message: Mapping[str, Any], name: str) -> int | None:
    """An integer of a message, if it has one of this name.

    Raises:
        InvalidRequest: it is something else.
    """
    value = message.get(name)
    if value is not None and (type(value) is not int or not -_WHOLE <= value < _WHOLE):
        raise InvalidRequest(f"{name}: wanted an integer", ("body", name))
    return value

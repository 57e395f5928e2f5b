"""Acts: requests of clients for actions, over HTTP or a stream, and their answers."""

from collections.abc import Mapping
from typing import Any

from service.errors import InvalidRequest
from service.streaming import observation
from service.streaming.direct_inference import DirectInference, InferenceTrace

_INTEGER_LIMIT = 1 << 63
# Fields of an act; ``kind`` is a field on the stream.
ACT_FIELDS = (*observation.OBSERVATION_FIELDS, "want", "executed", "reset", "kind")


async def answer_act(
    inference: DirectInference, message: Mapping[str, Any], observed_at: float | None = None
) -> dict[str, Any]:
    """Answer an act, whose fields ``docs/robots/direct.md`` lists.

    Args:
        observed_at: monotonic time at which the act was received. Defaults to now.

    Raises:
        InvalidRequest: a field is invalid.
        ServiceError: as ``DirectInference.infer``.
    """
    observation.check_fields(message, ACT_FIELDS)
    is_new = message.get("reset", False)
    if not isinstance(is_new, bool):
        raise InvalidRequest("reset: wanted true or false", ("body", "reset"))
    robot_io = inference.check_available()[1] if is_new else inference.check_not_stopped()[1]
    want = message.get("want", "chunk")
    if not isinstance(want, str) or want not in ("chunk", "action"):
        raise InvalidRequest("want: wanted chunk or action", ("body", "want"))
    executed, number = (read_integer(message, name) for name in ("executed", "number"))
    observed = observation.read_observation(message, inference.spec_for(robot_io), is_complete=True)
    answer: dict[str, Any] = {} if number is None else {"number": number}
    trace: InferenceTrace | None
    if is_new:
        inference.reset()
    if want == "action":
        action, left, trace = await inference.next_action(observed, observed_at=observed_at)
        answer |= {"action": action, "left": left}
    else:
        trace = await inference.infer(observed, executed, observed_at=observed_at)
        answer |= {"actions": trace.actions}
    config = robot_io.controller.config
    answer |= {
        "joint_names": list(robot_io.table.names),
        "action_rate": config.action_rate,
        "action_steps": config.action_steps,
        "clamped": list(trace.clamped) if trace else [],
    }
    if trace is not None:
        answer["timings_ms"] = trace.timings()
        warnings = [
            f"joint {name} is far outside of its range; does the robot use another unit?" for name in trace.out_of_range
        ]
        warnings += filter(None, (trace.units_warning, robot_io.runner.describe_cut()))
        if warnings:
            answer["warnings"] = warnings
    return answer


def read_integer(message: Mapping[str, Any], name: str) -> int | None:
    """Return an integer of a message, None if it is missing; raises InvalidRequest for other types."""
    value = message.get(name)
    if value is not None and (type(value) is not int or not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT):
        raise InvalidRequest(f"{name}: wanted an integer", ("body", name))
    return value

"""What a session's policy is told to do, checked and read before it is told."""

from functools import partial

from jaxmodels.errors import JaxModelsError
from service.engine.engine import Served
from service.engine.worker import call_in_thread
from service.errors import InvalidRequest
from service.motion.telling import complaint

WHERE = ("body", "language_instruction")


async def read_ahead(served: Served, instruction: str | None) -> None:
    """Let the policy read an instruction away from the loop and the device's thread: no chunk has to wait for that.

    Raises:
        InvalidRequest: it wants one, or cannot read this one.
    """
    if (why := complaint(served.requirements, instruction)) is not None:
        raise InvalidRequest(why, WHERE)
    if instruction is None or not served.requirements.language:
        return
    try:
        for replica in served.replicas:
            await call_in_thread(partial(replica.policy.prepare_task, instruction), "instruction")
    except JaxModelsError as error:
        raise InvalidRequest(f"language_instruction: {error}", WHERE) from error

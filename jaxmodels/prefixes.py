"""The plan in an observation from outside, checked: what a policy that continues plans is given."""

from collections.abc import Mapping

import numpy as np

from jaxmodels.errors import ObservationError
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, Prefix

NAMES = (PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH)


def check_none(observation: Mapping[str, np.ndarray]) -> None:
    """Raises:
    ObservationError: there is a plan, and the policy would not continue it.
    """
    found = [name for name in NAMES if name in observation]
    if found:
        raise ObservationError(
            f"{', '.join(found)} in the observation of a policy that continues no plan; leave it out "
            "(its requirements have takes_prefix false)"
        )


def read_prefix(observation: Mapping[str, np.ndarray], batch: int, chunk: int, action: int) -> Prefix:
    """The plan, as arrays for a program; of length 0 when the observation has none.

    Raises:
        ObservationError: a part is missing, has the wrong shape or dtype, or holds what no plan can.
    """
    found = [name for name in NAMES if name in observation]
    if not found:
        none = np.zeros(batch, np.int32)
        return Prefix(np.zeros((batch, chunk, action), np.float32), none, none)
    if missing := [name for name in NAMES if name not in found]:
        raise ObservationError(f"{', '.join(missing)} missing beside {', '.join(found)}; a plan is all three, or none")
    delay, length = (_counts(name, observation[name], batch, chunk) for name in (PREFIX_DELAY, PREFIX_LENGTH))
    if (delay > length).any():
        member = int(np.argmax(delay > length))
        raise ObservationError(
            f"{PREFIX_DELAY} is {delay[member]} for member {member}, and {PREFIX_LENGTH} {length[member]}; "
            "no more can have been executed than was planned"
        )
    actions = np.asarray(observation[PREFIX_ACTIONS])
    if actions.shape != (batch, chunk, action):
        raise ObservationError(
            f"{PREFIX_ACTIONS} has shape {actions.shape}; wanted {(batch, chunk, action)}, filled up to a whole chunk"
        )
    if not np.issubdtype(actions.dtype, np.floating):
        raise ObservationError(f"{PREFIX_ACTIONS} is {actions.dtype}; wanted float32")
    is_planned = np.arange(chunk) < length[:, None]
    actions = np.where(is_planned[..., None], actions, 0).astype(np.float32)
    if not np.isfinite(actions).all():
        where = np.argwhere(~np.isfinite(actions))[0].tolist()
        raise ObservationError(f"{PREFIX_ACTIONS} holds {actions[tuple(where)]} at {where}; wanted finite numbers")
    return Prefix(actions, delay, length)


def _counts(name: str, value: np.ndarray, batch: int, most: int) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != (batch,):
        raise ObservationError(f"{name} has shape {array.shape}; wanted {(batch,)}, one for each member of the batch")
    if not np.issubdtype(array.dtype, np.integer):
        raise ObservationError(f"{name} is {array.dtype}; wanted int32")
    if ((array < 0) | (array > most)).any():
        wrong = array[(array < 0) | (array > most)][0]
        raise ObservationError(f"{name} is {wrong}; wanted 0 to {most}, the actions of a chunk")
    return np.ascontiguousarray(array, np.int32)

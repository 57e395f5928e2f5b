"""A request goes to the device where fewest wait, and to another one when that fails; whose fault it was shows so."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.engine.device_lane import DeviceGone, InputRefused, LaneClosed, Overdue
from service.engine.devices import Devices
from service.engine.served import Inference, Replica, Served
from service.engine.store import in_short, let_go
from service.engine.turnover import Turnover
from service.errors import PolicyFailed

logger = logging.getLogger(__name__)


class Dispatch:
    """Asks devices, and holds against them what others make good."""

    def __init__(self, devices: Devices, turnover: Turnover):
        self._devices = devices
        self._turnover = turnover

    async def ask(
        self, served: Served, observation: Mapping[str, np.ndarray], due: float | None, *, is_alone: bool
    ) -> Inference:
        """The answer of some device.

        Args:
            due: when the plan of whoever asks runs dry, on the monotonic clock; as soon as possible when None.
            is_alone: it is not put together with others, because it may spoil what they get.

        Raises:
            PolicyFailed: the policy raised; in words that a session may hear.
        """
        devices = self._devices
        usable = devices.working(served) or await devices.until_one_works(served)
        replica = devices.least(usable)
        elsewhere = _elsewhere(usable, replica)
        try:
            inference = await self._ask_one(replica, observation, due, is_alone=is_alone, may_move=bool(elsewhere))
        except DeviceGone:
            return await self.ask(served, observation, due, is_alone=is_alone)
        except (JaxModelsError, InputRefused, LaneClosed) as error:
            _refuse(error)
        except Exception as error:
            try:
                return await self._ask_another(served, replica, observation, due, error)
            except DeviceGone:
                return await self.ask(served, observation, due, is_alone=is_alone)
        devices.health.answered(replica.policy.device)
        return inference

    async def _ask_one(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool,
        may_move: bool = False,
    ) -> Inference:
        lane = self._devices.lanes[replica.lane]
        try:
            return await lane.ask(replica, observation, due, is_alone=is_alone, may_move=may_move)
        except DeviceGone as error:
            self._turnover.leave(replica.policy.device, str(error))
            raise

    async def _ask_another(
        self,
        served: Served,
        failed: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        why: Exception,
    ) -> Inference:
        """What another device answers, or the first one does after all, whichever comes first."""
        late = why.answer if isinstance(why, Overdue) else None
        # Some may have left while the first one was waited for.
        elsewhere = _elsewhere(self._devices.working(served), failed)
        if not elsewhere and late is None:
            _refuse(why)
        other = self._devices.least(elsewhere) if elsewhere else failed
        asking = [asyncio.create_task(self._ask_one(other, observation, due, is_alone=True))] if elsewhere else []
        try:
            inference = await _first_good([*asking, *filter(None, (late,))])
        except DeviceGone:
            raise
        except Exception as error:
            # Neither: it is the observation, or the policy.
            is_another = isinstance(why, Overdue) or isinstance(error, LaneClosed | InputRefused)
            _refuse(error if is_another else why)
        finally:
            for task in asking:
                task.cancel()
        what = f"it raises {type(why).__name__}"
        if isinstance(why, Overdue):
            if why.is_counted:
                return inference
            why.is_counted, what = True, "it does not answer in time"
        self._turnover.failed(failed.policy.device, what, other.policy.device, why)
        return inference


async def _first_good(answers: Sequence[asyncio.Future[Inference]]) -> Inference:
    """The first that is no error.

    Raises:
        DeviceGone: one of them is gone, and the others are no better: it can be asked of others yet.
        Exception: what the first of them raised.
    """
    waited = set(answers)
    while waited:
        done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for answer in done:
            if answer.exception() is None:
                return answer.result()
    errors = [error for answer in answers if (error := answer.exception()) is not None]
    raise next((error for error in errors if isinstance(error, DeviceGone)), errors[0])


def _elsewhere(usable: Sequence[Replica], replica: Replica) -> Sequence[Replica]:
    return [one for one in usable if one.policy.device != replica.policy.device]


def _refuse(error: Exception) -> NoReturn:
    """Tell a session of an error, in words that it may hear."""
    if isinstance(error, PolicyFailed):
        raise error
    if isinstance(error, JaxModelsError):
        raise PolicyFailed(f"the policy refused its input: {error}") from error
    logger.error("a policy raised", exc_info=error)
    let_go(error)
    raise PolicyFailed(f"the policy raised {type(error).__name__} {in_short(error)}") from error

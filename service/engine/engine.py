"""Policies in memory and the devices that run them, as sessions see them."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from itertools import count
from typing import NoReturn
from weakref import WeakKeyDictionary, ref

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.engine.admission import Admission, Claim, judge
from service.engine.device_health import DeviceHealth
from service.engine.device_lane import DeviceGone, DeviceLane, InputRefused, LaneClosed, Overdue
from service.engine.growth import Growth
from service.engine.lane import Lane
from service.engine.progress import Durations
from service.engine.served import (
    Inference,
    InferenceStuck,
    LoadPolicy,
    Policy,
    Replica,
    Served,
    Sizes,
    in_words,
)
from service.engine.store import Store, in_short, let_go
from service.engine.worker import call_in_thread
from service.errors import PolicyFailed

__all__ = ["Admission", "Engine", "Inference", "InferenceStuck", "LoadPolicy", "Policy", "Served", "Sizes", "in_words"]

logger = logging.getLogger(__name__)

# Seconds that a trial waits for a moment in which no robot waits.
TRIAL_WAIT = 1.0
# Seconds without a question after which nobody is served: clients without a control loop here ask when they like.
QUIET = 3.0
# Inferences that go well before one who failed is put together with others again.
TRUSTED_AFTER = 16


class Engine:
    """Loads policies in threads of their own, and runs each device's in batches on one thread of that device.

    Requests wait for the device and go together where that makes nobody late (``service.engine.batching``). A batch
    that fails runs again member by member, so that only the one whose observation it was fails; one that takes far
    longer than it usually does is left aside, and the others go on in another thread. With several devices another one
    is asked when one fails or takes too long; a device that fails again and again where others answer is out
    (``service.engine.device_health``). All threads run at a lower priority than the event loop (see
    ``service.engine.worker.yield_to_others``).

    Attributes:
        stuck_after: seconds after which a running inference is given up.
        durations: how long policies took to be made ready.
        has_running_robot: whether any session moves its robot; larger batches are compiled while none does.
    """

    def __init__(
        self,
        *,
        stuck_after: float = 5.0,
        niceness: int = 5,
        switch_interval: float | None = 0.001,
        durations: Durations | None = None,
        batch_sizes: Sequence[int] = (1,),
        devices: Sequence[str] = (),
        load: float | None = None,
        are_elsewhere: bool = False,
        patience: float = 60.0,
    ):
        """One request at a time unless ``batch_sizes`` names larger ones.

        Args:
            devices: where policies run, each a copy; the one that it was loaded on when there are none. A device that
                is named twice runs two batches at a time.
            load: share of the devices' time that may be promised; no end of it when None.
            are_elsewhere: devices are not of this process: there are none until one joins, see ``join``.
            patience: seconds that a request then waits for one to join, where none works.
        """
        self.stuck_after = stuck_after
        self.durations = durations or Durations()
        self.has_running_robot: Callable[[], bool] = lambda: False
        self._niceness = niceness
        # Python's default of 5 ms is how long a thread in Python code may keep the event loop waiting.
        if switch_interval is not None:
            sys.setswitchinterval(switch_interval)
        self._idle = asyncio.Event()
        self._idle.set()
        self._asked, self._asked_at = 0, -QUIET
        self._suspects: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()
        self.load = load
        self._devices = dict(enumerate(devices))  # as they were named; none where nobody named one
        self._numbers = count(len(devices) or 1)
        self._lanes: dict[int, DeviceLane] = {}
        if not are_elsewhere:
            names = ["device", *(f"device:{number}" for number in range(1, len(devices)))]
            self._lanes = {number: Lane(name, niceness, stuck_after) for number, name in enumerate(names)}
        self._patience = patience if are_elsewhere else 0.0
        self._joined = asyncio.Event()
        self._is_closed = False
        self._joining: set[asyncio.Task[None]] = set()
        self._health = DeviceHealth()
        self._named = dict(self._devices)  # devices of the lanes, as policies call them
        self._claims: dict[object, Claim] = {}
        self._growth = Growth(batch_sizes, self._may_grow, niceness)
        self._store = Store(self._replicas, self._ready, niceness)

    @property
    def building(self) -> asyncio.Semaphore:
        """Held by whatever loads or compiles, so that only one thing at a time does."""
        return self._store.building

    def policy(
        self,
        load: LoadPolicy,
        path: str,
        revision: str | None,
        on_progress: Callable[[str], None],
        *,
        folder: str | None = None,
        like: Policy | None = None,
    ) -> AbstractAsyncContextManager[Served]:
        """A loaded and compiled policy, for as long as the context lasts.

        Args:
            on_progress: gets short words (``downloading``, ``reading``, ``compiling``), in another thread.
            folder: where the files of this path and revision are already, when they are.
            like: a policy that this one is expected to resemble.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        return self._store.policy(load, path, revision, on_progress, folder=folder, like=like)

    def _replicas(self, policy: Policy) -> tuple[Replica, ...]:
        """One for each device; a policy that came on another device than the first one's is put there, too."""
        usable = self._usable()
        if not usable:
            raise DeviceGone("no device is there that the policy could run on")
        first, *others = usable
        if self._devices and policy.device != self._devices[first]:
            policy = policy.on(self._devices[first])  # where it was loaded is out by now
        copies = {first: policy}
        for lane in others:
            try:
                copies[lane] = policy.on(self._devices[lane])
            except (DeviceGone, KeyError):  # it left meanwhile
                logger.warning("a device left while a policy was copied to it")
        self._named |= {lane: copy.device for lane, copy in copies.items()}
        return tuple(Replica(copy, lane) for lane, copy in copies.items())

    def _usable(self) -> list[int]:
        """Numbers of the lanes whose devices work; the first of this process when none does."""
        found = [lane for lane in tuple(self._lanes) if not self._health.is_out(self._named.get(lane, ""))]
        return found or ([] if self._patience else [0])

    @property
    def first_device(self) -> str | None:
        """Where a policy is loaded before it is copied, as it was named; None where nobody named one."""
        usable = self._usable()
        return self._devices[usable[0]] if self._devices and usable else None

    def _ready(self, served: Served) -> None:
        served.keep(self._works)  # but one that went out while it was being loaded
        there = {replica.lane for replica in served.replicas}
        for number in sorted(self._lanes.keys() - there):  # one that joined meanwhile
            if not self._health.is_out(self._named.get(number, "")):
                self._join(number, [served])
        self._growth.want(served)

    def _works(self, replica: Replica) -> bool:
        return replica.lane in self._lanes and not self._health.is_out(replica.policy.device)

    # Devices that come and go.

    def join(self, device: str, lane: DeviceLane) -> None:
        """Have policies run on one more device, too, as soon as those that are loaded were put there.

        Args:
            device: what policies call it, a name that no other one had.
        """
        if self._is_closed:
            return
        number = next(self._numbers)
        self._lanes[number], self._devices[number], self._named[number] = lane, device, device
        self._join(number, self._store.all)

    def _join(self, number: int, loaded: Sequence[Served]) -> None:
        task = asyncio.create_task(self._extend(number, loaded), name=f"join {self._devices.get(number)}")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _extend(self, number: int, loaded: Sequence[Served]) -> None:
        device = self._devices.get(number)
        for served in loaded:
            if device is None or number not in self._lanes or self._health.is_out(device):
                return  # it left
            try:
                replica = await self._store.copy(served, device, number)
            except Exception as error:
                logger.error("%s cannot be used for a policy: %s", device, in_short(error), exc_info=error)
                let_go(error)
                continue
            if self._works(replica):
                served.add(replica)
                served.keep(self._works)
                self._joined.set()

    def leave(self, device: str, why: str) -> None:
        """Ask nothing of a device any more; what it was asked, others are."""
        if not self._health.take_out(device, why):
            return
        logger.warning("device %s is not used any more: %s", device, why)
        for served in self._store.all:
            served.keep(self._works)

    @property
    def failed(self) -> Collection[str]:
        """Names of devices that are not asked any more."""
        return self._health.out

    async def forget(self, device: str) -> None:
        """Let go of a device that left."""
        for number in [number for number, named in self._devices.items() if named == device]:
            lane = self._lanes.pop(number, None)
            del self._devices[number], self._named[number]
            if lane is not None:
                await lane.close(1.0)
        for served in self._store.all:
            served.keep(self._works)
        self._health.forget(device)

    def _may_grow(self) -> bool:
        is_quiet = time.monotonic() >= self._asked_at + QUIET
        return is_quiet and not (self._asked or self.building.locked() or self.has_running_robot())

    @property
    def is_at_rest(self) -> bool:
        """Whether no larger batch is being compiled, as may be when a robot is started; ``rest`` waits for its end."""
        return self._growth.is_at_rest

    async def rest(self) -> None:
        """Wait for the end of what was being compiled when a robot was started; nothing new begins meanwhile."""
        await self._growth.rest()

    async def compile(self, served: Served, sizes: Sizes) -> None:
        """Make a policy ready for frames of these sizes, away from the device thread.

        Raises:
            PolicyFailed: it cannot be compiled for them.
        """
        await self._store.compile(served, sizes)
        self._growth.want(served, sizes)

    async def submit(
        self,
        served: Served,
        observation: Mapping[str, np.ndarray],
        *,
        due: float | None = None,
        asker: object | None = None,
    ) -> Inference:
        """Run the policy on one observation (batch of 1), together with those of others when that makes nobody late.

        Args:
            due: when the plan of whoever asks runs dry, on the monotonic clock; as soon as possible when None.
            asker: whoever asks, kept by reference only while it lives. Of one asker's requests one is with the device,
                the others wait for it; after one that failed the next ones run alone until they can be trusted.

        Raises:
            PolicyFailed: the policy raised.
            InferenceStuck: it did not come back in ``stuck_after`` seconds; its thread was replaced.
        """
        if asker is None:
            return await self._submit(served, observation, due, None)
        turn = self._turns.get(asker)
        if turn is None:
            turn = self._turns[asker] = asyncio.Lock()
        async with turn:
            return await self._submit(served, observation, due, asker)

    async def _submit(
        self, served: Served, observation: Mapping[str, np.ndarray], due: float | None, asker: object | None
    ) -> Inference:
        self._asked += 1
        self._idle.clear()
        try:
            inference = await self._ask(served, observation, due, asker)
        except Exception:
            if asker is not None:
                self._suspects[asker] = TRUSTED_AFTER
            raise
        finally:
            self._asked -= 1
            self._asked_at = time.monotonic()
            if not self._asked:
                self._idle.set()
        if asker in self._suspects:
            left = self._suspects.pop(asker)
            if left > 1:
                self._suspects[asker] = left - 1
        return inference

    async def _ask(
        self, served: Served, observation: Mapping[str, np.ndarray], due: float | None, asker: object | None
    ) -> Inference:
        is_alone = asker is not None and asker in self._suspects
        usable = self._working(served) or await self._until_one_works(served)
        replica = self._least(usable)
        elsewhere = self._elsewhere(usable, replica)
        lane = self._lanes[replica.lane]
        try:
            inference = await lane.ask(replica, observation, due, is_alone=is_alone, may_move=bool(elsewhere))
        except DeviceGone as error:
            self.leave(replica.policy.device, str(error))
            return await self._ask(served, observation, due, asker)
        except (JaxModelsError, InputRefused, LaneClosed) as error:
            _refuse(error)
        except Exception as error:
            # Some may have left while this one was waited for.
            if not (elsewhere := self._elsewhere(self._working(served), replica)):
                _refuse(error)
            other = self._least(elsewhere)
            try:
                return await self._ask_another(replica, other, observation, due, error)
            except DeviceGone as gone:
                self.leave(other.policy.device, str(gone))
                return await self._ask(served, observation, due, asker)
        self._health.answered(replica.policy.device)
        return inference

    def _working(self, served: Served) -> Sequence[Replica]:
        working = list(filter(self._works, served.replicas))
        return working if working or self._patience else served.replicas

    @staticmethod
    def _elsewhere(usable: Sequence[Replica], replica: Replica) -> Sequence[Replica]:
        return [one for one in usable if one.policy.device != replica.policy.device]

    async def _until_one_works(self, served: Served) -> Sequence[Replica]:
        """Nothing is lost by waiting: the robot is held when its plan runs dry."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while not (working := self._working(served)):
                    if self._is_closed:
                        raise LaneClosed("the server is ending")
                    self._joined.clear()
                    await self._joined.wait()
                return working
        raise PolicyFailed(f"no engine has been there for {self._patience:g} s that the policy could run on")

    async def _ask_another(
        self,
        failed: Replica,
        other: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        why: Exception,
    ) -> Inference:
        """What one device did not answer is asked of another one; whose fault it was shows by that."""
        try:
            inference = await self._lanes[other.lane].ask(other, observation, due, is_alone=True)
        except DeviceGone:
            raise
        except Exception as error:
            # Neither: it is the observation, or the policy.
            is_another = isinstance(why, Overdue) or isinstance(error, LaneClosed | InputRefused)
            _refuse(error if is_another else why)
        device, what = failed.policy.device, f"it raises {type(why).__name__}"
        if isinstance(why, Overdue):
            if why.is_counted:
                return inference
            why.is_counted, what = True, "it does not answer in time"
        if self._health.failed(device, what):
            logger.error(
                "device %s is not used any more: %s, and %s answers what it does not",
                device,
                self._health.why(device),
                other.policy.device,
                exc_info=why,
            )
            for loaded in self._store.all:
                loaded.keep(self._works)
        return inference

    def _least(self, replicas: Sequence[Replica]) -> Replica:
        """Where fewest wait; of those, who was not asked for the longest."""
        lanes = self._lanes
        return min(replicas, key=lambda replica: (lanes[replica.lane].asked, lanes[replica.lane].asked_at))

    def admit(self, served: Served, per_second: float, *, who: object = None) -> Admission:
        """Whether there is time for so many more inferences per second of this policy; promises nothing.

        Args:
            who: whose claim is to be another one; it counts no more.
        """
        mine, others = [], 0.0
        for holder, claim in self._claims.items():
            if holder is who:
                continue
            if claim.served() is served:
                mine.append(claim.per_second)
            else:
                others += claim.share
        limit = float("inf") if self.load is None else self.load
        return judge(served, per_second, mine, others, limit=limit)

    def claim(self, who: object, served: Served, per_second: float) -> None:
        """Promise somebody so many inferences per second, until ``release``."""
        share = self.admit(served, per_second, who=who).share
        self._claims[who] = Claim(ref(served), per_second, share)

    def move_claim(self, who: object, served: Served) -> None:
        """What was promised to somebody is of another policy from now on, which may take more or less of the time."""
        if who in self._claims:
            self.claim(who, served, self._claims[who].per_second)

    def release(self, who: object) -> None:
        """Nothing is promised to them any more."""
        self._claims.pop(who, None)

    async def until_idle(self) -> None:
        """Wait until no session waits for an inference: what has time begins only then."""
        while self._asked:
            await self._idle.wait()

    async def try_out(self, served: Served, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float]:
        """One inference that no robot waits for, in a thread that yields to the device thread: chunk and seconds.

        Raises:
            PolicyFailed: the policy raised.
        """

        def infer() -> tuple[np.ndarray, float]:
            began = time.perf_counter()
            chunk = served.policy.act(observation)
            return chunk, time.perf_counter() - began

        # Robots that keep the device busy all the time are yielded to by the thread's priority alone.
        with suppress(TimeoutError):
            async with asyncio.timeout(TRIAL_WAIT):
                await self.until_idle()
        try:
            return await call_in_thread(infer, "policy-trial", 2 * self._niceness)
        except JaxModelsError as error:
            raise PolicyFailed(f"the policy refused its input: {error}") from error
        except Exception as error:
            logger.exception("a policy on trial raised")
            raise PolicyFailed(f"the policy raised {type(error).__name__}; the server's log says more") from error

    def facts(self) -> dict[str, object]:
        """What is loaded, where it runs, what its batches take and how busy the devices are; JSON-ready."""
        loaded = self._store.all
        return {
            "device": next((served.policy.device for served in loaded), None),
            "devices_failed": list(self._health.out),
            "devices": [self._figures(number, lane, loaded) for number, lane in self._lanes.items()],
            "policies_loaded": len(loaded),
            "policies_loading": self._store.loading,
            "inferences_waiting": sum(lane.waiting for lane in self._lanes.values()),
            "threads_replaced": sum(lane.abandoned for lane in self._lanes.values()),
            "batch_sizes_to_compile": self._growth.left,
            "promised_per_second": round(sum(claim.per_second for claim in self._claims.values()), 2),
            "promised_load": round(sum(claim.share for claim in self._claims.values()), 4),
        }

    def _figures(self, number: int, lane: DeviceLane, loaded: Sequence[Served]) -> dict[str, object]:
        here = [replica for served in loaded for replica in served.replicas if replica.lane == number]
        device = self._named.get(number)
        return {
            "device": device,
            "failed": None if device is None else self._health.why(device),
            "waiting": lane.waiting,
            "load": round(lane.load(time.monotonic()), 4),
            "batches": {str(size): count for size, count in sorted(lane.batches.items())},
            "batch_ms": [replica.costs.milliseconds() for replica in here],
        }

    async def close(self) -> None:
        """End the device threads; waits a second for an inference that is running. Whoever waits is told."""
        self._is_closed = True
        self._joined.set()
        self._store.close()
        self._growth.close()
        for task in self._joining:
            task.cancel()
        ended = await asyncio.gather(*(lane.close(1.0) for lane in self._lanes.values()))
        if not all(ended):
            logger.warning("the device thread is still busy; it is left behind")


def _refuse(error: Exception) -> NoReturn:
    """Tell a session of an error, in words that it may hear."""
    if isinstance(error, PolicyFailed):
        raise error
    if isinstance(error, JaxModelsError):
        raise PolicyFailed(f"the policy refused its input: {error}") from error
    logger.error("a policy raised", exc_info=error)
    let_go(error)
    raise PolicyFailed(f"the policy raised {type(error).__name__} {in_short(error)}") from error

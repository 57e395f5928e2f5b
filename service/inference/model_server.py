"""Model server: forward passes of models that are no policies, at lower priority than robots.

A pass begins only if no session waits for an inference, on a low-priority thread. It cannot be interrupted, so a long
pass is refused while a robot runs. Reading, compiling and writing also run off the event loop, one at a time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.errors import InvalidRequest, ModelBusy, ModelError, ModelFailed, ServiceError, TooLarge, UnknownModel
from service.http.array_formats import ArrayFormat, ArrayLimits
from service.inference.config import ModelSettings
from service.inference.engine import Engine
from service.stats import Recent
from service.threads import Result, Worker, call_in_thread

if TYPE_CHECKING:
    from jaxmodels import LoadedModel  # An import at runtime takes seconds, because it imports JAX.

STAGES = ("queue", "read", "to_device", "compute", "to_host", "total")
_SAMPLES = 512


# Loads a model in a thread: (path, revision, *, on_progress). Raises JaxModelsError with a text for clients.
LoadModel = Callable[..., "LoadedModel"]


class ServedModel:
    """One model in memory; ``source`` is its repo or folder name, the counters start at zero."""

    def __init__(self, name: str, source: str, model: "LoadedModel"):
        self.name = name
        self.source = source
        self.model = model
        self.forwards = 0
        self.errors = 0
        self.compiles = 0
        self.compile_seconds = 0.0
        self.stages = {stage: Recent(_SAMPLES) for stage in STAGES}
        self.dtypes = {entry["name"]: entry["dtype"] for entry in model.description["inputs"]}

    def describe(self) -> dict[str, Any]:
        """Return what the API answers about the model; JSON-ready."""
        return {
            "name": self.name,
            "source": self.source,
            **self.model.description,
            "stats": {
                "forwards": self.forwards,
                "errors": self.errors,
                "compiles": self.compiles,
                "compile_seconds": round(self.compile_seconds, 3),
                "shapes_compiled": self.model.compiled_shapes,
                "stages_ms": {stage: recent.percentiles_ms(50, 99) for stage, recent in self.stages.items()},
            },
        }


logger = logging.getLogger(__name__)

_NICENESS = 10  # five more than inferences


@dataclass(frozen=True)
class ForwardResult:
    """An encoded answer in pieces, and where the time went, in milliseconds."""

    pieces: Sequence[bytes | memoryview]
    timings: Mapping[str, float]


@dataclass(frozen=True)
class ForwardRequest:
    """A request for a forward pass: body, its format, and the format of the answer."""

    body: Sequence[bytes]
    form: ArrayFormat
    answer_form: ArrayFormat
    received_at: float = field(default_factory=time.monotonic)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class ForwardQueue:
    """Queue of the forward passes of one process."""

    def __init__(
        self, engine: Engine, settings: ModelSettings, answer_deadline: float, has_running_robot: Callable[[], bool]
    ):
        self.settings, self.answer_deadline = settings, answer_deadline
        self._arrays = ArrayLimits(bytes=settings.max_forward_bytes)
        self._engine = engine
        self._has_running_robot = has_running_robot
        self._reserved = 0
        self._turn = asyncio.Lock()
        self._passes: set[asyncio.Task[ForwardResult]] = set()
        self._worker: Worker | None = None

    @contextmanager
    def reserve_slot(self) -> Iterator[None]:
        """Reserve a slot for one request, before its body is read; raises ModelBusy if none is free."""
        if self._reserved >= self.settings.max_forwards:
            raise ModelBusy(f"{self._reserved} forward passes are asked for already; try again in a moment")
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    async def forward(self, served: ServedModel, request: ForwardRequest, slot: ExitStack) -> ForwardResult:
        """Run one forward pass, from an encoded body to an encoded answer.

        Args:
            slot: of this request; when the caller leaves before the pass is over, it is kept until then.

        Raises:
            InvalidRequest: the body does not fit the model.
            TooLarge: it asks for more than is allowed.
            ModelBusy: it was not done in time.
            ModelFailed: the model raised.
        """
        task = asyncio.create_task(self._run_in_turn(served, request), name=f"forward {served.name}")
        self._passes.add(task)
        task.add_done_callback(self._passes.discard)
        # Retrieve the exception, or asyncio logs it as lost when the caller has left.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(self.answer_deadline):
                return await asyncio.shield(task)
        except TimeoutError:
            served.errors += 1
            raise ModelBusy(
                f"the forward pass was not done in {self.answer_deadline:g} s (answer_deadline); robots and requests "
                "before it come first"
            ) from None
        finally:
            request.cancelled.set()
            if not task.done():
                kept = slot.pop_all()
                task.add_done_callback(lambda task: kept.close())

    async def _run_in_turn(self, served: ServedModel, request: ForwardRequest) -> ForwardResult:
        async with self._turn:
            if request.cancelled.is_set():
                raise ModelBusy("given up")
            try:
                return await self._run(served, request)
            except ServiceError:
                served.errors += 1
                raise
            except JaxModelsError as error:
                served.errors += 1
                raise InvalidRequest(str(error), ("body", "inputs")) from error
            except Exception as error:
                served.errors += 1
                logger.exception("model %s raised", served.name)
                raise ModelFailed(f"the model raised {type(error).__name__}; the server's log says more") from error

    async def _run(self, served: ServedModel, request: ForwardRequest) -> ForwardResult:
        model = served.model
        begun = time.monotonic()
        inputs = await self._call(lambda: request.form.decode(b"".join(request.body), self._arrays, served.dtypes))
        cost = await self._call(lambda: model.cost(inputs))
        self._check_cost(cost, request.answer_form)
        self._check_robots(cost[0])
        read = time.monotonic()
        compile_seconds = await self._compile(served, inputs)
        compiled = time.monotonic()
        if not await _wait_for_first(self._engine.wait_until_idle(), request.cancelled.wait()):
            raise ModelBusy("given up")
        self._check_robots(cost[0])
        started = time.monotonic()
        outputs = await self._call(lambda: model.forward(inputs))
        seconds = {
            "queue": begun - request.received_at + started - compiled,
            "read": read - begun,
            **model.timings,
            "total": time.monotonic() - request.received_at,
        }
        served.forwards += 1
        for stage, recent in served.stages.items():
            recent.add(seconds.get(stage, 0.0))
        timings = {stage: round(spent * 1e3, 3) for stage, spent in (seconds | {"compile": compile_seconds}).items()}
        try:
            return ForwardResult(await self._call(lambda: request.answer_form.encode(outputs, timings)), timings)
        except ValueError as error:
            raise ModelFailed("the model gave NaN or infinity, which JSON has not; ask for npz") from error

    async def _compile(self, served: ServedModel, inputs: Mapping[str, np.ndarray]) -> float:
        """Compile for new shapes, never during a policy load or another compile: both cores are busy then."""
        if await self._call(lambda: served.model.is_compiled(inputs)):
            return 0.0
        async with self._engine.policy_cache.building:
            seconds = await self._call(lambda: served.model.compile(inputs))
        served.compiles += 1
        served.compile_seconds += seconds
        return seconds

    def _check_cost(self, cost: tuple[float, int, int], form: ArrayFormat) -> None:
        seconds, memory, answer = cost
        settings = self.settings
        if seconds > self.answer_deadline:
            raise TooLarge(
                f"the forward pass would take about {seconds:.0f} s here, and {self.answer_deadline:g} s are allowed "
                "(answer_deadline); send a smaller batch or size"
            )
        if memory > settings.max_forward_memory:
            raise TooLarge(
                f"the forward pass would take about {memory >> 20} MB of memory, and "
                f"{settings.max_forward_memory >> 20} MB are allowed (max_forward_memory); send a smaller batch or size"
            )
        if answer > settings.max_forward_bytes:
            raise TooLarge(
                f"the answer would have {answer} bytes, and {settings.max_forward_bytes} are allowed "
                "(max_forward_bytes)"
            )
        if form.max_numbers is not None and answer > 4 * form.max_numbers:
            raise TooLarge(
                f"the answer would have {answer // 4} numbers, and {form.max_numbers} are allowed in JSON; ask for "
                "another form: Accept: application/x-npz"
            )

    def _check_robots(self, seconds: float) -> None:
        if seconds > self.settings.forward_beside_robots and self._has_running_robot():
            raise ModelBusy(
                f"a robot is running, and the forward pass would take about {seconds:.2g} s; beside robots it may take "
                f"{self.settings.forward_beside_robots:g} s (forward_beside_robots); stop the sessions or send less"
            )

    async def _call(self, call: Callable[[], Result]) -> Result:
        if self._worker is None:
            self._worker = Worker("models", _NICENESS)
        return await self._worker.submit(call)

    async def close(self) -> None:
        """Close the thread; a running pass gets a second."""
        for task in self._passes:
            task.cancel()
        if self._worker is not None and not await asyncio.to_thread(self._worker.close, 1.0):
            logger.warning("a forward pass is still running; it is left behind")


async def _wait_for_first(awaited: Awaitable[object], other: Awaitable[object]) -> bool:
    """Wait for either of two; returns whether the first one is done."""
    tasks = [asyncio.ensure_future(awaited), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


class ModelServer:
    """All models of one process, and the queue ``forwards`` of their requests."""

    def __init__(
        self,
        engine: Engine,
        settings: ModelSettings | None = None,
        *,
        answer_deadline: float = 30.0,
        has_running_robot: Callable[[], bool] = lambda: False,
    ):
        """Create an empty server; a pass estimated to exceed ``answer_deadline`` seconds is refused."""
        self.forwards = ForwardQueue(engine, settings or ModelSettings(), answer_deadline, has_running_robot)
        self._engine = engine
        self._models: dict[str, ServedModel] = {}

    async def load(self, name: str, path: str, revision: str | None, load: LoadModel) -> ServedModel:
        """Load a model, compile it, and run it at its usual size; raises ModelError."""

        def log_stage(stage: str) -> None:
            if stage != "ready":  # it still has to be compiled
                logger.info("model %s: %s", name, stage)

        def load_and_run() -> "tuple[str, LoadedModel]":
            model = load(path, revision, on_progress=log_stage)
            inputs = model.example()
            logger.info("model %s: compiling", name)
            model.compile(inputs)
            began = time.monotonic()
            # More than once, because the first pass is a slow one, and how long one takes decides when it may run.
            for _ in range(5):
                model.forward(inputs)
                if time.monotonic() - began > 1.0:
                    break
            is_folder = Path(path).expanduser().is_dir()
            return (Path(path).name if is_folder else "@".join(filter(None, (path, revision)))), model

        began = time.monotonic()
        logger.info("model %s: loading %s", name, path)
        async with self._engine.policy_cache.building:
            try:
                source, model = await call_in_thread(load_and_run, "model-loader", 5)
            except JaxModelsError as error:
                raise ModelError(f"model {name!r} cannot be loaded: {error}") from error
            except Exception as error:
                logger.exception("loading model %r failed", name)
                raise ModelError(f"model {name!r} cannot be loaded ({type(error).__name__})") from error
        served = self._models[name] = ServedModel(name, source, model)
        millions = model.description["parameters"] / 1e6
        logger.info("model %s: ready in %.1f s, %.2f M parameters", name, time.monotonic() - began, millions)
        return served

    def list(self) -> list[ServedModel]:
        """Return all models, in the order of the settings."""
        return list(self._models.values())

    def get(self, name: str) -> ServedModel:
        """Return the model of this name; raises UnknownModel."""
        if name not in self._models:
            loaded = f"loaded: {', '.join(self._models)}" if self._models else "none is loaded"
            raise UnknownModel(f"no such model; {loaded} (robojax serve --model name=path loads one)")
        return self._models[name]

    async def close(self) -> None:
        """Close the thread that runs the models; a running pass gets a second."""
        await self.forwards.close()

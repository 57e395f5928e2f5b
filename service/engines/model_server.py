"""Model server: models that are not policies, in a process of their own with a lower priority than all engines."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.engines.connection import Connection, ConnectionLost, EngineFault
from service.engines.host_process import HostRefused, SupervisedProcess
from service.errors import InvalidRequest, ModelBusy, ModelError, ModelFailed, TooLarge, UnknownModel
from service.http.array_formats import ArrayFormat
from service.inference.config import ModelSettings, PolicySettings
from service.inference.model_host import (
    PIECE_BYTES,
    ForwardOutcome,
    LoadModel,
    ModelFacts,
    ModelHost,
    ModelOptions,
    ModelRefusal,
)
from service.inference.policy_sources import set_cache_folders
from service.stats import Recent
from service.threads import Worker

logger = logging.getLogger(__name__)

STAGES = ("queue", "read", "to_device", "compute", "to_host", "total")
_SAMPLES = 512
# Seconds after `answer_deadline` in which an abandoned pass ends; then its process is killed. In times of the deadline.
GRACE_FACTOR = 2.0
# Variables of the environment with a token of the Hub, which the process needs for private repos.
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class ModelProcess(SupervisedProcess):
    """Runs the process that holds the models."""

    module = "service.engines.model_process"
    begin_timeout = None  # downloads and compilations of large models take minutes
    niceness = 15  # engines have 5

    def __init__(self, options: ModelOptions):
        """Prepare; nothing is started yet."""
        tokens = {name: os.environ[name] for name in _HUB_TOKENS if name in os.environ}
        # An engine on the same GPU takes most of its memory at once.
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")}
        super().__init__("the process of the models", Worker("models"), tokens | memory)
        self._options = options
        self._facts: Mapping[str, ModelFacts] | None = None
        self._load_error: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Mapping[str, ModelFacts]:
        """Start the process, and wait until the models are loaded.

        Raises:
            ModelError: a model cannot be loaded.
        """
        self._task = asyncio.create_task(self.run(), name="models")
        await self.is_tried.wait()
        if self._facts is None:
            raise ModelError(self._load_error or f"the models cannot be loaded: {self.trouble}")
        return self._facts

    def begin_arguments(self) -> tuple[Any, ...]:
        """Return the models to load and their limits."""
        return (self._options,)

    def on_begun(self, connection: Connection, answer: Mapping[str, ModelFacts] | ModelRefusal) -> None:
        """Use the models."""
        if isinstance(answer, ModelRefusal):
            self._load_error = answer.text
            raise HostRefused(answer.text)
        self._facts = answer

    def on_ended(self, why: str) -> None:
        """Use the models no more, until they are loaded again."""
        self._facts = None

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the `ModelHost`.

        Raises:
            ConnectionLost: the process has ended, or its models are being loaded.
        """
        if self._facts is None or self._connection is None:
            raise ConnectionLost(self.trouble)
        return self._connection.call(method, *arguments)

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._starter.close(0.0)


class InProcessModels:
    """Holds the models in this process: for programs that bring their own loader of models."""

    def __init__(self, options: ModelOptions, load: LoadModel):
        self._options, self._host = options, ModelHost(load)

    async def begin(self) -> Mapping[str, ModelFacts]:
        """Load the models.

        Raises:
            ModelError: a model cannot be loaded.
        """
        facts = await self._host.begin(self._options)
        if isinstance(facts, ModelRefusal):
            raise ModelError(facts.text)
        return facts

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the `ModelHost`."""
        return getattr(self._host, method)(*arguments)

    def kill_process(self, why: str) -> None:
        """Log why the models would be killed if they were in another process."""
        logger.error("the models do not answer: %s", why)

    async def close(self) -> None:
        """End the thread of the models; a running pass gets a second."""
        if not await asyncio.to_thread(self._host.close):
            logger.warning("a forward pass is still running; it is left behind")


def create_host(
    models: ModelSettings, policies: PolicySettings, answer_deadline: float, load: LoadModel | None
) -> ModelProcess | InProcessModels | None:
    """Create what holds the models of the settings; None when the settings name no models.

    Args:
        load: loads models into this process; None for a process of their own.
    """
    if not models.models:
        return None
    options = ModelOptions(
        models.models,
        answer_deadline,
        models.max_forward_bytes,
        models.max_forward_memory,
        policies.dtype,
        policies.device,
    )
    if load is not None:
        return InProcessModels(options, load)
    set_cache_folders(policies)  # in variables that the process inherits
    return ModelProcess(options)


class ServedModel:
    """One loaded model; the counters start at zero, and outlive its process."""

    def __init__(self, name: str, facts: ModelFacts):
        self.name, self.source, self.description = name, facts.source, facts.description
        self.shapes_compiled = facts.shapes_compiled
        self.forwards = 0
        self.errors = 0
        self.compiles = 0
        self.compile_seconds = 0.0
        self.stages = {stage: Recent(_SAMPLES) for stage in STAGES}

    def record(self, outcome: ForwardOutcome) -> None:
        """Count a forward pass."""
        self.shapes_compiled = outcome.shapes_compiled
        if outcome.compile_seconds:
            self.compiles += 1
            self.compile_seconds += outcome.compile_seconds
        if outcome.refusal is None:
            self.forwards += 1
            for stage, recent in self.stages.items():
                recent.add(outcome.timings.get(stage, 0.0) / 1e3)

    def describe(self) -> dict[str, Any]:
        """Return what the API answers about the model; JSON-ready."""
        return {
            "name": self.name,
            "source": self.source,
            **self.description,
            "stats": {
                "forwards": self.forwards,
                "errors": self.errors,
                "compiles": self.compiles,
                "compile_seconds": round(self.compile_seconds, 3),
                "shapes_compiled": self.shapes_compiled,
                "stages_ms": {stage: recent.percentiles_ms(50, 99) for stage, recent in self.stages.items()},
            },
        }


@dataclass(frozen=True)
class ForwardResult:
    """An encoded answer in pieces, and where the time went, in milliseconds."""

    pieces: Sequence[memoryview]
    timings: Mapping[str, float]


@dataclass(frozen=True)
class ForwardRequest:
    """A request for a forward pass: body, its format, and the format of the answer."""

    body: Sequence[bytes]
    form: ArrayFormat
    answer_form: ArrayFormat
    received_at: float = field(default_factory=time.monotonic)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class ModelServer:
    """All models of a server, and the queue of their forward passes.

    Args:
        host: holds the models; None when there are none.
        answer_deadline: seconds that a request waits for its answer.
    """

    def __init__(self, host: ModelProcess | InProcessModels | None, settings: ModelSettings, answer_deadline: float):
        self.settings, self.answer_deadline = settings, answer_deadline
        self._host = host
        self._models: dict[str, ServedModel] = {}
        self._reserved = 0
        self._turn = asyncio.Lock()
        self._passes: set[asyncio.Task[ForwardResult]] = set()

    async def load(self) -> None:
        """Load the models of the settings; raises ModelError."""
        if self._host is not None:
            self._models = {name: ServedModel(name, facts) for name, facts in (await self._host.begin()).items()}

    def list(self) -> list[ServedModel]:
        """Return all models, in the order of the settings."""
        return list(self._models.values())

    def get(self, name: str) -> ServedModel:
        """Return the model of this name; raises UnknownModel."""
        if name not in self._models:
            loaded = f"loaded: {', '.join(self._models)}" if self._models else "none is loaded"
            raise UnknownModel(f"no such model; {loaded} (robojax serve --model name=path loads one)")
        return self._models[name]

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
            ModelBusy: it was not done in time, or the process of the models ended.
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
                f"the forward pass was not done in {self.answer_deadline:g} s (answer_deadline); engines of robots "
                "and earlier requests come first"
            ) from None
        finally:
            request.cancelled.set()
            if not task.done():
                kept = slot.pop_all()
                task.add_done_callback(lambda task: kept.close())

    async def _run_in_turn(self, served: ServedModel, request: ForwardRequest) -> ForwardResult:
        assert self._host is not None, "it holds the model that was found"
        async with self._turn:
            if request.cancelled.is_set():
                raise ModelBusy("given up")
            limit = (1 + GRACE_FACTOR) * self.answer_deadline
            try:
                async with asyncio.timeout(limit):
                    outcome, pieces = await _call_host(self._host.call, served.name, request)
            except TimeoutError:
                why = f"a forward pass of model {served.name} did not end in {limit:g} s"
                self._host.kill_process(why)
                raise ModelBusy(why) from None
            except ConnectionLost:
                served.errors += 1
                raise ModelBusy("the process of the models ended and is started again; try again in a moment") from None
            except EngineFault as error:
                served.errors += 1
                raise ModelFailed(str(error)) from error
            served.record(outcome)
            if (refusal := outcome.refusal) is not None:
                served.errors += 1
                raise _to_error(refusal)
            return ForwardResult(pieces, outcome.timings)

    async def close(self) -> None:
        """End the process of the models."""
        for task in self._passes:
            task.cancel()
        if self._host is not None:
            await self._host.close()


async def _call_host(
    call: Callable[..., Awaitable[Any]], name: str, request: ForwardRequest
) -> tuple[ForwardOutcome, Sequence[memoryview]]:
    """Send the body, run the pass, and fetch the answer."""
    began = time.monotonic()
    for index, piece in enumerate(request.body):
        await call("append", index, np.frombuffer(piece, np.uint8))
    seconds = began - request.received_at, time.monotonic() - began
    outcome = await call("forward", name, request.form.content_type, request.answer_form.content_type, *seconds)
    return outcome, [(await call("read", start)).data for start in range(0, outcome.size, PIECE_BYTES)]


def _to_error(refusal: ModelRefusal) -> Exception:
    if refusal.code == InvalidRequest.code:
        return InvalidRequest(refusal.text, refusal.loc)
    return {error.code: error for error in (TooLarge, ModelFailed)}[refusal.code](refusal.text)

"""Model server: models that are not policies, in a process of their own with a lower priority than all engines."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.engines.connection import Connection, ConnectionLost, EngineFault
from service.engines.host_process import HostRefused, SupervisedProcess
from service.engines.messages import ForwardOutcome, ModelFacts, ModelRefusal
from service.engines.model_host import PIECE_BYTES, LoadModel, ModelHost
from service.errors import InvalidRequest, ModelBusy, ModelError, ModelFailed, ServiceError, TooLarge, UnknownModel
from service.http.array_formats import ArrayFormat
from service.inference.config import ModelSettings, PolicySettings, set_cache_folders
from service.stats import Recent
from service.threads import WorkerThread

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

    def __init__(self) -> None:
        tokens = {name: os.environ[name] for name in _HUB_TOKENS if name in os.environ}
        # An engine on the same GPU takes most of its memory at once.
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")}
        super().__init__("the process of the models", WorkerThread("models"), tokens | memory)
        self._arguments: tuple[Any, ...] = ()
        self._facts: Mapping[str, ModelFacts] | None = None
        self._load_error: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self, *arguments: Any) -> Mapping[str, ModelFacts]:
        """Start the process, and wait until the models are loaded.

        Args:
            arguments: of `ModelHost.begin`.

        Raises:
            ModelError: a model cannot be loaded.
        """
        self._arguments = arguments
        self._task = asyncio.create_task(self.run(), name="models")
        await self.is_tried.wait()
        if self._facts is None:
            raise ModelError(self._load_error or f"the models cannot be loaded: {self.trouble}")
        return self._facts

    def begin_arguments(self) -> tuple[Any, ...]:
        """Return the models to load and their limits."""
        return self._arguments

    def on_begun(self, connection: Connection, answer: Mapping[str, ModelFacts] | ModelRefusal) -> None:
        """Use the models."""
        if isinstance(answer, ModelRefusal):
            self._load_error = answer.text
            raise HostRefused(answer.text)
        self._facts = answer

    def on_ended(self, why: str) -> None:
        """Use the models no more, until they are loaded again."""
        self._facts = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `ModelHost`.

        Raises:
            ModelBusy: the process has ended, or its models are being loaded.
            InvalidRequest, TooLarge, ModelFailed: as the method.
        """
        try:
            if self._facts is None or self._connection is None:
                raise ConnectionLost
            answer = await self._connection.call(method, *arguments)
        except ConnectionLost:
            text = "the process of the models ended and is started again; try again in a moment"
            raise ModelBusy(text) from None
        except EngineFault as error:
            raise ModelFailed(str(error)) from error
        if isinstance(answer, ModelRefusal):
            if answer.code == InvalidRequest.code:
                raise InvalidRequest(answer.text, answer.loc)
            raise (TooLarge if answer.code == TooLarge.code else ModelFailed)(answer.text)
        return answer

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._starter.close(0.0)


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
        self.forwards += 1
        if seconds := outcome.timings["compile"] / 1e3:
            self.compiles += 1
            self.compile_seconds += seconds
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
    """All models of a server, and the queue of their forward passes."""

    def __init__(
        self,
        settings: ModelSettings,
        policies: PolicySettings,
        answer_deadline: float,
        load_model: LoadModel | None = None,
    ):
        """Prepare; nothing is loaded yet.

        Args:
            policies: settings with the device and dtype of models.
            answer_deadline: seconds that a request waits for its answer.
            load_model: loads models into this process; None for a process of their own.
        """
        self.settings, self.answer_deadline = settings, answer_deadline
        self._policies, self._load_model = policies, load_model
        self._host: ModelHost | ModelProcess | None = None
        self._models: dict[str, ServedModel] = {}
        self._reserved = 0
        self._turn = asyncio.Lock()
        self._passes: set[asyncio.Task[ForwardResult]] = set()

    async def load(self) -> None:
        """Load the models of the settings; raises ModelError."""
        if not self.settings.models:
            return
        set_cache_folders(self._policies)  # A process inherits the variables.
        self._host = ModelProcess() if self._load_model is None else ModelHost(self._load_model)
        policies = self._policies
        facts = await self._host.begin(
            self.settings.model_dump(),
            policies.dtype if policies.dtype in ("float32", "bfloat16") else None,  # Models are not quantized.
            policies.device,
            policies.load_memory,
            self.answer_deadline,
        )
        self._models = {name: ServedModel(name, facts[name]) for name in self.settings.models}

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
            raise ModelBusy(f"{self._reserved} forward passes are requested already; try again in a moment")
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
        assert self._host is not None, "it has loaded the model"
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
            except ServiceError:
                served.errors += 1
                raise
            served.record(outcome)
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

"""Model host: loads diffusers models and runs their forward passes, from an encoded body to an encoded answer."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.engines.messages import ForwardOutcome, ModelFacts
from service.errors import InvalidRequest, ModelError, ModelFailed, ServiceError, TooLarge
from service.http.array_formats import ARRAY_FORMS, ArrayFormat, ArrayLimits
from service.inference.config import ModelSettings
from service.inference.sandbox import CheckpointSandbox
from service.processes import pause_garbage_collection
from service.threads import WorkerThread

if TYPE_CHECKING:
    from jaxmodels import LoadedModel  # An import at runtime takes seconds, because it imports JAX.

logger = logging.getLogger(__name__)

# Bytes of an answer in one message: a copy of them takes 0.1 ms of the server's event loop.
PIECE_BYTES = 1 << 18
# Passes that measure a model after it was loaded, and the seconds after which no further pass begins.
WARM_UP_PASSES, WARM_UP_SECONDS = 5, 1.0

# Loads a model in a thread: (path, revision, *, on_progress). Raises JaxModelsError with a text for clients.
LoadModel = Callable[..., "LoadedModel"]


class ModelHost:
    """Holds the models of one process, and runs one forward pass at a time.

    A body arrives by `append` and an answer leaves by `read` in pieces, because the server copies them on its event
    loop.

    Args:
        load: loads a model; None for folders and the Hub with JAX.
    """

    def __init__(self, load: LoadModel | None = None):
        self._load = load
        self._models: dict[str, LoadedModel] = {}
        self._body: list[bytes] = []
        self._answer = b""
        self._worker = WorkerThread("models")

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method, as another process does; see `ModelProcess.call`."""
        return getattr(self, method)(*arguments)

    async def begin(
        self,
        settings: Mapping[str, Any],
        dtype: str | None,
        device: str | None,
        load_memory: int,
        answer_deadline: float,
    ) -> Mapping[str, ModelFacts]:
        """Load the models, compile each, and run each at its usual size.

        Args:
            settings: fields of `ModelSettings`.
            load_memory: bytes of memory for the process that verifies the files of a model before they are loaded.
            answer_deadline: seconds that a forward pass may take, by estimate.

        Raises:
            ModelError: a model cannot be loaded.
        """
        self._settings, self._deadline = ModelSettings.model_validate(settings), answer_deadline
        verify = CheckpointSandbox(load_memory).verify_model
        load = self._load or partial(_load_files, dtype=dtype, device=device, inspect=verify)
        facts = {}
        for name, (path, revision) in self._settings.models.items():
            try:
                facts[name] = await self._worker.submit(partial(self._load_and_run, load, name, path, revision))
            except JaxModelsError as error:
                raise ModelError(f"model {name!r} cannot be loaded: {error}") from error
            except Exception as error:
                logger.exception("loading model %r failed", name)
                raise ModelError(f"model {name!r} cannot be loaded ({type(error).__name__})") from error
        return facts

    async def append(self, index: int, piece: np.ndarray) -> None:
        """Take the piece with this index of the next forward pass's body; index 0 begins a new body."""
        self._body[index:] = [piece.tobytes()]

    async def forward(
        self, name: str, content_type: str, answer_type: str, queue: float, transfer: float
    ) -> ForwardOutcome:
        """Run a forward pass over the body that was appended.

        Args:
            name: of the model.
            content_type, answer_type: content types of the body and of the answer.
            queue: seconds for which the request has waited for its turn.
            transfer: seconds that the body was on its way to this process.

        Raises:
            InvalidRequest: the body does not fit the model.
            TooLarge: it asks for more than is allowed.
            ModelFailed: the model raised.
        """
        body, self._body = self._body, []
        form, answer_form = ARRAY_FORMS[content_type], ARRAY_FORMS[answer_type]
        run = partial(self._run, self._models[name], body, form, answer_form, {"queue": queue, "read": transfer})
        try:
            return await self._worker.submit(run)
        except ServiceError:
            raise
        except JaxModelsError as error:
            raise InvalidRequest(str(error), ("body", "inputs")) from error
        except Exception as error:
            logger.exception("model %s raised", name)
            raise ModelFailed(f"the model raised {type(error).__name__}; the server's log says more") from error

    async def read(self, start: int) -> np.ndarray:
        """Return bytes of the newest answer, from `start` on; the host drops it after its last piece."""
        piece = np.frombuffer(self._answer[start : start + PIECE_BYTES], np.uint8)
        if start + PIECE_BYTES >= len(self._answer):
            self._answer = b""
        return piece

    def kill_process(self, why: str) -> None:
        """Log that a pass does not end, when the models are in the server's process."""
        logger.error("the models do not answer: %s", why)

    async def close(self) -> None:
        """End the thread of the models; a running pass gets a second."""
        if not await asyncio.to_thread(self._worker.close, 1.0):
            logger.warning("a forward pass is still running; it is left behind")

    def _load_and_run(self, load: LoadModel, name: str, path: str, revision: str | None) -> ModelFacts:
        def log_stage(stage: str) -> None:
            if stage != "ready":  # the model has yet to be compiled
                logger.info("model %s: %s", name, stage)

        began = time.monotonic()
        logger.info("model %s: loading %s", name, path)
        model = self._models[name] = load(path, revision, on_progress=log_stage)
        inputs = model.example()
        logger.info("model %s: compiling", name)
        model.compile(inputs)
        started = time.monotonic()
        # Several passes, because the first pass is slow, and `LoadedModel.cost` estimates from the fastest pass.
        for _ in range(WARM_UP_PASSES):
            model.forward(inputs)
            if time.monotonic() - started > WARM_UP_SECONDS:
                break
        millions = model.description["parameters"] / 1e6
        logger.info("model %s: ready in %.1f s, %.2f M parameters", name, time.monotonic() - began, millions)
        is_folder = Path(path).expanduser().is_dir()
        source = Path(path).name if is_folder else "@".join(filter(None, (path, revision)))
        return ModelFacts(source, model.description, model.compiled_shapes)

    def _run(
        self,
        model: "LoadedModel",
        body: list[bytes],
        form: ArrayFormat,
        answer_form: ArrayFormat,
        waited: Mapping[str, float],
    ) -> ForwardOutcome:
        began, compile_seconds = time.monotonic(), 0.0
        dtypes = {entry["name"]: entry["dtype"] for entry in model.description["inputs"]}
        inputs = form.decode(b"".join(body), ArrayLimits(bytes=self._settings.max_forward_bytes), dtypes)
        self._check_cost(*model.cost(inputs), answer_form)
        was_read = time.monotonic()
        if not model.is_compiled(inputs):
            compile_seconds = model.compile(inputs)
        outputs = model.forward(inputs)
        seconds = {
            "queue": waited["queue"],
            "read": waited["read"] + was_read - began,
            **model.timings,
            "total": sum(waited.values()) + time.monotonic() - began,
            "compile": compile_seconds,
        }
        timings = {stage: round(spent * 1e3, 3) for stage, spent in seconds.items()}
        try:
            self._answer = b"".join(answer_form.encode(outputs, timings))
        except ValueError as error:
            raise ModelFailed("the model gave NaN or infinity, which JSON has not; ask for npz") from error
        return ForwardOutcome(len(self._answer), timings, model.compiled_shapes)

    def _check_cost(self, seconds: float, memory: int, answer: int, form: ArrayFormat) -> None:
        settings = self._settings
        if seconds > self._deadline:
            raise TooLarge(
                f"the forward pass would take about {seconds:.0f} s here, and {self._deadline:g} s are allowed "
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


def _load_files(path: str, revision: str | None, **options: Any) -> "LoadedModel":
    with pause_garbage_collection():
        load = jaxmodels.load_model
    return load(path, revision, **options)

"""Model host: loads diffusers models and runs their forward passes, from an encoded body to an encoded answer."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.errors import InvalidRequest, ModelFailed, ServiceError, TooLarge
from service.http.array_formats import ArrayFormat, ArrayLimits, find_body_format
from service.processes import pause_garbage_collection
from service.threads import Worker

if TYPE_CHECKING:
    from jaxmodels import LoadedModel  # An import at runtime takes seconds, because it imports JAX.

logger = logging.getLogger(__name__)

# Bytes of an answer in one message: a copy of them takes 0.1 ms of the server's event loop.
PIECE_BYTES = 1 << 18
# Passes that measure a model after it was loaded, and the seconds after which no further pass begins.
WARM_UP_PASSES, WARM_UP_SECONDS = 5, 1.0

# Loads a model in a thread: (path, revision, *, on_progress). Raises JaxModelsError with a text for clients.
LoadModel = Callable[..., "LoadedModel"]


@dataclass(frozen=True)
class ModelOptions:
    """Models of a host, and its limits; from the settings of these names.

    Attributes:
        models: path and revision by name.
    """

    models: Mapping[str, tuple[str, str | None]]
    answer_deadline: float = 30.0
    max_forward_bytes: int = 64 << 20
    max_forward_memory: int = 4 << 30
    dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model that is loaded.

    Attributes:
        source: name of its folder, or its repo.
        description: for clients; JSON-ready.
        shapes_compiled: number of sets of input shapes with an executable.
    """

    source: str
    description: Mapping[str, Any]
    shapes_compiled: int


@dataclass(frozen=True)
class ModelRefusal:
    """Why a model was not loaded, or a forward pass not run.

    Attributes:
        code: of the error that the client gets.
        text: for clients.
        loc: place in the request.
    """

    code: str
    text: str
    loc: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class ForwardOutcome:
    """Outcome of a forward pass.

    Attributes:
        size: bytes of the encoded answer, which `ModelHost.read` returns in pieces.
        timings: milliseconds by stage.
        compile_seconds: seconds spent on compiling; 0 when the shapes were compiled before.
        shapes_compiled: number of sets of input shapes with an executable.
        refusal: why there is no answer, or None.
    """

    size: int
    timings: Mapping[str, float]
    compile_seconds: float
    shapes_compiled: int
    refusal: ModelRefusal | None = None


RECORDS = (ModelOptions, ModelFacts, ModelRefusal, ForwardOutcome)


class ModelHost:
    """Holds the models of one process, and runs one forward pass at a time.

    A body arrives by `append` and an answer leaves by `read` in pieces, because the server copies them on its event
    loop.

    Args:
        load: loads a model; None for folders and the Hub with JAX.
    """

    def __init__(self, load: LoadModel | None = None):
        self._load = load
        self._options = ModelOptions({})
        self._models: dict[str, LoadedModel] = {}
        self._dtypes: dict[str, Mapping[str, str]] = {}
        self._body: list[bytes] = []
        self._answer = b""
        self._worker = Worker("models")

    async def begin(self, options: ModelOptions) -> Mapping[str, ModelFacts] | ModelRefusal:
        """Load all models, compile each, and run each at its usual size."""
        self._options = options
        facts = {}
        for name, (path, revision) in options.models.items():
            try:
                facts[name] = await self._worker.submit(partial(self._load_and_run, name, path, revision))
            except JaxModelsError as error:
                return ModelRefusal("model", f"model {name!r} cannot be loaded: {error}")
            except Exception as error:
                logger.exception("loading model %r failed", name)
                return ModelRefusal("model", f"model {name!r} cannot be loaded ({type(error).__name__})")
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
        """
        body, self._body = self._body, []
        form, answer_form = find_body_format(content_type), find_body_format(answer_type)
        return await self._worker.submit(
            partial(self._run, name, body, form, answer_form, {"queue": queue, "read": transfer})
        )

    async def read(self, start: int) -> np.ndarray:
        """Return bytes of the newest answer, from `start` on; the host drops it after its last piece."""
        piece = np.frombuffer(self._answer[start : start + PIECE_BYTES], np.uint8)
        if start + PIECE_BYTES >= len(self._answer):
            self._answer = b""
        return piece

    def close(self) -> bool:
        """End the thread of the models; returns whether it ended within a second."""
        return self._worker.close(1.0)

    def _load_and_run(self, name: str, path: str, revision: str | None) -> ModelFacts:
        def log_stage(stage: str) -> None:
            if stage != "ready":  # the model has yet to be compiled
                logger.info("model %s: %s", name, stage)

        began = time.monotonic()
        logger.info("model %s: loading %s", name, path)
        model = self._models[name] = (self._load or self._load_files)(path, revision, on_progress=log_stage)
        inputs = model.example()
        logger.info("model %s: compiling", name)
        model.compile(inputs)
        started = time.monotonic()
        # Several passes, because the first pass is slow, and `LoadedModel.cost` estimates from the fastest pass.
        for _ in range(WARM_UP_PASSES):
            model.forward(inputs)
            if time.monotonic() - started > WARM_UP_SECONDS:
                break
        self._dtypes[name] = {entry["name"]: entry["dtype"] for entry in model.description["inputs"]}
        millions = model.description["parameters"] / 1e6
        logger.info("model %s: ready in %.1f s, %.2f M parameters", name, time.monotonic() - began, millions)
        is_folder = Path(path).expanduser().is_dir()
        source = Path(path).name if is_folder else "@".join(filter(None, (path, revision)))
        return ModelFacts(source, model.description, model.compiled_shapes)

    def _load_files(self, path: str, revision: str | None, *, on_progress: Callable[[str], None]) -> "LoadedModel":
        with pause_garbage_collection():
            load = jaxmodels.load_model
        return load(path, revision, self._options.dtype, self._options.device, on_progress=on_progress)

    def _run(
        self, name: str, body: list[bytes], form: ArrayFormat, answer_form: ArrayFormat, waited: Mapping[str, float]
    ) -> ForwardOutcome:
        model, began, compile_seconds = self._models[name], time.monotonic(), 0.0
        try:
            inputs = form.decode(b"".join(body), ArrayLimits(bytes=self._options.max_forward_bytes), self._dtypes[name])
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
            self._answer = _encode(answer_form, outputs, timings)
        except Exception as error:
            refusal = _refuse(name, error)
            return ForwardOutcome(0, {}, compile_seconds, model.compiled_shapes, refusal)
        return ForwardOutcome(len(self._answer), timings, compile_seconds, model.compiled_shapes)

    def _check_cost(self, seconds: float, memory: int, answer: int, form: ArrayFormat) -> None:
        options = self._options
        if seconds > options.answer_deadline:
            raise TooLarge(
                f"the forward pass would take about {seconds:.0f} s here, and {options.answer_deadline:g} s are "
                "allowed (answer_deadline); send a smaller batch or size"
            )
        if memory > options.max_forward_memory:
            raise TooLarge(
                f"the forward pass would take about {memory >> 20} MB of memory, and "
                f"{options.max_forward_memory >> 20} MB are allowed (max_forward_memory); send a smaller batch or size"
            )
        if answer > options.max_forward_bytes:
            raise TooLarge(
                f"the answer would have {answer} bytes, and {options.max_forward_bytes} are allowed (max_forward_bytes)"
            )
        if form.max_numbers is not None and answer > 4 * form.max_numbers:
            raise TooLarge(
                f"the answer would have {answer // 4} numbers, and {form.max_numbers} are allowed in JSON; ask for "
                "another form: Accept: application/x-npz"
            )


def _encode(form: ArrayFormat, outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> bytes:
    try:
        return b"".join(form.encode(outputs, timings))
    except ValueError as error:
        raise ModelFailed("the model gave NaN or infinity, which JSON has not; ask for npz") from error


def _refuse(name: str, error: Exception) -> ModelRefusal:
    if isinstance(error, JaxModelsError):
        error = InvalidRequest(str(error), ("body", "inputs"))
    elif not isinstance(error, ServiceError):
        logger.error("model %s raised", name, exc_info=error)
        error = ModelFailed(f"the model raised {type(error).__name__}; the server's log says more")
    return ModelRefusal(error.code, str(error), getattr(error, "loc", ()))

"""One model in memory: what is needed of it, and how it fared."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from service.stats import Recent

STAGES = ("queue", "read", "to_device", "compute", "to_host", "total")
_SAMPLES = 512


class Model(Protocol):
    """What is needed of a model; ``jaxmodels.LoadedModel`` is one."""

    @property
    def description(self) -> Mapping[str, Any]: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    @property
    def compiled_shapes(self) -> int: ...

    def example(self, batch: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
        """Inputs of the size it was made for."""
        ...

    def cost(self, inputs: Mapping[str, np.ndarray]) -> tuple[float, int, int]:
        """Seconds, bytes of memory and bytes of the answer, estimated."""
        ...

    def is_compiled(self, inputs: Mapping[str, np.ndarray]) -> bool: ...

    def compile(self, inputs: Mapping[str, np.ndarray]) -> float:
        """Make ``forward`` quick for these shapes; the seconds it took."""
        ...

    def forward(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...


class LoadModel(Protocol):
    """``jaxmodels.load_model``, or a double."""

    def __call__(
        self, path: str, revision: str | None = None, /, *, on_progress: Callable[[str], None] | None = None
    ) -> Model:
        """Called in a worker thread; raises JaxModelsError with a text that may be shown."""
        ...


class ServedModel:
    """One model in memory, and how it fared.

    Attributes:
        source: the repo, or the last part of the folder's path.
        forwards, errors, compiles: counted since the start.
    """

    def __init__(self, name: str, source: str, model: Model):
        self.name = name
        self.source = source
        self.model = model
        self.forwards = 0
        self.errors = 0
        self.compiles = 0
        self.compile_seconds = 0.0
        self.stages = {stage: Recent(_SAMPLES) for stage in STAGES}
        self.dtypes = {entry["name"]: entry["dtype"] for entry in model.description["inputs"]}

    def facts(self) -> dict[str, Any]:
        """What the API says of it; JSON-ready."""
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

"""The models that requests may run forward: loaded when the server starts, there until it ends."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from jaxmodels.errors import JaxModelsError
from service.engine.engine import Engine
from service.engine.worker import call_in_thread
from service.errors import ModelError, UnknownModel
from service.models.forwards import ForwardLimits, Forwards
from service.models.served_model import LoadModel, Model, ServedModel

logger = logging.getLogger(__name__)


class Models:
    """All models of one process.

    Attributes:
        forwards: the queue of what is asked of them.
    """

    def __init__(
        self, engine: Engine, limits: ForwardLimits | None = None, has_running_robot: Callable[[], bool] = lambda: False
    ):
        self.forwards = Forwards(engine, limits, has_running_robot)
        self._engine = engine
        self._models: dict[str, ServedModel] = {}

    async def load(self, name: str, path: str, revision: str | None, load: LoadModel) -> ServedModel:
        """Load, compile and run at the size it was made for.

        Raises:
            ModelError: it cannot be loaded.
        """

        def tell(stage: str) -> None:
            if stage != "ready":  # it still has to be compiled
                logger.info("model %s: %s", name, stage)

        def load_and_run() -> tuple[str, Model]:
            model = load(path, revision, on_progress=tell)
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
        async with self._engine.building:
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
        """All models, in the order of the settings."""
        return list(self._models.values())

    def get(self, name: str) -> ServedModel:
        """The model of this name.

        Raises:
            UnknownModel: there is none.
        """
        if name not in self._models:
            loaded = f"loaded: {', '.join(self._models)}" if self._models else "none is loaded"
            raise UnknownModel(f"no such model; {loaded} (robojax serve --model name=path loads one)")
        return self._models[name]

    async def close(self) -> None:
        """End the thread that runs them; waits a second for a pass that is running."""
        await self.forwards.close()

"""How policies and models come into memory: from folders and the Hub with JAX, as the settings say."""

import os
from collections.abc import Callable
from typing import Any

import jaxmodels
from service.edge.policy_places import copies_in, opened_in
from service.engine.engine import LoadPolicy, Policy
from service.engine.loading import Inspection
from service.engine.policy_reader import ReadRequirements
from service.models.served_model import LoadModel, Model
from service.settings import Settings

# Seconds that reading the small files of a policy may take.
CHECK_PATIENCE = 15.0


def policy_loader(settings: Settings, first_device: Callable[[], str | None]) -> LoadPolicy:
    """Loads to the first device that works, where devices are named."""

    def load(path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None) -> Policy:
        name_caches(settings)
        return jaxmodels.load_policy(
            path,
            revision,
            settings.dtype,
            first_device() or settings.device,
            like=like,
            on_progress=on_progress,
            inspect=Inspection(settings.load_memory),
            largest=settings.policy_bytes,
            roots=opened_in(settings) if like is None else copies_in(path),
        )

    return load


def requirements_reader(settings: Settings) -> ReadRequirements:
    """Finds out what a policy needs before it is loaded; a process of its own reads the files."""
    inspection = Inspection(settings.load_memory, patience=CHECK_PATIENCE)

    def read(path: str, revision: str | None) -> jaxmodels.Requirements:
        name_caches(settings)
        return jaxmodels.read_requirements(path, revision, read=inspection.describe, roots=opened_in(settings))

    return read


def model_loader(settings: Settings) -> LoadModel:
    """Loads the models of the settings."""

    def load(path: str, revision: str | None = None, /, *, on_progress: Any = None) -> Model:
        name_caches(settings)
        return jaxmodels.load_model(path, revision, settings.dtype, settings.device, on_progress=on_progress)

    return load


def name_caches(settings: Settings) -> None:
    """Tell JAX and the Hub's library where they keep things."""
    # Both libraries read these when they are first used, which is after this, in a loader's thread.
    if settings.compile_cache is not None:
        os.environ["ROBOJAX_COMPILE_CACHE"] = settings.compile_cache
    if settings.policy_cache is not None:
        os.environ["HF_HUB_CACHE"] = settings.policy_cache

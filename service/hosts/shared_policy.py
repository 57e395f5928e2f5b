"""A policy that is spread over several hosts, as the service sees it: an ordinary one."""

import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import ConfigError, ObservationError
from service.arrays.limits import DTYPES
from service.engine.served import IMAGES, Sizes
from service.hosts.crew import Arrays, Crew, Words
from service.hosts.patience import QUIET

if TYPE_CHECKING:
    import jaxmodels  # a server of one host listens before it imports JAX


class _Held:
    """What the followers call a policy; they let it go when nobody here has it any more."""

    def __init__(self, crew: Crew, number: int):
        self.number = number
        weakref.finalize(self, crew.tell, {"do": "drop", "policy": number})


class SharedPolicy:
    """All of `service.engine.served.Policy`; every host does what this one is asked for.

    Args:
        local: this process' part of it.
        number: by which the followers know theirs.

    Attributes:
        commit: what its files are called, when that is known.
        local: as above.
    """

    def __init__(self, crew: Crew, local: "jaxmodels.Policy", number: int):
        self.commit: str | None = local.commit
        self.local = local
        self._crew = crew
        self._held = _Held(crew, number)
        self._timings: Mapping[str, float] = {}

    @property
    def number(self) -> int:
        """By which the followers know it."""
        return self._held.number

    @property
    def requirements(self) -> Requirements:
        """What it needs."""
        return self.local.requirements

    @property
    def device(self) -> str:
        """The place of all devices of all hosts."""
        return self.local.device

    @property
    def timings(self) -> Mapping[str, float]:
        """As `jaxmodels.Policy.timings`, of this host; waiting for its turn is in none of them."""
        return MappingProxyType(dict(self._timings))

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Feature names to arrays with a batch axis -> (b, t, a) float32.

        Raises:
            ObservationError: a feature is missing or is not as it should be.
            HostSilent: another host says nothing, and may be gone.
            HostsLost: another host is gone or failed.
        """
        texts, arrays = _apart(observation)
        batch, sizes = _sizes(arrays)
        if set(sizes) == set(self.requirements.cameras) and not self.is_compiled(batch, sizes):
            self._build(batch, sizes)  # robots that ask for something else are answered meanwhile

        def here() -> tuple[np.ndarray, Mapping[str, float]]:
            return self.local.act(observation), dict(self.local.timings)

        actions, self._timings = self._crew.run(self._words("act") | {"texts": texts}, here, arrays, quiet=QUIET)
        return actions

    def prepare_task(self, text: str) -> None:
        """As `jaxmodels.Policy.prepare_task`.

        Raises:
            ObservationError: the policy cannot read it.
            HostsLost: another host is gone or failed.
        """
        self._crew.run(self._words("prepare") | {"text": text}, lambda: self.local.prepare_task(text))

    def compile(self, batch: int = 1, cameras: Sizes | None = None) -> None:
        """On all hosts at a time, while others are acted for; then it runs once.

        Raises:
            ObservationError: a camera the policy does not have, or one left out.
            HostRefused: another host cannot.
            HostsLost: another host is gone or failed.
        """
        self._build(batch, cameras)
        words = self._words("compile") | _which(batch, cameras)
        self._crew.run(words, lambda: self.local.compile(batch, cameras))

    def rehearse(self, batch: int = 1, cameras: Sizes | None = None) -> float:
        """Seconds that `act` takes now for such a batch, measured with zeros; raises as `compile`."""
        if not self.is_compiled(batch, cameras):
            self._build(batch, cameras)
        words = self._words("rehearse") | _which(batch, cameras)
        return self._crew.run(words, lambda: self.local.rehearse(batch, cameras))

    def is_compiled(self, batch: int = 1, cameras: Sizes | None = None) -> bool:
        """Whether this host has the program; others may take a moment longer, and are waited for."""
        return self.local.is_compiled(batch, cameras)

    def on(self, device: str) -> "SharedPolicy":
        """The same, sharing the weights.

        Raises:
            ConfigError: it is to be somewhere else than on all hosts.
        """
        if device != self.device:
            raise ConfigError(f"device is {device!r}; a policy of several hosts is on all of them ({self.device!r})")
        return copy(self)

    def _build(self, batch: int, cameras: Sizes | None) -> None:
        asked = self._crew.ask(self._words("build") | _which(batch, cameras))
        self.local.build(batch, cameras)
        asked.wait()

    def _words(self, what: str) -> Words:
        return {"do": what, "policy": self.number}


def _which(batch: int, cameras: Sizes | None) -> Words:
    return {"batch": batch, "cameras": None if cameras is None else {name: list(cameras[name]) for name in cameras}}


def _apart(observation: Mapping[str, Any]) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
    """An observation in the two forms in which it travels: texts, and arrays of numbers."""
    texts: dict[str, list[str]] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in observation.items():
        if isinstance(value, np.ndarray) and value.dtype.name in DTYPES:
            arrays[name] = value
            continue
        if isinstance(value, str):
            raise ObservationError(f"{name} is one text without a batch axis; wanted one for each member")
        said = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(said, Sequence) or not all(isinstance(text, str) for text in said):
            raise ObservationError(f"{name} is {type(value).__name__}; wanted an array of numbers, or texts")
        texts[name] = list(said)
    return texts, arrays


def _sizes(arrays: Arrays) -> tuple[int, Sizes]:
    frames = {name.removeprefix(IMAGES): array.shape for name, array in arrays.items() if name.startswith(IMAGES)}
    batch = max((array.shape[0] for array in arrays.values() if array.ndim), default=1)
    return batch, {name: (shape[1], shape[2]) for name, shape in frames.items() if len(shape) == 4}

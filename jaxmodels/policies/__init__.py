"""Registry of policy types: each folder here is a type.

The ``__init__.py`` of the folder defines `FACTS`, which are read without JAX, and its ``policy.py`` defines `POLICY`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from jaxmodels.errors import ConfigError
from jaxmodels.types import Language, Observation

# Prefix of serving weights that are computed from others, and float32 in each dtype.
CONSTANTS = "constants."


def keep_weights(config: Any, weights: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return the weights as they are, for serving programs that run over the weights of the module."""
    del config, platform
    return dict(weights)


@dataclass(frozen=True)
class PolicyType:
    """Functions and classes that make up one type of policy.

    Attributes:
        config: reads a parsed ``config.json``, raising `ConfigError`.
        model: builds the NNX module from a config, given random keys.
        tensors: our names of the weights to the table of LeRobot's tensors.
        stages: parts of a chunk's computation, in order, each a program of its own; the last returns the chunk.
        fit: (config, pixels (b, h, w, 3) of [0, 1]) to the pixels that the stages read, for policies that resize frames
            themselves.
        prepare: (config, weights of the module, platform) to weights of the serving program, perhaps with `CONSTANTS`.
        depends_on_version: whether LeRobot 0.4 and 0.6 read a policy's files differently; the config then has the
            field ``lerobot``.
        runs_as_read: whether `prepare` returns the arrays as they were read.
        takes_prefix: whether the observation may hold a plan to continue.
        read: (`PolicyConfig.architecture`, serving weights, tokens (b, n) int32, mask (b, n) bool) to the `Language` in
            the observation, for policies whose config has a `text_encoder`.
        unused: config to the shapes of a file's tensors that acting does not need.
        rename: name of a file's tensor to its name in the table.
        tied: name of a tensor to the name of a tensor with the same content that may replace it.
        openpi: reader of openpi's trees.
        small: config fields of a policy that a CPU trains in minutes.
        accelerator_dtype: default dtype on an accelerator; norms, softmax and flow times are always float32.
        parts: prefix of weight names to part of the network; the first matching prefix counts.
    """

    config: Callable[[dict[str, Any]], Any]
    model: Callable[..., Any]
    tensors: Callable[[Iterable[str]], Any]
    stages: tuple["ActStage", ...]
    fit: Callable[..., Any] | None = None
    prepare: Callable[..., dict[str, Any]] = keep_weights
    depends_on_version: bool = False
    runs_as_read: bool = False
    takes_prefix: bool = False
    read: Callable[..., Language] | None = None
    unused: Callable[[Any], Mapping[str, tuple[int, ...]]] | None = None
    rename: Callable[[str], str] = str
    tied: Mapping[str, str] = field(default_factory=dict)
    openpi: "TreeReader | None" = None
    small: Mapping[str, Any] = field(default_factory=dict)
    accelerator_dtype: str = "float32"
    parts: Mapping[str, str] = field(default_factory=lambda: {"": "network"})

    def act(self, config: Any, weights: Mapping[str, Any], observation: Observation) -> Any:
        """Return a normalised chunk for weights of the module or of serving and a normalised observation."""
        if self.fit is not None:
            images = tuple(pixels if pixels is None else self.fit(config, pixels) for pixels in observation.images)
            observation = observation._replace(images=images)
        given = None
        for stage in self.stages:
            given = stage.run(config, weights, observation, given)
        return given


@dataclass(frozen=True)
class ActStage:
    """Part of the computation of a chunk.

    Attributes:
        run: (`PolicyConfig.architecture`, serving weights, normalised observation, result of the previous stage or
            None) to a result.
        reads: fields of the observation that it reads. Observations that differ in other fields share its program.
        count: config to the number of equal steps in it, for a sampler.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...] = Observation._fields
    count: Callable[[Any], int] = lambda config: 1

    def select(self, observation: Observation) -> Observation:
        """Return an observation with the fields that it reads, and None elsewhere."""
        if len(self.reads) == len(Observation._fields):
            return observation
        return Observation(**{name: getattr(observation, name) for name in self.reads})


def as_stages(act: Callable[..., Any]) -> tuple[ActStage]:
    """Return the only stage of a policy: (config, serving weights, normalised observation) to a normalised chunk."""
    return (ActStage("chunk", lambda config, weights, observation, given: act(config, weights, observation)),)


@dataclass(frozen=True)
class TreeReader:
    """Reader of a tree of arrays: `complete` returns a config with the tree's sizes; `read` our weights, float32."""

    complete: Callable[[Path, Any], Any]
    read: Callable[[Path, Any], dict[str, Any]]


@dataclass(frozen=True)
class PolicyFacts:
    """Facts about a policy type that are read without importing JAX: `FACTS` of its folder.

    Attributes:
        is_trained: whether the type can be trained here; otherwise it is served from checkpoints of LeRobot.
        sizes: field of the config for the sizes of the underlying model, and their JSON file in the policy's folder.
            The file's name may contain fields of ``config.json`` in braces.
        tokenizer: Hub repo of the tokenizer, if the policy's files name no other.
    """

    is_trained: bool = False
    sizes: tuple[str, str] | None = None
    tokenizer: str | None = None


@cache
def policy_types() -> tuple[str, ...]:
    """Return the policy types that can be served, sorted: each folder in this package is a type.

    Example:
        >>> "act" in policy_types()
        True
    """
    return tuple(sorted(module.name for module in iter_modules(__path__) if module.ispkg))


def trained_types() -> tuple[str, ...]:
    """Return the policy types that can be trained here, sorted.

    Example:
        >>> "act" in trained_types(), "pi0" in trained_types()
        (True, False)
    """
    return tuple(name for name in policy_types() if get_policy_facts(name).is_trained)


def get_policy_facts(name: Any) -> PolicyFacts:
    """Return the facts about a policy type; raises ConfigError, which lists the known types."""
    return import_module(f"{__name__}.{_check_name(name)}").FACTS


def get_policy_type(name: Any) -> PolicyType:
    """Return the policy type of this name; raises ConfigError, which lists the known types."""
    return import_module(f"{__name__}.{_check_name(name)}.policy").POLICY


def _check_name(name: Any) -> str:
    if name not in policy_types():
        raise ConfigError(f"policy type is {name!r}; known: {', '.join(policy_types())}")
    return name

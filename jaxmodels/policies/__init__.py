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
from jaxmodels.types import Language


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
        act: serving weights and a normalised observation to a normalised chunk.
        prepare: (config, weights of the module, platform) to weights of the serving program.
        depends_on_version: whether LeRobot 0.4 and 0.6 read a policy's files differently; the config then has the
            field ``lerobot``.
        runs_as_read: whether `prepare` returns the arrays as they were read.
        takes_prefix: whether the observation may hold a plan for `act` to continue.
        read: (`PolicyConfig.architecture`, serving weights, tokens (b, n) int32, mask (b, n) bool) to the `Language` in
            the observation of `act`, for policies whose config has a `text_encoder`.
        unused: config to the shapes of a file's tensors that acting does not need.
        rename: name of a file's tensor to its name in the table.
        tied: name of a tensor to the name of a tensor with the same content that may replace it.
        openpi: reader of openpi's trees.
        small: config fields of a policy that a CPU trains in minutes.
        accelerator_dtype: default dtype on an accelerator; norms, softmax and flow times are always float32.
        stages: parts of `act` that can be compiled and timed separately, in order.
        parts: prefix of weight names to part of the network; the first matching prefix counts.
    """

    config: Callable[[dict[str, Any]], Any]
    model: Callable[..., Any]
    tensors: Callable[[Iterable[str]], Any]
    act: Callable[..., Any]
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
    stages: tuple["ActStage", ...] = ()
    parts: Mapping[str, str] = field(default_factory=lambda: {"": "network"})


@dataclass(frozen=True)
class ActStage:
    """Part of a policy's `act`; serving runs all of them as one program.

    Attributes:
        run: (`PolicyConfig.architecture`, serving weights, normalised observation, result of the previous stage or
            None) to the next stage's input; for a sampler, its first step.
        count: config to the number of runs per chunk.
    """

    name: str
    run: Callable[..., Any]
    count: Callable[[Any], int] = lambda config: 1


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

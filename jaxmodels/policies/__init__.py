"""The policies there are: each folder is a policy type, its name the registry name, its ``POLICY`` what it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxmodels.errors import ConfigError


@dataclass(frozen=True)
class PolicyType:
    """What the rest of the package knows about a kind of policy.

    Attributes:
        config: reads a parsed ``config.json``, raising `ConfigError`.
        model: builds the NNX module from a config, given random keys.
        tensors: the table of LeRobot's tensors for our names of the weights.
        architecture: what programs depend on, out of a config; equal ones share programs.
        prepare: (config, weights of the module, platform) to weights of the serving program.
        act: serving weights and a normalised observation to a normalised chunk.
        takes_prefix: whether the observation may hold a plan for `act` to continue.
    """

    config: Callable[[dict[str, Any]], Any]
    model: Callable[..., Any]
    tensors: Callable[[Iterable[str]], Any]
    architecture: Callable[[Any], Any]
    prepare: Callable[..., dict[str, Any]]
    act: Callable[..., Any]
    takes_prefix: bool = False


def policy_types() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py")))


def policy_type(name: Any) -> PolicyType:
    """The kind of policy with this name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in policy_types():
        raise ConfigError(f"policy type is {name!r}; known: {', '.join(policy_types())}")
    return import_module(f"{__name__}.{name}").POLICY

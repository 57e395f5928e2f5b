"""Registry of policy types: each is a module or a package here with a ``POLICY``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
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


# Policy type to the config reader's field for the sizes of its underlying model, and their file in the folder.
VLM_NAME = "VLM"
ARCHITECTURE_FILES: Mapping[str, tuple[str, str]] = {
    "smolvla": ("vlm", f"{VLM_NAME}/config.json"),
    "pi0": ("architecture", "architecture.json"),
    "pi05": ("architecture", "architecture.json"),
}
# Policy type to the model of its tokenizer, if the policy's files name no other.
TOKENIZER_MODELS = {"pi0": "google/paligemma-3b-pt-224", "pi05": "google/paligemma-3b-pt-224"}

_TRAINED = ("act", "diffusion", "diffusion2d", "tokens2d")
# Policy types that are served from checkpoints of LeRobot, and not trained here.
SERVED_ONLY = frozenset({"pi0", "pi05", "smolvla"})


def trained_types() -> tuple[str, ...]:
    """Return the policy types that can be trained here."""
    return _TRAINED


def policy_types() -> tuple[str, ...]:
    """Return the policy types that can be served, sorted."""
    return tuple(sorted({*_TRAINED, *SERVED_ONLY}))


def get_policy_type(name: Any) -> PolicyType:
    """Return the policy type of this name; raises ConfigError, which lists the known types."""
    if name not in policy_types():
        raise ConfigError(f"policy type is {name!r}; known: {', '.join(policy_types())}")
    return import_module(f"{__name__}.{name}").POLICY

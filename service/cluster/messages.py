"""What a front and an engine of its cluster say to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jaxmodels import Requirements

Sizes: TypeAlias = Mapping[str, tuple[int, int]]

# input: the policy refused it, as it would anywhere. failed: it raised. stuck: it did not come back in time.
# unknown: the engine does not have the policy (any more). policy: it cannot be loaded. engine: this engine cannot be
# used at all.
Kind = Literal["input", "failed", "stuck", "unknown", "policy", "engine"]


@dataclass(frozen=True)
class Refusal:
    """Why there is no answer, in words that clients may read."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs policies; as the settings of these names, of the first front.

    Attributes:
        accelerators: places on its machine that Ray gave it, `engine_resources`.
    """

    dtype: str | None = None
    devices: Sequence[str] = ()
    together: bool = False
    batch_sizes: Sequence[int] = (1,)
    stuck_after: float = 5.0
    load_memory: int = 1 << 30
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})


@dataclass(frozen=True)
class Begun:
    """What an engine says of itself when it has begun."""

    version: str
    node: str
    process: int
    devices: Sequence[str]


@dataclass(frozen=True)
class Loaded:
    """A policy in an engine.

    Attributes:
        handle: by which the engine knows it.
        compiled: sizes of frames that it is compiled for.
    """

    handle: str
    requirements: Requirements
    device: str
    compiled: Sequence[Sizes]


@dataclass(frozen=True)
class EngineFacts:
    """How an engine does.

    Attributes:
        load: share of the newest seconds that its busiest device computed.
        queue: seconds that nine of ten of the newest requests waited for the device.
        waiting: requests not yet begun.
        batches: how many there were of each size.
        batch_ms: of each policy, batch size to median and p90.
    """

    load: float = 0.0
    queue: float = 0.0
    waiting: int = 0
    batches: Mapping[int, int] = field(default_factory=dict)
    batch_ms: Sequence[Mapping[str, Any]] = ()
    policies: int = 0

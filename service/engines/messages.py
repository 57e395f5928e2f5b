"""What a server and its engines say to each other."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxmodels import PolicyFolder, Requirements
from jaxmodels.errors import CheckpointError
from service.engines.codec import MessageCodec
from service.engines.shared_memory import SharedMemory
from service.inference.batching import FrameSizesKey
from service.inference.loaded_policy import InferenceResult

# input: the policy refused it, as it would anywhere. failed: it raised. stuck: it did not come back in time.
# unknown: the engine does not have the policy (any more). policy: it cannot be loaded. engine: this engine cannot be
# used at all.
Kind = Literal["input", "failed", "stuck", "unknown", "policy", "engine"]


@dataclass(frozen=True)
class Refusal:
    """Why an engine gives no answer, with a text that clients may read."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs policies; from the settings of these names.

    Attributes:
        action_error: largest error of a quantized policy's actions, as a share of a joint's range.
        together: whether a policy is spread over all devices.
        resources: what Ray reserves for an engine, as the setting `engine_resources`.
    """

    dtype: str | None = None
    action_error: float = 0.005
    devices: Sequence[str] = ()
    together: bool = False
    batch_sizes: Sequence[int] = (1,)
    stuck_after: float = 5.0
    load_timeout: float = 600.0
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})


@dataclass(frozen=True)
class Begun:
    """What an engine reports once it is started.

    Attributes:
        version: of robojax.
        node: name of its machine.
        process: its process id.
        devices: names of its devices.
    """

    version: str
    node: str
    process: int
    devices: Sequence[str] = ()


@dataclass(frozen=True)
class LocalFolder:
    """A policy's verified files on this machine.

    Attributes:
        sha: hash by which engines know the policy.
        path: folder with the files.
        identities: device, inode, size and times of change of each verified file; others must not be read.
        commit: commit on the Hub or content hash, if known.
    """

    sha: str
    path: str
    identities: Mapping[str, tuple[int, ...]]
    commit: str | None = None

    @classmethod
    def of(cls, folder: PolicyFolder, commit: str | None = None) -> "LocalFolder":
        """Return the files of an open folder that have been verified."""
        identities = folder.identities
        path = str(folder.path.absolute())
        sha = hashlib.sha256(repr((path, sorted(identities.items()))).encode()).hexdigest()
        return cls(sha, path, identities, commit)

    def check(self, folder: PolicyFolder) -> None:
        """Raise CheckpointError if a file of an open folder is not the file that was verified."""
        for name, identity in folder.identities.items():
            if tuple(self.identities.get(name, ())) != identity:
                raise CheckpointError(f"{name}: was changed since it was verified; load the policy once more")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A policy that is loaded in an engine.

    Attributes:
        handle: by which the engine knows it.
        seconds: of one inference, by the sizes of frames that it is compiled for.
    """

    handle: str
    requirements: Requirements
    seconds: Mapping[FrameSizesKey, float]


@dataclass(frozen=True)
class EngineFacts:
    """Load and latencies of an engine.

    Attributes:
        load: share of the newest seconds that its busiest device computed.
        queue: seconds that nine of ten of the newest requests waited for the device.
        waiting: requests not yet begun.
        batches: how many there were of each size.
        batch_ms: of each policy, batch size to median and p90.
        policies: number of policies in memory.
        is_compiling: whether it compiles larger batches, and robots that start wait for that.
        to_compile: number of programs for larger batches that are not compiled yet.
        stages: stage of each policy that is being loaded, by hash.
        latencies: median seconds by policy, frame sizes and batch size, of what is compiled.
    """

    load: float = 0.0
    queue: float = 0.0
    waiting: int = 0
    batches: Mapping[int, int] = field(default_factory=dict)
    batch_ms: Sequence[Mapping[str, Any]] = ()
    policies: int = 0
    is_compiling: bool = False
    to_compile: int = 0
    stages: Mapping[str, str] = field(default_factory=dict)
    latencies: Mapping[str, Mapping[FrameSizesKey, Mapping[int, float]]] = field(default_factory=dict)


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
class ForwardOutcome:
    """Outcome of a forward pass.

    Attributes:
        size: bytes of the encoded answer, which `ModelHost.read` returns in pieces.
        timings: milliseconds by stage.
        shapes_compiled: number of sets of input shapes with an executable.
    """

    size: int
    timings: Mapping[str, float]
    shapes_compiled: int


@dataclass(frozen=True)
class ModelRefusal:
    """Error of a host of models, with the code, text and place in the request that the client gets."""

    code: str
    text: str
    loc: tuple[str | int, ...]


RECORDS = (Refusal, EngineOptions, Begun, LocalFolder, Loaded, EngineFacts, Requirements, InferenceResult)
RECORDS += (ModelFacts, ForwardOutcome, ModelRefusal)


def make_codec(outgoing: SharedMemory, incoming: SharedMemory, *, copies: bool) -> MessageCodec:
    """Return the codec of one end of a connection; see `MessageCodec`."""
    return MessageCodec(RECORDS, outgoing, incoming, copies=copies)

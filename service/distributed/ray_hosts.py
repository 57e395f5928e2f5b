"""Worker hosts of a host group as Ray actors, one per machine, in a cluster whose head is a child of the server."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import RayActorError, RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.util import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from service.distributed.artifacts import pack
from service.distributed.host_coordinator import HostOptions
from service.distributed.host_group import (
    Arrays,
    HostFailed,
    HostGone,
    HostsLost,
    Words,
)
from service.distributed.host_worker import GROUPS, MISSING, HostActor, versions
from service.distributed.ray_node import FOR_EVER, RESOURCE, Credentials, RayNode, join_address

logger = logging.getLogger(__name__)

# Seconds between looks for hosts that have to come; that an actor has to begin once its machine is there.
LOOK = 0.2
BEGINNING = 120.0


@dataclass(eq=False)
class RayHost:
    """A `Host` that is a Ray actor.

    Args:
        folder: of the policy that is loaded, for a host that does not have its files.
    """

    name: str
    actor: Any
    folder: Callable[[str], Path]
    heard_at: float = field(default_factory=time.monotonic)
    _is_asked: bool = False

    def beat(self) -> None:
        """See `Host`."""
        if not self._is_asked:
            self._is_asked = True
            self.actor.beat.remote().future().add_done_callback(self._hear)

    def stay(self) -> "Future[None]":
        """See `Host`."""
        return _outcome(self.actor.stay.remote())

    def run(self, number: int, words: Words, arrays: Arrays) -> "Future[list[tuple[int, str]]]":
        """See `Host`."""
        return _outcome(self.actor.run.remote(number, words, arrays))

    def build(self, words: Words) -> "Future[str | None]":
        """See `Host`; files are sent to a host that does not have them."""
        outcome: Future[str | None] = Future()

        def send() -> None:
            try:
                parcel = pack(self.folder(words["sha"]), ray.put)  # kept in the store until it has arrived
                outcome.set_result(_outcome(self.actor.build.remote(words, parcel)).result())
            except OSError as error:
                outcome.set_result(f"its files cannot be read on the server: {error.strerror}")
            except Exception as error:
                outcome.set_exception(error)

        def hear(asked: "Future[str | None]") -> None:
            if (error := asked.exception()) is not None:
                outcome.set_exception(error)
            elif asked.result() == MISSING:
                threading.Thread(target=send, name="policy-files", daemon=True).start()
            else:
                outcome.set_result(asked.result())

        _outcome(self.actor.build.remote(words)).add_done_callback(hear)
        return outcome

    def end(self, why: str | None) -> "Future[None]":
        """See `Host`."""
        return _outcome(self.actor.end.remote(why))

    def _hear(self, answer: "Future[Any]") -> None:
        if answer.exception() is None:
            self.heard_at = time.monotonic()
        self._is_asked = False


class RayHosts:
    """The Ray cluster of one server and its worker hosts; it is gathered once, and closed.

    Args:
        on_end: called in a thread with the reason, should Ray end on this machine.
        folder: of a policy, by its sha.
    """

    def __init__(
        self,
        options: HostOptions,
        credentials: Credentials,
        folder: Callable[[str], Path],
        on_end: Callable[[str], None],
    ):
        self._options, self._credentials = options, credentials
        self._folder, self._on_end = folder, on_end
        self._node: RayNode | None = None
        self._ended: str | None = None

    def gather(self) -> Sequence[RayHost]:
        """Wait for all worker hosts; blocks.

        Raises:
            HostsLost: they did not come, or Ray cannot be begun here.
        """
        options, environment = self._options, self._credentials.environment
        until = time.monotonic() + options.patience
        address = join_address(options.host, options.port)
        head = ["--head", f"--port={options.port}", f"--node-ip-address={options.host}", "--num-cpus=0"]
        head += ["--include-dashboard=false", "--include-log-monitor=false", f"--ray-client-server-port={_free_port()}"]
        self._node = RayNode([*head, f"--temp-dir={self._credentials.folder}"], environment, self._hear_end)
        _connect(options, until, self._check)
        logger.info("waiting for %d more hosts at %s", options.count - 1, address)
        group = placement_group([{RESOURCE: 1.0}] * (options.count - 1), strategy="STRICT_SPREAD")
        while not group.wait(LOOK):
            self._check()
            if time.monotonic() > until:
                came = sum(node["Alive"] and RESOURCE in node["Resources"] for node in ray.nodes())
                came_of = f"{came} of {options.count - 1} other hosts came"
                raise HostsLost(f"{came_of} within {options.patience:g} s; start robojax follow on them")
        remote: Any = ray.remote
        kind = remote(concurrency_groups=GROUPS)(HostActor)
        actors = [
            kind.options(
                num_cpus=0,
                resources={RESOURCE: 1.0},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(index + 1, options.count)
            for index in range(options.count - 1)
        ]
        return [self._welcome(number, actor) for number, actor in enumerate(actors, 1)]

    def close(self) -> None:
        """End Ray on this machine."""
        self._on_end = lambda why: None
        if ray.is_initialized():
            ray.shutdown()
        if self._node is not None:
            self._node.kill()
        self._credentials.remove()

    def _welcome(self, number: int, actor: Any) -> RayHost:
        try:
            address, theirs = ray.get(actor.introduce.remote(), timeout=BEGINNING)
        except RayError as error:
            raise HostsLost(f"host {number} is gone: {_in_short(error)}") from error
        name = f"host {number} ({address})"
        if theirs != versions():
            raise HostsLost(f"{name} has other versions: {theirs}; this one has {versions()}")
        return RayHost(name, actor, self._folder)

    def _check(self) -> None:
        if self._ended is not None:
            address = join_address(self._options.host, self._options.port)
            raise HostsLost(f"{address} cannot be listened on, or Ray cannot begin there: {self._ended}")

    def _hear_end(self, last: str) -> None:
        self._ended = last or "it wrote no reason"
        self._on_end(f"Ray ended on this machine: {self._ended}")


def _connect(options: HostOptions, until: float, check: Callable[[], None]) -> None:
    """Connect this process to the cluster as soon as its head listens; without one Ray would wait for ever."""
    os.environ.update(FOR_EVER)
    address = join_address(options.host, options.port)
    while True:
        check()
        try:
            socket.create_connection((options.host, options.port), LOOK).close()
            ray.init(
                address,
                namespace="hosts",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=options.host,
            )
            return
        except (RayError, OSError, ValueError, RuntimeError) as error:
            if time.monotonic() > until:
                raise HostsLost(f"Ray does not answer at {address}: {error}") from error
            time.sleep(LOOK)


def _free_port() -> int:
    """Return a free port for Ray's client server, which cannot be left out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _outcome(asked: Any) -> "Future[Any]":
    """Return an actor's answer as a future whose errors are those of hosts."""
    outcome: Future[Any] = Future()

    def settle(answer: "Future[Any]") -> None:
        error: Any = answer.exception()
        if error is None:
            outcome.set_result(answer.result())
        elif isinstance(error, RayTaskError):
            outcome.set_exception(HostFailed(f"{type(error.cause).__name__}; its log says more"))
        else:
            outcome.set_exception(HostGone(_in_short(error)))

    asked.future().add_done_callback(settle)
    return outcome


def _in_short(error: BaseException) -> str:
    return "its process ended, or its connection" if isinstance(error, RayActorError) else type(error).__name__

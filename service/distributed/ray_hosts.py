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
    Command,
    HostFailed,
    HostGone,
    HostsLost,
)
from service.distributed.host_worker import CONCURRENCY_GROUPS, MISSING, HostActor, package_versions
from service.distributed.ray_node import NO_RECONNECT_TIMEOUT, RESOURCE, Credentials, RayNode, join_address

logger = logging.getLogger(__name__)

# Seconds between two checks for hosts that have to come; that an actor has to begin once its machine is there.
POLL_PERIOD = 0.2
BEGIN_TIMEOUT = 120.0


@dataclass(eq=False)
class RayHost:
    """A `Host` that is a Ray actor.

    Args:
        folder: of the policy that is loaded, for a host that does not have its files.
    """

    name: str
    actor: Any
    folder: Callable[[str], Path]
    last_beat_at: float = field(default_factory=time.monotonic)
    _is_beat_pending: bool = False

    def beat(self) -> None:
        """See `Host`."""
        if not self._is_beat_pending:
            self._is_beat_pending = True
            self.actor.beat.remote().future().add_done_callback(self._on_beat)

    def stay(self) -> "Future[None]":
        """See `Host`."""
        return _as_future(self.actor.stay.remote())

    def run(self, number: int, command: Command, arrays: Arrays) -> "Future[list[tuple[int, str]]]":
        """See `Host`."""
        return _as_future(self.actor.run.remote(number, command, arrays))

    def build(self, command: Command) -> "Future[str | None]":
        """See `Host`; files are sent to a host that does not have them."""
        outcome: Future[str | None] = Future()

        def send() -> None:
            try:
                artifact = pack(self.folder(command["sha"]), ray.put)  # kept in the store until it has arrived
                outcome.set_result(_as_future(self.actor.build.remote(command, artifact)).result())
            except OSError as error:
                outcome.set_result(f"its files cannot be read on the server: {error.strerror}")
            except Exception as error:
                outcome.set_exception(error)

        def on_reply(reply: "Future[str | None]") -> None:
            if (error := reply.exception()) is not None:
                outcome.set_exception(error)
            elif reply.result() == MISSING:
                threading.Thread(target=send, name="policy-files", daemon=True).start()
            else:
                outcome.set_result(reply.result())

        _as_future(self.actor.build.remote(command)).add_done_callback(on_reply)
        return outcome

    def end(self, why: str | None) -> "Future[None]":
        """See `Host`."""
        return _as_future(self.actor.end.remote(why))

    def _on_beat(self, answer: "Future[Any]") -> None:
        if answer.exception() is None:
            self.last_beat_at = time.monotonic()
        self._is_beat_pending = False


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
        deadline = time.monotonic() + options.timeout
        address = join_address(options.host, options.port)
        head = ["--head", f"--port={options.port}", f"--node-ip-address={options.host}", "--num-cpus=0"]
        head += ["--include-dashboard=false", "--include-log-monitor=false", f"--ray-client-server-port={_free_port()}"]
        self._node = RayNode([*head, f"--temp-dir={self._credentials.folder}"], environment, self._on_node_end)
        _connect(options, deadline, self._check_node)
        logger.info("waiting for %d more hosts at %s", options.count - 1, address)
        group = placement_group([{RESOURCE: 1.0}] * (options.count - 1), strategy="STRICT_SPREAD")
        while not group.wait(POLL_PERIOD):
            self._check_node()
            if time.monotonic() > deadline:
                arrived = sum(node["Alive"] and RESOURCE in node["Resources"] for node in ray.nodes())
                arrived_text = f"{arrived} of {options.count - 1} other hosts came"
                raise HostsLost(f"{arrived_text} within {options.timeout:g} s; start robojax follow on them")
        remote: Any = ray.remote
        kind = remote(concurrency_groups=CONCURRENCY_GROUPS)(HostActor)
        actors = [
            kind.options(
                num_cpus=0,
                resources={RESOURCE: 1.0},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(index + 1, options.count)
            for index in range(options.count - 1)
        ]
        return [self._check_host(number, actor) for number, actor in enumerate(actors, 1)]

    def close(self) -> None:
        """End Ray on this machine."""
        self._on_end = lambda why: None
        if ray.is_initialized():
            ray.shutdown()
        if self._node is not None:
            self._node.kill()
        self._credentials.remove()

    def _check_host(self, number: int, actor: Any) -> RayHost:
        try:
            address, theirs = ray.get(actor.introduce.remote(), timeout=BEGIN_TIMEOUT)
        except RayError as error:
            raise HostsLost(f"host {number} is gone: {_summarize(error)}") from error
        name = f"host {number} ({address})"
        if theirs != package_versions():
            raise HostsLost(f"{name} has other versions: {theirs}; this one has {package_versions()}")
        return RayHost(name, actor, self._folder)

    def _check_node(self) -> None:
        if self._ended is not None:
            address = join_address(self._options.host, self._options.port)
            raise HostsLost(f"{address} cannot be listened on, or Ray cannot begin there: {self._ended}")

    def _on_node_end(self, last: str) -> None:
        self._ended = last or "it wrote no reason"
        self._on_end(f"Ray ended on this machine: {self._ended}")


def _connect(options: HostOptions, deadline: float, check: Callable[[], None]) -> None:
    """Connect this process to the cluster as soon as its head listens; without one Ray would wait for ever."""
    os.environ.update(NO_RECONNECT_TIMEOUT)
    address = join_address(options.host, options.port)
    while True:
        check()
        try:
            socket.create_connection((options.host, options.port), POLL_PERIOD).close()
            ray.init(
                address,
                namespace="hosts",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=options.host,
            )
            return
        except (RayError, OSError, ValueError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise HostsLost(f"Ray does not answer at {address}: {error}") from error
            time.sleep(POLL_PERIOD)


def _free_port() -> int:
    """Return a free port for Ray's client server, which cannot be left out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _as_future(call: Any) -> "Future[Any]":
    """Return an actor's answer as a future whose errors are those of hosts."""
    outcome: Future[Any] = Future()

    def settle(answer: "Future[Any]") -> None:
        error: Any = answer.exception()
        if error is None:
            outcome.set_result(answer.result())
        elif isinstance(error, RayTaskError):
            outcome.set_exception(HostFailed(f"{type(error.cause).__name__}; its log says more"))
        else:
            outcome.set_exception(HostGone(_summarize(error)))

    call.future().add_done_callback(settle)
    return outcome


def _summarize(error: BaseException) -> str:
    return "its process ended, or its connection" if isinstance(error, RayActorError) else type(error).__name__

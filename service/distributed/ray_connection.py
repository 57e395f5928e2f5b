"""Connection to a Ray cluster, and calls of its actors with time limits."""

import asyncio
import logging
import os
import socket
import threading
from concurrent.futures import Future
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from yarl import URL

from service.threads import settle_threadsafe

NAMESPACE = "robojax"

# On the cluster's head, whose end is the cluster's: no other machine that fails takes it along.
_ON_THE_HEAD = {"node:__internal_head__": 0.001}


def get_or_create_actor(name: str, kind: type, *arguments: Any, at_once: int | None = None, retries: int = 0) -> Any:
    """Return Ray's handle of the actor of this name, created if there is none; blocks.

    It outlives the process that created it, and Ray starts it again when it ends.

    Args:
        kind, arguments: of which it is made.
        at_once: calls that it runs side by side; as Ray has it when None.
        retries: of a call in which it ended.
    """
    actor_class: Any = ray.remote(kind)
    return actor_class.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=_ON_THE_HEAD,
        max_restarts=-1,
        max_concurrency=at_once,
        max_task_retries=retries,
    ).remote(*arguments)


# Seconds that a machine may take to say whether something listens where the cluster's head was.
CONNECT_TIMEOUT = 2.0
# Ray ends a process that has not reached its cluster's head for a minute. One that moves robots has to outlive it.
RECONNECT_VARIABLE, NO_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s", 10**6
REFUSED_HINT = (
    ", though something listens there: is it Ray, of this version, and are its token and certificates those that "
    "this process has (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH, RAY_USE_TLS)? `ray health-check` says more"
)


class CannotJoin(Exception):
    """The cluster cannot be joined, or has no engine; the text says what to do."""


class NoAnswer(Exception):
    """An actor did not answer in time, or there is no connection to its cluster."""


class Connection:
    """Connection of this process to a Ray cluster; its methods block.

    Args:
        address: as Ray has it: ``local``, ``auto``, ``ray://host:port`` or ``host:port``.

    Attributes:
        number: of the present one. What was given to the object store, and handles of actors, are of one connection;
            those of another must not be used.
    """

    def __init__(self, address: str):
        self.address = address
        self.number = 0
        self._head: tuple[str, int] | None = None

    def open(self) -> None:
        """Connect to the cluster.

        Raises:
            CannotJoin: and why.
        """
        if self.address != "local":
            os.environ.setdefault(RECONNECT_VARIABLE, str(NO_TIMEOUT))
        head = self._head or _parse_address(self.address) or _parse_address(os.environ.get("RAY_ADDRESS", ""))
        if self.address != "local" and head is not None:
            _probe_head(*head)  # Ray would wait for it without an end
        try:
            ray.init(
                self.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False if self.address == "local" else None,
            )
            if self.address != "local":
                self._head = _parse_address(self.address) or _parse_address(ray.get_runtime_context().gcs_address)
        except (RayError, ConnectionError, OSError, ValueError, RuntimeError, TimeoutError) as error:
            # It listens: what else may be wrong, Ray itself writes to the terminal only, if at all.
            is_refused = isinstance(error, ConnectionError) and head is not None
            raise CannotJoin(_summarize(error) + (REFUSED_HINT if is_refused else "")) from error
        self.number += 1

    def close(self) -> None:
        """Disconnect."""
        ray.shutdown()


def _parse_address(address: str) -> tuple[str, int] | None:
    """Return host and port of an address, or None when it has none."""
    try:
        url = URL(address if "://" in address else f"ray://{address}")
        return None if not url.host or url.explicit_port is None else (url.host, url.explicit_port)
    except ValueError:
        return None  # Ray says what is wrong with it


def _probe_head(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise CannotJoin(
            f"nothing answers at {host}:{port} ({error.strerror or error}); is the cluster's head up, and is this its "
            "address? (`ray start --head` begins one, RAY_ADDRESS says where it is)"
        ) from error


async def call_actor(actor: Any, within: float, method: str, *arguments: Any) -> Any:
    """Call an actor's method, with a time limit.

    The call is sent by a thread of its own: where Ray's client has lost its server, it stands still for half a minute,
    and the event loop has ticks to keep.

    Args:
        actor: Ray's handle; None where there is no connection.
        within: seconds.

    Raises:
        NoAnswer: it did not answer in time, or cannot be called.
    """
    if actor is None:
        raise NoAnswer("not connected")
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def on_reply(reply: "Future[Any]") -> None:
        error = reply.exception()
        settle_threadsafe(loop, outcome, reply.result() if error is None else error)

    def send() -> None:
        try:
            getattr(actor, method).remote(*arguments).future().add_done_callback(on_reply)
        except Exception as error:
            settle_threadsafe(loop, outcome, error)

    threading.Thread(target=send, name="cluster", daemon=True).start()
    try:
        return await asyncio.wait_for(outcome, within)
    except Exception as error:
        if means_no_answer(error):
            raise NoAnswer(type(error).__name__) from error
        raise


def means_no_answer(error: BaseException) -> bool:
    """Return whether this error of Ray means that there is no answer."""
    # Its client raises no kind of its own where it has lost its server.
    return isinstance(error, RayError | TimeoutError | ConnectionError) or not ray.is_initialized()


def _summarize(error: Exception) -> str:
    """Return the first line of an error of Ray, with the last where the first only introduces it."""
    lines = [line.strip() for line in str(error).strip("'\"").splitlines() if line.strip()] or [repr(error)]
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def to_ray_address(setting: str) -> str:
    """Return Ray's address for the setting ``engine``: ray-local, ray-auto, ray://host:port."""
    return {"ray-local": "local", "ray-auto": "auto"}.get(setting, setting)

"""Connection to a Ray cluster, and calls of its actors with time limits."""

import asyncio
import logging
import os
import socket
import threading
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from yarl import URL

from service.threads import settle_threadsafe

NAMESPACE = "robojax"

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

    def send() -> None:
        try:
            getattr(actor, method).remote(*arguments).future().add_done_callback(
                lambda reply: settle_threadsafe(loop, outcome, reply.exception() or reply.result())
            )
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

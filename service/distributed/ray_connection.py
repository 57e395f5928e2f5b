"""Connection to a Ray cluster, and calls of its actors with time limits."""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from yarl import URL

from service.threads import call_soon, settle

NAMESPACE = "robojax"

# Seconds that a machine may take to say whether something listens where the cluster's head was.
CONNECT_TIMEOUT = 2.0
# Ray ends a process that has not reached its cluster's head for a minute. The gateway must live longer, because its
# engines may still answer.
RECONNECT_VARIABLE, NO_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s", 10**6
REFUSED_HINT = (
    ", though something listens there: is it Ray, of this version, and does this process have its token and "
    "certificates (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH, RAY_USE_TLS)? `ray health-check` says more"
)


class CannotJoin(Exception):
    """The cluster cannot be joined, or has no engine; the text says what to do."""


class NoAnswer(Exception):
    """An actor did not answer in time, or there is no connection to its cluster."""


def connect(address: str, head: str = "") -> str:
    """Connect this process to a Ray cluster; blocks.

    Args:
        address: as Ray has it: ``local``, ``auto``, ``ray://host:port`` or ``host:port``.
        head: host and port of the cluster's head, as an earlier process found it.

    Returns:
        Host and port of the cluster's head; an empty text for ``local``.

    Raises:
        CannotJoin: the cluster cannot be joined.
    """
    is_local = address == "local"
    known = _parse_address(head) or _parse_address(address) or _parse_address(os.environ.get("RAY_ADDRESS", ""))
    options: dict[str, Any] = {}
    if is_local:
        options = {"include_dashboard": False}
    else:
        os.environ.setdefault(RECONNECT_VARIABLE, str(NO_TIMEOUT))
        if known is not None:
            _probe_head(*known)  # Ray would wait for it without an end
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
        if is_local:
            return ""
        host, port = _parse_address(address) or _parse_address(ray.get_runtime_context().gcs_address) or ("", 0)
    except (RayError, ConnectionError, OSError, ValueError, RuntimeError, TimeoutError) as error:
        # Ray writes other reasons to the terminal only, if at all.
        is_refused = isinstance(error, ConnectionError) and not is_local and known is not None
        raise CannotJoin(_summarize(error) + (REFUSED_HINT if is_refused else "")) from error
    return f"{host}:{port}" if host else ""


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


def send_call(
    start: Callable[[Callable[[], None]], object], actor: Any, method: str, *arguments: Any
) -> asyncio.Future[Any]:
    """Call an actor's method in another thread, because Ray's client blocks for half a minute when it lost its server.

    Args:
        start: runs a function in a thread.
        actor: Ray's handle.

    Returns:
        The future of the answer, or of Ray's error.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def send() -> None:
        try:
            getattr(actor, method).remote(*arguments).future().add_done_callback(
                lambda reply: call_soon(loop, settle, outcome, reply.exception() or reply.result())
            )
        except Exception as error:
            call_soon(loop, settle, outcome, error)

    start(send)
    return outcome


async def call_actor(actor: Any, within: float, method: str, *arguments: Any) -> Any:
    """Call an actor's method in a thread of its own, with a time limit.

    Args:
        actor: Ray's handle; None where there is no connection.
        within: seconds.

    Raises:
        NoAnswer: it did not answer in time, or cannot be called.
    """
    if actor is None:
        raise NoAnswer("not connected")
    try:
        return await asyncio.wait_for(send_call(_start_thread, actor, method, *arguments), within)
    except Exception as error:
        if means_no_answer(error):
            raise NoAnswer(type(error).__name__) from error
        raise


def _start_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="cluster", daemon=True).start()


def means_no_answer(error: BaseException) -> bool:
    """Return whether this error of Ray means that there is no answer."""
    # Its client raises no kind of its own where it has lost its server.
    return isinstance(error, RayError | TimeoutError | ConnectionError) or not ray.is_initialized()


def _summarize(error: Exception) -> str:
    """Return the first line of an error of Ray, with the last where the first only introduces it."""
    lines = [line.strip() for line in str(error).strip("'\"").splitlines() if line.strip()] or [repr(error)]
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]

"""Worker node of a host group: runs Ray on this machine for `robojax follow`, as long as the server lives."""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc  # pyright: ignore[reportMissingImports, reportMissingModuleSource] - an extra

from service.distributed.ray_node import (
    ADDRESS,
    PIPE,
    RESOURCE,
    Credentials,
    RayNode,
    find_own_address,
    join_address,
    make_credentials,
)

RESTART_HINT = "start this again, and the server if it has ended"
# gRPC would close a connection without calls after half an hour.
_NO_IDLE_TIMEOUT = ("grpc.client_idle_timeout_ms", 2**31 - 1)
_FAST_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 500))


def follow_server(host: str, port: int, secret: bytes, timeout: float, show: Callable[[str], None]) -> str | None:
    """Run a worker node until the server ends; returns why it ended, None where the server ended in order.

    Args:
        timeout: seconds in which the server has to be there.
        show: called with each line for the person at the terminal.
    """
    address = join_address(host, port)
    try:
        own = find_own_address(host, port)
        credentials = make_credentials(secret, host, port)
    except OSError as error:
        return f"the server at {address}: there is no way there ({error.strerror}); {RESTART_HINT}"
    endings: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    node = None
    try:
        channel = _connect(address, credentials)
        try:
            grpc.channel_ready_future(channel).result(timeout)
        except grpc.FutureTimeoutError:
            return f"the server at {address}: none that knows this secret for {timeout:g} s; {RESTART_HINT}"
        pipe = str(credentials.folder / "pipe")
        os.mkfifo(pipe, 0o600)
        threading.Thread(target=_read_messages, args=(pipe, show, endings.put), name="pipe", daemon=True).start()
        arguments = [f"--address={address}", f"--node-ip-address={own}", f"--resources={json.dumps({RESOURCE: 1})}"]
        node = RayNode(
            [*arguments, "--num-cpus=0", "--include-log-monitor=false", f"--temp-dir={credentials.folder}"],
            dict(credentials.environment) | {PIPE: pipe, ADDRESS: own},
            lambda last: endings.put(f"Ray ended on this machine ({last}); {RESTART_HINT}"),
        )

        def watch(state: Any) -> None:
            # It has been connected: whatever comes now is the end of it.
            if state is not grpc.ChannelConnectivity.READY:
                endings.put(f"the server at {address}: it closed the connection; {RESTART_HINT}")

        channel.subscribe(watch)
        return endings.get()
    finally:
        if node is not None:
            node.kill()
        credentials.remove()


def _connect(address: str, credentials: Credentials) -> Any:
    files = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    secured = grpc.ssl_channel_credentials(*map(credentials.read, files))
    return grpc.secure_channel(address, secured, options=[_NO_IDLE_TIMEOUT, *_FAST_RECONNECT])


def _read_messages(pipe: str, show: Callable[[str], None], end: Callable[[str | None], None]) -> None:
    """Read messages of the host's actor; the pipe ends with the actor's process."""
    with open(pipe, encoding="utf-8") as lines:
        for line in lines:
            match json.loads(line):
                case {"say": text}:
                    show(text)
                case {"log": text}:
                    sys.stderr.write(f"{text}\n")
                case {"end": why}:
                    end(why)
    end(f"its process ended; {RESTART_HINT}")

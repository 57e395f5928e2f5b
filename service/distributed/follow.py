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
    join_address,
    own_address,
    own_credentials,
)

AGAIN = "start this again, and the server if it has ended"
# gRPC would close a connection on which nothing is asked after half an hour.
_NEVER_IDLE = ("grpc.client_idle_timeout_ms", 2**31 - 1)
_LOOK_OFTEN = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 500))


def follow_front(host: str, port: int, secret: bytes, patience: float, show: Callable[[str], None]) -> str | None:
    """Run a worker node until the server ends; returns why it ended, None where the server ended in order.

    Args:
        patience: seconds in which the front has to be there.
        show: called with each thing that a person may want to know.
    """
    address = join_address(host, port)
    try:
        own = own_address(host, port)
        credentials = own_credentials(secret, host, port)
    except OSError as error:
        return f"the server at {address}: there is no way there ({error.strerror}); {AGAIN}"
    ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    node = None
    try:
        channel = _connect(address, credentials)
        try:
            grpc.channel_ready_future(channel).result(patience)
        except grpc.FutureTimeoutError:
            return f"the server at {address}: none that knows this secret for {patience:g} s; {AGAIN}"
        pipe = str(credentials.folder / "pipe")
        os.mkfifo(pipe, 0o600)
        threading.Thread(target=_read, args=(pipe, show, ends.put), name="pipe", daemon=True).start()
        arguments = [f"--address={address}", f"--node-ip-address={own}", f"--resources={json.dumps({RESOURCE: 1})}"]
        node = RayNode(
            [*arguments, "--num-cpus=0", "--include-log-monitor=false", f"--temp-dir={credentials.folder}"],
            dict(credentials.environment) | {PIPE: pipe, ADDRESS: own},
            lambda last: ends.put(f"Ray ended on this machine ({last}); {AGAIN}"),
        )

        def watch(state: Any) -> None:
            # It has been connected: whatever comes now is the end of it.
            if state is not grpc.ChannelConnectivity.READY:
                ends.put(f"the server at {address}: it closed the connection; {AGAIN}")

        channel.subscribe(watch)
        return ends.get()
    finally:
        if node is not None:
            node.kill()
        credentials.remove()


def _connect(address: str, credentials: Credentials) -> Any:
    files = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    secured = grpc.ssl_channel_credentials(*map(credentials.read, files))
    return grpc.secure_channel(address, secured, options=[_NEVER_IDLE, *_LOOK_OFTEN])


def _read(pipe: str, show: Callable[[str], None], end: Callable[[str | None], None]) -> None:
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
    end(f"its process ended; {AGAIN}")

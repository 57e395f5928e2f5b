"""Where a server listens, and by which address others reach it."""

import os
import socket
from collections.abc import Mapping

from hooks.errors import HooksError

FIRST_PORT = 7860  # gradio's, so that what was set up for huggingface_hub's server finds this one
PORTS = 100
HOST, PORT = "ROBOJAX_WEBHOOKS_HOST", "ROBOJAX_WEBHOOKS_PORT"


class CannotListen(HooksError, OSError):
    """The address cannot be listened on; the text says what to do."""


def chosen(
    host: str | None, port: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, tuple[int, ...]]:
    """The host, and the ports to try in this order.

    Arguments win over ``ROBOJAX_WEBHOOKS_HOST`` and ``ROBOJAX_WEBHOOKS_PORT``, those over gradio's
    ``GRADIO_SERVER_NAME`` and ``GRADIO_SERVER_PORT``. A port that was named is the only one; else it is the first free
    one from 7860 on.

    Raises:
        CannotListen: a port in the environment is no port.
    """
    is_space = bool(environment.get("SPACE_ID"))
    named = environment.get(HOST) or environment.get("GRADIO_SERVER_NAME")
    host = host or named or ("0.0.0.0" if is_space else "127.0.0.1")
    if port is None:
        variable = next((name for name in (PORT, "GRADIO_SERVER_PORT") if environment.get(name)), None)
        if variable is None:
            # A Space is reached on this port only.
            return host, (FIRST_PORT,) if is_space else tuple(range(FIRST_PORT, FIRST_PORT + PORTS))
        try:
            port = int(environment[variable])
        except ValueError:
            raise CannotListen(f"{variable} is {environment[variable]!r}; wanted a number from 0 to 65535") from None
    if not 0 <= port <= 65535:
        raise CannotListen(f"port {port}: wanted a number from 0 to 65535 (0: any free one)")
    return host, (port,)


def listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    """A listening socket on the first of these ports that is free.

    Raises:
        CannotListen: none is, or the host is no address of this machine.
    """
    refused: OSError | None = None
    for port in ports:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise CannotListen(f"host {host!r} is no address of this machine ({error.strerror or error})") from error
        listener = socket.socket(family, kind, protocol)
        try:
            # One that ended a moment ago does not block its port; one that listens does.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            refused = error
        else:
            return listener
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise CannotListen(
        f"cannot listen on {host}, port {tried}: {refused.strerror if refused else 'no port'}; "
        f"end what listens there, or choose another port (port=0 or {PORT}=0: any free one)"
    ) from refused


def url_of(listener: socket.socket) -> str:
    """The URL that a client on this machine can use."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(bound), str(bound))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

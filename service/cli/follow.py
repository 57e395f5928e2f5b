"""``robojax follow``: this machine's devices for a server on another one, which spreads its policies over both."""

import os
import sys
from typing import Annotated

import typer

from service.cli.failure import Code, fail


def follow(
    front: Annotated[str, typer.Argument(help="ADDRESS:PORT of the server, its hosts_address.", show_default=False)],
    secret_file: Annotated[
        str | None,
        typer.Option(envvar="ROBOJAX_HOSTS_SECRET_FILE", help="File with the secret that is the same on all hosts."),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds in which the server has to be there.")] = 300.0,
) -> None:
    """Run the programs of a server with `--hosts-count` on this machine's devices, too; it ends when that server does.

    No port is opened for anybody but the other hosts. Exit codes: 0 the server ended, 2 it cannot begin, 4 the server
    or another host is gone; start it again then, and the server too.
    """
    from service.hosts.options import read_address, read_secret
    from service.settings import SettingsError

    try:
        host, port = read_address("front", front)
        secret = read_secret(secret_file)
    except SettingsError as error:
        fail(Code.USAGE, "this host cannot follow", str(error), "robojax follow ADDRESS:PORT --secret-file FILE")
    try:
        from service.hosts.following import follow_front
    except ModuleNotFoundError as error:
        fail(Code.USAGE, "this host cannot follow", f"{error.name} is not installed", "pip install 'robojax[ray]'")
    typer.echo(f"Waiting for the server at {front}.")
    try:
        why = follow_front(host.strip("[]"), port, secret, wait, typer.echo)
    except KeyboardInterrupt:
        why = None
    typer.echo(f"Ended: {why or 'the server did, or Ctrl-C'}.", err=why is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    # What still runs are threads that wait for Ray, which is gone.
    os._exit(0 if why is None else Code.TRANSPORT)

"""``robojax transport``: the rooms server alone."""

from typing import Annotated

import typer

from service.cli.failure import Code, fail


def transport(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, without any login.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Web page that may call, e.g. https://my.page, or '*'; repeat it. This machine's may."),
    ] = None,
    oddities: Annotated[
        bool, typer.Option("--oddities", help="Behave like the reference server where it is broken, to test clients.")
    ] = False,
) -> None:
    """Serve rooms (RobotHub's REST, WebSocket and WebRTC signalling) at / and under /api until Ctrl-C."""
    from service.serving import CannotListen
    from service.transport.server import TransportSettings, run_transport

    def started(url: str) -> None:
        typer.echo(f"Rooms at {url} and {url}/api. Ctrl-C ends it.")

    settings = TransportSettings(origins=tuple(origin or ()), is_odd=oddities)
    try:
        run_transport(host, port, settings, started)
    except CannotListen as error:
        fail(Code.USAGE, "the rooms server cannot start", str(error), "robojax transport --port 0 takes a free port")

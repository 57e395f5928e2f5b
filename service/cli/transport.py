"""``robojax transport``: the rooms server alone."""

from typing import Annotated

import typer

from service.cli.failure import Code, fail


def transport(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, and wants a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Web page that may call, e.g. https://my.page, or '*'; repeat it. This machine's may."),
    ] = None,
    keys_file: Annotated[
        str | None, typer.Option(help="File of keys that `robojax token new --keys-file` makes; then one is wanted.")
    ] = None,
    jwt_secret_file: Annotated[
        str | None, typer.Option(help="File of the secret that `robojax token jwt --jwt-secret-file` signs with.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody who reaches the port in, also from other machines.")
    ] = False,
    oddities: Annotated[
        bool, typer.Option("--oddities", help="Behave like the reference server where it is broken, to test clients.")
    ] = False,
) -> None:
    """Serve rooms (RobotHub's REST, WebSocket and WebRTC signalling) at / and under /api until Ctrl-C."""
    import logging

    from service.auth.access import guard_of
    from service.cli.serve import close_to_strangers
    from service.serving import CannotListen, listen
    from service.settings import Settings
    from service.state import OFF
    from service.transport.server import TransportSettings, run_transport

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    def started(url: str) -> None:
        typer.echo(f"Rooms at {url} and {url}/api. Ctrl-C ends it.")

    origins = tuple(origin or ())
    access = Settings(
        host=host,
        port=port,
        origins=origins,
        state=OFF,
        keys_file=keys_file,
        jwt_secret_file=jwt_secret_file,
        insecure=insecure,
    )
    try:
        listener = listen(host, port)
    except CannotListen as error:
        fail(Code.USAGE, "the rooms server cannot start", str(error), "robojax transport --port 0 takes a free port")
    with listener:
        close_to_strangers(listener.getsockname()[0], access, "transport")
        run_transport(listener, TransportSettings(origins=origins, is_odd=oddities), started, guard_of(access))

"""Commands `serve`, `transport` and `doctor`, for a server's machine."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from robojax.cli.app import Code, fail, show_findings
from service.setting_types import Mark, SettingsError
from service.settings import FIELDS, FILE, GROUPS, PREFIX, Settings, load_settings, unknown_variables

if TYPE_CHECKING:
    from service.api.context import App
    from service.lerobot.grpc_server import LerobotServer
    from service.logging import BackgroundHandler, LogSettings, RotatingLogFile


def serve(config: Path | None, help_all: bool, **flags: Any) -> None:
    """Run the server until Ctrl-C or SIGTERM.

    Settings come from flags, then from the environment (ROBOJAX_PORT for --port), then from a TOML file (port = 8001),
    then from the defaults shown here.
    """
    import logging

    from service.processes import pause_garbage_collection

    with pause_garbage_collection():
        from service.engines.launch import launch_engine
        from service.http.server import CannotListen, listen, run, serve_app
        from service.logging import configure_logging

    settings = settings_or_end(flags, config).with_state()
    server = settings.server
    log = configure_logging(settings.logging.log_level, settings.logging.log_format, _log_file(settings.logging))
    for name in unknown_variables():
        logging.getLogger(__name__).warning("environment variable %s is not a setting and is ignored", name)
    try:
        listener = listen(server.host, server.port)
        openpi = None if server.openpi_port is None else listen(server.host, server.openpi_port)
    except CannotListen as error:
        fail(Code.USAGE, "the server cannot start", str(error), "robojax serve --port 0 takes a free port")
    refuse_without_keys(listener.getsockname()[0], settings, "serve")
    _refuse_open_robots(listener.getsockname()[0], settings)
    launched = launch_engine(settings.policies) if settings.cluster.engine == "local" else None
    # The refusals above do not need these slow imports.
    with pause_garbage_collection():
        from service.api.websockets import create_openpi_app
        from service.app import create_app
        from service.errors import ModelError, NoDatabase, NoDevice, NoEngine, ServerNameTaken
        from service.rollout.webhooks import StartFailed

    rooms = "rooms included" if settings.transport.embedded_transport else "without rooms"
    try:
        app = create_app(settings, launched=launched)
    except SettingsError as error:
        listener.close()
        fail(Code.USAGE, "the settings cannot be used", str(error), "`robojax serve --help-all` lists all")
    others: list[AbstractAsyncContextManager[object]] = []
    also = ""
    if openpi is not None:
        others.append(serve_app(create_openpi_app(app), openpi))
        also = f"; openpi clients: port {openpi.getsockname()[1]}"
    robots = None if settings.lerobot.lerobot_port is None else _create_lerobot_server(app, listener.getsockname()[0])
    if robots is not None:
        others.append(robots)
    list_commands: Callable[[], list[str]] = list
    if settings.lerobot.lerobot_zenoh is not None:
        from service.lerobot.zenoh_server import LerobotZenohServer

        others.append(remote := LerobotZenohServer(app))
        list_commands = remote.list_client_commands
    see_cluster = "docs/operate/cluster.md describes"
    advice: dict[type[Exception], str] = {
        ServerNameTaken: f"end that server, or use another --front-name; {see_cluster} several servers",
        NoDatabase: "start the database, or correct --database; without it sessions are not shared",
        NoEngine: f"{see_cluster} the start of a cluster; without --engine policies run here",
        NoDevice: "robojax serve --devices all uses all available devices",
        ModelError: "robojax check PATH says more about a model",
        **dict.fromkeys(StartFailed, "--state names another folder; `--state off` keeps nothing"),
        **dict.fromkeys((CannotListen, SettingsError), "`robojax serve --help-all` lists all settings"),
    }

    def announce(url: str) -> None:
        lerobot = "" if robots is None else f"; LeRobot's robots: port {robots.port}"
        pages = f"page: {url}/ui, API: {url}/docs{also}{lerobot}"
        typer.echo(f"robojax serves at {url} ({rooms}; {pages}). Ctrl-C ends it.")
        for command in list_commands():
            typer.echo(f"LeRobot's remote inference, on a robot: {command}")

    try:
        run(app, listener, announce, others, app.ctx.loop_watchdog)
    except tuple(advice) as error:
        code = Code.POLICY if isinstance(error, ModelError) else Code.USAGE
        then = next(text for kind, text in advice.items() if isinstance(error, kind))
        fail(code, "the server cannot start", str(error), then)
    _end(log)


def _end(log: "BackgroundHandler") -> None:
    """End the process with 0, because Python's own end aborts (SIGABRT) while a thread runs inside JAX."""
    log.close()
    with suppress(OSError):  # The terminal was closed.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _log_file(settings: "LogSettings") -> "RotatingLogFile | None":
    from service.logging import RotatingLogFile

    if settings.log_file is None:
        return None
    try:
        return RotatingLogFile(Path(settings.log_file).expanduser(), settings.log_file_bytes, settings.log_files)
    except OSError as error:
        why = f"log_file {settings.log_file!r}: {error.strerror}; wanted a file that can be written"
        fail(Code.USAGE, "the settings cannot be used", why, "`robojax serve --help-all` lists all")


def refuse_without_keys(bound: str, settings: Settings, command: str) -> None:
    """Refuse to serve other machines without keys, or log a warning with --insecure."""
    import logging

    from service.auth.config import keys_path
    from service.auth.guard import create_guard
    from service.http.origins import is_loopback
    from service.reloading_file import FileUnusable

    access, server, state = settings.access, settings.server, settings.webhooks.state
    try:
        guard = create_guard(access, host=server.host, origins=server.origins, state=state)
        is_keyed = guard.admissions.check_files()
    except (SettingsError, FileUnusable) as error:
        fail(Code.USAGE, "the server cannot start", str(error), "docs/operate/access.md describes keys")
    if is_loopback(bound) or is_keyed:
        return
    if not access.insecure:
        path = keys_path(access, state)
        named = "" if access.keys_file is None and path is not None else f" --keys-file {path or 'keys.json'}"
        port = f" --port {server.port}" if not named and command == "serve" and server.port != 8001 else ""
        fail(
            Code.USAGE,
            f"the server does not listen on {server.host} without a key",
            "any client that reaches the port could load any policy and move the robots",
            f"create a key: robojax token new --role operator --name me{named}{port}\n"
            f"then: robojax {command} --host {server.host}{named}{port}\n"
            "or --host 127.0.0.1 for this machine only; --insecure accepts all clients",
        )
    logging.getLogger(__name__).warning(
        "INSECURE: listening on %s without any key. Any client can load policies and move the robots; "
        "`robojax token new --role operator` creates a key",
        server.host,
    )


def _refuse_open_robots(bound: str, settings: Settings) -> None:
    """Refuse a port for LeRobot's robots that any machine could use, or that needs a missing package."""
    from service.http.origins import is_loopback

    lerobot = settings.lerobot
    if lerobot.lerobot_zenoh is not None and find_spec("zenoh") is None:
        why = f"lerobot_zenoh: {lerobot.lerobot_zenoh} needs eclipse-zenoh (it is not installed)"
        fail(Code.USAGE, "the server cannot start", why, "pip install -e '.[zenoh]'")
    if lerobot.lerobot_port is None:
        return
    if find_spec("grpc") is None:
        why = f"lerobot_port: {lerobot.lerobot_port} needs grpcio (it is not installed)"
        fail(Code.USAGE, "the server cannot start", why, "pip install -e '.[lerobot]'")
    if is_loopback(bound) or lerobot.lerobot_allow or lerobot.lerobot_tls_client_ca is not None:
        return
    fail(
        Code.USAGE,
        f"the server does not listen on {settings.server.host} for robots of any address",
        "LeRobot's protocol has no keys, so any program that reaches the port could use policies as a robot",
        "name the networks of the robots: --lerobot-allow 192.168.1.0/24\n"
        "or require certificates: --lerobot-tls-cert, --lerobot-tls-key and --lerobot-tls-client-ca\n"
        "or --host 127.0.0.1 for this machine only",
    )


def _create_lerobot_server(app: "App", host: str) -> "LerobotServer":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log has lines for mistakes of each client.
    from service.lerobot.grpc_server import LerobotServer

    return LerobotServer(app, host)


def settings_or_end(flags: dict[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read the settings; ends the process if they are invalid."""
    try:
        return load_settings(flags, config)
    except SettingsError as error:
        fail(
            Code.USAGE,
            "the settings cannot be used",
            str(error),
            f"correct them; `robojax serve --help-all` lists all. Precedence: flags, {PREFIX}*, TOML file",
        )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command one option per setting, described and parsed by the settings."""
    options = [_parameter("config", Path | None, typer.Option(help=f"TOML file; default: ./{FILE} if there is one"))]
    for group in GROUPS.values():
        for name, field in group.model_fields.items():
            flags, metavar = setting_flags(name, field)
            default = setting_default(field)
            # A default with commas would not show how to repeat the option.
            more = "; repeatable" if field.json_schema_extra else f"; default: {default}" if default else ""
            option = typer.Option(
                *(flags if field.json_schema_extra else ()),
                help=f"{field.description}{more}",
                rich_help_panel=(group.__doc__ or "").removesuffix("."),
                metavar=metavar,
                show_default=False,
                hidden=Mark.COMMON not in field.metadata,
            )
            kind = list[str] if field.json_schema_extra else bool if field.annotation is bool else str
            options.append(_parameter(name, kind | None, option))
    common_count = sum(Mark.COMMON in field.metadata for field in FIELDS.values())
    every = f"Show all {len(FIELDS)} settings; --help shows the {common_count} most common settings"
    options.append(
        _parameter("help_all", bool, typer.Option("--help-all", help=every, is_eager=True, callback=_show_all))
    )
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _show_all(context: typer.Context, is_given: bool) -> None:
    if is_given:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def setting_flags(name: str, field: FieldInfo) -> tuple[tuple[str, ...], str | None]:
    """Return the flags of a setting, and the name of their value in the help; None for a switch."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(field.json_schema_extra, dict):
        return (str(field.json_schema_extra["flag"]), flag), str(field.json_schema_extra["metavar"])
    if field.annotation is bool:
        return (flag, f"--no-{flag.removeprefix('--')}"), None
    return (flag,), _metavar(field.annotation)


def setting_default(field: FieldInfo) -> str:
    """Return the default of a setting in the format of its flag; empty if its description explains the default."""
    value = field.default
    if value is None or value == () or value == {}:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return ",".join(f"{name}={amount:g}" for name, amount in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _metavar(annotation: Any) -> str:
    if get_args(annotation) and all(isinstance(choice, str) for choice in get_args(annotation)):
        return "|".join(get_args(annotation))
    if annotation in (int, float):
        return "NUMBER"
    if get_origin(annotation) is tuple:
        return "A,B"
    if get_origin(annotation) is Mapping and "tuple" not in str(annotation):
        return "NAME=NUMBER"
    return "JSON" if "Mapping" in str(annotation) else "TEXT"


_with_settings(serve)


def transport(
    host: Annotated[str, typer.Option(help="Address; 0.0.0.0 accepts other machines with keys")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free port")] = 8000,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Web page that may call the rooms, e.g. https://my.page, or '*' for all; repeatable"),
    ] = None,
    keys_file: Annotated[str | None, typer.Option(help="Keys of `robojax token new`; then a key is required")] = None,
    jwt_secret_file: Annotated[str | None, typer.Option(help="File with the secret of `robojax token jwt`")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept all clients if there is no key")] = False,
) -> None:
    """Serve rooms (RobotHub's REST, WebSocket and WebRTC signalling) at / and under /api until Ctrl-C."""
    import logging

    from service.auth.guard import create_guard
    from service.http.server import CannotListen, listen
    from service.settings import Settings
    from service.state import OFF
    from service.transport.server.app import RoomsSettings, run_transport

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    def started(url: str) -> None:
        typer.echo(f"Rooms at {url} and {url}/api. Ctrl-C ends it.")

    origins = tuple(origin or ())
    settings = Settings.from_values(
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
        refuse_without_keys(listener.getsockname()[0], settings, "transport")
        guard = create_guard(settings.access, host=host, origins=origins, state=OFF)
        run_transport(listener, RoomsSettings(origins=origins), started, guard)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON")] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to check; default: the settings' port")
    ] = None,
) -> None:
    """Check Python, JAX's devices, rendering, video, the port, keys, disk, caches and packages of `robojax robot`.

    Each finding has its fix. A robojax server that already runs on the port is not a problem, and is shown.

    Exit code 1 if a requirement of the server is missing.
    """
    from service.doctor import diagnose

    settings = settings_or_end({"port": port}).with_state()
    show_findings(diagnose(settings), as_json=as_json)

"""Builds the Sanic app from settings."""

import asyncio
import json
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sanic import Sanic

from hooks.addresses import describe_danger, unwrap_ipv4
from hooks.database import Database
from hooks.errors import StoreError
from hooks.registry.delivery import resolve_host
from service.api import pages
from service.api.blueprint import (
    API_ROUTES,
    ROUTES,
    build_blueprint,
    build_config,
    install_middleware,
    install_path_check,
)
from service.api.context import App, Context
from service.api.metrics import Metrics
from service.api.pages import build_live_blueprint, full_document, specified_document
from service.api.websockets import build_streams_blueprint
from service.auth.caller import Role
from service.auth.guard import create_guard
from service.control.limits import read_limits
from service.dashboard.live import Live
from service.distributed.cluster import ClusterEngine
from service.engines.launch import Launched
from service.engines.local_engines import LocalEngines
from service.engines.model_host import LoadModel
from service.engines.model_server import ModelServer
from service.http.bodies import install_errors
from service.http.config import TransportSettings
from service.http.limits import CreateLimiter, Rates
from service.http.origins import Origins, is_loopback
from service.inference.config import PolicySettings
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadPolicy
from service.inference.policy_sources import (
    PolicyReader,
    ReadRequirements,
    SourceRules,
    make_requirements_reader,
)
from service.inference.progress import LoadDurations
from service.logging import RecentLogs, capture_logs
from service.loop_watchdog import LoopWatchdog
from service.processes import pause_garbage_collection
from service.recording.recordings import Recordings
from service.reloading_file import FileUnusable
from service.rollout.webhooks import Webhooks
from service.sessions.records import SCHEMA, SessionRecords
from service.sessions.request import RequestRules
from service.sessions.room_authority import RoomAuthority
from service.sessions.store import Sessions, SessionSettings
from service.setting_types import SettingsError
from service.settings import Settings
from service.shared_sessions import SharedDatabase, server_name
from service.state import lock_state_folder, state_folder
from service.streaming.clients import StreamClients
from service.streaming.direct_transport import DirectTransport, TransportByUrl
from service.threads import WorkerThread
from service.transport.address import AddressRules, Destinations
from service.transport.client.room_keys import RoomKeys, open_key_file
from service.transport.link import Transport
from service.transport.protocol import build_validators
from service.transport.server.app import RoomsSettings, add_transport
from service.transport.server.rooms import RoomTable

if TYPE_CHECKING:
    from hooks.registry.http_delivery import PinnedResolver


def _create_destinations(settings: TransportSettings) -> Destinations:
    """Create the rules of `transport_hosts`; raises SettingsError if an entry cannot be used."""
    rules = AddressRules(describe_danger, unwrap_ipv4, resolve_host, _create_resolver)
    try:
        return Destinations(settings.transport_hosts, rules)
    except ValueError as error:
        raise SettingsError(f"transport_hosts: {error}") from error


def _create_resolver(host: str, addresses: Sequence[str]) -> "PinnedResolver":
    from hooks.registry.http_delivery import PinnedResolver

    return PinnedResolver(host, addresses)


def _prepare_rooms_transport(app: App, destinations: Destinations | None) -> Callable[[], Transport]:
    """Return a function that creates the transport over the RobotHub wire.

    Raises:
        SettingsError: the file of room keys cannot be used.
    """
    settings, named = app.ctx.settings, app.ctx.settings.access.transport_key_file
    try:
        key_file = None if named is None else open_key_file(Path(named).expanduser())
    except FileUnusable as error:
        raise SettingsError(f"transport_key_file: {error}") from error

    def create() -> Transport:
        _import_late_modules()
        from service.transport.client.rooms_link import RoomsTransport

        own_address = app.config.get("OWN_ADDRESS") if settings.transport.embedded_transport else None
        keys = RoomKeys(app.ctx.guard.admissions.own, own_address, key_file)
        return RoomsTransport(ice_servers=settings.transport.ice_servers, destinations=destinations, keys=keys)

    return create


# Modules that take 0.3 s to import. Sessions, deliveries of webhooks and `/debug/system` use them first.
LOAD_DELAY = 0.05  # seconds after the start of the server
LATE_MODULES = ("service.transport.client.rooms_link", "hooks.registry.http_delivery", "psutil")


@cache
def _import_late_modules() -> None:
    with pause_garbage_collection():
        for name in LATE_MODULES:
            import_module(name)
        from jaxmodels.data import decode_picture  # noqa: F401
    build_validators()


def read_versions() -> dict[str, str]:
    """Return the installed version of each main package, and of Python, by name."""
    found = {"python": platform.python_version()}
    for package in ("robojax", "jax", "flax", "sanic", "aiortc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class InProcessEngine:
    """Engine source that runs policies in this process: for programs that bring their own loader of policies."""

    def __init__(self, policies: PolicySettings, load: LoadPolicy):
        self._policies, self.load = policies, load

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Open the engine; it is closed when the context ends."""
        policies = self._policies
        yield Engine(
            stuck_after=policies.stuck_after,
            durations=durations,
            batch_sizes=policies.engine_batch_sizes,
            devices=policies.devices,
            max_load=policies.engine_load,
            load_timeout=policies.load_timeout,
        )


EngineSource: TypeAlias = InProcessEngine | LocalEngines | ClusterEngine


def create_engine_source(app: App, load: LoadPolicy | None, launched: Launched | None) -> EngineSource:
    """Create the engine source that the settings ask for.

    Args:
        load: loads policies into this process; None for engines in other processes.
        launched: process of the first engine, if it was started before.

    Raises:
        SettingsError: the settings ask for a cluster, and Ray is not installed.
    """
    settings = app.ctx.settings
    if settings.cluster.engine == "local":
        if load is not None:
            return InProcessEngine(settings.policies, load)
        local = LocalEngines(settings.policies, settings.cluster.engine_patience, launched)
        app.ctx.engines = local.engines
        return local
    if find_spec("ray") is None:
        raise SettingsError(
            f"engine: {settings.cluster.engine} needs Ray (it is not installed); pip install -e '.[ray]'"
        )
    source = ClusterEngine(settings.policies, settings.cluster, lambda: server_name(app))
    app.ctx.engines = source.cluster.engines
    return source


# Routes outside of the route table, with the required role. Deliveries and the management of webhooks have their own
# secrets and tokens.
UNLISTED_ROUTES = (
    ("POST", "/webhooks/_events", Role.OPERATOR),
    ("POST", "/webhooks/", None),
    ("GET", "/webhooks", Role.VIEWER),
    ("*", "/api/settings/webhooks", None),
    ("GET", "/api/whoami-v2", None),
    ("GET", "/api/agent-harnesses", None),
)


def create_app(
    settings: Settings | None = None,
    *,
    transport: Transport | None = None,
    load: LoadPolicy | None = None,
    load_model: LoadModel | None = None,
    read_requirements: ReadRequirements | None = None,
    launched: Launched | None = None,
) -> App:
    """Create the Sanic app with all routes; nothing runs before it is served.

    Args:
        transport: connects sessions to their rooms; None for the RobotHub wire.
        load, load_model: load policies, and the models of the settings, into this process; None for processes of
            their own, which load folders and repos of the Hub with JAX.
        launched: process of the first engine, if it was started before; see `launch_engine`.
        read_requirements: reads the requirements of a policy before it is loaded; None for the same.
    """
    settings = settings or Settings()
    rooms = RoomsSettings(origins=settings.server.origins)
    authority = RoomAuthority()
    table = rooms.table(authority) if settings.transport.embedded_transport else None
    context = _create_context(settings, table, read_requirements or make_requirements_reader(settings.policies))
    # Sanic registers apps by name, and refuses a second app with the same name.
    name = f"robojax-{secrets.token_hex(4)}"
    app: App = Sanic(name, config=build_config(settings.limits), ctx=context, configure_logging=False)
    install_middleware(app)
    context.guard.install(app)
    install_path_check(app)
    # After the access guard and before the routes: requests about sessions of other servers are redirected.
    shared = SharedDatabase(app)
    source = create_engine_source(app, load, launched)
    install_errors(app)
    origins = Origins(settings.server.origins)
    app.blueprint(build_live_blueprint(origins))
    app.blueprint(build_streams_blueprint(origins))
    for prefix, routes in (("", ROUTES), ("/api", API_ROUTES)):
        app.blueprint(build_blueprint(prefix, routes, origins))
    if table is not None:
        add_transport(app, table, rooms)
    webhooks = Webhooks(settings.updates, settings.webhooks, settings.policies, settings.server.origins)
    if webhooks.registry is not None:
        from hooks.registry.api import build_blueprint as build_registry  # Most servers have none.

        # Before the sessions: it starts first and stops last, so that it receives all their events.
        app.blueprint(build_registry(webhooks.registry))
    destinations = None if transport else _create_destinations(settings.transport)
    direct = DirectTransport()
    by_url = TransportByUrl(
        direct, _prepare_rooms_transport(app, destinations) if transport is None else lambda: transport
    )
    register_lifespan(
        app,
        source=source,
        shared=shared,
        authority=authority,
        direct=direct,
        transport=by_url,
        load=context.source_rules.guard_loader(webhooks.identify_commits(load or source.load)),
        load_model=load_model,
        webhooks=webhooks,
        request_rules=RequestRules(context.source_rules, destinations),
    )
    # After the sessions, because deliveries that are repeated at the start may concern them.
    for blueprint in webhooks.build_blueprints():
        app.blueprint(blueprint)
    # Registered last and so run first, because Sanic runs stop listeners in reverse.
    app.before_server_stop(_hold_robots)
    return app


def _create_context(settings: Settings, table: RoomTable | None, read: ReadRequirements) -> Context:
    """Create what the routes share; sessions and what reads them are added when the server starts."""
    server, limits, policies = settings.server, settings.limits, settings.policies
    guard = create_guard(
        settings.access, host=server.host, origins=server.origins, state=settings.webhooks.state, rules=UNLISTED_ROUTES
    )
    source_rules = SourceRules(
        policies.policy_roots, policies.policy_owners, is_open=is_loopback(server.host) and not guard.requires_key
    )
    watchdog = LoopWatchdog()
    return Context(
        settings=settings,
        documents=_build_documents(settings.control.max_rate, limits.max_cameras),
        page=pages.build_docs_page(),
        versions=read_versions(),
        metrics=Metrics(watchdog),
        loop_watchdog=watchdog,
        logs=RecentLogs(settings.logging.log_lines),
        room_table=table,
        guard=guard,
        source_rules=source_rules,
        policy_reader=PolicyReader(source_rules.guard_reader(read)),
        create_limiter=CreateLimiter(
            Rates(limits.creates_per_minute / 60, limits.creates_per_minute), limits.limit_local
        ),
    )


@cache
def _build_documents(max_rate: float, max_cameras: int) -> Mapping[str, bytes]:
    """Build the OpenAPI documents by file name, before any request: building one takes longer than a tick."""
    limits = {"rate": {"maximum": max_rate}, "camera_names": {"maxItems": max_cameras}}
    return {
        "openapi.json": json.dumps(specified_document(ROUTES), indent=2).encode(),
        "openapi-full.json": json.dumps(full_document(ROUTES, limits), indent=2).encode(),
    }


@contextmanager
def _open_records(settings: Settings) -> Iterator[SessionRecords]:
    folder, is_shared = state_folder(settings.webhooks.state), settings.cluster.database is not None
    if folder is None:
        yield SessionRecords(is_shared=is_shared)
        return
    with lock_state_folder(folder):
        yield SessionRecords(Database(folder / "sessions.sqlite3", SCHEMA), StoreError, is_shared=is_shared)


def session_settings(settings: Settings) -> SessionSettings:
    """Return the settings of all sessions; raises LimitsError if the file of limits cannot be used."""
    path = settings.safety.limits
    file = None if path is None else read_limits(path)
    return SessionSettings(settings.limits, settings.control, settings.safety, file)


def register_lifespan(
    app: App,
    *,
    source: EngineSource,
    shared: SharedDatabase,
    authority: RoomAuthority,
    direct: DirectTransport,
    transport: TransportByUrl,
    load: LoadPolicy,
    load_model: LoadModel | None,
    webhooks: Webhooks,
    request_rules: RequestRules,
) -> None:
    """Register the listeners that open everything when the app starts, and close it in the opposite order."""
    settings = app.ctx.settings
    session_limits = session_settings(settings)
    opened = AsyncExitStack()

    @app.before_server_start
    async def open_all(app: App) -> None:
        opened.enter_context(capture_logs(app.ctx.logs))
        if request_rules.destinations is not None:
            request_rules.destinations.own_port = app.config.get("OWN_PORT")
        app.ctx.started_at = time.monotonic()
        app.ctx.list_worker = WorkerThread("lists")
        opened.callback(app.ctx.list_worker.close, 0.0)
        folder = state_folder(settings.webhooks.state)
        durations = None if folder is None else folder / "durations.json"
        engine = await opened.enter_async_context(
            source.open(LoadDurations(durations, app.ctx.metrics.record_preparation))
        )
        app.ctx.recordings = Recordings(settings.recording, settings.webhooks.state)
        try:
            app.ctx.sessions = Sessions(
                transport=transport,
                load=load,
                engine=engine,
                settings=session_limits,
                listeners=[direct.on_event, app.ctx.recordings.on_event, webhooks.on_event],
                check_request=shared.wrap_check(request_rules.check),
                records=opened.enter_context(_open_records(settings)),
            )
            authority.sessions = app.ctx.metrics.sessions = app.ctx.sessions
            app.ctx.live = Live(app.ctx.sessions)
            app.ctx.stream_clients = StreamClients(app.ctx.sessions, direct, app.ctx.recordings.on_act)
            await opened.enter_async_context(shared.open(app.ctx.sessions))
            app.ctx.models = app.ctx.metrics.models = ModelServer(
                settings.models, settings.policies, settings.limits.answer_deadline, load_model
            )
            await opened.enter_async_context(webhooks.open_publishing())
            # Updates are closed first, so that none begins while the sessions end.
            opened.push_async_callback(app.ctx.recordings.close)
            opened.push_async_callback(app.ctx.sessions.close)
            opened.push_async_callback(app.ctx.models.close)
            app.ctx.updates = await opened.enter_async_context(webhooks.open_updates(app.ctx.sessions))
            await app.ctx.models.load()  # A model that cannot be loaded stops the start.
        except BaseException:
            await opened.aclose()
            raise

    @app.after_server_start
    async def load_transport(app: App) -> None:
        # An import on another thread would delay the rest of the start.
        asyncio.get_running_loop().call_later(LOAD_DELAY, transport.load)

    @app.before_server_stop
    async def close_all(app: App) -> None:
        # Sanic does not cancel tasks: robots are held, and rooms are left here.
        await opened.aclose()


async def _hold_robots(app: App) -> None:
    """Hold all robots, before anything else is closed."""
    app.ctx.sessions.begin_close()

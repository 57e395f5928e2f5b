"""Builds the Sanic app from settings."""

import json
import platform
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sanic import Sanic

from hooks.addresses import describe_danger, unwrap_ipv4
from hooks.database import Database
from hooks.errors import StoreError
from hooks.registry.delivery import PinnedResolver, resolve_host
from service.api import pages
from service.api.blueprint import API_ROUTES, ROUTES, build_blueprint, build_config, install_middleware
from service.api.context import App, Context
from service.api.metrics import Metrics
from service.api.openapi import full_document, specified_document
from service.api.pages import build_live_blueprint
from service.api.websockets import build_streams_blueprint
from service.auth.caller import Role
from service.auth.guard import create_guard
from service.dashboard.live import Live
from service.engine_source import create_engine_source
from service.http.bodies import install_errors
from service.http.limits import CreateLimiter, Rates
from service.http.origins import Origins, is_loopback
from service.inference.loaded_policy import LoadPolicy
from service.inference.model_server import LoadModel
from service.inference.policy_sources import (
    PolicyReader,
    ReadRequirements,
    SourceRules,
    make_model_loader,
    make_requirements_reader,
)
from service.lifespan import hold_robots_first, import_jax_early, register_lifespan
from service.logging import RecentLogs
from service.loop_watchdog import LoopWatchdog
from service.reloading_file import FileUnusable
from service.rollout.webhooks import Webhooks
from service.sessions.records import SCHEMA, SessionRecords
from service.sessions.request import RequestRules
from service.sessions.room_authority import RoomAuthority
from service.setting_types import SettingsError
from service.settings import Settings
from service.shared_sessions import SharedDatabase
from service.state import lock_state_folder, state_folder
from service.streaming.clients import StreamClients
from service.streaming.direct_transport import TransportByUrl
from service.transport.address import AddressRules, Destinations
from service.transport.client.room_keys import RoomKeys
from service.transport.client.rooms_link import RoomsTransport
from service.transport.link import Transport
from service.transport.server.app import TransportSettings, add_transport


def create_destinations(app: App, rules: AddressRules) -> Destinations:
    """Create the rules for which transport servers sessions may be sent to, from `transport_hosts`.

    Raises:
        SettingsError: one that is named cannot be meant.
    """
    try:
        return Destinations(app.ctx.settings.transport.transport_hosts, rules, lambda: app.config.get("OWN_PORT"))
    except ValueError as error:
        raise SettingsError(f"transport_hosts: {error}") from error


def create_rooms_transport(app: App, destinations: Destinations | None) -> RoomsTransport:
    """Create the transport that reaches rooms over the RobotHub wire.

    Raises:
        SettingsError: the file of keys for other transport servers cannot be used.
    """
    return RoomsTransport(
        ice_servers=app.ctx.settings.transport.ice_servers,
        destinations=destinations,
        keys=_create_room_keys(app),
    )


def _create_room_keys(app: App) -> RoomKeys:
    settings, named = app.ctx.settings, app.ctx.settings.access.transport_key_file
    keys = RoomKeys(
        app.ctx.guard.admissions.own,
        lambda: app.config.get("OWN_ADDRESS") if settings.transport.embedded_transport else None,
        lambda session_id: app.ctx.sessions.get(session_id).new.owner,
        None if named is None else Path(named).expanduser(),
        lambda session_id: app.ctx.sessions.get(session_id).claim,
    )
    try:
        keys.check()
    except FileUnusable as error:
        raise SettingsError(f"transport_key_file: {error}") from error
    return keys


def read_versions() -> dict[str, str]:
    """Return the installed version of each main package, and of Python, by name."""
    found = {"python": platform.python_version()}
    for package in ("robojax", "jax", "flax", "sanic", "aiortc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


# Routes that are not of the table, and the role that each wants. Deliveries and the management of webhooks have their
# own secrets and tokens.
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
) -> App:
    """Create the Sanic app with all routes; nothing runs before it is served.

    Args:
        transport: how sessions reach their rooms; the RobotHub wire when None.
        load: how policies are loaded; from folders and the Hub with JAX when None.
        load_model: how the models of the settings are loaded; likewise when None.
        read_requirements: how it is found out what a policy needs before it is loaded; likewise when None.
    """
    settings = settings or Settings()
    rooms = TransportSettings(origins=settings.server.origins)
    context = _create_context(settings, rooms, read_requirements or make_requirements_reader(settings.policies))
    # Sanic keeps every app in a registry by name and refuses a second one of the same name.
    name = f"robojax-{secrets.token_hex(4)}"
    app: App = Sanic(name, config=build_config(settings.limits), ctx=context, configure_logging=False)
    install_middleware(app)
    context.guard.install(app)
    # After the guard and before the doors: whatever session is not here is sent on.
    shared = SharedDatabase(app)
    source = create_engine_source(app, lambda: context.sessions.engine.devices.first)
    install_errors(app)
    origins = Origins(settings.server.origins)
    app.blueprint(build_live_blueprint(origins))
    app.blueprint(build_streams_blueprint(origins))
    for prefix, routes in (("", ROUTES), ("/api", API_ROUTES)):
        app.blueprint(build_blueprint(prefix, routes, origins))
    if context.room_table is not None:
        add_transport(app, context.room_table, rooms)
    webhooks = Webhooks(settings.updates, settings.webhooks, settings.policies, settings.server.origins)
    if webhooks.registry is not None:
        # Before the sessions: it starts first and stops last, so that it hears of all they do.
        app.blueprint(webhooks.registry.blueprint())
    rules = AddressRules(describe_danger, unwrap_ipv4, resolve_host, PinnedResolver)
    destinations = None if transport else create_destinations(app, rules)
    register_lifespan(
        app,
        source=source,
        shared=shared,
        transport=TransportByUrl(context.stream_clients.direct, transport or create_rooms_transport(app, destinations)),
        load=context.source_rules.guard_loader(webhooks.identify_commits(load or source.load)),
        load_model=load_model or make_model_loader(settings.policies),
        webhooks=webhooks,
        check_request=RequestRules(context.source_rules, destinations).check,
        records=lambda: _open_records(settings.webhooks.state, is_shared=settings.cluster.database is not None),
    )
    # After the sessions: what is delivered again at the start may be about them.
    for blueprint in webhooks.build_blueprints():
        app.blueprint(blueprint)
    if load is None and settings.cluster.engine == "here":
        import_jax_early(app)
    hold_robots_first(app)
    return app


def _create_context(settings: Settings, rooms: TransportSettings, read: ReadRequirements) -> Context:
    """Create what the routes share; sessions, models, recordings and updates are added when the server starts."""
    authority = RoomAuthority(lambda: getattr(context, "sessions", None))
    table = rooms.table(authority) if settings.transport.embedded_transport else None
    server, limits, policies = settings.server, settings.limits, settings.policies
    guard = create_guard(
        settings.access, host=server.host, origins=server.origins, state=settings.webhooks.state, rules=UNLISTED_ROUTES
    )
    source_rules = SourceRules(
        policies.policy_roots, policies.policy_owners, is_open=is_loopback(server.host) and not guard.requires_key
    )
    watchdog = LoopWatchdog()
    context = Context(
        settings=settings,
        documents=_build_documents(settings.control.max_rate, limits.max_cameras),
        page=pages.build_docs_page(),
        versions=read_versions(),
        metrics=Metrics(
            lambda: context.sessions.list(),
            lambda: context.models.list(),
            lambda: context.sessions.engine.get_stats(),
            watchdog,
        ),
        loop_watchdog=watchdog,
        logs=RecentLogs(settings.logging.log_lines),
        room_table=table,
        guard=guard,
        source_rules=source_rules,
        policy_reader=PolicyReader(source_rules.guard_reader(read)),
        live=Live(lambda: context.sessions),
        create_limiter=CreateLimiter(
            Rates(limits.creates_per_minute / 60, limits.creates_per_minute), limits.limit_local
        ),
        stream_clients=StreamClients(lambda: context.sessions),
    )
    return context


@cache
def _build_documents(max_rate: float, max_cameras: int) -> Mapping[str, bytes]:
    """Build the OpenAPI documents by file name, before any request: building one takes longer than a tick."""
    limits = {"rate": {"maximum": max_rate}, "camera_names": {"maxItems": max_cameras}}
    return {
        "openapi.json": json.dumps(specified_document(ROUTES), indent=2).encode(),
        "openapi-full.json": json.dumps(full_document(ROUTES, limits), indent=2).encode(),
    }


@contextmanager
def _open_records(state: str | None, *, is_shared: bool) -> Iterator[SessionRecords]:
    folder = state_folder(state)
    if folder is None:
        yield SessionRecords(is_shared=is_shared)
        return
    with lock_state_folder(folder):
        yield SessionRecords(Database(folder / "sessions.sqlite3", SCHEMA), StoreError, is_shared=is_shared)

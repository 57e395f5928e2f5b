"""The composition: settings in, a server of sessions, rooms, routes and documents out."""

import asyncio
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sanic import Sanic

import jaxmodels
from hooks.database import Database
from hooks.errors import StoreError
from hooks.receiving.rates import Rates
from hooks.sending.resolver import PinnedResolver, resolve
from hooks.sending.targets import danger, layers
from jaxmodels.errors import JaxModelsError
from service.api import PREFIXES, ROUTES, api, configuration, watch
from service.arrays.limits import ArrayLimits
from service.auth.access import guard_of
from service.auth.places import is_loopback
from service.auth.roles import Role
from service.auth.room_keys import RoomKeys
from service.auth.watched import FileUnusable
from service.doors.direct import ByAddress
from service.doors.doors import Doors
from service.doors.sockets import doors_blueprint
from service.edge.allowance import Admit, Allowance
from service.edge.destinations import AddressRules, Destinations
from service.edge.limits import Creates
from service.edge.origins import Origins
from service.edge.policy_places import PolicyPlaces
from service.engine.engine import Engine, LoadPolicy, Policy
from service.engine.loading import Inspection
from service.engine.policy_reader import PolicyReader, ReadRequirements
from service.engine.progress import Durations
from service.engine.worker import call_in_thread
from service.errors import NoDevice
from service.hosts.front import Front
from service.hosts.options import host_options
from service.logs import RecentLogs, keeping
from service.metrics import Metrics
from service.models.forwards import ForwardLimits
from service.models.models import Models
from service.models.served_model import LoadModel, Model
from service.openapi import full_document, specified_document
from service.recording.recordings import Recordings
from service.routes import docs
from service.routes.answers import install_errors
from service.routes.context import App, Context
from service.routes.ui import live_blueprint
from service.safety.limits import Asked
from service.safety.sources import read_limits
from service.safety.watchdog import Patience
from service.sessions.records import SCHEMA, SessionRecords
from service.sessions.request import NewSession
from service.sessions.sessions import Sessions, SessionSettings
from service.settings import Settings, SettingsError
from service.state import alone_in, state_folder
from service.transport.base import Transport
from service.transport.client import RoomsTransport
from service.transport.server import TransportSettings, add_transport
from service.ui.live import Live
from service.updates.webhooks import Webhooks

# Routes that are not of the table, and the role that each wants. Deliveries and the management of webhooks have their
# own secrets and tokens.
APART = (
    ("POST", "/webhooks/_events", Role.OPERATOR),
    ("GET", "/webhooks/_docs", None),
    ("GET", "/webhooks/_openapi.json", None),
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
    """A server that is ready to be served; nothing runs before that.

    Args:
        transport: how sessions reach their rooms; the RobotHub wire when None.
        load: how policies are loaded; from folders and the Hub with JAX when None.
        load_model: how the models of the settings are loaded; likewise when None.
        read_requirements: how it is found out what a policy needs before it is loaded; likewise when None.
    """
    settings = settings or Settings()
    imports_jax = load is None and settings.engine == "here"
    # Sanic keeps every app in a registry by name and refuses a second one of the same name.
    name = f"robojax-{secrets.token_hex(4)}"
    rooms = TransportSettings(origins=settings.origins, is_odd=settings.transport_oddities)
    table = rooms.table() if settings.embedded_transport else None
    limits = {"rate": {"maximum": settings.max_rate}, "camera_names": {"maxItems": settings.max_cameras}}
    guard = guard_of(settings, APART)
    places = PolicyPlaces(
        settings.policy_roots, settings.policy_owners, is_open=is_loopback(settings.host) and not guard.is_guarded
    )
    context = Context(
        settings=settings,
        documents={
            "openapi.json": json.dumps(specified_document(ROUTES), indent=2).encode(),
            "openapi-full.json": json.dumps(full_document(ROUTES, limits), indent=2).encode(),
        },
        page=docs.page(),
        versions=_versions(),
        metrics=Metrics(
            lambda: context.sessions.list(), lambda: context.models.list(), lambda: context.sessions.engine.facts()
        ),
        logs=RecentLogs(settings.log_lines),
        table=table,
        guard=guard,
        places=places,
        policy_reader=PolicyReader(places.guarded_reading(read_requirements or _requirements_reader(settings))),
        live=Live(lambda: context.sessions),
        creates=Creates(Rates(settings.creates_per_minute / 60, settings.creates_per_minute), settings.limit_local),
        doors=Doors(lambda: context.sessions),
    )
    app: App = Sanic(name, config=configuration(settings), ctx=context, configure_logging=False)
    watch(app)
    guard.watch(app)
    # After the guard and before the doors, which refuse whatever session is not here.
    shared = None if settings.engine == "here" else _Shared(app)
    install_errors(app)
    for prefix in PREFIXES:
        app.blueprint(api(prefix, Origins(settings.origins)))
        app.blueprint(live_blueprint(prefix, Origins(settings.origins)))
        app.blueprint(doors_blueprint(prefix, Origins(settings.origins)))
        if table is not None:
            add_transport(app, table, rooms, prefix)
    webhooks = Webhooks(settings)
    if webhooks.registry is not None:
        # Before the sessions: it starts first and stops last, so that it hears of all they do.
        app.blueprint(webhooks.registry.blueprint())
    destinations = None if transport else _destinations(app)
    hosts = _hosts(settings)
    if hosts is not None:
        load = load or hosts.load
    load = load or (_loader(settings, lambda: context.sessions.engine.first_device) if shared is None else shared.load)
    _keep_sessions(
        app,
        ByAddress(
            context.doors.direct,
            transport
            or RoomsTransport(ice_servers=settings.ice_servers, destinations=destinations, credentials=_room_keys(app)),
        ),
        places.guarded(webhooks.identified(load)),
        load_model or _model_loader(settings),
        webhooks,
        Allowance(places, destinations).check,
        shared,
        hosts,
    )
    # After the sessions: what is delivered again at the start may be about them.
    for blueprint in webhooks.blueprints():
        app.blueprint(blueprint)
    if imports_jax:
        _import_ahead(app)
    _hold_first(app)
    return app


class _Shared:
    """What a server of a cluster shares with others: engines, and the directory of sessions.

    Raises:
        SettingsError: Ray is not installed.
    """

    def __init__(self, app: App):
        settings = app.ctx.settings
        try:
            from service.cluster.joining import Joining
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"engine: {settings.engine} needs Ray ({error.name} is not installed); pip install 'robojax[ray]'"
            ) from error
        self._app = app
        self._joining = Joining(settings)
        self.load: LoadPolicy = self._joining.load
        self._joining.forwarding.watch(app)

    async def open(self, durations: Durations) -> Engine:
        """Join the cluster: the engine whose devices are the cluster's engines."""
        engine = await self._joining.open(durations, self._app.config.get("OWN_ADDRESS"))
        self._app.ctx.engines = self._joining.cluster
        return engine

    async def share(self, sessions: Sessions) -> None:
        """Let other fronts see these sessions."""
        self._app.ctx.front = await self._joining.share(sessions)
        self._app.ctx.forwarding = self._joining.forwarding

    def admit(self, admit: Admit) -> Admit:
        """The same, and a session's id is taken in the whole cluster."""

        async def admit_and_claim(new: NewSession) -> None:
            await admit(new)
            await self._joining.claim(new)

        return admit_and_claim

    async def close(self) -> None:
        """Leave."""
        await self._joining.close()


def _hold_first(app: App) -> None:
    """Robots are held before anything else of the end is begun; listed last, as Sanic ends in the opposite order."""

    @app.before_server_stop
    async def hold(app: App) -> None:
        app.ctx.sessions.begin_close()


def _room_keys(app: App) -> RoomKeys:
    settings = app.ctx.settings
    named = None if settings.transport_key_file is None else Path(settings.transport_key_file).expanduser()
    keys = RoomKeys(
        app.ctx.guard.admissions.own,
        lambda: app.config.get("OWN_ADDRESS") if settings.embedded_transport else None,
        lambda session_id: app.ctx.sessions.get(session_id).new.owner,
        named,
    )
    try:
        keys.check()
    except FileUnusable as error:
        raise SettingsError(f"transport_key_file: {error}") from error
    return keys


def _keep_sessions(
    app: App,
    transport: Transport,
    load: LoadPolicy,
    load_model: LoadModel,
    webhooks: Webhooks,
    admit: Admit,
    shared: "_Shared | None",
    hosts: Front | None,
) -> None:
    settings = app.ctx.settings
    limits = SessionSettings(
        max_sessions=settings.max_sessions,
        max_cameras=settings.max_cameras,
        rate=settings.rate,
        max_rate=settings.max_rate,
        frame_age_limit=settings.frame_age_limit,
        starved_after=settings.starved_after,
        hold_repeats=settings.hold_repeats,
        failures_allowed=settings.failures_allowed,
        input_timeout=settings.input_timeout,
        joint_ranges=settings.joint_ranges,
        patience=_patience(settings),
        motion=Asked(
            mode=settings.safety,
            setting=settings.max_relative_target,
            file=None if settings.limits is None else read_limits(settings.limits),
        ),
        on_hold=settings.on_hold,
    )
    opened = AsyncExitStack()

    @app.before_server_start
    async def open_store(app: App) -> None:
        opened.enter_context(keeping(app.ctx.logs))
        app.ctx.started_at = time.monotonic()
        durations = _durations(app.ctx)
        if shared is None:
            engine = Engine(
                stuck_after=settings.stuck_after,
                durations=durations,
                batch_sizes=settings.engine_batch_sizes,
                devices=await _devices(settings, hosts),
                load=settings.engine_load,
            )
            if hosts is not None:
                _keep_together(hosts, engine, opened)
        else:
            engine = await shared.open(durations)
            opened.push_async_callback(shared.close)
        app.ctx.recordings = Recordings(settings, lambda session_id: app.ctx.sessions.get(session_id))
        try:
            app.ctx.sessions = Sessions(
                transport=transport,
                load=load,
                engine=engine,
                settings=limits,
                tell=app.ctx.doors.direct.hears(app.ctx.recordings.hears(webhooks.tell)),
                admit=admit if shared is None else shared.admit(admit),
                records=opened.enter_context(_records(settings)),
            )
            if shared is not None:
                await shared.share(app.ctx.sessions)
            app.ctx.models = Models(engine, _forward_limits(settings), app.ctx.sessions.has_running_robot)
            await opened.enter_async_context(webhooks.telling())
            # Closed in the opposite order: no update begins any more while the sessions end.
            opened.push_async_callback(app.ctx.recordings.close)
            opened.push_async_callback(app.ctx.sessions.close)
            opened.push_async_callback(app.ctx.models.close)
            app.ctx.updates = await opened.enter_async_context(webhooks.updating(app.ctx.sessions))
            # The server answers when they are there: one that cannot be loaded stops the start.
            for name, (path, revision) in settings.models.items():
                await app.ctx.models.load(name, path, revision, load_model)
        except BaseException:
            await opened.aclose()
            raise

    @app.before_server_stop
    async def close_store(app: App) -> None:
        # Sanic never cancels tasks by itself: every robot gets its hold and every room is left here.
        await opened.aclose()


def _destinations(app: App) -> Destinations:
    rules = AddressRules(danger, layers, resolve, PinnedResolver)
    try:
        return Destinations(app.ctx.settings.transport_hosts, rules, lambda: app.config.get("OWN_PORT"))
    except ValueError as error:
        raise SettingsError(f"transport_hosts: {error}") from error


@contextmanager
def _records(settings: Settings) -> Iterator[SessionRecords]:
    folder = state_folder(settings)
    if folder is None:
        yield SessionRecords()
        return
    with alone_in(folder):
        yield SessionRecords(Database(folder / "sessions.sqlite3", SCHEMA), StoreError)


def _durations(context: Context) -> Durations:
    folder = state_folder(context.settings)
    return Durations(None if folder is None else folder / "durations.json", context.metrics.prepared)


def _patience(settings: Settings) -> Patience:
    return Patience(
        degraded_after=settings.degraded_after,
        stop_after=settings.stop_after,
        frozen_after=settings.frozen_after,
        frozen_stops=settings.frozen_stops,
        bad_inputs=settings.bad_inputs,
        action_age=settings.action_age_limit,
        slow=settings.slow_inference,
    )


def _forward_limits(settings: Settings) -> ForwardLimits:
    return ForwardLimits(
        arrays=ArrayLimits(bytes=settings.max_forward_bytes),
        memory=settings.max_forward_memory,
        places=settings.max_forwards,
        seconds=settings.answer_deadline,
        beside_robots=settings.forward_beside_robots,
    )


def _hosts(settings: Settings) -> Front | None:
    """The other hosts, where policies are spread over several."""
    options = host_options(settings)
    return None if options is None else Front(options, Inspection(settings.load_memory))


def _keep_together(hosts: Front, engine: Engine, opened: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    place = engine.first_device or ""

    def leave(why: str) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(engine.leave, place, why)

    hosts.told = leave
    # Last of all: robots are held by then, and nobody asks any more.
    opened.callback(hosts.close)


async def _devices(settings: Settings, hosts: Front | None) -> tuple[str, ...]:
    """Places for policies, when some are named: then JAX is imported before the server answers."""
    if hosts is not None:
        _name_caches(settings)
        try:
            return (await call_in_thread(hosts.begin, "join-hosts"),)
        except JaxModelsError as error:
            hosts.close()
            raise NoDevice(f"hosts: {error}") from error
    if not settings.devices:
        return ()
    named = partial(jaxmodels.name_devices, settings.devices, together=settings.placement == "shard")
    try:
        return await call_in_thread(named, "import-jax")
    except JaxModelsError as error:
        raise NoDevice(f"devices: {error}") from error


def _loader(settings: Settings, first_device: Callable[[], str | None]) -> LoadPolicy:
    def load(path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None) -> Policy:
        _name_caches(settings)
        return jaxmodels.load_policy(
            path,
            revision,
            settings.dtype,
            first_device() or settings.device,
            like=like,
            on_progress=on_progress,
            inspect=Inspection(settings.load_memory),
            largest=settings.policy_bytes,
        )

    return load


def _requirements_reader(settings: Settings) -> ReadRequirements:
    def read(path: str, revision: str | None) -> jaxmodels.Requirements:
        _name_caches(settings)
        return jaxmodels.read_requirements(path, revision)

    return read


def _model_loader(settings: Settings) -> LoadModel:
    def load(path: str, revision: str | None = None, /, *, on_progress: Any = None) -> Model:
        _name_caches(settings)
        return jaxmodels.load_model(path, revision, settings.dtype, settings.device, on_progress=on_progress)

    return load


def _name_caches(settings: Settings) -> None:
    # Both libraries read these when they are first used, which is after this, in a loader's thread.
    if settings.compile_cache is not None:
        os.environ["ROBOJAX_COMPILE_CACHE"] = settings.compile_cache
    if settings.policy_cache is not None:
        os.environ["HF_HUB_CACHE"] = settings.policy_cache


def _import_ahead(app: App) -> None:
    """Importing JAX takes seconds: it begins when the server answers, in a thread, and a first session waits less."""

    @app.after_server_start
    async def begin(app: App) -> None:
        app.ctx.importing = call_in_thread(lambda: jaxmodels.load_policy, "import-jax", niceness=5)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("robojax", "jax", "flax", "sanic", "aiortc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found

"""Opens and closes everything a server runs, in order."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack

import jaxmodels
from service.api.context import App, Context
from service.control.limits import read_limits
from service.engine_source import EngineSource
from service.inference.loaded_policy import LoadPolicy
from service.inference.model_server import LoadModel, ModelServer
from service.inference.progress import LoadDurations
from service.logging import capture_logs
from service.processes import pause_garbage_collection
from service.recording.recordings import Recordings
from service.rollout.webhooks import Webhooks
from service.sessions.records import SessionRecords
from service.sessions.request import CheckRequest
from service.sessions.store import Sessions, SessionSettings
from service.settings import Settings
from service.shared_sessions import SharedDatabase
from service.state import state_folder
from service.threads import call_in_thread
from service.transport.link import Transport


def session_settings(settings: Settings) -> SessionSettings:
    """Collect what holds for all sessions.

    Raises:
        LimitsError: the file of limits cannot be used.
    """
    path = settings.safety.limits
    file = None if path is None else read_limits(path)
    return SessionSettings(settings.limits, settings.control, settings.safety, file)


def register_lifespan(
    app: App,
    *,
    source: EngineSource,
    shared: SharedDatabase,
    transport: Transport,
    load: LoadPolicy,
    load_model: LoadModel,
    webhooks: Webhooks,
    check_request: CheckRequest,
    records: Callable[[], AbstractContextManager[SessionRecords]],
) -> None:
    """Register the listeners that open everything when the app starts and close it in the opposite order.

    Args:
        source: where its engine comes from.
        shared: with which servers it shares its sessions.
        check_request: asked before a session is made.
        records: what is to be known of sessions after this process was killed.

    Raises:
        LimitsError: the file of limits cannot be used.
    """
    settings = app.ctx.settings
    session_limits = session_settings(settings)
    opened = AsyncExitStack()

    @app.before_server_start
    async def open_all(app: App) -> None:
        opened.enter_context(capture_logs(app.ctx.logs))
        app.ctx.started_at = time.monotonic()
        engine = await opened.enter_async_context(source.open(_create_durations(app.ctx)))
        app.ctx.recordings = Recordings(
            settings.recording, settings.webhooks.state, lambda session_id: app.ctx.sessions.get(session_id)
        )
        try:
            app.ctx.sessions = Sessions(
                transport=transport,
                load=load,
                engine=engine,
                settings=session_limits,
                publish=app.ctx.stream_clients.direct.wrap_notify(app.ctx.recordings.wrap_notify(webhooks.publish)),
                check_request=shared.wrap_check(check_request),
                records=opened.enter_context(records()),
            )
            await opened.enter_async_context(shared.open(lambda: app.ctx.sessions))
            app.ctx.models = ModelServer(
                engine,
                settings.models,
                answer_deadline=settings.limits.answer_deadline,
                has_running_robot=app.ctx.sessions.has_running_robot,
            )
            await opened.enter_async_context(webhooks.open_publishing())
            # Closed in the opposite order: no update begins any more while the sessions end.
            opened.push_async_callback(app.ctx.recordings.close)
            opened.push_async_callback(app.ctx.sessions.close)
            opened.push_async_callback(app.ctx.models.close)
            app.ctx.updates = await opened.enter_async_context(webhooks.open_updates(app.ctx.sessions))
            # The server answers when they are there: one that cannot be loaded stops the start.
            for name, (path, revision) in settings.models.models.items():
                await app.ctx.models.load(name, path, revision, load_model)
        except BaseException:
            await opened.aclose()
            raise

    @app.before_server_stop
    async def close_all(app: App) -> None:
        # Sanic never cancels tasks by itself: every robot gets its hold and every room is left here.
        await opened.aclose()


def hold_robots_first(app: App) -> None:
    """Hold all robots before anything else is closed. Call it last: Sanic runs stop listeners in opposite order."""

    @app.before_server_stop
    async def hold(app: App) -> None:
        app.ctx.sessions.begin_close()


def _create_durations(context: Context) -> LoadDurations:
    folder = state_folder(context.settings.webhooks.state)
    return LoadDurations(None if folder is None else folder / "durations.json", context.metrics.record_preparation)


def import_jax_early(app: App) -> None:
    """Import JAX in a thread once the server answers; it takes seconds, and the first session waits less."""

    @app.after_server_start
    async def begin(app: App) -> None:
        app.ctx.jax_import = call_in_thread(_import_jax, "import-jax", niceness=5)


def _import_jax() -> None:
    with pause_garbage_collection():
        _ = jaxmodels.load_policy

"""What a server opens at its start and closes at its stop: engine, recordings, sessions, models, policy updates."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack

import jaxmodels
from service.collector import collector_paused
from service.composition.engine_source import EngineSource
from service.composition.part_settings import forward_limits, session_settings
from service.composition.shared_sessions import SharedDatabase
from service.edge.allowance import Admit
from service.engine.engine import LoadPolicy
from service.engine.progress import Durations
from service.engine.worker import call_in_thread
from service.logs import keeping
from service.models.models import Models
from service.models.served_model import LoadModel
from service.recording.recordings import Recordings
from service.routes.context import App, Context
from service.sessions.records import SessionRecords
from service.sessions.sessions import Sessions
from service.state import state_folder
from service.transport.base import Transport
from service.updates.webhooks import Webhooks


def live(
    app: App,
    *,
    source: EngineSource,
    shared: SharedDatabase,
    transport: Transport,
    load: LoadPolicy,
    load_model: LoadModel,
    webhooks: Webhooks,
    admit: Admit,
    records: Callable[[], AbstractContextManager[SessionRecords]],
) -> None:
    """Have the app do so.

    Args:
        source: where its engine comes from.
        shared: with which servers it shares its sessions.
        admit: asked before a session is made.
        records: what is to be known of sessions after this process was killed.

    Raises:
        LimitsError: the file of limits cannot be used.
    """
    settings = app.ctx.settings
    of_sessions = session_settings(settings)
    opened = AsyncExitStack()

    @app.before_server_start
    async def open_all(app: App) -> None:
        opened.enter_context(keeping(app.ctx.logs))
        app.ctx.started_at = time.monotonic()
        engine = await opened.enter_async_context(source.opened(_durations(app.ctx)))
        app.ctx.recordings = Recordings(settings, settings.state, lambda session_id: app.ctx.sessions.get(session_id))
        try:
            app.ctx.sessions = Sessions(
                transport=transport,
                load=load,
                engine=engine,
                settings=of_sessions,
                tell=app.ctx.doors.direct.hears(app.ctx.recordings.hears(webhooks.tell)),
                admit=shared.admit(source.admit(admit)),
                records=opened.enter_context(records()),
            )
            await opened.enter_async_context(shared.opened(lambda: app.ctx.sessions))
            app.ctx.models = Models(engine, forward_limits(settings), app.ctx.sessions.has_running_robot)
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
    async def close_all(app: App) -> None:
        # Sanic never cancels tasks by itself: every robot gets its hold and every room is left here.
        await opened.aclose()


def hold_first(app: App) -> None:
    """Robots are held before anything else of the end is begun; called last, as Sanic ends in the opposite order."""

    @app.before_server_stop
    async def hold(app: App) -> None:
        app.ctx.sessions.begin_close()


def _durations(context: Context) -> Durations:
    folder = state_folder(context.settings.state)
    return Durations(None if folder is None else folder / "durations.json", context.metrics.prepared)


def import_ahead(app: App) -> None:
    """Importing JAX takes seconds: it begins when the server answers, in a thread, and a first session waits less."""

    @app.after_server_start
    async def begin(app: App) -> None:
        app.ctx.importing = call_in_thread(_import_jax, "import-jax", niceness=5)


def _import_jax() -> None:
    with collector_paused():
        _ = jaxmodels.load_policy

"""Webhook receiver and registry of this server, and its deployments."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sanic import Blueprint, HTTPResponse, Request

import jaxmodels
from hooks.errors import HooksError
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.inbox import Event
from hooks.receiver.receiver import Receiver
from hooks.server.event_routes import build_blueprint as events_of
from hooks.server.event_routes import is_local_request
from hooks.server.pages import build_blueprint as pages_of
from jaxmodels.errors import HubError
from service.auth.caller import caller_of
from service.errors import PolicyError
from service.http.bodies import json_response
from service.http.origins import Origins
from service.inference.config import PolicySettings
from service.inference.loaded_policy import LoadPolicy, Policy
from service.inference.policy_sources import allowed_roots
from service.rollout.config import DeploymentSettings, UpdateSettings, WebhookSettings
from service.rollout.deployments import Deployments
from service.rollout.gates import GateLimits, ProbationSettings
from service.rollout.rollout import Rollout, RolloutSettings
from service.rollout.sources import FolderSource, HubLimits, HubSource, PolicySource
from service.rollout.triggers import is_pattern
from service.sessions.session import SessionEvent
from service.sessions.store import Sessions
from service.setting_types import SettingsError
from service.state import StateTaken, load_registry_token, read_secrets, state_folder

if TYPE_CHECKING:
    from hooks.registry.registry import Registry

logger = logging.getLogger(__name__)

# Errors of a start other than wrong settings, e.g. a database that cannot be opened.
StartFailed = (HooksError, StateTaken)
# The name that huggingface_hub's own server has for it.
SECRET_VARIABLE = "WEBHOOK_SECRET"
ENDPOINT = "policies"
WHEN_OPEN = "only this machine itself may deliver, until one is."
# Seconds between looks at policy folders that sessions follow.
FOLDER_POLL_INTERVAL = 1.0
# Seconds that events of the shutdown get to be written to disk.
FLUSH_TIMEOUT = 1.0


class Webhooks:
    """Receiver of deliveries (``receiver``), registry of this server's webhooks (``registry``), and policy updates."""

    def __init__(
        self, updates: UpdateSettings, webhooks: WebhookSettings, policies: PolicySettings, origins: Sequence[str]
    ):
        self._updates, self._settings, self._origins = updates, webhooks, tuple(origins)
        self._state = state_folder(webhooks.state)
        secrets = read_secrets("webhook_secret_file", webhooks.webhook_secret_file)
        if not secrets and os.environ.get(SECRET_VARIABLE):
            secrets = (os.environ[SECRET_VARIABLE],)
        try:
            self.receiver = Receiver(
                ReceiverSettings(secrets=secrets, database=self._file("events.sqlite3")), is_guarded=True
            )
            self.receiver.add(self._handle_push, ENDPOINT)
            self.registry = self._make_registry() if webhooks.registry else None
        except HooksError as error:
            raise SettingsError(str(error)) from error
        self._hub = HubSource(
            cache=None if policies.policy_cache is None else Path(policies.policy_cache).expanduser(),
            limits=HubLimits(max_bytes=updates.update_cache_bytes),
        )
        self._folders = FolderSource(
            self._file("policies") or jaxmodels.user_cache() / "robojax" / "policies",
            largest=min(policies.policy_bytes, updates.update_cache_bytes),
            roots=allowed_roots(policies),
        )
        self._events: asyncio.Queue[tuple[str, Mapping[str, object]]] = asyncio.Queue()
        self._deployments: Deployments | None = None
        self._is_from_folder: dict[str, bool] = {}

    def _file(self, name: str) -> Path | None:
        return None if self._state is None else self._state / name

    def _make_registry(self) -> "Registry":
        from hooks.registry.registry import Registry, RegistrySettings  # Most servers have none, and it takes 20 ms.

        settings = self._settings
        tokens = read_secrets("registry_token_file", settings.registry_token_file)
        if not tokens and self._state is None:
            text = "it needs a token; set registry_token_file, or state to a folder where one can be kept"
            raise SettingsError(f"registry: {text}")
        if not tokens and self._state is not None:
            token, path = load_registry_token(self._state)
            tokens = (token,)
            logger.info("the token that manages the webhooks of this server is in %s", path)
        return Registry(
            RegistrySettings(
                tokens=tokens,
                database=self._file("registry.sqlite3"),
                allowed_networks=settings.registry_allow,
                jobs_file=None if settings.registry_jobs is None else Path(settings.registry_jobs).expanduser(),
            )
        )

    # Deliveries.

    def build_blueprints(self) -> Sequence[Blueprint]:
        """Build the routes that receive deliveries, a page about them at ``/webhooks``, and the list of events."""
        links = {"API": "/docs", "Health": "/health", "Policy updates": "/deployments"}
        pages = pages_of(self.receiver, links=links, when_open=WHEN_OPEN)
        events = events_of(self.receiver, lambda: self.receiver.settings.secrets, is_allowed=_may_see_events)
        blueprint = self.receiver.blueprint()
        origins = Origins(self._origins)

        @blueprint.on_request
        async def refuse(request: Request[Any, Any]) -> HTTPResponse | None:
            if self.receiver.settings.secrets or is_local_request(request):
                return origins.refuse_request(request)
            detail = "No webhook secret is set, so only this machine may deliver; set WEBHOOK_SECRET and restart"
            return json_response({"detail": detail, "code": "no_secret"}, 403)

        return blueprint, pages, events

    async def _handle_push(self, payload: WebhookPayload, event: Event) -> dict[str, object]:
        """Handle a delivery of the Hub: check the heads that sessions follow."""
        if self._deployments is None:
            raise HooksError("the server is not ready")
        interpretation = self._deployments.handle_delivery(payload, event.delivery_id)
        if self.registry is not None:
            await self.registry.emit_payload(payload, event_id=event.delivery_id)
        if interpretation.targets:
            return {"status": "accepted", "looks_at": [f"{one.repo}@{one.ref}" for one in interpretation.targets]}
        alert = interpretation.alert[1] if interpretation.alert else ""
        return {"status": "ignored", "reason": interpretation.ignored or alert}

    # Updates of sessions.

    @asynccontextmanager
    async def open_updates(self, sessions: Sessions) -> AsyncIterator[Deployments]:
        """Deploy pushes to sessions until the context ends."""
        settings = self._updates
        patience = settings.update_patience
        probation = ProbationSettings(
            seconds=settings.update_probation, still_timeout=patience, step=settings.update_step
        )
        limits = GateLimits(difference=settings.update_difference, slow=settings.update_slow)
        deployments = Deployments(
            sources=self._source,
            rollout=Rollout(sessions, RolloutSettings(limits, settings.update_fade, patience, probation)),
            database=self._file("deployments.sqlite3"),
            settings=DeploymentSettings(
                quiet=settings.update_quiet,
                longest=settings.update_latest,
                poll=settings.update_poll or None,
                swapping=patience + 30,
            ),
            on_event=lambda event, about: self.publish(f"session.{event}", about),
        )
        self._deployments = deployments
        running = [
            asyncio.create_task(deployments.run(), name="policy updates"),
            asyncio.create_task(self._watch_folders(sessions, deployments), name="policy folders"),
        ]
        for task in running:
            task.add_done_callback(_log_crash)
        try:
            yield deployments
        finally:
            self._deployments = None
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            deployments.close()

    def _source(self, repo: str) -> PolicySource:
        # A folder that is gone for a moment is not looked up on the Hub, where a stranger may own a repo of its name.
        return self._folders if self._is_from_folder.get(repo, is_folder(repo)) else self._hub

    def identify_commits(self, load: LoadPolicy) -> LoadPolicy:
        """Return a loader that hashes policies from folders, resolves tag patterns, and refuses quarantined commits.

        A new session, or a session of a killed server, passes no gate and has no probation, so that the quarantine is
        checked here.
        """

        def load_and_name(path: str, revision: str | None = None, /, **more: Any) -> Policy:
            if more.get("like") is not None:
                return load(path, revision, **more)  # The commit of an update was checked before.
            self._is_from_folder[os.path.expanduser(path)] = is_folder(path)
            policy = self._load_named(load, path, revision, more)
            deployments, commit = self._deployments, policy.commit
            if deployments is None or commit is None:
                return policy
            if one := deployments.quarantine.get(os.path.expanduser(path), commit):
                raise PolicyError(
                    f"{commit} is in quarantine ({one.reason}: {one.text}); push another commit, create the session "
                    f"with the revision of a good commit, or DELETE /quarantine/{commit} first"
                )
            return policy

        return load_and_name

    def _load_named(self, load: LoadPolicy, path: str, revision: str | None, more: Mapping[str, Any]) -> Policy:
        if not is_folder(path):
            if revision is not None and is_pattern(revision):
                try:
                    revision = asyncio.run(self._hub.head(path, revision))
                except HooksError as error:
                    raise HubError(str(error)) from error
            return load(path, revision, **more)
        before = _read_file_states(path)
        policy = load(path, revision, **more)
        # Hashed after loading, because loading refuses bad files sooner. The hash of files that changed meanwhile is
        # unknown; the watcher notices the change.
        content = None
        with suppress(HooksError):
            content = asyncio.run(self._folders.head(path, None))  # a loader's thread has no event loop
        policy.commit = content if before == _read_file_states(path) else None
        return policy

    async def _watch_folders(self, sessions: Sessions, deployments: Deployments) -> None:
        """Check the policy folders that sessions follow, and deploy a folder whose files changed."""
        seen: dict[str, object] = {}
        while True:
            followed = _list_followed(sessions)
            for folder in filter(is_folder, followed):
                look = await asyncio.to_thread(_read_file_states, folder)
                if folder in seen and seen[folder] != look:
                    deployments.handle_change(folder)
                seen[folder] = look
            seen = {folder: look for folder, look in seen.items() if folder in followed}
            await asyncio.sleep(FOLDER_POLL_INTERVAL)

    # Events for registered webhooks.

    def on_event(self, event: SessionEvent) -> None:
        """Publish an event of a session to the registered webhooks."""
        self.publish(event.name, event.payload)

    def publish(self, name: str, payload: Mapping[str, object]) -> None:
        """Publish an event to the registered webhooks; the order of events stays."""
        if self.registry is not None:
            self._events.put_nowait((name, payload))

    @asynccontextmanager
    async def open_publishing(self) -> AsyncIterator[None]:
        """Publish events while the context lasts; all earlier events are written before it ends."""
        if self.registry is None:
            yield
            return
        publishing = asyncio.create_task(self._publish_events(self.registry), name="session events")
        try:
            yield
        finally:
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT):
                    await self._events.join()
            except TimeoutError:
                logger.error("%d events of sessions were not saved in time", self._events.qsize())
            publishing.cancel()

    async def _publish_events(self, registry: "Registry") -> None:
        while True:
            event, payload = await self._events.get()
            try:
                await registry.emit_session(event, payload)
            except HooksError as error:
                # A full disk must not stop a robot.
                logger.error("event %s is lost: %s", event, error)
            finally:
                self._events.task_done()


def _may_see_events(request: Any) -> bool:
    """Return whether a caller may see the received events, which name the policies of all owners."""
    return caller_of(request).sees_all and (request.app.ctx.guard.requires_key or is_local_request(request))


def is_folder(path: str) -> bool:
    """Return whether a policy's path is a folder of this machine, as loading it would decide."""
    return bool(path) and os.path.isdir(os.path.expanduser(path))


def _list_followed(sessions: Sessions) -> set[str]:
    return {os.path.expanduser(one.new.policy_path) for one in sessions.list() if one.new.auto_update != "off"}


def _read_file_states(folder: str) -> object:
    """Return a value that changes when a file of a policy's folder changes, or a file in a folder within it."""
    found, root = [], Path(os.path.expanduser(folder))
    with suppress(OSError):
        for name in jaxmodels.list_policy_files(root):
            with suppress(OSError):  # The file was removed after it was listed.
                status = (root / name).stat()
                found.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return found


def _log_crash(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("policy updates ended; restart the server", exc_info=task.exception())

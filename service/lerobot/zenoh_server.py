"""LeRobot's remote inference over Zenoh (dialect v2), with the sessions of the app.

Source: huggingface/lerobot, src/lerobot/remote_inference.
"""

import asyncio
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from uuid import uuid4

import zenoh

from jaxmodels import Requirements
from service.api.context import App
from service.control.aggregation import RTC
from service.control.config import ControlConfig
from service.errors import Overloaded, ServiceError, TooManyRequests, TooManySessions, UnknownSession
from service.http.config import LerobotSettings
from service.http.origins import is_loopback
from service.http.server import CannotListen
from service.lerobot.envelopes import MAX_BYTES, Envelope, EnvelopeError, read_envelope, write_envelope
from service.lerobot.pickles import RobotPolicyRequest
from service.lerobot.robot import POLL_TIMEOUT, choose_session_id, make_session_request
from service.lerobot.zenoh_session import (
    ACTION_DEADLINE,
    CAMERA,
    MAX_INPUT,
    STATE,
    RemoteSession,
    check_interval,
)
from service.logging import sanitize_text
from service.sessions.compatibility import configure_control
from service.setting_types import SettingsError
from service.streaming.observation import DECODERS

logger = logging.getLogger(__name__)

SEMANTICS = "robot-units"  # What the client's --inference.semantics must say.
ALIGNED = {"chunk_merge": "aligned"}
ALIGNMENT = "chunk_alignment_v2"
IDLE_TIMEOUT = 10.0  # Seconds without the client's liveliness token after which its session is closed.
_CHECK_INTERVAL = 0.2
_SUBSCRIBER_TIMEOUT = 5.0  # Seconds that a reset waits for the client's subscribers.
_MAX_WAITING = 4 * MAX_BYTES  # Bytes of messages that wait; more are dropped, as by the network.
_MESSAGE_COST = 1 << 16  # Bytes that every message counts at least.
_MAX_REMEMBERED = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
_LOCKS = {"transport/link/tls/enable_mtls": ("true",), "access_control/enabled": ("true",)}

_Handler = Callable[[Envelope, float], Awaitable[Envelope]]


@dataclass(eq=False)
class _Deployment:
    """A policy under the name that clients use; ``identity`` is None until it is loaded."""

    name: str
    request: RobotPolicyRequest
    revision: str | None
    requirements: Requirements
    config: ControlConfig
    identity: str | None = None
    failure: str | None = None

    @property
    def modes(self) -> list[str]:
        rtc = "rtc_trained" if self.requirements.trained_delay else "rtc_guided"
        return ["chunk", rtc] if self.requirements.takes_prefix else ["chunk"]

    def describe(self, instance_id: str) -> dict[str, Any]:
        names = self.request.features[STATE]["names"]
        kinds = {STATE: ([len(names)], "float32", "tensor", names)} | {
            f"{CAMERA}{camera}": ([*size, 3], "uint8", "rgb", []) for camera, size in self.requirements.cameras.items()
        }
        fields = ("shape", "dtype", "kind", "names")
        features = [
            {"name": name, **dict(zip(fields, kind, strict=True)), "semantics": SEMANTICS}
            for name, kind in kinds.items()
        ]
        steps = {"prediction_steps": self.config.chunk, "execution_steps": self.config.action_steps}
        capabilities = {
            "modes": self.modes,
            **steps,
            "action_interval": 1 / self.config.action_rate,
            "features": features,
            "action_feature": {**features[0], "name": "action"},
            "training_max_delay": self.requirements.trained_delay,
            "rtc_horizon": self.config.chunk if self.requirements.takes_prefix else 0,
        }
        return {
            "deployment": self.name,
            "instance_id": instance_id,
            "ready": self.identity is not None,
            "artifact_identity": self.identity or "",
            "semantics": SEMANTICS,
            "capabilities": capabilities,
            "execution_contracts": [ALIGNMENT],
            "limits": {
                "max_input_chars": MAX_INPUT,
                "max_output_chars": MAX_INPUT,
                "action_deadline_s": ACTION_DEADLINE,
                "idle_timeout_s": IDLE_TIMEOUT,
                "inflight_inference": 1,
            },
            "failure": self.failure,
        }


class LerobotZenohServer:
    """Zenoh peer or client of one app, as an asynchronous context manager that runs while the app does."""

    def __init__(self, app: App):
        self._context = app.ctx
        self._settings = app.ctx.settings.lerobot
        self._instance_id = uuid4().hex
        self._sessions: dict[str, RemoteSession] = {}
        self._declared: dict[str, list[Any]] = {}  # Of each session, by its id.
        self._answers: dict[tuple[str, str], asyncio.Task[Envelope]] = {}
        self._creating: set[str | None] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock, self._waiting = threading.Lock(), 0
        self._tokens: list[Any] = []

    async def __aenter__(self) -> Self:
        """Open Zenoh, and load the policies; raises CannotListen or SettingsError."""
        self._loop = asyncio.get_running_loop()
        config = make_config(self._settings)
        sources = self._settings.lerobot_deployments
        deployments = [await self._read_deployment(name, *source) for name, source in sources.items()]
        try:
            self._zenoh = await asyncio.to_thread(zenoh.open, config)
        except zenoh.ZError as error:
            raise CannotListen(f"lerobot_zenoh: {self._settings.lerobot_zenoh} cannot be opened: {error}") from error
        for deployment in deployments:
            self._declare(deployment)
            self._run(self._keep_loaded(deployment))
        self._run(self._watch())
        return self

    async def __aexit__(self, *reason: object) -> None:
        """Hold all robots and close Zenoh."""
        self._context.sessions.begin_close()
        for token in self._tokens:
            token.undeclare()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._zenoh.close)

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="a robot of LeRobot over Zenoh")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read_deployment(self, name: str, path: str, revision: str | None) -> _Deployment:
        """Read what a policy needs; raises SettingsError if robots cannot use it."""
        if not _NAME.fullmatch(name):
            raise SettingsError(f"lerobot_deployments: the name {name!r} is not 1 to 48 letters, digits, '_', '.', '-'")
        try:
            needs = await self._context.policy_reader.read(path, revision)
            names = self._settings.lerobot_joints.get(name) or needs.joint_names
            if names is None:
                raise EnvelopeError(
                    "its checkpoint has no names of joints; give them in the order of its actions: "
                    f'--lerobot-joints \'{{"{name}": ["shoulder_pan.pos", ...]}}\''
                )
            if not needs.controls_joints or needs.observation_steps > 1:
                raise EnvelopeError("its actions are not targets of joints, or it reads several observations")
            features = {STATE: {"names": list(names)}} | {f"{CAMERA}{camera}": {} for camera in needs.cameras}
            request = RobotPolicyRequest(needs.policy_type, path, features, needs.chunk, "", {}, "")
            new = make_session_request(request, needs, f"zenoh-{name}", revision)
            config = configure_control(needs, new, self._context.sessions.settings)[1]
        except ServiceError as error:
            raise SettingsError(f"lerobot_deployments: {name}={path}: {error}") from error
        return _Deployment(name, request, revision, needs, config)

    async def _keep_loaded(self, deployment: _Deployment) -> None:
        path, revision = deployment.request.path, deployment.revision
        try:
            async with self._context.sessions.open_policy(path, revision) as loaded:
                identity = f"{path}@{loaded.commit or revision}"
                deployment.identity = f"sha256:{hashlib.sha256(identity.encode()).hexdigest()}"
                await asyncio.Event().wait()
        except ServiceError as error:
            deployment.failure = sanitize_text(str(error))
            logger.error("deployment %s cannot be loaded: %s", deployment.name, deployment.failure)

    # Messages. Zenoh calls the callbacks in its own threads.

    def _declare(self, deployment: _Deployment) -> None:
        name = f"lerobot/inference/v1/deployments/{deployment.name}"
        instance = f"{name}/instances/{self._instance_id}"

        async def describe(request: Envelope, received_at: float) -> Envelope:
            body = deployment.describe(self._instance_id)
            return request.reply("descriptor", body, instance_id=self._instance_id)

        async def create(request: Envelope, received_at: float) -> Envelope:
            return await self._once("", request, lambda: self._create_session(deployment, instance, request))

        self._answer_queries(f"{name}/describe", "describe", describe)
        self._answer_queries(f"{instance}/open", "open", create)
        self._tokens.append(self._zenoh.liveliness().declare_token(f"{instance}/alive"))

    def _answer_queries(self, key: str, kind: str, handle: _Handler) -> Any:
        def reply(query: zenoh.Query, payload: bytes | None) -> None:
            with query, suppress(zenoh.ZError):
                if payload is not None:
                    query.reply(query.key_expr, payload)

        def receive(query: zenoh.Query) -> None:
            if not self._receive(query.payload, kind, handle, lambda payload: reply(query, payload)):
                query.drop()

        return self._zenoh.declare_queryable(key, receive, complete=True)

    def _receive(
        self, data: zenoh.ZBytes | None, kind: str, handle: _Handler, respond: Callable[[bytes | None], None]
    ) -> bool:
        """Hand a copy of a message to the event loop; False if it is too large, or too many wait."""
        received_at, size = time.monotonic(), 0 if data is None else len(data)
        cost = max(size, _MESSAGE_COST)
        with self._lock:
            if not 0 < size <= MAX_BYTES or self._waiting + cost > _MAX_WAITING:
                return False
            self._waiting += cost
        payload = bytes(data or b"")

        def start() -> None:
            task = self._run(self._answer(payload, kind, handle, respond, received_at))
            task.add_done_callback(lambda done: self._release(cost))

        self._loop.call_soon_threadsafe(start)
        return True

    def _release(self, cost: int) -> None:
        with self._lock:
            self._waiting -= cost

    async def _answer(
        self,
        payload: bytes,
        kind: str,
        handle: _Handler,
        respond: Callable[[bytes | None], None],
        received_at: float,
    ) -> None:
        request = Envelope("error")
        try:
            request = await DECODERS.submit(partial(read_envelope, payload))
            if request.message_type != kind:
                raise EnvelopeError(f"message_type is {request.message_type}; wanted {kind}", "protocol")
            answer = await handle(request, received_at)
        except ServiceError as error:
            answer = request.reply("error", _describe_error(error))
        except Exception:
            logger.exception("message %s of a robot failed", kind)
            answer = request.reply("error", {"code": "execution", "message": "the server's log says more"})
        respond(write_envelope(answer))

    async def _once(self, scope: str, request: Envelope, make: Callable[[], Coroutine[Any, Any, Envelope]]) -> Envelope:
        """Return the same answer for a repeated request id."""
        key = (scope, request.request_id)
        if key not in self._answers:
            self._answers[key] = self._run(make())
            known = [one for one in self._answers if one[0] == scope]
            for old in known[:-_MAX_REMEMBERED]:
                del self._answers[old]
        return await asyncio.shield(self._answers[key])

    # Sessions.

    async def _create_session(self, deployment: _Deployment, instance: str, request: Envelope) -> Envelope:
        body, context, name = request.body, self._context, deployment.name
        descriptor = deployment.describe(self._instance_id)
        if deployment.identity is None or request.instance_id != self._instance_id:
            raise EnvelopeError(f"deployment {name} is not loaded, or of another instance", "execution")
        mode, is_aligned = _check_contract(body, descriptor)
        prefix, whose = f"zenoh-{name}", f"a robot of deployment {name}"
        count = 2 * context.settings.limits.max_sessions
        session_id = choose_session_id(context.sessions, prefix, count, self._creating, whose)
        new = make_session_request(deployment.request, deployment.requirements, session_id, deployment.revision)
        if mode != "chunk":
            new = replace(new, overlap=RTC)  # The program that continues plans is compiled before the session is ready.
        self._creating.add(session_id)
        try:
            context.create_limiter.take("LeRobot over Zenoh", "")
            session = await context.sessions.create(new)
        except (Overloaded, TooManySessions, TooManyRequests) as error:
            details = {"admission_blocker": "active_session", "absence_grace_remaining_s": None}
            raise EnvelopeError(str(error), "busy", details) from error
        finally:
            self._creating.discard(session_id)
        remote = RemoteSession(
            uuid4().hex,
            session_id,
            context.stream_clients.create_inference(session, "lerobot-zenoh", POLL_TIMEOUT),
            deployment.config,
            descriptor["capabilities"]["features"],
            deployment.identity,
            mode,
            is_aligned,
            context.settings.control.frame_age_limit,
        )
        self._sessions[remote.id] = remote
        await asyncio.to_thread(self._declare_session, f"{instance}/sessions/{remote.id}", remote)
        logger.info("a robot of deployment %s has session %s", name, session_id)
        more = {"mode": mode, "chunk_settings": body.get("chunk_settings")}
        return request.reply("accepted", {**descriptor, **more}, session_id=remote.id)

    def _declare_session(self, key: str, remote: RemoteSession) -> None:
        def publisher(name: str) -> zenoh.Publisher:
            return self._zenoh.declare_publisher(f"{key}/{name}", congestion_control=zenoh.CongestionControl.DROP)

        act, result = publisher("act"), publisher("language/result")

        async def control(request: Envelope, received_at: float) -> Envelope:
            return await self._once(remote.id, request, lambda: self._control(remote, request, act, result))

        async def observe(request: Envelope, received_at: float) -> Envelope:
            _check_ids(request, self._instance_id, remote)
            return request.reply("action", await remote.answer_observation(request, received_at))

        async def refuse(request: Envelope, received_at: float) -> Envelope:
            raise EnvelopeError("this server answers no language requests", "unsupported")

        def subscribe(name: str, kind: str, handle: _Handler, answers: zenoh.Publisher) -> Any:
            def receive(sample: zenoh.Sample) -> None:
                self._receive(sample.payload, kind, handle, lambda payload: answers.put(payload or b""))

            return self._zenoh.declare_subscriber(f"{key}/{name}", receive)

        def notice(sample: zenoh.Sample) -> None:
            now = None if sample.kind == zenoh.SampleKind.PUT else time.monotonic()
            self._loop.call_soon_threadsafe(setattr, remote, "absent_since", now)

        alive = self._zenoh.liveliness().declare_subscriber(f"{key}/alive", notice, history=True)
        self._declared[remote.id] = [
            alive,
            self._answer_queries(f"{key}/control", "control", control),
            subscribe("obs", "observation", observe, act),
            subscribe("language/request", "language_request", refuse, result),
            act,
            result,
        ]

    async def _control(self, remote: RemoteSession, request: Envelope, *publishers: Any) -> Envelope:
        _check_ids(request, self._instance_id, remote)
        if request.body.get("operation") == "close":
            await self._close(remote)
            body = {"operation": "close", "applied_generation": request.generation}
            return request.reply("ack", body)
        if request.body.get("operation") == "reset":
            end = time.monotonic() + _SUBSCRIBER_TIMEOUT
            while not all(publisher.matching_status.matching for publisher in publishers):
                if time.monotonic() > end:
                    raise EnvelopeError("the client does not subscribe to act and language/result", "timeout")
                await asyncio.sleep(0.02)
        return request.reply("ack", await remote.control(request))

    async def _close(self, remote: RemoteSession) -> None:
        """Delete a session after its running inference; an emergency stop stays latched."""
        if self._sessions.pop(remote.id, None) is None:
            return
        async with remote.work:
            remote.is_closing = True
            with suppress(UnknownSession):
                await self._context.sessions.delete(remote.session_id)
        self._run(self._forget(remote))

    async def _forget(self, remote: RemoteSession) -> None:
        await asyncio.sleep(1.0)  # Seconds in which a repeated close is answered.
        for declared in self._declared.pop(remote.id):
            await asyncio.to_thread(declared.undeclare)
        self._answers = {key: task for key, task in self._answers.items() if key[0] != remote.id}

    async def _watch(self) -> None:
        """Close the sessions of clients that are gone."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            for remote in list(self._sessions.values()):
                if remote.absent_since is not None and time.monotonic() - remote.absent_since > IDLE_TIMEOUT:
                    logger.info("session %s ends: its robot was gone for %g s", remote.session_id, IDLE_TIMEOUT)
                    self._run(self._close(remote))


def make_config(settings: LerobotSettings) -> zenoh.Config:
    """Return Zenoh's configuration.

    Raises:
        CannotListen: the file cannot be used, or robots of other machines would need no key.
    """
    path, endpoint = settings.lerobot_zenoh_config, settings.lerobot_zenoh or ""
    try:
        config = zenoh.Config() if path is None else zenoh.Config.from_file(path)
    except zenoh.ZError as error:
        raise CannotListen(f"lerobot_zenoh_config {path!r} cannot be read: {error}") from error
    is_locked = any(config.get_json(key) in accepted for key, accepted in _LOCKS.items())
    is_locked |= config.get_json("transport/auth/usrpwd/dictionary_file") != "null"
    if not is_locked and not is_loopback(endpoint.partition("/")[2].rpartition(":")[0].strip("[]")):
        raise CannotListen(
            f"lerobot_zenoh: {endpoint} is open to other machines, and LeRobot's protocol has no keys; name a file "
            "with enable_mtls, access_control or usrpwd as --lerobot-zenoh-config, or listen on tcp/127.0.0.1:7447"
        )
    is_peer = settings.lerobot_zenoh_mode == "peer"
    values: dict[str, Any] = {"mode": settings.lerobot_zenoh_mode, "connect/timeout_ms": 10_000}
    values |= {"listen/endpoints": [endpoint] * is_peer, "connect/endpoints": [endpoint] * (not is_peer)}
    values |= {"connect/exit_on_failure": True, "transport/link/rx/max_message_size": MAX_BYTES + (1 << 20)}
    off = ("scouting/multicast/enabled", "scouting/gossip/enabled", "transport/shared_memory/enabled")
    for key, value in (values | dict.fromkeys(off, False)).items():
        config.insert_json5(key, json.dumps(value))
    return config


def _check_contract(body: Any, descriptor: Any) -> tuple[str, bool]:
    """Return the mode and whether chunks are aligned; raises EnvelopeError for another contract or dialect."""
    capabilities, settings, mode = descriptor["capabilities"], body.get("chunk_settings"), body.get("mode")
    required = [] if settings is None else [ALIGNMENT]
    if settings not in (None, ALIGNED) or body.get("required_capabilities", []) != required:
        raise EnvelopeError(
            f"chunk_settings {settings!r:.200} with required_capabilities {body.get('required_capabilities')!r:.200} "
            f"are of another dialect; this server supports {ALIGNED} with {ALIGNMENT} (dialect v2), or neither",
            "unsupported",
        )
    if (
        mode not in capabilities["modes"]
        or (settings and mode != "chunk")
        or body.get("encoding") not in ("raw", "jpeg")
    ):
        raise EnvelopeError(f"mode {mode!r:.40} or its encoding; supported: {capabilities['modes']}", "unsupported")
    expected = {
        "expected_artifact": descriptor["artifact_identity"],
        "semantics": SEMANTICS,
        "features": capabilities["features"],
        "action_feature": capabilities["action_feature"],
    }
    if wrong := [name for name, value in expected.items() if body.get(name) != value]:
        found = {name: body.get(name) for name in wrong}
        wanted = {name: expected[name] for name in wrong}
        raise EnvelopeError(f"the robot has {found!r:.900}; wanted {wanted!r:.900}", "incompatible")
    if not check_interval(body.get("action_interval"), capabilities["action_interval"]):
        wanted = f"{capabilities['action_interval']:g} s; set --fps to {1 / capabilities['action_interval']:g}"
        raise EnvelopeError(f"action_interval is {body.get('action_interval')!r:.40}; wanted {wanted}", "incompatible")
    return mode, settings is not None


def _check_ids(request: Envelope, instance_id: str, remote: RemoteSession) -> None:
    if (request.instance_id, request.session_id) != (instance_id, remote.id):
        raise EnvelopeError("instance_id or session_id is not of this session", "protocol")


def _describe_error(error: ServiceError) -> dict[str, Any]:
    code = "malformed" if error.status in (413, 422) else "execution"
    body = {"code": getattr(error, "wire_code", code), "message": sanitize_text(str(error), 2048)}
    details = getattr(error, "details", None)
    return body if details is None else {**body, "details": details}

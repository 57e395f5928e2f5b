"""LeRobot's remote inference over Zenoh (dialect v2), with the sessions of the app.

Source: huggingface/lerobot, src/lerobot/remote_inference.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self
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
from service.inference.loaded_policy import add_plan
from service.lerobot.envelopes import MAX_BYTES, Envelope, EnvelopeError, read_envelope, write_envelope
from service.lerobot.pickles import RobotPolicyRequest
from service.lerobot.robot import POLL_TIMEOUT, READERS, choose_session_id, make_session_request
from service.lerobot.zenoh_session import ACTION_DEADLINE, CAMERA, MAX_INPUT, STATE, RemoteSession
from service.logging import sanitize_text
from service.sessions.compatibility import configure_control
from service.sessions.request import NewSession
from service.setting_types import SettingsError

logger = logging.getLogger(__name__)

SEMANTICS = "robot-units"  # What the client's --inference.semantics must say.
IDLE_TIMEOUT = 10.0  # Seconds without the client's liveliness token after which its session is closed.
_ALIGNMENT = "chunk_alignment_v2"
_SUBSCRIBER_TIMEOUT = 5.0  # Seconds that a reset waits for the client's subscribers.
_MAX_UNREAD = 4  # Messages; the network waits while they are read.
_BAD_MESSAGE_DELAY = 0.05  # Seconds that a bad message keeps its turn, so that a flood delays no other robot.
_PATIENCE = 1.0  # Seconds that a message waits for its turn to be read, before it is dropped.
_MAX_ANSWERS = 1024  # Answers to queries that are remembered, so that a repeated request gets the same answer.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")


class _Deployment(NamedTuple):
    """A loaded policy under the name that clients use; ``new`` is the request of its sessions, but for their ids."""

    new: NewSession
    config: ControlConfig
    descriptor: dict[str, Any]


class _Endpoint(NamedTuple):
    """Messages of one kind; ``{}`` in the key is a session's id, and ``answers`` changes the key's end for answers."""

    deployment: _Deployment
    kind: str
    key: str
    answers: list[str]  # Empty for queries.


class LerobotZenohServer:
    """Zenoh peer or client of one app, as an asynchronous context manager that runs while the app does."""

    def __init__(self, app: App):
        self._context = app.ctx
        self._settings = app.ctx.settings.lerobot
        self._instance_id = uuid4().hex
        self._deployments: list[_Deployment] = []
        self._sessions: dict[str, RemoteSession] = {}
        self._creating: set[str | None] = set()
        self._answers: dict[tuple[str, str], asyncio.Task[Envelope]] = {}  # By key and request id.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turns = threading.Semaphore(_MAX_UNREAD)

    async def __aenter__(self) -> Self:
        """Load and compile the policies and open Zenoh; raises CannotListen or SettingsError."""
        self._loop, settings, sessions = asyncio.get_running_loop(), self._settings, self._context.sessions
        config = make_config(settings)
        async with AsyncExitStack() as stack:
            for name, (path, revision) in settings.lerobot_deployments.items():
                try:
                    needs = await self._context.policy_reader.read(path, revision)
                    deployment = self._describe(name, path, revision, needs)
                    loaded = await stack.enter_async_context(sessions.open_policy(path, revision))
                    if needs.takes_prefix:  # Now, because a client waits at most 10 s for its session.
                        logger.info("deployment %s: compiling the program that continues plans", name)
                        await sessions.engine.compile(loaded, add_plan(loaded.requirements.cameras, needs))
                except ServiceError as error:
                    raise SettingsError(f"lerobot_deployments: {name}={path}: {error}") from error
                identity = hashlib.sha256(f"{path}@{loaded.commit or revision}".encode()).hexdigest()
                deployment.descriptor["artifact_identity"] = f"sha256:{identity}"
                self._deployments.append(deployment)
            try:
                self._zenoh = await asyncio.to_thread(zenoh.open, config)
            except zenoh.ZError as error:
                raise CannotListen(
                    f"lerobot_zenoh: {settings.lerobot_zenoh} cannot be opened: {_describe(error)}"
                ) from error
            stack.push_async_callback(asyncio.to_thread, self._zenoh.close)
            self._tokens = [self._declare(deployment) for deployment in self._deployments]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *reason: object) -> None:
        """Hold all robots and close Zenoh."""
        self._context.sessions.begin_close()
        for token in self._tokens:
            token.undeclare()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def list_client_commands(self) -> list[str]:
        """Return the command of a robot of each deployment, without the flags of the robot."""
        endpoint = re.sub(r"/(0\.0\.0\.0|\[::\]):", "/HOST:", self._settings.lerobot_zenoh or "")
        command = f"lerobot-rollout --inference.type=remote --inference.endpoint={endpoint}"
        command += " --inference.zenoh_mode=client" * (self._settings.lerobot_zenoh_mode == "client")
        command += " --inference.zenoh_config_path=FILE" * (self._settings.lerobot_zenoh_config is not None)
        return [
            f"{command} --inference.deployment={each.descriptor['deployment']} --inference.semantics={SEMANTICS} "
            f"--fps={each.config.action_rate:g}"
            for each in self._deployments
        ]

    def _describe(self, name: str, path: str, revision: str | None, needs: Requirements) -> _Deployment:
        """Return the deployment of a policy; raises ServiceError if robots cannot use it."""
        if not _NAME.fullmatch(name):
            raise EnvelopeError("the name is not 1 to 48 letters, digits, '_', '.', '-'")
        given = self._settings.lerobot_joints.get(name)
        if given is None and needs.joint_names is None:
            raise EnvelopeError(
                "its checkpoint has no names of joints; give them in the order of its actions: "
                f'--lerobot-joints \'{{"{name}": ["shoulder_pan.pos", ...]}}\''
            )
        if not needs.controls_joints or needs.observation_steps > 1:
            raise EnvelopeError("its actions are not targets of joints, or it reads several observations")
        features = {STATE: {"names": given or needs.joint_names}} | {CAMERA + camera: {} for camera in needs.cameras}
        request = RobotPolicyRequest(needs.policy_type, path, features, needs.chunk, {})
        new = make_session_request(request, needs, f"zenoh-{name}", revision)
        table, config = configure_control(needs, new, self._context.sessions.settings)
        # An SO-101 has LeRobot's names, even if its checkpoint has other names.
        names = given or [f"{joint.alias}.pos" if joint.alias else joint.name for joint in table.joints]
        joints = {"shape": [len(names)], "dtype": "float32", "kind": "tensor", "names": names, "semantics": SEMANTICS}
        pictures = {"dtype": "uint8", "kind": "rgb", "names": [], "semantics": SEMANTICS}
        cameras = [{"name": CAMERA + camera, "shape": [*size, 3], **pictures} for camera, size in needs.cameras.items()]
        rtc = ["rtc_trained" if needs.trained_delay else "rtc_guided"] if needs.takes_prefix else []
        deadline = {"action_deadline_s": ACTION_DEADLINE}
        descriptor = {
            "deployment": name,
            "instance_id": self._instance_id,
            "ready": True,
            "semantics": SEMANTICS,
            "execution_contracts": [_ALIGNMENT],
            "capabilities": {
                "modes": ["chunk", *rtc],
                "prediction_steps": config.chunk,
                "execution_steps": config.action_steps,
                "action_interval": 1 / config.action_rate,
                "features": [{"name": STATE, **joints}, *cameras],
                "action_feature": {"name": "action", **joints},
                "training_max_delay": needs.trained_delay,
                "rtc_horizon": config.chunk if rtc else 0,
            },
            "limits": {"max_input_chars": MAX_INPUT, "max_output_chars": MAX_INPUT} | deadline,
        }
        return _Deployment(new, config, descriptor)

    # Messages.

    def _declare(self, deployment: _Deployment) -> zenoh.LivelinessToken:
        root = f"lerobot/inference/v1/deployments/{deployment.descriptor['deployment']}"
        instance = f"{root}/instances/{self._instance_id}"
        session = f"{instance}/sessions/{{}}"
        for kind, key, *answers in (
            ("describe", f"{root}/describe"),
            ("open", f"{instance}/open"),
            ("control", f"{session}/control"),
            ("observation", f"{session}/obs", "obs", "act"),
            ("language_request", f"{session}/language/request", "request", "result"),
        ):
            endpoint = _Endpoint(deployment, kind, key, answers)
            if answers:
                self._zenoh.declare_subscriber(key.format("*"), partial(self._receive, endpoint))
            else:
                self._zenoh.declare_queryable(key.format("*"), partial(self._receive, endpoint), complete=True)

        def notice(sample: zenoh.Sample) -> None:
            session_id, is_present = str(sample.key_expr).split("/")[-2], sample.kind == zenoh.SampleKind.PUT
            self._loop.call_soon_threadsafe(self._note_presence, session_id, is_present)

        self._zenoh.liveliness().declare_subscriber(f"{session.format('*')}/alive", notice, history=True)
        return self._zenoh.liveliness().declare_token(f"{instance}/alive")

    def _receive(self, endpoint: _Endpoint, message: zenoh.Query | zenoh.Sample) -> None:
        """Hand a copy of a message to the event loop, from a thread of Zenoh, which waits while others are read."""
        received_at, data, key = time.monotonic(), message.payload or b"", str(message.key_expr)
        if len(data) > MAX_BYTES or not self._turns.acquire(timeout=_PATIENCE):
            return
        query = message if isinstance(message, zenoh.Query) else None  # A sample would keep its payload.
        self._loop.call_soon_threadsafe(self._run, self._respond(endpoint, key, query, bytes(data), received_at))

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="a robot of LeRobot over Zenoh")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _respond(
        self, endpoint: _Endpoint, key: str, query: zenoh.Query | None, payload: bytes, received_at: float
    ) -> None:
        request, kind, delay = Envelope("error"), endpoint.kind, _BAD_MESSAGE_DELAY
        try:
            try:
                request = await READERS.submit(partial(read_envelope, payload))
                found = (request.message_type, request.instance_id, endpoint.key.format(request.session_id))
                if found != (kind, "" if kind == "describe" else self._instance_id, key):
                    raise EnvelopeError(f"message type, instance or session differ from {key}: {found}", "protocol")
                delay = 0.0
            finally:
                self._loop.call_later(delay, self._turns.release)
            if endpoint.answers:
                reply = await self._handle(endpoint, key, request, received_at)
            else:
                asked = (key, request.request_id)
                if asked not in self._answers:
                    self._answers[asked] = self._run(self._handle(endpoint, key, request, received_at))
                    while len(self._answers) > _MAX_ANSWERS:
                        del self._answers[next(iter(self._answers))]
                reply = await self._answers[asked]
        except ServiceError as error:
            code = getattr(error, "wire_code", "malformed" if error.status in (413, 422) else "execution")
            body = {"code": code, "message": sanitize_text(str(error), 2048), "details": getattr(error, "details", {})}
            reply = request.reply("error", body)
        except Exception:
            logger.exception("message %s of a robot failed", kind)
            reply = request.reply("error", {"code": "execution", "message": "the server's log says more"})
        with suppress(zenoh.ZError):  # The client is gone.
            if query is not None:
                with query:
                    query.reply(key, write_envelope(reply))
            else:
                last, replacement = endpoint.answers
                key, drop = key.removesuffix(last) + replacement, zenoh.CongestionControl.DROP
                self._zenoh.put(key, write_envelope(reply), congestion_control=drop)

    async def _handle(self, endpoint: _Endpoint, key: str, request: Envelope, received_at: float) -> Envelope:
        deployment = endpoint.deployment
        match endpoint.kind:
            case "describe":
                return request.reply("descriptor", deployment.descriptor, instance_id=self._instance_id)
            case "open":
                return await self._create_session(deployment, request)
            case "control":
                return await self._control(key.removesuffix("control"), request)
            case "observation":
                return request.reply("action", await self._find(request).answer_observation(request, received_at))
        raise EnvelopeError("this server answers no language requests", "unsupported")

    # Sessions.

    async def _create_session(self, deployment: _Deployment, request: Envelope) -> Envelope:
        context, body, (new, config, descriptor) = self._context, request.body, deployment
        _check_contract(body, descriptor)
        count, whose = 2 * context.settings.limits.max_sessions, f"a robot of deployment {descriptor['deployment']}"
        session_id = choose_session_id(context.sessions, new.session_id, count, self._creating, whose)
        new = replace(new, session_id=session_id)
        if body["mode"] != "chunk":
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
        inference = context.stream_clients.create_inference(session, "lerobot-zenoh", POLL_TIMEOUT)
        remote_id, settings = uuid4().hex, body.get("chunk_settings")
        self._sessions[remote_id] = RemoteSession(inference, config, descriptor, body["mode"], settings is not None)
        self._note_presence(remote_id, is_present=False)
        logger.info("%s has session %s", whose, session_id)
        accepted = {**descriptor, "mode": body["mode"], "chunk_settings": settings}
        return request.reply("accepted", accepted, session_id=remote_id)

    def _find(self, request: Envelope) -> RemoteSession:
        if request.session_id not in self._sessions:
            raise EnvelopeError(f"session {request.session_id} is closed; open a new one", "stale")
        return self._sessions[request.session_id]

    def _note_presence(self, remote_id: str, is_present: bool) -> None:
        """Close the session of a client that stays absent."""
        if (remote := self._sessions.get(remote_id)) is None:
            return
        if remote.absence is not None:
            remote.absence.cancel()
        gone = partial(self._close, remote_id, f"its robot was gone for {IDLE_TIMEOUT:g} s")
        remote.absence = None if is_present else self._loop.call_later(IDLE_TIMEOUT, lambda: self._run(gone()))

    async def _control(self, key: str, request: Envelope) -> Envelope:
        operation, remote = request.body.get("operation"), self._find(request)
        if operation == "close":
            await self._close(request.session_id, "its robot closed it")
        else:
            if operation == "reset":
                await self._wait_for_subscribers(f"{key}act", f"{key}language/result")
            await remote.control(operation, request.generation)
        return request.reply("ack", {"operation": operation, "applied_generation": request.generation})

    async def _wait_for_subscribers(self, *keys: str) -> None:
        until = time.monotonic() + _SUBSCRIBER_TIMEOUT
        for key in keys:
            publisher: Any = self._zenoh.declare_publisher(key)  # The stub of matching_status says bool.
            with publisher:
                while not publisher.matching_status.matching:
                    if time.monotonic() > until:
                        raise EnvelopeError(f"the client does not subscribe to {key}", "timeout")
                    await asyncio.sleep(0.02)

    async def _close(self, remote_id: str, reason: str) -> None:
        """Delete a session after its running inference; an emergency stop stays latched."""
        remote, sessions = self._sessions.pop(remote_id, None), self._context.sessions
        if remote is None:
            return
        remote.state, session = "closed", remote.inference.session
        async with remote.work:
            with suppress(UnknownSession):
                if sessions.get(session.id) is session:  # An operator may have deleted it, and its id is used again.
                    await sessions.delete(session.id)
        logger.info("session %s ends: %s", session.id, reason)


def make_config(settings: LerobotSettings) -> zenoh.Config:
    """Return Zenoh's configuration.

    Raises:
        CannotListen: the file cannot be used, or robots of other machines would need no key.
    """
    path, endpoint, mode = settings.lerobot_zenoh_config, settings.lerobot_zenoh or "", settings.lerobot_zenoh_mode
    try:
        config = zenoh.Config() if path is None else zenoh.Config.from_file(path)
    except zenoh.ZError as error:
        raise CannotListen(f"lerobot_zenoh_config {path!r} cannot be read: {_describe(error)}") from error
    rules = json.loads(config.get_json("access_control"))
    is_locked = (
        (endpoint.startswith("tls/") and config.get_json("transport/link/tls/enable_mtls") == "true")
        or (rules["enabled"] and rules["default_permission"] == "deny")
        or config.get_json("transport/auth/usrpwd/dictionary_file") != "null"
    )
    if not is_locked and not is_loopback(endpoint.partition("/")[2].rpartition(":")[0].strip("[]")):
        raise CannotListen(
            f"lerobot_zenoh: {endpoint} is open to other machines, and LeRobot's protocol has no keys; "
            "use tcp/127.0.0.1:7447, or name a file of Zenoh with enable_mtls (only for tls/), usrpwd, or "
            "access_control with default_permission deny: --lerobot-zenoh-config FILE"
        )
    addresses = {"peer": ("listen/endpoints", "connect/endpoints"), "client": ("connect/endpoints", "listen/endpoints")}
    used, unused = addresses[mode]
    values: dict[str, Any] = {"mode": mode, used: [endpoint], unused: [], "connect/exit_on_failure": True}
    values |= {"connect/timeout_ms": 10_000, "transport/link/rx/max_message_size": MAX_BYTES + (1 << 20)}
    off = ("scouting/multicast/enabled", "scouting/gossip/enabled", "transport/shared_memory/enabled")
    for key, value in (values | dict.fromkeys(off, False)).items():
        config.insert_json5(key, json.dumps(value))
    return config


def _describe(error: zenoh.ZError) -> str:
    return str(error).partition(" at /")[0]  # Without the line of Zenoh's source.


def _check_contract(body: Mapping[str, Any], descriptor: Mapping[str, Any]) -> None:
    """Check that the contract of ``open`` is the descriptor's, in this dialect."""
    capabilities, is_aligned = descriptor["capabilities"], body.get("chunk_settings") is not None
    supported = {
        "required_capabilities": [[_ALIGNMENT]] if is_aligned else [None, []],
        "chunk_settings": [None, {"chunk_merge": "aligned"}],
        "mode": ["chunk"] if is_aligned else capabilities["modes"],
        "encoding": ["raw", "jpeg"],
    }
    of_robot = {"expected_artifact": [descriptor["artifact_identity"]], "semantics": [SEMANTICS]}
    of_robot |= {name: [capabilities[name]] for name in ("features", "action_feature", "action_interval")}
    for name, accepted in (supported | of_robot).items():
        found = body.get(name)
        if not any(_is_same(found, one) for one in accepted):
            code = "unsupported" if name in supported else "incompatible"
            text = f"{name} is {found!r:.400}; this server (dialect v2) accepts {accepted!r:.400}"
            raise EnvelopeError(f"{text}; change the robot's flags", code)


def _is_same(found: object, offered: object) -> bool:
    if isinstance(found, float) and isinstance(offered, float):
        return math.isclose(found, offered, rel_tol=1e-6)
    # As text, because the comparison with an array has no truth value.
    return json.dumps(found, default=str, sort_keys=True) == json.dumps(offered, sort_keys=True)

"""gRPC server ``transport.AsyncInference`` for unmodified robots of LeRobot, with the sessions of the app.

Source: huggingface/lerobot, src/lerobot/async_inference/policy_server.py, at 0.4.4 and 0.6.1.
"""

import asyncio
import ipaddress
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import grpc
import grpc.aio

from jaxmodels import hub_cache
from service.api.context import App
from service.errors import (
    Forbidden,
    InvalidRequest,
    MoveRefused,
    PolicyNotCached,
    ServiceError,
    TooManyRequests,
    UnknownSession,
)
from service.http.config import LerobotSettings
from service.http.server import CannotListen
from service.inference.config import PolicySettings, set_cache_folders
from service.inference.policy_sources import REPO_ID
from service.lerobot import messages, pickles
from service.lerobot.robot import POLL_TIMEOUT, READERS, RobotExchange, choose_session_id, make_session_request
from service.logging import sanitize_text

logger = logging.getLogger(__name__)

_PROTOCOL = "lerobot-grpc"

MAX_ROBOTS = 32
_MAX_MESSAGE = 4 << 20  # Bytes; LeRobot's client sends pieces of 2 MiB.
_CHECK_INTERVAL = 0.2  # Seconds between checks for silent robots.
_ERROR_DELAY = 0.5  # Seconds before GetActions fails, because the client repeats the call at once.
_REFUSAL_DELAY = 0.02  # Seconds before another call fails, so that a flood of bad calls delays no robot.
_CLOSE_TIMEOUT = 0.2  # Seconds for calls in progress when the server ends.
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # Otherwise two servers could share the port.
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_allowed_incoming_connections", 2 * MAX_ROBOTS),
    ("grpc.max_connection_idle_ms", 60_000),
    # Detects robots without a connection while their policy loads.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # No compression: a small message must not become a large one.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)
# HTTP status of an error to gRPC's code. None is UNAVAILABLE, because the client's channel repeats such calls.
_CODES = {403: grpc.StatusCode.PERMISSION_DENIED, 404: grpc.StatusCode.NOT_FOUND, 503: grpc.StatusCode.ABORTED}
_CODES |= {409: grpc.StatusCode.FAILED_PRECONDITION, 422: grpc.StatusCode.INVALID_ARGUMENT}
_CODES |= dict.fromkeys((413, 429), grpc.StatusCode.RESOURCE_EXHAUSTED)
_MAX_DETAILS = 2000  # Characters of an error; trailers of HTTP/2 are limited to 8 KiB.
_ORIGIN = (
    "The robot sent these fields: camera_names are its --robot.cameras, joint_names its motors, policy_type its "
    "--policy_type"
)


@dataclass(eq=False)
class _Connection:
    """Connection of one robot."""

    address: str  # The robot's IP address.
    session_id: str | None = None  # Id of its session, also while that is created.
    exchange: RobotExchange | None = None  # None before its session is ready.
    calls: set[str] = field(default_factory=set)  # Methods in progress.
    last_call_at: float = field(default_factory=time.monotonic)


_Handler = Callable[[_Connection, Any], Awaitable[bytes]]


class LerobotServer:
    """gRPC server of one app, as an asynchronous context manager that runs while the app does.

    Attributes:
        port: port that it listens on, once it is open.
    """

    def __init__(self, app: App, host: str):
        """Create it for an address of this machine."""
        self.port = 0
        self._context = app.ctx
        self._host = host
        self._settings = app.ctx.settings.lerobot
        self._networks = [ipaddress.ip_network(text) for text in self._settings.lerobot_allow]
        self._connections: dict[str, _Connection] = {}  # By peer; a connection is one robot.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        """Listen and serve; raises CannotListen."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        handlers = {
            "Ready": unary(self._wrap("Ready", self._close)),
            "SendPolicyInstructions": unary(self._wrap("SendPolicyInstructions", self._create_session)),
            "SendObservations": stream(self._wrap("SendObservations", self._take_observation)),
            "GetActions": unary(self._wrap("GetActions", self._send_actions)),
        }
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=4 * MAX_ROBOTS)
        service = grpc.method_handlers_generic_handler("transport.AsyncInference", handlers)
        self._server.add_generic_rpc_handlers((service,))
        address = f"{f'[{self._host}]' if ':' in self._host else self._host}:{self._settings.lerobot_port}"
        try:
            credentials = _read_credentials(self._settings)
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except (OSError, RuntimeError) as error:  # gRPC gives no reason.
            raise CannotListen(
                f"cannot listen on {address} for LeRobot ({error}); end what listens there, choose another "
                "--lerobot-port (0: any), or correct the PEM files of lerobot_tls_cert (--lerobot-tls-cert), "
                "--lerobot-tls-key and --lerobot-tls-client-ca"
            ) from error
        await self._server.start()
        self._run(self._close_silent())
        return self

    async def __aexit__(self, *reason: object) -> None:
        """Hold all robots, end the calls in progress, and stop listening."""
        self._context.sessions.begin_close()
        await self._server.stop(_CLOSE_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work, name="a robot of LeRobot")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wrap(self, name: str, handle: _Handler) -> Callable[..., Awaitable[bytes]]:
        """Return a handler of gRPC that counts its calls and sends errors."""

        async def call(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            try:
                connection = self._find_connection(context.peer())
                if name in connection.calls:  # Two robots may share it, so actions of one could reach the other.
                    self._run(self._close(connection))
                    raise MoveRefused(
                        f"another {name} of this connection is in progress; a connection is one robot, so use no proxy "
                        "that joins connections, and one process for each robot"
                    )
                connection.calls.add(name)
                try:
                    return await handle(connection, request)
                finally:
                    connection.calls.discard(name)
                    connection.last_call_at = time.monotonic()
            except ServiceError as error:
                code, text = _CODES.get(error.status, grpc.StatusCode.INTERNAL), f"{error.code}: {error}"
            except Exception:
                logger.exception("call %s of a robot failed", name)
                code, text = grpc.StatusCode.INTERNAL, "internal: the server's log says more"
            await asyncio.sleep(_ERROR_DELAY if name == "GetActions" else _REFUSAL_DELAY)
            if name == "SendPolicyInstructions":  # Others fail many times per second.
                logger.warning("the robot at %s gets no session: %s", context.peer(), sanitize_text(text))
            return await context.abort(code, sanitize_text(text, _MAX_DETAILS))

        return call

    def _find_connection(self, peer: str) -> _Connection:
        """Return the state of a connection, a new one if needed; raises Forbidden or TooManyRequests."""
        if (known := self._connections.get(peer)) is not None:
            return known
        # "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000".
        text = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]").partition("%")[0]
        address = ipaddress.ip_address(text)
        address = getattr(address, "ipv4_mapped", None) or address
        if self._networks and not any(address in network for network in self._networks):
            raise Forbidden(f"{address} is not in the networks of --lerobot-allow; the server's operator can add it")
        if len(self._connections) >= MAX_ROBOTS:
            raise TooManyRequests(f"{MAX_ROBOTS} robots are connected, and no more are allowed; disconnect one")
        connection = self._connections[peer] = _Connection(str(address))
        return connection

    # Sessions.

    async def _create_session(self, connection: _Connection, request: bytes) -> bytes:
        """Create a session with the requested policy, and wait until that is loaded."""
        await self._close(connection)
        context, sessions = self._context, self._context.sessions
        policy = await _run_decoder(pickles.read_policy_request, messages.read_policy_setup(request))
        context.create_limiter.take(None, connection.address)
        try:
            await asyncio.to_thread(context.source_rules.check, policy.path)
        except InvalidRequest as error:
            raise Forbidden(str(error)) from None
        try:
            revision = await asyncio.to_thread(_find_cached_revision, policy.path, context.settings.policies)
        except PolicyNotCached:  # Here; engines of other machines have their own caches.
            running = [each.new for each in sessions.list() if each.robot_io is not None]
            revisions = [new.revision for new in running if new.policy_path == policy.path]
            if not revisions:
                raise
            revision = revisions[0]
        requirements = await context.policy_reader.read(policy.path, revision)
        count = context.settings.limits.max_sessions + MAX_ROBOTS
        taken = {each.session_id for each in self._connections.values()}
        # A robot that connects again has another port, so its address identifies it.
        prefix, whose = f"lerobot-{connection.address.replace(':', '-')}", f"a robot at {connection.address}"
        session_id = choose_session_id(sessions, prefix, count, taken, whose)
        new = make_session_request(policy, requirements, session_id, revision)
        connection.session_id = session_id
        try:
            session = await sessions.create(new)
        except asyncio.CancelledError:  # The robot has disconnected.
            self._run(self._close(connection))
            raise
        except ServiceError as error:
            connection.session_id = None
            if error.status == 422:
                raise InvalidRequest(f"{error}. {_ORIGIN}") from None
            raise
        session.protocol = _PROTOCOL
        # While pictures of another size are compiled, GetActions fails after this time, so that no chunk is too late.
        inference = context.stream_clients.create_inference(session, _PROTOCOL, POLL_TIMEOUT)
        connection.exchange = RobotExchange(inference, policy, context.settings.control.frame_age_limit)
        logger.info("the robot at %s has session %s", connection.address, session_id)
        return messages.EMPTY

    async def _close(self, connection: _Connection, request: bytes = b"") -> bytes:
        """Delete the session of a connection; an emergency stop stays latched."""
        session_id, connection.session_id, connection.exchange = connection.session_id, None, None
        if session_id is not None:
            with suppress(UnknownSession):
                await self._context.sessions.delete(session_id)
        return messages.EMPTY

    async def _close_silent(self) -> None:
        """Close the sessions of disconnected robots: those without calls for the ``silence`` of streams."""
        silence = self._context.stream_clients.settings.silence
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            for peer, connection in list(self._connections.items()):
                if not connection.calls and time.monotonic() - connection.last_call_at > silence:
                    del self._connections[peer]
                    if connection.session_id is not None:
                        logger.info("session %s ends: its robot was silent for %g s", connection.session_id, silence)
                        self._run(self._close(connection))

    # Observations and actions.

    async def _take_observation(self, connection: _Connection, request: AsyncIterator[bytes]) -> bytes:
        exchange, deadline = _require_exchange(connection), self._context.settings.limits.request_deadline
        pieces, whole = messages.ObservationPieces(), None
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                async for message in request:
                    if (whole := pieces.add(message)) is not None:
                        break
        if whole is None:
            raise InvalidRequest(f"the observation has no END piece within {deadline:g} s; send it again")
        received_at = time.monotonic()
        await exchange.take_observation(await _run_decoder(pickles.read_observation, whole), received_at)
        return messages.EMPTY

    async def _send_actions(self, connection: _Connection, request: bytes) -> bytes:
        return messages.write_actions_message(await _require_exchange(connection).next_chunk())


def _require_exchange(connection: _Connection) -> RobotExchange:
    if connection.exchange is None:
        raise MoveRefused(
            "this connection has no session: it sent no policy instructions, was silent, or its session was closed; "
            "start robot_client again"
        )
    return connection.exchange


async def _run_decoder(read: Callable[[Any], Any], data: memoryview) -> Any:
    """Read a pickle in a thread, so that no robot misses a tick."""
    return await READERS.submit(partial(read, data))


def _find_cached_revision(path: str, policies: PolicySettings) -> str | None:
    """Return the cached commit of a policy from the Hub, or None for a folder; raises PolicyNotCached."""
    if os.path.isdir(os.path.expanduser(path)):
        return None
    set_cache_folders(policies)
    if REPO_ID.fullmatch(path):
        repo = hub_cache() / f"models--{path.replace('/', '--')}"
        with suppress(OSError):
            commit = (repo / "refs" / "main").read_text().strip()
            # Without weights, only the description of the policy was read.
            if any((repo / "snapshots" / commit).glob("model*.safetensors")):
                return commit
    raise PolicyNotCached(
        f"policy {sanitize_text(path)!r} is neither a folder on the server's machine nor a Hub repo in its cache, and "
        "the server downloads nothing for a robot; let the operator run `robojax check` with its name there, or load "
        "it in a session"
    )


def _read_credentials(settings: LerobotSettings) -> grpc.ServerCredentials | None:
    """Read the files of mTLS; None without them."""
    paths = settings.lerobot_tls_key, settings.lerobot_tls_cert, settings.lerobot_tls_client_ca
    files = [Path(path).expanduser().read_bytes() for path in paths if path is not None]
    if len(files) < len(paths):
        return None
    key, certificate, authority = files
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)

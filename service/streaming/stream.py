"""Stream of one client: receives observations, sends commands and events."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from service.auth.caller import Caller, Role
from service.errors import Forbidden, InvalidRequest, MoveRefused, ServiceError, SessionLoading, UnknownSession
from service.logging import sanitize_text
from service.stage import Stage
from service.streaming import acts, codec, observation
from service.streaming.direct_inference import DirectInference
from service.streaming.direct_transport import DirectLink, LinkClient
from service.streaming.observation import ClientObservation, ObservationSpec
from service.streaming.websocket import SocketClosed, StreamSocket
from service.transport.link import JointValue

log = logging.getLogger(__name__)

_CHECK_INTERVAL = 0.2  # Seconds between checks of the session, and of the client's newest message.
_KEY_CHECK_INTERVAL = 2.0  # Seconds between checks of the client's key, which may be revoked.
_MAX_BAD_MESSAGES = 20  # Number of invalid messages in a row that closes the socket.
_MAX_UNSENT = 4096  # Unsent bytes above which commands are refused, so that no old commands queue up.
_MAX_AGE_MS = 10_000.0
CLOSE_ROBOT_TAKEN = 4409


class ClientStream:
    """Stream of one client."""

    def __init__(
        self,
        socket: StreamSocket,
        inference: DirectInference,
        caller: Caller,
        *,
        silence_timeout: float,
        max_bytes: int,
        is_still_authorized: Callable[[], bool],
        stop: Callable[[str], Any],
    ):
        """Create it; ``stop`` is awaited, and stops the session's robot by an emergency stop."""
        self._client = LinkClient(self._send_command, self._on_session_event)
        self._socket = socket
        self._inference = inference
        self._caller = caller
        self._silence_timeout = silence_timeout
        self._max_bytes = max_bytes
        self._is_still_authorized = is_still_authorized
        self._stop = stop
        self._is_text = False
        self._link: DirectLink | None = None  # None while the policy loads
        self._commands = 0
        self._newest_observation: tuple[int | None, float] | None = None
        self._act_task: asyncio.Task[None] | None = None
        self._next_act: tuple[Mapping[str, Any], float] | None = None
        self._decode_task: asyncio.Task[None] | None = None
        self._next_to_decode: tuple[ClientObservation, float] | None = None
        self._sent_status: tuple[object, ...] = ()
        self._bad_messages = 0

    async def serve(self) -> None:
        """Serve the client until its socket, its session or its key ends."""
        try:
            self._join()
        except SessionLoading:
            self._send_status()
        except MoveRefused as error:
            self._send("error", code=error.code, detail=str(error))
            self._socket.close(1008, error.code)
            return
        watch_task = asyncio.create_task(self._watch_session(), name="a stream's watch")
        try:
            while True:
                message = await self._socket.receive()
                self._client.last_message_at = time.monotonic()
                await self._handle_message(message)
        except SocketClosed:
            pass
        finally:
            # Synchronous, because this runs inside a cancellation if the connection is lost.
            if self._link is not None:
                self._link.listeners.discard(self._client)
                self._link.release_control(self._client, "the client on the stream is gone")
            for task in (watch_task, self._act_task, self._decode_task):
                if task is not None:
                    task.cancel()

    def _join(self) -> DirectLink:
        """Join the session once; raises SessionLoading, or MoveRefused if no policy runs."""
        if self._link is None:
            link = self._inference.get_link()[0]
            about = dict(self._inference.describe())
            # With this, a client that reconnects detects a recreated session, which lost earlier stops.
            about["instance"] = f"{self._inference.session.created_at:.6f}"
            self._link = link
            link.listeners.add(self._client)
            self._send("welcome", **about, silence_s=self._silence_timeout, max_bytes=self._max_bytes)
        return self._link

    # Messages of the client.

    async def _handle_message(self, raw: memoryview | str) -> None:
        number = None
        try:
            self._is_text = isinstance(raw, str)
            message = await codec.read_json(raw) if isinstance(raw, str) else codec.unpack(raw)
            if not isinstance(message, Mapping) or not isinstance(message.get("kind"), str):
                raise InvalidRequest("wanted a map with a kind")
            number = acts.read_integer(message, "number")
            await self._dispatch(message["kind"], message, number)
            self._bad_messages = 0
        except SessionLoading as error:
            self._send_error(error, number)
        except ServiceError as error:
            self._send_error(error, number)
            self._bad_messages += 1
            if self._bad_messages >= _MAX_BAD_MESSAGES:
                self._socket.close(1007, f"{_MAX_BAD_MESSAGES} messages in a row were invalid")

    async def _dispatch(self, kind: str, message: Mapping[str, Any], number: int | None) -> None:
        if kind == "stop":
            reason = message.get("reason")
            words = sanitize_text(reason) if isinstance(reason, str) else ""
            await self._stop(words or "requested on the stream")
        elif kind == "ping":
            sent = message.get("time")
            if isinstance(sent, bool) or not isinstance(sent, int | float) or not math.isfinite(sent):
                sent = None
            self._send("pong", number=number, time=sent, server_time=time.monotonic())
        elif self._caller.role < Role.OPERATOR:
            raise Forbidden("this needs the role operator; a viewer's stream may watch and stop the robot")
        elif kind == "observation":
            await self._take_observation(self._join(), message, number)
        elif kind == "act":
            self._join()
            await self._begin_act(message)
        elif kind == "latch":
            self._take_latch(message)
        else:
            raise InvalidRequest("kind: wanted observation, act, latch, stop or ping", ("body", "kind"))

    def _take_latch(self, message: Mapping[str, Any]) -> None:
        """Take the client's report whether its own program has latched an emergency stop."""
        # Without this check, a misspelt ``reason`` would release the latch.
        observation.check_fields(message, ("kind", "reason", "number"))
        reason = message.get("reason")
        if "reason" not in message or (reason is not None and not isinstance(reason, str)):
            raise InvalidRequest("reason: wanted a text, or null for no latch", ("body", "reason"))
        self._client.robot_latch = None if reason is None else sanitize_text(reason) or "no reason given"
        if self._link is not None:  # Otherwise it is reported when this client takes control.
            self._link.report_latch(self._client)

    async def _take_observation(self, link: DirectLink, message: Mapping[str, Any], number: int | None) -> None:
        now = time.monotonic()
        observation.check_fields(message, (*observation.OBSERVATION_FIELDS, "age_ms", "kind"))
        age = message.get("age_ms", 0)
        if isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age <= _MAX_AGE_MS:
            raise InvalidRequest(f"age_ms: wanted 0 to {_MAX_AGE_MS:g}", ("body", "age_ms"))
        spec = self._inference.observation_spec()
        observed = observation.read_observation(message, spec, is_complete=False)
        if not link.take_control(self._client, self._silence_timeout):
            self._send("error", code="robot_taken", detail="another client drives this robot", number=number)
            self._socket.close(CLOSE_ROBOT_TAKEN, "another client drives this robot")
            return
        self._inference.session.protocol = self._inference.protocol
        if number is not None:
            self._newest_observation = (number, now)
        if observed.prompt is not None:
            await self._inference.resolve_instruction(observed, self._inference.get_link()[1])
        observed_at = now - age / 1e3
        if observed.files:
            # Pictures are decoded in a thread, the newest observation next. Joints are delivered now, because after the
            # decoding they would replace newer joints.
            self._deliver(link, {}, observed.joints, observed_at)
            self._next_to_decode = (observed, observed_at)
            if self._decode_task is None or self._decode_task.done():
                self._decode_task = asyncio.create_task(self._decode_pictures(link, spec), name="a stream's pictures")
        else:
            self._deliver(link, observed.frames, observed.joints, observed_at)
            await self._keep(observed, spec, observed_at)

    async def _keep(self, observed: ClientObservation, spec: ObservationSpec, observed_at: float) -> None:
        """Keep a complete observation for later acts of a policy that reads several."""
        if observed.is_complete(spec):
            await self._inference.observe(observed, observed_at)

    async def _decode_pictures(self, link: DirectLink, spec: ObservationSpec) -> None:
        while self._next_to_decode is not None:
            (observed, observed_at), self._next_to_decode = self._next_to_decode, None
            try:
                frames = await observed.decode_images(spec)
                await self._keep(replace(observed, frames=frames, files={}), spec, observed_at)
            except ServiceError as error:
                self._send_error(error, None)
                continue
            if link.driver is self._client:
                self._deliver(link, frames, {}, observed_at)

    def _deliver(
        self, link: DirectLink, frames: Mapping[str, Any], joints: Mapping[str, float], observed_at: float
    ) -> None:
        inbox = link.inbox
        for camera, image in frames.items():
            inbox.on_frame(camera, image, observed_at)
        if joints:
            inbox.on_joints(joints, observed_at)

    async def _begin_act(self, message: Mapping[str, Any]) -> None:
        act = message, self._client.last_message_at
        if self._act_task is not None and not self._act_task.done():
            before, self._next_act = self._next_act, act
            if before is not None:
                text = "a newer act arrived before this act was started"
                self._send("error", code="superseded", detail=text, number=before[0].get("number"))
                await self._keep_superseded(*before)
            return
        self._act_task = asyncio.create_task(self._answer_acts(act), name="a stream's act")

    async def _keep_superseded(self, message: Mapping[str, Any], observed_at: float) -> None:
        """Keep the observation of an unanswered act for the history of later acts."""
        spec = self._inference.observation_spec()
        if spec.steps == 1:
            return
        try:
            observed = observation.read_observation(message, spec, is_complete=True)
            await self._inference.observe(observed, observed_at)
        except ServiceError as error:
            self._send_error(error, acts.read_integer(message, "number"))

    async def _answer_acts(self, act: tuple[Mapping[str, Any], float] | None) -> None:
        while act is not None:
            message, observed_at = act
            number = acts.read_integer(message, "number")
            try:
                answer = await acts.answer_act(self._inference, message, observed_at)
            except ServiceError as error:
                self._send_error(error, number)
            except Exception:
                log.exception("an act of session %s failed", self._inference.session.id)
                self._send("error", code="internal", detail="Internal Server Error", number=number)
            else:
                self._send("action" if "action" in answer else "chunk", **answer)
            act, self._next_act = self._next_act, None

    # Messages to the client.

    def _send_command(self, joints: Sequence[JointValue]) -> bool:
        """Send a command of the session's control loop; False if older ones are still unread."""
        if self._socket.unsent > _MAX_UNSENT:
            return False
        number, observed_at = self._newest_observation or (None, None)
        self._commands += 1
        now = time.monotonic()
        return self._send(
            "command",
            number=self._commands,
            joints={joint.name: joint.value for joint in joints},
            observation=number,
            age_ms=None if observed_at is None else round((now - observed_at) * 1e3, 2),
        )

    def _on_session_event(self, event: str, about: Mapping[str, object]) -> None:
        """Report a stop or the session's end to the client."""
        if event == "session.deleted":
            self._socket.close(1001, "the session is over")
        elif about.get("emergency_stop"):
            self._send("stopped", reason=about.get("reason"))
            self._sent_status = ()  # The client must also be notified of a reset before the next check.

    async def _watch_session(self) -> None:
        key_checked_at = -math.inf
        while True:
            if time.monotonic() - key_checked_at > _KEY_CHECK_INTERVAL:
                key_checked_at = time.monotonic()
                if not self._is_still_authorized():
                    await self._stop_unauthorized()
                    self._socket.close(1008, "the key is no longer accepted")
                    return
            try:
                link = self._join()
            except SessionLoading:
                self._send_status()
                await asyncio.sleep(_CHECK_INTERVAL)
                continue
            except MoveRefused as refusal:
                await self._close_unloaded(refusal)
                return
            silence, limit = time.monotonic() - self._client.last_message_at, self._silence_timeout
            if link.driver is self._client and silence > limit:
                link.release_control(self._client, f"the client on the stream was silent for {limit:g} s")
            self._send_status()
            await asyncio.sleep(_CHECK_INTERVAL)

    async def _stop_unauthorized(self) -> None:
        """Latch the session of a client in control, because its robot must not move if the key file is restored."""
        is_driver = self._link is not None and self._link.driver is self._client
        if is_driver or self._act_task is not None:
            with suppress(UnknownSession):
                await self._stop("the key of the client on the stream is no longer accepted")

    async def _close_unloaded(self, refusal: MoveRefused) -> None:
        """Close a client that waited for a session that failed or was deleted."""
        error = await self._inference.explain_refusal(refusal)
        self._send_error(error, None)
        self._socket.close(1001 if isinstance(error, UnknownSession) else 1011, f"{error.code}: {error}")

    def _send_status(self) -> None:
        """Send the session's status if it differs from the last one sent."""
        session = self._inference.session
        hold = None if session.robot_io is None else session.robot_io.controller.hold
        status, reason = str(session.stage), session.reason
        if reason is None and session.stage is Stage.INITIALIZING:
            reason = session.progress.stage
        # Only the code of a hold is compared, because its text counts seconds.
        shown = (status, reason, hold.code if hold else None, session.latch)
        if shown != self._sent_status:
            self._sent_status = shown
            hold_text = hold.text if hold else None
            self._send("status", status=status, reason=reason, hold=hold_text, hold_code=shown[2], latch=shown[3])

    def _send_error(self, error: ServiceError, number: int | None) -> None:
        self._send("error", code=error.code, detail=str(error), number=number)

    def _send(self, kind: str, **fields: Any) -> bool:
        message = {"kind": kind, "time": time.monotonic()} | fields
        if self._is_text:
            return self._socket.send(codec.pack_json(message).encode(), is_text=True)
        return self._socket.send(codec.pack(message))

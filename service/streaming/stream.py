"""One client's stream: observations in, commands and events out."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.auth.caller import Caller, Role
from service.errors import Forbidden, InvalidRequest, MoveRefused, ServiceError
from service.logging import sanitize_text
from service.streaming import codec, direct_inference, observation
from service.streaming.direct_inference import DirectInference
from service.streaming.direct_transport import DirectLink
from service.streaming.observation import Observation, Wanted
from service.streaming.websocket import SocketClosed, StreamSocket
from service.transport.link import JointValue

log = logging.getLogger(__name__)

_LOOK = 0.2  # seconds between looks at the session, and whether the client is still heard of
_LOOK_AT_KEY = 2.0  # which is in a file
_BAD = 20  # messages in a row that make no sense
# Bytes that wait to be sent before a command; as in rooms, more would be a backlog of old commands.
_MOST_UNSENT = 4096
_OLDEST = 10_000.0  # milliseconds
TAKEN = 4409


class Stream:
    """One client.

    Attributes:
        heard_at: when its newest message came.
    """

    def __init__(
        self,
        socket: StreamSocket,
        consultation: DirectInference,
        caller: Caller,
        *,
        silence: float,
        most: int,
        is_still_authorized: Callable[[], bool],
        stop: Callable[[str], Any],
    ):
        """``stop`` makes an emergency stop of the session, and is awaited."""
        self.heard_at = time.monotonic()
        self._socket = socket
        self._consultation = consultation
        self._caller = caller
        self._silence = silence
        self._most = most
        self._is_still_authorized = is_still_authorized
        self._stop = stop
        self._is_text = False
        self._unpacker = codec.Unpacker()
        self._link: DirectLink
        self._commands = 0
        self._seen: tuple[int | None, float] | None = None
        self._acting: asyncio.Task[None] | None = None
        self._next_act: Mapping[str, Any] | None = None
        self._decoding: asyncio.Task[None] | None = None
        self._next_seen: tuple[Observation, float] | None = None
        self._shown: tuple[object, ...] = ()
        self._bad = 0

    async def attend(self) -> None:
        """Serve it until its socket, its session or its key ends."""
        try:
            self._link = self._consultation.link()[0]
            about = dict(self._consultation.about())
        except MoveRefused as error:
            self._tell("error", code=error.code, detail=str(error))
            self._socket.close(1008, error.code)
            return
        self._link.watchers.add(self)
        watching = asyncio.create_task(self._watch(), name="a stream's watch")
        self._tell("welcome", **about, silence_s=self._silence, max_bytes=self._most)
        try:
            while True:
                message = await self._socket.receive()
                self.heard_at = time.monotonic()
                await self._hear(message)
        except SocketClosed:
            pass
        finally:
            # Synchronous on purpose: when the peer is gone this runs inside a cancellation.
            self._link.watchers.discard(self)
            self._link.part(self, "the client on the stream is gone")
            for task in (watching, self._acting, self._decoding):
                if task is not None:
                    task.cancel()

    # What it says.

    async def _hear(self, raw: memoryview | str) -> None:
        number = None
        try:
            self._is_text = isinstance(raw, str)
            message = await codec.read_json(raw) if isinstance(raw, str) else self._unpacker.unpack(raw)
            if not isinstance(message, Mapping) or not isinstance(message.get("kind"), str):
                raise InvalidRequest("wanted a map with a kind")
            number = direct_inference.whole_number(message, "number")
            await self._do(message["kind"], message, number)
            self._bad = 0
        except ServiceError as error:
            self._refuse(error, number)
            self._bad += 1
            if self._bad >= _BAD:
                self._socket.close(1007, f"{_BAD} messages in a row made no sense")

    async def _do(self, kind: str, message: Mapping[str, Any], number: int | None) -> None:
        if kind == "stop":
            reason = message.get("reason")
            words = sanitize_text(reason) if isinstance(reason, str) else ""
            await self._stop(words or "asked for on the stream")
        elif kind == "ping":
            sent = message.get("time")
            if isinstance(sent, bool) or not isinstance(sent, int | float) or not math.isfinite(sent):
                sent = None
            self._tell("pong", number=number, time=sent, server_time=time.monotonic())
        elif self._caller.role < Role.OPERATOR:
            raise Forbidden("this wants the role operator; a viewer's stream may look on, and stop the robot")
        elif kind == "observation":
            await self._observe(message, number)
        elif kind == "act":
            self._act(message)
        else:
            raise InvalidRequest("kind: wanted observation, act, stop or ping", ("body", "kind"))

    async def _observe(self, message: Mapping[str, Any], number: int | None) -> None:
        now = time.monotonic()
        age = message.get("age_ms", 0)
        if isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age <= _OLDEST:
            raise InvalidRequest(f"age_ms: wanted 0 to {_OLDEST:g}", ("body", "age_ms"))
        wanted = self._consultation.wanted()
        seen = observation.read(message, wanted, is_whole=False)
        if not self._link.drive(self, self._silence):
            self._tell("error", code="robot_taken", detail="another client drives this robot", number=number)
            self._socket.close(TAKEN, "another client drives this robot")
            return
        if number is not None:
            self._seen = (number, now)
        if seen.prompt is not None:
            await self._consultation.prompted(seen, self._consultation.link()[1])
        seen_at = now - age / 1e3
        if seen.files:
            # Decoded in a thread, one observation at a time; of those that come meanwhile the newest is next.
            # Joints are told at once: decoded pictures must not bring back where the arm was before.
            self._show({}, seen.joints, seen_at)
            self._next_seen = (seen, seen_at)
            if self._decoding is None or self._decoding.done():
                self._decoding = asyncio.create_task(self._decode(wanted), name="a stream's pictures")
        else:
            self._show(seen.frames, seen.joints, seen_at)

    async def _decode(self, wanted: Wanted) -> None:
        while self._next_seen is not None:
            (seen, seen_at), self._next_seen = self._next_seen, None
            try:
                frames = await seen.decoded(wanted)
            except ServiceError as error:
                self._refuse(error, None)
                continue
            if self._link.driver is self:
                self._show(frames, {}, seen_at)

    def _show(self, frames: Mapping[str, Any], joints: Mapping[str, float], seen_at: float) -> None:
        inbox = self._link.inbox
        for camera, image in frames.items():
            inbox.on_frame(camera, image, seen_at)
        if joints:
            inbox.on_joints(joints, seen_at)

    def _act(self, message: Mapping[str, Any]) -> None:
        if self._acting is not None and not self._acting.done():
            before, self._next_act = self._next_act, message
            if before is not None:
                text = "a newer act came before this one was begun"
                self._tell("error", code="superseded", detail=text, number=before.get("number"))
            return
        self._acting = asyncio.create_task(self._answer(message), name="a stream's act")

    async def _answer(self, message: Mapping[str, Any] | None) -> None:
        while message is not None:
            number = direct_inference.whole_number(message, "number")
            try:
                told = await direct_inference.act(self._consultation, message)
            except ServiceError as error:
                self._refuse(error, number)
            except Exception:
                log.exception("an act of session %s failed", self._consultation.session.id)
                self._tell("error", code="internal", detail="Internal Server Error", number=number)
            else:
                self._tell("action" if "action" in told else "chunk", **told)
            message, self._next_act = self._next_act, None

    # What it is told.

    def command(self, joints: Sequence[JointValue]) -> bool:
        """A command of the session's control loop; False when it is not taken, because older ones are still unread."""
        if self._socket.unsent > _MOST_UNSENT:
            return False
        number, came = self._seen or (None, None)
        self._commands += 1
        now = time.monotonic()
        return self._tell(
            "command",
            number=self._commands,
            joints={joint.name: joint.value for joint in joints},
            observation=number,
            age_ms=None if came is None else round((now - came) * 1e3, 2),
        )

    def told(self, event: str, about: Mapping[str, object]) -> None:
        """Something happened to the session."""
        if event == "session.deleted":
            self._socket.close(1001, "the session is over")
        elif about.get("emergency_stop"):
            self._tell("stopped", reason=about.get("reason"))

    async def _watch(self) -> None:
        session = self._consultation.session
        looked_at = -math.inf
        while True:
            if time.monotonic() - looked_at > _LOOK_AT_KEY:
                looked_at = time.monotonic()
                if not self._is_still_authorized():
                    self._socket.close(1008, "the key does not count any more")
                    return
            if self._link.driver is self and time.monotonic() - self.heard_at > self._silence:
                self._link.part(self, f"the client on the stream was silent for {self._silence:g} s")
            hold = None if session.robot_io is None else session.robot_io.controller.hold
            shown = (str(session.stage), session.reason, hold.text if hold else None, hold.code if hold else None)
            # Texts of holds count seconds; only what it is about is news.
            if (shown[0], shown[1], shown[3]) != self._shown:
                self._shown = (shown[0], shown[1], shown[3])
                status, reason, text, code = shown
                self._tell("status", status=status, reason=reason, hold=text, hold_code=code)
            await asyncio.sleep(_LOOK)

    def _refuse(self, error: ServiceError, number: int | None) -> None:
        self._tell("error", code=error.code, detail=str(error), number=number)

    def _tell(self, kind: str, **fields: Any) -> bool:
        message = {"kind": kind, "time": time.monotonic()} | fields
        if self._is_text:
            return self._socket.send(codec.pack_json(message).encode(), is_text=True)
        return self._socket.send(codec.pack(message))

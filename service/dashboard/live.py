"""Dashboard: its static files, and the socket that updates open pages."""

import asyncio
import contextlib
import json
import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
from sanic.exceptions import RequestCancelled, WebsocketClosed
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.auth.caller import Caller
from service.dashboard.live_view import LiveView, PictureEncoder, PictureSettings
from service.http.limits import Bucket
from service.logging import sanitize_text
from service.sessions.store import AnySession, Sessions
from service.stage import Stage

# Upper edges in milliseconds; the last bin is open.
HISTOGRAM_EDGES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_HISTOGRAM_BINS = np.array((0.0, *HISTOGRAM_EDGES, np.inf))


def summarize_session(session: AnySession) -> dict[str, Any]:
    """Summarize one session for the list, without percentiles.

    ``silent_s`` is the number of seconds since the last frame or joint value, or since the creation. It is None for a
    session without a policy, and for a direct session whose control loop does not run.
    """
    robot_io, new = session.robot_io, session.new
    line: dict[str, Any] = {
        "id": session.id,
        "stage": str(session.stage),
        "reason": session.reason,
        "latched": session.is_latched,
        "policy": new.policy_path,
        "owner": new.owner,
        "dry_run": new.dry_run,
        "hold": None,
        "hold_code": None,
        "silent_s": None,
    }
    if robot_io is None:
        stats = session.status().stats
        return line | {name: value for name, value in stats.items() if name.startswith("progress")}
    if robot_io.controller.is_running or not new.is_direct:
        # Whole seconds: a line is sent again whenever it changes.
        line["silent_s"] = int(time.monotonic() - (robot_io.buffer.last_input_at or session.created_at))
    hold = robot_io.controller.hold
    if hold is not None:
        line |= {"hold": hold.text, "hold_code": hold.code}
    return line


def describe_session(session: AnySession) -> dict[str, Any]:
    """Describe one session: its status as in the API, its joints, and histograms of times."""
    robot_io = session.robot_io
    detail: dict[str, Any] = {"status": vars(session.status()), "joints": [], "edges_ms": HISTOGRAM_EDGES, "spread": {}}
    if robot_io is not None:
        detail["joints"] = [
            {"name": joint.name, "low": _finite_or_none(joint.low), "high": _finite_or_none(joint.high)}
            for joint in robot_io.table.joints
        ]
        histograms: Mapping[str, np.ndarray] = {
            "inference": robot_io.runner.seconds["total"].samples,
            "lateness": robot_io.controller.lateness.samples,
        }
        detail["spread"] = {
            name: np.histogram(samples * 1e3, _HISTOGRAM_BINS)[0].tolist() for name, samples in histograms.items()
        }
    return detail


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


MAX_MESSAGE = 4096  # characters of a page's message


@dataclass(frozen=True)
class BinaryPart:
    """Bytes behind the JSON of a message, and the fields that describe them there (``size`` is added)."""

    fields: Mapping[str, Any]
    content: bytes


def pack_message(head: Mapping[str, Any], parts: Sequence[BinaryPart] = ()) -> bytes:
    """Pack a message: length of the JSON (4 bytes, little endian), the JSON, each part; all aligned to 4 bytes.

    Raises:
        ValueError: a number that JSON does not have.
    """
    about = [{**part.fields, "size": len(part.content)} for part in parts]
    text = json.dumps({**head, "parts": about}, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return b"".join(
        (struct.pack("<I", len(text)), text, *(part.content + bytes(-len(part.content) % 4) for part in parts))
    )


class BadMessage(Exception):
    """A message of a page cannot be understood; the text says why."""


@dataclass(frozen=True)
class ViewSession:
    """Request of a page: show this session from now on (None: none), with pictures or without."""

    session: str | None
    pictures: bool


@dataclass(frozen=True)
class DrawnAck:
    """Acknowledgement that the page has drawn message ``number``; without it no more are sent."""

    number: int


@dataclass(frozen=True)
class StopAll:
    """Request of a page: stop every robot. ``number`` comes back in the answer."""

    number: int
    reason: str


def parse_message(raw: str | bytes) -> ViewSession | DrawnAck | StopAll:
    """Parse a message of a page.

    Raises:
        BadMessage: it is none of the three.
    """
    if not isinstance(raw, str) or len(raw) > MAX_MESSAGE:
        raise BadMessage(f"wanted a text of at most {MAX_MESSAGE} characters")
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadMessage("wanted JSON") from error
    match message:
        case {"type": "seen", "number": int(number)}:
            return DrawnAck(number)
        case {"type": "look", "session": None | str() as session}:
            return ViewSession(session, message.get("pictures") is True)
        case {"type": "stop"}:
            # An error in the other fields must not keep the robots moving.
            number, reason = message.get("number"), message.get("reason")
            text = sanitize_text(reason) if isinstance(reason, str) else ""
            return StopAll(number if type(number) is int else 0, text or "asked for on the page")
    raise BadMessage("wanted an object of type look, seen or stop")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveSettings:
    """Limits and intervals of viewers; times in seconds.

    Attributes:
        viewers: largest number of sockets.
        period: time between two messages.
        detail_period: time between two full statuses of the viewed session.
        ahead: largest number of unconfirmed messages.
        view_timeout: time without a confirmation after which a page is disconnected.
        messages_per_second: limit for messages of one page, which is disconnected beyond it.
    """

    viewers: int = 16
    period: float = 0.1
    detail_period: float = 1.0
    ahead: int = 2
    view_timeout: float = 5.0
    messages_per_second: int = 50
    pictures: PictureSettings = field(default_factory=PictureSettings)


class Live:
    """All viewers of one server's dashboard.

    Attributes:
        cut: number of viewers that were disconnected because they were too slow or sent invalid messages.
    """

    def __init__(self, sessions: Sessions, settings: LiveSettings | None = None):
        self.settings = settings or LiveSettings()
        self.viewers: set[Viewer] = set()
        self.cut = 0
        self.pictures = PictureEncoder(self.settings.pictures)
        self._sessions = sessions
        self._views: dict[str, LiveView] = {}
        self._summaries: tuple[float, list[tuple[str | None, dict[str, Any]]]] = (0.0, [])
        self._details: dict[str, tuple[float, AnySession, BinaryPart]] = {}

    async def serve(
        self, socket: WebsocketImplProtocol, caller: Caller, is_still_authorized: Callable[[], bool] = lambda: True
    ) -> None:
        """Serve one upgraded socket until it ends, or until its key does."""
        if len(self.viewers) >= self.settings.viewers and not self._evict_page(caller):
            await socket.close(1013, f"{len(self.viewers)} pages look on already")
            return
        viewer = Viewer(self, socket, caller, is_still_authorized)
        self.viewers.add(viewer)
        writer = asyncio.create_task(viewer.write(), name="a page's messages")
        try:
            await viewer.read()
        except (WebsocketClosed, BadMessage) as error:
            if isinstance(error, BadMessage):
                self._cut_off(viewer, str(error))
        finally:
            # Synchronous on purpose: when the page is gone this runs inside a cancellation.
            self.viewers.discard(viewer)
            viewer.view_session(None)
            writer.cancel()

    def _evict_page(self, caller: Caller) -> bool:
        """Close the oldest page of the owner with the most pages, if the new caller has fewer pages."""
        pages = Counter(viewer.caller.owner for viewer in self.viewers)
        most, count = pages.most_common(1)[0]
        if count <= pages[caller.owner] + 1:
            return False
        oldest = min((one for one in self.viewers if one.caller.owner == most), key=lambda one: one.connected_at)
        self.viewers.discard(oldest)
        oldest.close(1013, "others want to look on, too")
        return True

    def _cut_off(self, viewer: "Viewer", why: str) -> None:
        self.cut += 1
        logger.warning("a page of %s is cut off: %s", viewer.caller.name, why)
        viewer.abort()

    async def stop_all(self, reason: str, caller: Caller) -> dict[str, Any]:
        """Stop every robot; return their number, and the ids of the sessions that the caller may see."""
        sessions = self._sessions
        stopped = await sessions.emergency_stop(reason)
        logger.warning("emergency stop of %d sessions by %s, on the page", len(stopped), caller.name)
        own = {session.id for session in self.visible_sessions(caller)}
        return {"count": len(stopped), "stopped": [one for one in stopped if one in own], **sessions.get_warning()}

    def visible_sessions(self, caller: Caller) -> Iterable[AnySession]:
        """Return the sessions that this caller sees."""
        return (session for session in self._sessions.list() if caller.sees(session.new.owner))

    def summaries_for(self, caller: Caller, now: float) -> list[dict[str, Any]]:
        """Return a summary of each session that the caller sees; made once for all viewers."""
        if now - self._summaries[0] >= self.settings.period / 2:
            self._summaries = (
                now,
                [(session.new.owner, summarize_session(session)) for session in self._sessions.list()],
            )
        return [line for owner, line in self._summaries[1] if caller.sees(owner)]

    def get_detail(self, session: AnySession, now: float) -> tuple[float, BinaryPart]:
        """Return the time and content of this session's full status, which is built once for all viewers."""
        known = self._details.get(session.id)
        if known is None or known[1] is not session or now - known[0] >= self.settings.detail_period:
            text = json.dumps(describe_session(session), allow_nan=False, separators=(",", ":"))
            known = self._details[session.id] = (now, session, BinaryPart({"kind": "detail"}, text.encode()))
        return known[0], known[2]

    def open_view(self, session: AnySession) -> LiveView:
        """Open the view of this session, which its viewers share."""
        view = self._views.get(session.id)
        if view is None or view.session is not session:
            view = self._views[session.id] = LiveView(session)
        view.viewers += 1
        return view

    def release_view(self, view: LiveView) -> None:
        """Release a view; the last viewer closes it."""
        view.viewers -= 1
        if view.viewers:
            return
        view.close()
        if self._views.get(view.session.id) is view:
            del self._views[view.session.id]
            self._details.pop(view.session.id, None)


class Viewer:
    """One open page of the dashboard; ``sent`` counts the messages sent to it."""

    def __init__(
        self, live: Live, socket: WebsocketImplProtocol, caller: Caller, is_still_authorized: Callable[[], bool]
    ):
        self.caller = caller
        self.connected_at = time.monotonic()
        self.sent = 0
        self._live = live
        self._socket = socket
        self._is_still_authorized = is_still_authorized
        self._acknowledged = 0
        self._has_acknowledged = asyncio.Event()
        self._session_id: str | None = None
        self._wants_pictures = False
        self._view: LiveView | None = None
        self._sent_ticks = 0
        self._sent_plan = 0
        self._detail_at = 0.0
        self._sent_pictures: dict[str, float] = {}
        self._summaries: list[dict[str, Any]] | None = None

    # Messages of the page.

    async def read(self) -> None:
        """Handle the page's messages until its socket ends, or an invalid message or too many (BadMessage)."""
        limit = self._live.settings.messages_per_second
        bucket = Bucket(limit, limit)
        while True:
            raw = await self._socket.recv()
            if raw is None:
                continue
            message, is_within_limit = parse_message(raw), bucket.take()
            if isinstance(message, StopAll):
                await self._stop(message)  # A stop is never refused.
            elif not is_within_limit:
                raise BadMessage(f"more than {limit} messages a second")
            elif isinstance(message, ViewSession):
                self._session_id, self._wants_pictures = message.session, message.pictures
            elif self._acknowledged < message.number <= self.sent:
                self._acknowledged = message.number
                self._has_acknowledged.set()

    async def _stop(self, message: StopAll) -> None:
        answer = {"stop": {"number": message.number, **await self._live.stop_all(message.reason, self.caller)}}
        with contextlib.suppress(WebsocketClosed, RequestCancelled):
            await self._socket.send(pack_message(answer))

    # Messages to the page.

    async def write(self) -> None:
        """Send updates to the page, at most once per period, and only while the page confirms them."""
        settings = self._live.settings
        try:
            while True:
                async with asyncio.timeout(settings.view_timeout):
                    while self.sent - self._acknowledged >= settings.ahead:
                        self._has_acknowledged.clear()
                        await self._has_acknowledged.wait()
                    if not self._is_still_authorized():
                        await self._socket.close(1008, "the key was taken back")
                        return
                    await self._socket.send(self._build_message(time.monotonic()))
                await asyncio.sleep(settings.period)
        except TimeoutError:
            self._live._cut_off(self, f"it has confirmed nothing for {settings.view_timeout:g} s")
        except (WebsocketClosed, RequestCancelled, ConnectionError):
            self.abort()
        except Exception:
            logger.exception("sending to a page of the dashboard failed")
            self.abort()

    def close(self, code: int, reason: str) -> None:
        """Close the socket without waiting for the page's own close."""
        self._socket.fail_connection(code, reason)

    def abort(self) -> None:
        """End the connection now."""
        if self._socket.io_proto is not None and self._socket.io_proto.transport is not None:
            self._socket.io_proto.transport.abort()

    def view_session(self, session: AnySession | None) -> None:
        """View another session, or none."""
        if self._view is not None:
            self._live.release_view(self._view)
        self._view = None if session is None else self._live.open_view(session)
        self._sent_ticks = self._sent_plan = 0
        self._detail_at = 0.0
        self._sent_pictures = {}

    def _build_message(self, now: float) -> bytes:
        self.sent += 1
        head: dict[str, Any] = {
            "number": self.sent,
            "now": now,
            "clock": time.time(),
            "viewers": len(self._live.viewers),
        }
        if self.sent == 1:
            head["caller"] = {"name": self.caller.name, "role": str(self.caller.role)}
        lines = self._live.summaries_for(self.caller, now)
        if lines != self._summaries:
            head["sessions"] = self._summaries = lines
        self._follow_request()
        if self._view is None:
            return pack_message(head)
        head["session"] = self._view.session.id
        return pack_message(head, self._build_parts(self._view, head, now))

    def _follow_request(self) -> None:
        sessions = self._live.visible_sessions(self.caller)
        session = next((one for one in sessions if one.id == self._session_id and one.stage is not Stage.DELETED), None)
        if session is not (None if self._view is None else self._view.session):
            self.view_session(session)

    def _build_parts(self, view: LiveView, head: dict[str, Any], now: float) -> list[BinaryPart]:
        parts = []
        at, detail = self._live.get_detail(view.session, now)
        if at != self._detail_at:
            self._detail_at = at
            parts.append(detail)
        robot_io = view.session.robot_io
        if robot_io is not None:
            rows = view.ticks_since(self._sent_ticks, now, len(robot_io.table))
            self._sent_ticks = view.tick_count
            if len(rows):
                parts.append(BinaryPart({"kind": "ticks", "shape": rows.shape}, rows.tobytes()))
            plan = view.plan
            if plan is not None and plan.number != self._sent_plan:
                self._sent_plan = plan.number
                times = {"begins": plan.begins - now, "ends": plan.ends - now}
                parts.append(BinaryPart({"kind": "plan", "shape": plan.points.shape, **times}, plan.points.tobytes()))
        if self._wants_pictures:
            parts += self._build_pictures(view, head, now)
        return parts

    def _build_pictures(self, view: LiveView, head: dict[str, Any], now: float) -> list[BinaryPart]:
        head["frame_ages"] = {camera: round(now - frame.received_at, 3) for camera, frame in view.frames.items()}
        parts = []
        for camera, picture in self._live.pictures.get_newest(view).items():
            if picture.received_at > self._sent_pictures.get(camera, 0.0):
                self._sent_pictures[camera] = picture.received_at
                about = {"kind": "picture", "camera": camera, "age": round(now - picture.received_at, 3)}
                parts.append(BinaryPart(about, picture.jpeg))
        self._live.pictures.request(view, now)
        return parts


CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# connect-src: 'self' covers the socket too, in every browser since 2022. Pictures of cameras are blobs.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)


@dataclass(frozen=True)
class StaticFile:
    """One static file as it is answered."""

    content: bytes
    type: str


def read_static_files() -> Mapping[str, StaticFile]:
    """Read all files of the page, by name."""
    static_files = {}
    for path in files("service.dashboard").joinpath("static").iterdir():
        kind = path.name.rpartition(".")[2]
        if kind in CONTENT_TYPES:
            static_files[path.name] = StaticFile(path.read_bytes(), CONTENT_TYPES[kind])
    return static_files

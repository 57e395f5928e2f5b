"""Dashboard files, and the socket that updates open pages."""

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
from service.dashboard.live_view import LiveView, Pictures, PictureSettings
from service.logging import sanitize_text
from service.sessions.store import Listed, Sessions
from service.stage import Stage

# Upper edges in milliseconds; the last bin is open.
EDGES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SPLIT = np.array((0.0, *EDGES, np.inf))


def line_of(session: Listed) -> dict[str, Any]:
    """One session in the list. Cheap: no percentile is taken of a session that is driven."""
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
    }
    if robot_io is None:
        # Nothing is measured yet, so this costs little; how far it is stands there.
        stats = session.status().stats
        return line | {name: value for name, value in stats.items() if name.startswith("progress")}
    hold = robot_io.controller.hold
    if hold is not None:
        line |= {"hold": hold.text, "hold_code": hold.code}
    return line


def detail_of(session: Listed) -> dict[str, Any]:
    """Everything of one session: its status as the API tells it, its joints, and how times are spread."""
    robot_io = session.robot_io
    detail: dict[str, Any] = {"status": vars(session.status()), "joints": [], "edges_ms": EDGES, "spread": {}}
    if robot_io is not None:
        detail["joints"] = [
            {"name": joint.name, "low": _finite(joint.low), "high": _finite(joint.high)}
            for joint in robot_io.table.joints
        ]
        spread: Mapping[str, np.ndarray] = {
            "inference": robot_io.runner.seconds["total"].samples,
            "lateness": robot_io.controller.lateness.samples,
        }
        detail["spread"] = {name: np.histogram(samples * 1e3, _SPLIT)[0].tolist() for name, samples in spread.items()}
    return detail


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


LONGEST_MESSAGE = 4096  # characters of what a page may say


@dataclass(frozen=True)
class Part:
    """Bytes behind the JSON, and what is said about them there (``size`` is added)."""

    about: Mapping[str, Any]
    content: bytes


def pack(head: Mapping[str, Any], parts: Sequence[Part] = ()) -> bytes:
    """Length of the JSON (4 bytes, little endian), the JSON, each part; all aligned to 4 bytes.

    Raises:
        ValueError: a number that JSON does not have.
    """
    about = [{**part.about, "size": len(part.content)} for part in parts]
    text = json.dumps({**head, "parts": about}, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return b"".join(
        (struct.pack("<I", len(text)), text, *(part.content + bytes(-len(part.content) % 4) for part in parts))
    )


class BadMessage(Exception):
    """What a page said cannot be understood; the text says why."""


@dataclass(frozen=True)
class Look:
    """Show this session from now on (None: none), with pictures or without."""

    session: str | None
    pictures: bool


@dataclass(frozen=True)
class Drawn:
    """Acknowledgement that the page has drawn message ``number``; without it no more are sent."""

    number: int


@dataclass(frozen=True)
class Stop:
    """Stop every robot. ``number`` comes back in the answer."""

    number: int
    reason: str


def parse_message(raw: str | bytes) -> Look | Drawn | Stop:
    """What a page said.

    Raises:
        BadMessage: it is none of the three.
    """
    if not isinstance(raw, str) or len(raw) > LONGEST_MESSAGE:
        raise BadMessage(f"wanted a text of at most {LONGEST_MESSAGE} characters")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadMessage("wanted JSON") from error
    match said:
        case {"type": "seen", "number": int(number)}:
            return Drawn(number)
        case {"type": "look", "session": None | str() as session}:
            return Look(session, said.get("pictures") is True)
        case {"type": "stop"}:
            # Nothing that is wrong with the rest may keep the robots moving.
            number, reason = said.get("number"), said.get("reason")
            return Stop(number if type(number) is int else 0, _plain(reason) or "asked for on the page")
    raise BadMessage("wanted an object of type look, seen or stop")


def _plain(text: object) -> str:
    return sanitize_text(text) if isinstance(text, str) else ""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveSettings:
    """How much viewers get; times in seconds.

    Attributes:
        viewers: sockets at a time.
        period: from one message to the next, at least.
        detail_period: from one full status of the session looked at to the next.
        ahead: messages on their way that the page has not said to have seen; it gets no more until it has.
        patience: a page that has seen nothing for so long is cut off.
        words_per_second: what a page may say; more cuts it off.
        pictures: how good and how many.
    """

    viewers: int = 16
    period: float = 0.1
    detail_period: float = 1.0
    ahead: int = 2
    patience: float = 5.0
    words_per_second: int = 50
    pictures: PictureSettings = field(default_factory=PictureSettings)


class Live:
    """All viewers of one server.

    Attributes:
        viewers: who looks on.
        cut: viewers that were cut off because they were too slow or said what makes no sense.
    """

    def __init__(self, sessions: Callable[[], Sessions], settings: LiveSettings | None = None):
        """``sessions`` are there when the first viewer comes."""
        self.settings = settings or LiveSettings()
        self.viewers: set[Viewer] = set()
        self.cut = 0
        self.pictures = Pictures(self.settings.pictures)
        self._sessions = sessions
        self._onlookers: dict[str, LiveView] = {}
        self._lines: tuple[float, list[tuple[str | None, dict[str, Any]]]] = (0.0, [])
        self._details: dict[str, tuple[float, Listed, Part]] = {}

    async def attend(
        self, socket: WebsocketImplProtocol, caller: Caller, is_still_authorized: Callable[[], bool] = lambda: True
    ) -> None:
        """Serve one upgraded socket until it ends, or until its key does."""
        if len(self.viewers) >= self.settings.viewers and not self._make_room(caller):
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
            viewer.look(None)
            writer.cancel()

    def _make_room(self, caller: Caller) -> bool:
        """Let the oldest page of whoever has the most go, if the newcomer has fewer still: nobody keeps others out."""
        had = Counter(viewer.caller.owner for viewer in self.viewers)
        most, count = had.most_common(1)[0]
        if count <= had[caller.owner] + 1:
            return False
        oldest = min((one for one in self.viewers if one.caller.owner == most), key=lambda one: one.since)
        self.viewers.discard(oldest)
        oldest.end(1013, "others want to look on, too")
        return True

    def _cut_off(self, viewer: "Viewer", why: str) -> None:
        self.cut += 1
        logger.warning("a page of %s is cut off: %s", viewer.caller.name, why)
        viewer.abort()

    async def stop(self, reason: str, caller: Caller) -> dict[str, Any]:
        """Stop every robot, whoever asks; how many there are, and the ids of those that the caller sees."""
        sessions = self._sessions()
        stopped = await sessions.emergency_stop(reason)
        logger.warning("emergency stop of %d sessions by %s, on the page", len(stopped), caller.name)
        own = {session.id for session in self.seen_by(caller)}
        return {"count": len(stopped), "stopped": [one for one in stopped if one in own], **sessions.caveat()}

    def seen_by(self, caller: Caller) -> Iterable[Listed]:
        """Sessions that are there for this caller."""
        return (session for session in self._sessions().list() if caller.sees(session.new.owner))

    def lines_for(self, caller: Caller, now: float) -> list[dict[str, Any]]:
        """A line of each session; made once for all viewers."""
        if now - self._lines[0] >= self.settings.period / 2:
            self._lines = (now, [(session.new.owner, line_of(session)) for session in self._sessions().list()])
        return [line for owner, line in self._lines[1] if caller.sees(owner)]

    def detail(self, session: Listed, now: float) -> tuple[float, Part]:
        """When it was made, and everything of this session; made once for all viewers, as it takes a millisecond."""
        known = self._details.get(session.id)
        if known is None or known[1] is not session or now - known[0] >= self.settings.detail_period:
            text = json.dumps(detail_of(session), allow_nan=False, separators=(",", ":"))
            known = self._details[session.id] = (now, session, Part({"kind": "detail"}, text.encode()))
        return known[0], known[2]

    def onlooker(self, session: Listed, caller: Caller) -> LiveView:
        """The one of this session, which is taken up and let go of by each viewer."""
        onlooker = self._onlookers.get(session.id)
        if onlooker is None or onlooker.session is not session:
            onlooker = self._onlookers[session.id] = LiveView(session)
        onlooker.viewers += 1
        return onlooker

    def let_go(self, onlooker: LiveView) -> None:
        """One viewer less."""
        onlooker.viewers -= 1
        if onlooker.viewers:
            return
        onlooker.close()
        if self._onlookers.get(onlooker.session.id) is onlooker:
            del self._onlookers[onlooker.session.id]
            self._details.pop(onlooker.session.id, None)


class Viewer:
    """One page that is open somewhere.

    Attributes:
        caller: whose sessions it sees.
        since: when it came.
        sent: messages sent to it.
    """

    def __init__(
        self, live: Live, socket: WebsocketImplProtocol, caller: Caller, is_still_authorized: Callable[[], bool]
    ):
        self.caller = caller
        self.since = time.monotonic()
        self.sent = 0
        self._live = live
        self._socket = socket
        self._is_still_authorized = is_still_authorized
        self._seen = 0
        self._has_seen = asyncio.Event()
        self._wanted: str | None = None
        self._wants_pictures = False
        self._onlooker: LiveView | None = None
        self._ticks = 0
        self._plan = 0
        self._detail_at = 0.0
        self._shown: dict[str, float] = {}
        self._lines: list[dict[str, Any]] | None = None

    # What it says.

    async def read(self) -> None:
        """Hear the page until its socket ends.

        Raises:
            BadMessage: it says what makes no sense, or too much.
        """
        budget, at = float(self._live.settings.words_per_second), time.monotonic()
        while True:
            raw = await self._socket.recv()
            if raw is None:
                continue
            now = time.monotonic()
            budget = min(
                budget + (now - at) * self._live.settings.words_per_second, self._live.settings.words_per_second
            )
            at = now
            word = parse_message(raw)
            if isinstance(word, Stop):
                # However much it says, and however slow it is.
                await self._stop(word)
            elif budget < 1:
                raise BadMessage(f"more than {self._live.settings.words_per_second} messages a second")
            elif isinstance(word, Look):
                self._wanted, self._wants_pictures = word.session, word.pictures
            elif self._seen < word.number <= self.sent:
                self._seen = word.number
                self._has_seen.set()
            budget -= 1

    async def _stop(self, word: Stop) -> None:
        answer = {"stop": {"number": word.number, **await self._live.stop(word.reason, self.caller)}}
        with contextlib.suppress(WebsocketClosed, RequestCancelled):
            await self._socket.send(pack(answer))

    # What it gets.

    async def write(self) -> None:
        """Tell the page what happens, at most once per period, and only as long as it keeps up."""
        settings = self._live.settings
        try:
            while True:
                async with asyncio.timeout(settings.patience):
                    while self.sent - self._seen >= settings.ahead:
                        self._has_seen.clear()
                        await self._has_seen.wait()
                    if not self._is_still_authorized():
                        await self._socket.close(1008, "the key was taken back")
                        return
                    await self._socket.send(self._message(time.monotonic()))
                await asyncio.sleep(settings.period)
        except TimeoutError:
            self._live._cut_off(self, f"it has seen nothing for {settings.patience:g} s")
        except (WebsocketClosed, RequestCancelled, ConnectionError):
            self.abort()
        except Exception:
            logger.exception("a page cannot be told what happens")
            self.abort()

    def end(self, code: int, reason: str) -> None:
        """Close the socket; nobody waits for the page to agree."""
        self._socket.fail_connection(code, reason)

    def abort(self) -> None:
        """End the connection now."""
        if self._socket.io_proto is not None and self._socket.io_proto.transport is not None:
            self._socket.io_proto.transport.abort()

    def look(self, session: Listed | None) -> None:
        """Look at another session, or at none."""
        if self._onlooker is not None:
            self._live.let_go(self._onlooker)
        self._onlooker = None if session is None else self._live.onlooker(session, self.caller)
        self._ticks = self._plan = 0
        self._detail_at = 0.0
        self._shown = {}

    def _message(self, now: float) -> bytes:
        self.sent += 1
        head: dict[str, Any] = {
            "number": self.sent,
            "now": now,
            "clock": time.time(),
            "viewers": len(self._live.viewers),
        }
        if self.sent == 1:
            head["caller"] = {"name": self.caller.name, "role": str(self.caller.role)}
        lines = self._live.lines_for(self.caller, now)
        if lines != self._lines:
            head["sessions"] = self._lines = lines
        self._look_where_wanted()
        if self._onlooker is None:
            return pack(head)
        head["session"] = self._onlooker.session.id
        return pack(head, self._parts(self._onlooker, head, now))

    def _look_where_wanted(self) -> None:
        sessions = self._live.seen_by(self.caller)
        session = next((one for one in sessions if one.id == self._wanted and one.stage is not Stage.DELETED), None)
        if session is not (None if self._onlooker is None else self._onlooker.session):
            self.look(session)

    def _parts(self, onlooker: LiveView, head: dict[str, Any], now: float) -> list[Part]:
        parts = []
        at, detail = self._live.detail(onlooker.session, now)
        if at != self._detail_at:
            self._detail_at = at
            parts.append(detail)
        robot_io = onlooker.session.robot_io
        if robot_io is not None:
            rows = onlooker.since(self._ticks, now, len(robot_io.table))
            self._ticks = onlooker.ticked_in_all
            if len(rows):
                parts.append(Part({"kind": "ticks", "shape": rows.shape}, rows.tobytes()))
            plan = onlooker.plan
            if plan is not None and plan.number != self._plan:
                self._plan = plan.number
                times = {"begins": plan.begins - now, "ends": plan.ends - now}
                parts.append(Part({"kind": "plan", "shape": plan.points.shape, **times}, plan.points.tobytes()))
        if self._wants_pictures:
            parts += self._pictures(onlooker, head, now)
        return parts

    def _pictures(self, onlooker: LiveView, head: dict[str, Any], now: float) -> list[Part]:
        head["frame_ages"] = {camera: round(now - frame.seen_at, 3) for camera, frame in onlooker.frames.items()}
        parts = []
        for camera, picture in self._live.pictures.newest(onlooker).items():
            if picture.seen_at > self._shown.get(camera, 0.0):
                self._shown[camera] = picture.seen_at
                about = {"kind": "picture", "camera": camera, "age": round(now - picture.seen_at, 3)}
                parts.append(Part(about, picture.jpeg))
        self._live.pictures.want(onlooker, now)
        return parts


TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# connect-src: 'self' covers the socket too, in every browser since 2022. Pictures of cameras are blobs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)


@dataclass(frozen=True)
class File:
    """One file as it is answered."""

    content: bytes
    type: str


def read_files() -> Mapping[str, File]:
    """File name to file, of all that the page is made of."""
    found = {}
    for path in files("service.dashboard").joinpath("static").iterdir():
        kind = path.name.rpartition(".")[2]
        if kind in TYPES:
            found[path.name] = File(path.read_bytes(), TYPES[kind])
    return found

"""Recordings of a server: start, stop, list, convert, delete."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from service.errors import InvalidRequest, RecordingRefused, UnknownRecording
from service.logging import sanitize_text
from service.recording.mcap_format import RecordingHeader, feature_names, replace_infinite
from service.recording.recorder import FAILED, LIMIT, OFF, ON, Recorder, RecorderLimits, RecordingSettings
from service.sessions.request import NewSession
from service.sessions.session import Session, SessionEvent
from service.sessions.store import AnySession
from service.stage import MOVING, Stage
from service.state import state_folder
from service.threads import WorkerThread, call_in_thread

if TYPE_CHECKING:
    from service.recording.library import RecordingEntry

logger = logging.getLogger(__name__)

INSTALL = "pip install -e '.[recording]'"
CanSee = Callable[[str | None], bool]
DISK_STUCK = "the disk does not take what was recorded before; look at it, or restart the server"
_FIGURES: Mapping[str, object] = {"file": None, "seconds": 0.0, "bytes": 0, "dropped": 0, "reason": None}
NOT_RECORDING: Mapping[str, object] = {"state": OFF, **_FIGURES}
MAX_UNFINISHED = 8  # Ended recordings that a blocked disk may keep open, each with a thread and unwritten frames.
CLOSE_TIMEOUT = 2.0  # Seconds to close a recording when the server ends.


class Recordings:
    """Recordings of one server's sessions, started by events of `on_event`. The event loop never waits for a disk.

    Attributes:
        list_worker: thread that lists recordings.
    """

    def __init__(self, settings: RecordingSettings, state: str | None):
        self._limits = RecorderLimits(free=settings.recording_free, bytes=settings.recording_limit)
        self._makes_datasets = settings.recording_datasets
        self._enabled: set[str] = set()
        self._recorders: dict[str, Recorder] = {}
        self._unfinished: dict[str, Recorder] = {}
        self._detach: dict[str, Callable[[], None]] = {}
        self._dataset_states: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_export = asyncio.Semaphore(1)
        self.list_worker = WorkerThread("recordings")
        self._is_closing = False
        if settings.recordings is not None:
            folder = Path(settings.recordings).expanduser()
        elif (folder := state_folder(state)) is not None:
            folder /= "recordings"
        self._refusal: str | None = None
        if folder is None:
            self._refusal = (
                "this server keeps no state, so there is no folder for recordings; start it with --recordings"
            )
        elif find_spec("mcap") is None or find_spec("pyarrow") is None:
            self._refusal = f"this server cannot record: the packages for it are missing; {INSTALL}, then restart it"
        else:
            from service.recording.library import RecordingLibrary

            # Imported now, because an import blocks other threads, and later a robot may be moving.
            import_module("service.recording.mcap_writer")

            self._library = RecordingLibrary(folder)

    def check_request(self, new: NewSession) -> None:
        """Check that a new session can be recorded if it asks for a recording.

        Raises:
            InvalidRequest: this server cannot record.
        """
        if new.record and self._refusal is not None:
            raise InvalidRequest(f"record: {self._refusal}", ("body", "record"))

    def set_recording(self, session: AnySession, is_on: bool) -> Mapping[str, object]:
        """Start recording a session (at its next start if it does not move), or stop recording it.

        Raises:
            RecordingRefused: this server cannot record, or the session is closed or interrupted.
        """
        if not isinstance(session, Session) or session.is_closed:
            raise RecordingRefused(
                f"session {session.id!r} is {session.stage} and cannot be recorded; restart it first"
            )
        if not is_on:
            self._enabled.discard(session.id)
            self._close_recorder(session.id, "switched off")
        elif self._refusal is not None:
            raise RecordingRefused(self._refusal)
        elif self._is_stuck():
            raise RecordingRefused(DISK_STUCK)
        else:
            self._enabled.add(session.id)
            if self._find_recorder(session.id) is None:
                self._recorders.pop(session.id, None)
                if session.stage in MOVING:
                    self._begin_recording(session).begin_episode("recording was switched on")
        return self.get_stats(session.id)

    def get_stats(self, session_id: str) -> Mapping[str, object]:
        """Return the recording part of a session's stats."""
        recorder = self._recorders.get(session_id)
        if recorder is not None and (recorder.state != OFF or session_id not in self._enabled):
            return recorder.get_stats()
        # An enabled session without a recorder waits for its first start.
        return {**NOT_RECORDING, "state": ON} if session_id in self._enabled else NOT_RECORDING

    def list_entries(self, can_see: CanSee) -> "Iterator[RecordingEntry]":
        """Yield the recordings that the caller may see, newest first; reads the disk, so it is for ``list_worker``."""
        if self._refusal is None:
            visible = cache(can_see)
            yield from (entry for entry in self._library.list_entries() if visible(entry.owner))

    def prepare_description(self) -> "Callable[[RecordingEntry], dict[str, object]]":
        """Return a function that describes a recording, JSON-ready; it reads the disk, so it is for ``list_worker``."""
        recorders = [recorder for recorder in self._recorders.values() if recorder.state == ON]
        running = {recorder.name: {"state": ON, "seconds": recorder.get_stats()["seconds"]} for recorder in recorders}
        datasets = dict(self._dataset_states)

        def describe(entry: "RecordingEntry") -> dict[str, object]:
            dataset = datasets.get(entry.name) or ("ready" if self._library.has_dataset(entry.name) else "none")
            row: dict[str, object] = {**vars(self._library.read_entry(entry.name) or entry), "dataset": dataset}
            del row["owner"]
            return row | running.get(entry.name, {})

        return describe

    async def remove(self, name: str, can_see: CanSee) -> None:
        """Remove a recording and its dataset.

        Raises:
            UnknownRecording: the recording does not exist, or the caller may not see it.
            RecordingRefused: the recording is being written, or converted to a dataset.
        """
        unknown = UnknownRecording("there is no recording of this name; GET /recordings lists them")
        if self._refusal is not None or self._library.find_file(name) is None:
            raise unknown
        entry = await asyncio.to_thread(self._library.read_entry, name)
        if entry is None or not can_see(entry.owner):
            raise unknown
        if name in self._unfinished:
            raise RecordingRefused(f"{name} is being recorded; switch the recording off or delete its session first")
        if self._dataset_states.get(name) in ("waiting", "making"):
            raise RecordingRefused(f"{name} is being made into a dataset; try again when that is done")
        try:
            if not await asyncio.to_thread(self._library.remove, name):
                raise unknown
        except OSError as error:
            raise RecordingRefused(f"{name} cannot be removed: {error.strerror}") from error
        self._dataset_states.pop(name, None)

    def on_event(self, event: SessionEvent) -> None:
        """Begin, continue or end the recording of a session."""
        session, reason = event.session, str(event.payload.get("reason") or "by request")
        session_id, name = session.new.session_id, event.name
        recorder = self._find_recorder(session_id)
        if name == "session.deleted":
            self._close_recorder(session_id, "the session was deleted")
            self._enabled.discard(session_id)
        if event.state.stage is Stage.DELETED or not isinstance(session, Session):
            return
        if name == "session.created":
            self._recorders.pop(session_id, None)
            session.stats_sources.append(lambda: {"recording": self.get_stats(session_id)})
            if session.new.record and self._refusal is None:
                self._enabled.add(session_id)
        elif name == "session.started":
            if (recorder := self._find_or_begin(session)) is not None:
                recorder.begin_episode(reason)
        elif name == "session.stopped" and recorder is not None:
            recorder.end_episode(reason)
        elif name == "session.error":
            # The session may never start again, and its file must be closed.
            self._close_recorder(session_id, reason)

    def on_act(self, session: Session, begins_motion: bool) -> None:
        """Record a client that runs the control loop: begin an episode with its motion, or after a stop."""
        before = self._recorders.get(session.id)
        if before is not None and before.state not in (ON, OFF) and not begins_motion:
            return  # It failed; a new motion or another request to record tries again.
        recorder = self._find_or_begin(session)
        if recorder is not None and (begins_motion or not recorder.is_running):
            recorder.begin_episode(f"a client asked for actions ({session.protocol})")

    def _find_or_begin(self, session: Session) -> Recorder | None:
        """Return the session's recorder, which begins now if the session is to be recorded."""
        recorder = self._find_recorder(session.id)
        if recorder is None and session.id in self._enabled:
            if not self._is_stuck():
                return self._begin_recording(session)
            logger.error("session %s is not recorded: %s", session.id, DISK_STUCK)
            self._enabled.discard(session.id)
        return recorder

    def _is_stuck(self) -> bool:
        """Whether too many ended recordings are still being written."""
        return sum(recorder.is_closing for recorder in self._unfinished.values()) >= MAX_UNFINISHED

    def _begin_recording(self, session: Session) -> Recorder:
        policies, robot_io, loop = session.policies, session.robot_io, asyncio.get_running_loop()
        assert robot_io is not None, "only loaded sessions start"

        def commit() -> str | None:
            return policies.running.commit if policies.running else None

        def ended(recorder: Recorder) -> None:
            with suppress(RuntimeError):  # The event loop has ended.
                loop.call_soon_threadsafe(self._on_recorder_closed, recorder)

        recorder = Recorder(
            self._library.new_path(session.id),
            _create_header(session, commit()),
            self._limits,
            get_commit=commit,
            get_task=lambda: robot_io.runner.followed,
            on_closed=ended,
        )
        self._recorders[session.id] = self._unfinished[recorder.name] = recorder
        self._detach[recorder.name] = session.attach(recorder)
        logger.info("session %s is recorded as %s", session.id, recorder.name)
        return recorder

    def _close_recorder(self, session_id: str, reason: str) -> None:
        recorder = self._find_recorder(session_id)
        if recorder is not None:
            recorder.close(reason)

    def _on_recorder_closed(self, recorder: Recorder) -> None:
        self._unfinished.pop(recorder.name, None)
        detach = self._detach.pop(recorder.name, None)
        if detach is not None:
            detach()
        # A full disk has no room for a dataset, and where the client runs the loop, its commands are unknown.
        if self._makes_datasets and not self._is_closing and recorder.state in (OFF, LIMIT) and recorder.has_commands:
            self._dataset_states[recorder.name] = "waiting"
            task = asyncio.create_task(self._make_dataset(recorder.name), name=f"dataset {recorder.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _make_dataset(self, name: str) -> None:
        async with self._one_export:
            path, folder = self._library.folder / f"{name}.mcap", self._library.folder / name
            self._dataset_states[name] = "making"
            command = (sys.executable, "-m", "service.recording.library", str(path), str(folder))
            try:
                code, output = await run_process(command)
            except OSError as error:
                self._dataset_states[name] = FAILED
                logger.error("no dataset was made of recording %s: %s", name, error.strerror)
                return
        lines = [sanitize_text(line, 500) for line in output[-4096:].decode(errors="replace").strip().splitlines()]
        if code == 0:
            self._dataset_states.pop(name, None)
            logger.info("recording %s is a dataset now", name)
            if lines:
                logger.warning("the dataset of recording %s is incomplete: %s", name, lines[-1])
        else:
            self._dataset_states[name] = FAILED
            logger.error("no dataset was made of recording %s: %s", name, lines[-1] if lines else f"exit code {code}")

    def _find_recorder(self, session_id: str) -> Recorder | None:
        recorder = self._recorders.get(session_id)
        return recorder if recorder is not None and recorder.state == ON and not recorder.is_closing else None

    async def close(self) -> None:
        """End all recordings, and cancel the conversion to datasets."""
        self._is_closing = True
        self.list_worker.close(0.0)
        recorders = list(self._unfinished.values())
        for recorder in recorders:
            recorder.close("the server was shut down")
        for task in self._tasks:
            task.cancel()
        ending = [asyncio.to_thread(recorder.join, CLOSE_TIMEOUT) for recorder in recorders]
        for is_over, recorder in zip(await asyncio.gather(*ending), recorders, strict=True):
            if not is_over:
                logger.error("recording %s could not be closed in %g s", recorder.name, CLOSE_TIMEOUT)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._dataset_states:
            logger.warning(
                "no dataset was made of %s; `robojax recordings export` does", ", ".join(sorted(self._dataset_states))
            )


async def run_process(command: Sequence[str]) -> tuple[int, bytes]:
    """Run a process until it ends or the caller is cancelled; return its exit code and standard error.

    It is started in a thread, because a fork on the event loop would delay ticks by 10 ms.
    """
    nothing = subprocess.DEVNULL
    start = partial(subprocess.Popen, command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)
    starting = call_in_thread(start, name="a dataset's start")
    talking: asyncio.Future[tuple[bytes, bytes]] | None = None
    try:
        child = await asyncio.shield(starting)
        talking = call_in_thread(child.communicate, name="a dataset")
        _, output = await asyncio.shield(talking)
    except asyncio.CancelledError:
        child = await starting
        child.terminate()
        await (talking or call_in_thread(child.communicate, name="a dataset's end"))
        raise
    return child.returncode, output


def _create_header(session: Session, commit: str | None) -> RecordingHeader:
    robot_io, new = session.robot_io, session.new
    assert robot_io is not None, "only loaded sessions start"
    joints, config, limits = robot_io.table.joints, robot_io.controller.config, robot_io.controller.guard.limits
    low, high = np.array([(joint.low, joint.high) for joint in joints], float).T
    features, robot = feature_names(joints)
    return RecordingHeader(
        session_id=session.id,
        policy_path=new.policy_path,
        policy_type=new.policy_type,
        commit=commit,
        rate=config.rate,
        action_rate=config.action_rate,
        joints=robot_io.table.names,
        features=features,
        # Ranges of the joints, and the session's limits for joints without a known range.
        low=replace_infinite(np.where(np.isfinite(low), low, limits.low).tolist()),
        high=replace_infinite(np.where(np.isfinite(high), high, limits.high).tolist()),
        cameras=tuple(new.camera_names),
        task=new.language_instruction or "",
        is_dry_run=new.dry_run,
        version=version("robojax"),
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        robot_type=robot,
        owner=new.owner,
        limits={"mode": limits.mode, **limits.as_json()},
        protocol=session.protocol,
    )

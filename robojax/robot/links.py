"""Connections of a robot to its session: a direct stream, or rooms."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from robojax.client import (
    AsyncSession,
    Command,
    MessageRefused,
    ProtocolError,
    RequestRefused,
    RobojaxError,
    ServerUnreachable,
    SessionStatus,
    StatusMessage,
    StopMessage,
    StreamClosed,
)
from robojax.client.codec import pack_observation
from robojax.client.stream import AsyncStream, encode_message
from robojax.robot.arm_thread import ArmThread
from robojax.robot.errors import RobotError, SessionTaken

# Seconds before each further attempt to connect to a lost server.
RETRY_WAITS = (0.2, 0.5, 1.0, 2.0)
STOP_REPORT_DELAY = 1.0  # seconds after a local emergency stop, after which the link reports it if the program did not
LATCH_CHECK_INTERVAL = 0.05  # seconds
ROBOT_TAKEN = 4409
# Statuses of temporary refusals: a person may restart an interrupted session, or reset a latch.
FOR_NOW = (409, 429, 503)
Pictures = Callable[[], Mapping[str, np.ndarray]]
OnEvent = Callable[[str], None]


class StreamLink:
    """Connection over the stream of a direct session, which reconnects after failures.

    The program and the server report their latches to each other. The program releases its latch only if the same
    instance of the session first confirmed the emergency stop and then reports no latch, because a person reset it. A
    stop that the server does not know, e.g. because the connection was lost, becomes an emergency stop of the session.
    """

    def __init__(
        self,
        session: AsyncSession,
        arm_thread: ArmThread,
        pictures: Pictures,
        rate: float,
        is_compressed: bool,
        on_event: OnEvent,
    ):
        self._session, self._arm_thread, self._pictures = session, arm_thread, pictures
        self._period, self._is_compressed, self._on_event = 1 / rate, is_compressed, on_event
        self._reported: set[str] = set()
        self._confirmed: tuple[str | None, int] | None = None  # instance of the session, number of the stop

    async def run(self, linked: asyncio.Event) -> None:
        """Send observations and receive commands until cancelled; ``linked`` is set while connected.

        Raise ``RobotError`` if reconnecting cannot help.
        """
        tries = 0
        while True:
            try:
                async with self._session.stream() as stream:
                    tries = 0
                    await run_until_first_ends(
                        self._read(stream), self._send(stream, linked), self._report_stops(stream)
                    )
            except (RequestRefused, ServerUnreachable, StreamClosed, ProtocolError) as error:
                if isinstance(error, RequestRefused) and error.status not in FOR_NOW:
                    raise RobotError(f"the server refused: {error}", "robojax sessions lists the sessions") from error
                if isinstance(error, StreamClosed) and error.code == ROBOT_TAKEN:
                    raise SessionTaken(str(error), "end the other client first") from error
                if isinstance(error, RequestRefused):
                    self._report_once(error.code, f"the server says: {error.text}")
                    self._arm_thread.stop(f"the server refuses for now ({error.code})")
                else:
                    self._arm_thread.stop(f"the server is gone ({error})")
                linked.clear()
                await asyncio.sleep(RETRY_WAITS[min(tries, len(RETRY_WAITS) - 1)])
                tries += 1

    async def _report_latch(self, stream: AsyncStream, reported: int) -> int:
        """Report a changed latch of the arm; return the number of the reported stop, 0 for no stop."""
        latch = self._arm_thread.latch
        number = 0 if latch is None else latch.number
        if number != reported:
            await stream.report_latch(None if latch is None else latch.reason)
        return number

    async def _report_stops(self, stream: AsyncStream) -> None:
        """Request an emergency stop of the session for each local stop that the server does not know."""
        while True:
            latch = self._arm_thread.latch
            is_local = latch is not None and self._confirmed != (stream.welcome.instance, latch.number)
            # With a lost arm, the program ends and stops its session, so no reset is possible.
            if latch is not None and is_local and not latch.is_final:
                left = latch.since + STOP_REPORT_DELAY - time.monotonic()
                if left <= 0:
                    await stream.emergency_stop(latch.reason)
                    left = STOP_REPORT_DELAY
                await asyncio.sleep(left)
            else:
                await asyncio.sleep(LATCH_CHECK_INTERVAL)

    def _take_latch(self, instance: str | None, reason: str | None) -> None:
        """Follow the latch of the session: latch the arm with it, and release it after the session's reset."""
        latch = self._arm_thread.latch
        if reason is not None:
            if latch is None:
                self._arm_thread.stop(f"emergency stop: {reason}", is_latched=True)
                latch = self._arm_thread.latch
            assert latch is not None, "it was latched above"
            self._confirmed = (instance, latch.number)
        elif latch is not None and self._confirmed == (instance, latch.number):
            self._confirmed = None
            release_latch(self._arm_thread, latch.number, self._session.id, self._on_event)

    async def _send(self, stream: AsyncStream, linked: asyncio.Event) -> None:
        number, sent_at, due, reported = 0, 0.0, time.monotonic(), 0
        while True:
            reported = await self._report_latch(stream, reported)
            newest = self._arm_thread.pose
            if newest is not None and newest[1] > sent_at:
                pose, observed_at = newest
                number += 1
                data = await asyncio.to_thread(self._packed, pose, observed_at, number)
                await stream.send(data)
                sent_at = observed_at
                linked.set()
            else:
                # Without a new reading of the arm, only show the server that this program is alive.
                await stream.ping(number)
            due = max(due + self._period, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _packed(self, pose: Mapping[str, float], observed_at: float, number: int) -> bytes:
        observation = pack_observation(self._pictures(), pose, number=number, is_compressed=self._is_compressed)
        age = max(0.0, time.monotonic() - observed_at) * 1e3
        return encode_message("observation", observation | {"age_ms": min(age, 10_000.0)})

    async def _read(self, stream: AsyncStream) -> None:
        while True:
            match await stream.next():
                case Command(joints=joints):
                    self._arm_thread.command(joints)
                case StopMessage(reason=reason):
                    self._arm_thread.stop(f"emergency stop: {reason}", is_latched=True)
                    self._take_latch(stream.welcome.instance, reason)
                case StatusMessage(status=status, hold=hold, reason=reason, latch=latch):
                    self._take_latch(stream.welcome.instance, latch)
                    why = hold or reason
                    self._on_event(f"session {self._session.id}: {status}" + (f" ({why})" if why else ""))
                case MessageRefused(code=code, detail=detail):
                    self._report_once(code, f"the server cannot use what is sent: {detail} ({code})")
                case _:
                    pass

    def _report_once(self, code: str, text: str) -> None:
        if code not in self._reported:
            self._reported.add(code)
            self._on_event(text)


def release_latch(arm_thread: ArmThread, number: int, session_id: str, on_event: OnEvent) -> None:
    """Release the arm's latch after the session's reset; if that is impossible, latch the arm again."""
    if (problem := arm_thread.reset(number)) is None:
        on_event(f"the emergency stop was reset; robojax start {session_id} moves the arm again")
    else:
        on_event(f"the emergency stop was reset, but the arm stays held: {problem}")
        arm_thread.stop(problem, is_latched=True)


class RobotRoomsLink:
    """Connection over the rooms of a session."""

    def __init__(
        self,
        session: AsyncSession,
        transport: str,
        arm_thread: ArmThread,
        pictures: Pictures,
        rate: float,
        on_event: OnEvent,
    ):
        self._session, self._transport = session, transport
        self._arm_thread, self._pictures, self._rate, self._on_event = arm_thread, pictures, rate, on_event
        self._passed_stop = 0  # number of the newest stop that the rooms know

    async def run(self, linked: asyncio.Event) -> None:
        """Send and receive as ``StreamLink.run``; lost rooms are joined again."""
        from service.errors import ServiceError

        try:
            async with self._session.robot(
                self._transport,
                on_command=lambda values, _: self._arm_thread.command(values),
                on_emergency_stop=self._take_stop,
                rate=self._rate,
            ) as robot:
                await run_until_first_ends(
                    self._send(robot, linked), self._report_status(robot), self._sync_latch(robot)
                )
        except ServiceError as error:
            raise RobotError(f"the rooms cannot be used: {error}", "robojax sessions lists the sessions") from error

    def _take_stop(self, stop: Any) -> None:
        self._arm_thread.stop(f"emergency stop: {stop.reason}", is_latched=True)
        if (latch := self._arm_thread.latch) is not None:
            self._passed_stop = latch.number

    async def _sync_latch(self, robot: Any) -> None:
        """Send local stops to the rooms, and release the arm's latch after ``robot`` has released its latch.

        ``robot`` polls the session's server, and releases its latch after a confirmed stop was reset there.
        """
        while True:
            latch = self._arm_thread.latch
            if latch is not None and latch.number != self._passed_stop:
                self._passed_stop = latch.number
                if robot.latch is None and not latch.is_final:
                    robot.emergency_stop(latch.reason)
            elif latch is not None and robot.latch is None and not latch.is_final:
                release_latch(self._arm_thread, latch.number, self._session.id, self._on_event)
            await asyncio.sleep(LATCH_CHECK_INTERVAL)

    async def _send(self, robot: Any, linked: asyncio.Event) -> None:
        sent_at, due = 0.0, time.monotonic()
        while True:
            newest = self._arm_thread.pose
            if newest is not None and newest[1] > sent_at:
                pose, sent_at = newest
                for name, picture in self._pictures().items():
                    robot.show(name, picture)
                robot.send_joints(pose)
                linked.set()
            due = max(due + 1 / self._rate, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _report_status(self, robot: Any) -> None:
        """Report the session's status, which rooms do not send, and commands that arrive during a latched stop."""
        last, refused = None, 0
        while True:
            if robot.refused > refused:
                refused = robot.refused
                self._on_event(
                    f"{refused} commands refused: an emergency stop is latched ({robot.latch or 'now reset'})"
                )
            try:
                status = await self._session.status()
                if (description := describe_status(status)) != last:
                    self._on_event(description)
                    last = description
            except RobojaxError:
                last = None
            await asyncio.sleep(1)


def describe_status(status: SessionStatus) -> str:
    """Describe a session's status in one line."""
    why = status.error_message or status.stats.get("hold")
    return f"session {status.session_id}: {status.status}" + (f" ({why})" if why else "")


async def run_until_first_ends(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines until the first ends or fails; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()

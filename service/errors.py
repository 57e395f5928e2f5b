"""Errors of the service as one tree of exceptions. Each class carries its HTTP status and a stable code."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class ServiceError(Exception):
    """Base of every error the service raises on purpose. Its text is safe to send to a client.

    A subclass names its status, code and fixed ``retry-after`` header (seconds) in its class statement, and inherits
    what it does not name.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(
        cls, status: int | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        if status is not None:
            cls.status = status
        if code is not None:
            cls.code = code
        if retry_after is not None:
            cls.headers = MappingProxyType({"retry-after": str(retry_after)})


class InvalidRequest(ServiceError, status=422, code="invalid"):
    """The request was parsed, but a value cannot be used.

    Attributes:
        loc: place of the value, as in a ValidationError, e.g. ``("body", "camera_names", 0)``.
    """

    def __init__(self, message: str, loc: tuple[str | int, ...] = ("body",)):
        super().__init__(message)
        self.loc = loc


class UnitsDiffer(InvalidRequest, code="joints_units"):
    """The state is far outside the data that the policy was trained on, as in another unit."""

    def __init__(self, message: str):
        super().__init__(message, ("body", "state"))


class Unauthorized(ServiceError, status=401, code="unauthorized"):
    """The request has no key or token, or an unknown one."""

    headers = MappingProxyType({"www-authenticate": "Bearer"})


class Forbidden(ServiceError, status=403, code="forbidden"):
    """The caller's role does not allow this; the message names the role that does."""


class UnknownSession(ServiceError, status=404, code="unknown_session"):
    """No session has this id."""


class SessionExists(ServiceError, status=409, code="session_exists"):
    """A live session already has this id."""


class MoveRefused(ServiceError, status=409, code="move_refused"):
    """The session's stage does not allow this move; the message names the allowed ones."""


class RoomsTaken(ServiceError, status=409, code="rooms_taken"):
    """A room of the new session would have the id of another session's room; the message names both."""


class RobotTaken(ServiceError, status=409, code="robot_taken"):
    """Another controller commands the robot of these rooms; only one at a time may."""


class TooManyRequests(ServiceError, status=429, code="too_many_requests"):
    """The caller sent more requests than it may in this time; ``headers`` has ``retry-after`` in whole seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.headers = {"retry-after": str(max(math.ceil(retry_after), 1))}


class Overloaded(ServiceError, status=409, code="overloaded"):
    """The devices have no time for another robot at the requested rate; the message has the measured times."""


class TooManySessions(ServiceError, status=429, code="too_many_sessions"):
    """The server has the largest number of sessions that the settings allow."""


class PolicyError(ServiceError, status=422, code="policy"):
    """The policy cannot be loaded, or does not fit the session's request."""


class PolicyNotCached(ServiceError, status=404, code="policy_not_cached"):
    """The policy is on the Hub only, and a client without a key must not cause its download."""


class PolicyFailed(ServiceError, status=500, code="policy_failed"):
    """A loaded policy raised, or returned something that is not an action chunk."""


class UnknownDeployment(ServiceError, status=404, code="unknown_deployment"):
    """No policy update has this id."""


class UpdateFailed(ServiceError, status=409, code="update_failed"):
    """The session cannot get another policy now; the message says why."""


class SourceFailed(ServiceError, status=502, code="source"):
    """The source of policies refused, cannot be reached, or returned broken files."""


class UnknownModel(ServiceError, status=404, code="unknown_model"):
    """No model was loaded under this name."""


class NoDevice(ServiceError, status=500, code="no_device"):
    """The devices that policies should run on are missing."""


class NoEngine(NoDevice, code="no_engine"):
    """The cluster whose engines should run policies cannot be joined, or has none."""


class ServerNameTaken(NoEngine, status=503, code="front_name_taken"):
    """Another server of the shared database already uses this server's name."""


class NoDatabase(ServiceError, status=503, code="no_directory"):
    """The database in which servers share their sessions cannot be used."""


class ModelError(ServiceError, status=422, code="model"):
    """A model cannot be loaded."""


class ModelFailed(ServiceError, status=500, code="model_failed"):
    """A loaded model raised, or returned something that the format of the answer cannot hold."""


class NotKept(ServiceError, status=503, code="not_kept"):
    """The change cannot be written to disk, so it would be lost with the process; the message says what to do."""


class UnknownRecording(ServiceError, status=404, code="unknown_recording"):
    """No recording has this name, or it belongs to a session of another owner."""


class RecordingRefused(ServiceError, status=409, code="recording_refused"):
    """A recording cannot be started or removed now; the message says why."""


class SessionLoading(ServiceError, status=503, code="loading"):
    """The session's policy is still being loaded; ``headers`` has ``retry-after`` in whole seconds."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after)}


class Compiling(ServiceError, status=503, code="compiling", retry_after=5):
    """The policy is being compiled for images of a new size; try again soon."""


class ModelBusy(ServiceError, status=503, code="model_busy", retry_after=1):
    """The largest allowed number of forward passes runs, or a pass did not finish in time."""


class UnknownForm(ServiceError, status=415, code="unknown_form"):
    """The format of the request's body is not supported; the message names the supported formats."""


class NotAcceptable(ServiceError, status=406, code="not_acceptable"):
    """The request accepts no supported format of the response; the message names the supported formats."""


class TooLarge(ServiceError, status=413, code="too_large"):
    """The request has more bytes, arrays or work than the settings allow."""


class TransportError(ServiceError, status=502, code="transport"):
    """The transport server refused, cannot be reached, or broke the protocol."""

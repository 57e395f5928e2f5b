"""Errors of the service as a tree; each class carries the HTTP status and a stable code.

ServiceError                  500 internal
├── InvalidRequest            422 invalid          a field that parsed but cannot be used
│   └── UnitsDiffer           422 joints_units     a state far outside the policy's training data, as in another unit
├── Unauthorized              401 unauthorized     no key or token where one is wanted, or one that is not known
├── Forbidden                 403 forbidden        a key whose role does not allow it
├── UnknownSession            404 unknown_session  also one that belongs to another key
├── SessionExists             409 session_exists
├── MoveRefused               409 move_refused     the stage table forbids the move
├── RoomsTaken                409 rooms_taken      a room of the new session would be another session's, too
├── RobotTaken                409 robot_taken      another controller commands the robot of these rooms
├── Overloaded                409 overloaded       the devices have no time for another robot at its rate
├── TooManySessions           429 too_many_sessions
├── TooManyRequests           429 too_many_requests  a caller asked for more than it may in this time
├── PolicyError               422 policy           the policy cannot be loaded or does not fit the request
├── PolicyFailed              500 policy_failed    a loaded policy raised, or gave something that is not a chunk
├── LoadsStuck                503 loads_stuck      loads that were ended still run: nothing is loaded until one is over
├── UnknownDeployment         404 unknown_deployment
├── UpdateFailed              409 update_failed    another policy cannot be brought to a session now
├── SourceFailed              502 source           where policies come from refused, vanished or gave something broken
├── UnknownModel              404 unknown_model
├── ModelError                422 model            a model cannot be loaded
├── ModelFailed               500 model_failed     a loaded model raised
├── UnknownRecording          404 unknown_recording
├── RecordingRefused          409 recording_refused  this server, or this session, cannot be recorded now
├── NotKept                   503 not_kept         it cannot be written down, so it would be lost with the process
├── NoDatabase                503 no_directory     the database in which servers share their sessions does not answer
├── SessionLoading            503 loading          the session's policy is still being loaded
├── Compiling                 503 compiling        a policy is made ready for pictures of a new size
├── ModelBusy                 503 model_busy       as many forward passes are asked for as are allowed, or one took long
├── UnknownForm               415 unknown_form     a body in a form that is not read
├── NotAcceptable             406 not_acceptable   an answer in a form that is not written
├── TooLarge                  413 too_large        more bytes, arrays or work than the settings allow
└── TransportError            502 transport        the transport server refused, vanished or broke the wire
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class ServiceError(Exception):
    """Base of every error the service raises on purpose; its text is safe to send to a client."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    headers: Mapping[str, str] = MappingProxyType({})


class InvalidRequest(ServiceError):
    """The request parsed, but one of its values cannot be used.

    Attributes:
        loc: where it stands, as in a ValidationError, e.g. ``("body", "camera_names", 0)``.
    """

    status = 422
    code = "invalid"

    def __init__(self, message: str, loc: tuple[str | int, ...] = ("body",)):
        super().__init__(message)
        self.loc = loc


class UnitsDiffer(InvalidRequest):
    """The state is far outside the data that the policy was trained on, as in another unit."""

    code = "joints_units"

    def __init__(self, message: str):
        super().__init__(message, ("body", "state"))


class Unauthorized(ServiceError):
    """The request needs a key or token, and has none or one that is not known (any more)."""

    status = 401
    code = "unauthorized"
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class Forbidden(ServiceError):
    """The caller's role does not allow this; the message names the role that does."""

    status = 403
    code = "forbidden"


class UnknownSession(ServiceError):
    """No session has this id."""

    status = 404
    code = "unknown_session"


class SessionExists(ServiceError):
    """A live session already has this id."""

    status = 409
    code = "session_exists"


class MoveRefused(ServiceError):
    """The session's stage does not allow this move; the message names the allowed ones."""

    status = 409
    code = "move_refused"


class RoomsTaken(ServiceError):
    """A room of the new session would have the id of another session's room; the message names both."""

    status = 409
    code = "rooms_taken"


class RobotTaken(ServiceError):
    """Another controller commands the robot of these rooms; only one at a time may."""

    status = 409
    code = "robot_taken"


class TooManyRequests(ServiceError):
    """The caller sent more requests than it may in this time.

    Attributes:
        headers: ``retry-after`` with whole seconds.
    """

    status = 429
    code = "too_many_requests"

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.headers = {"retry-after": str(max(math.ceil(retry_after), 1))}


class Overloaded(ServiceError):
    """The devices have no time for another robot at the requested rate; the message has the figures."""

    status = 409
    code = "overloaded"


class TooManySessions(ServiceError):
    """The server has as many sessions as the settings allow."""

    status = 429
    code = "too_many_sessions"


class PolicyError(ServiceError):
    """The policy cannot be loaded, or does not fit what the session asks for."""

    status = 422
    code = "policy"


class PolicyFailed(ServiceError):
    """A loaded policy raised, or returned something that is not an action chunk."""

    status = 500
    code = "policy_failed"


class LoadsStuck(ServiceError):
    """Too many cancelled loads still run in this process: nothing more is loaded until one of them is over."""

    status = 503
    code = "loads_stuck"
    headers = MappingProxyType({"retry-after": "30"})


class UnknownDeployment(ServiceError):
    """No policy update has this id."""

    status = 404
    code = "unknown_deployment"


class UpdateFailed(ServiceError):
    """The session cannot get another policy now; the message says why."""

    status = 409
    code = "update_failed"


class SourceFailed(ServiceError):
    """The place that policies come from refused, vanished, or gave something broken."""

    status = 502
    code = "source"


class UnknownModel(ServiceError):
    """No model was loaded under this name."""

    status = 404
    code = "unknown_model"


class NoDevice(ServiceError):
    """The devices that policies should run on are missing."""

    status = 500
    code = "no_device"


class NoEngine(NoDevice):
    """The cluster whose engines should run policies cannot be joined, or has none."""

    code = "no_engine"


class FrontNameTaken(NoEngine):
    """Another server of the shared database already uses this server's name."""

    status = 503
    code = "front_name_taken"


class NoDatabase(ServiceError):
    """The database in which servers share their sessions cannot be used."""

    status = 503
    code = "no_directory"


class ModelError(ServiceError):
    """A model cannot be loaded."""

    status = 422
    code = "model"


class ModelFailed(ServiceError):
    """A loaded model raised, or returned something that the format of the answer cannot hold."""

    status = 500
    code = "model_failed"


class NotKept(ServiceError):
    """The change cannot be written to disk, so it would be lost with the process; the message says what to do."""

    status = 503
    code = "not_kept"


class UnknownRecording(ServiceError):
    """No recording has this name, or it belongs to somebody else's session."""

    status = 404
    code = "unknown_recording"


class RecordingRefused(ServiceError):
    """A recording cannot be begun or removed now; the message says why."""

    status = 409
    code = "recording_refused"


class SessionLoading(ServiceError):
    """The session's policy is still being loaded; try again later.

    Attributes:
        headers: ``retry-after`` with whole seconds.
    """

    status = 503
    code = "loading"

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after)}


class Compiling(ServiceError):
    """The policy is being compiled for images of a new size; try again soon."""

    status = 503
    code = "compiling"
    headers = MappingProxyType({"retry-after": "5"})


class ModelBusy(ServiceError):
    """As many forward passes run as are allowed, or one did not finish in time."""

    status = 503
    code = "model_busy"
    headers = MappingProxyType({"retry-after": "1"})


class UnknownForm(ServiceError):
    """The request's body has a format that is not read; the message names those that are."""

    status = 415
    code = "unknown_form"


class NotAcceptable(ServiceError):
    """The answer is asked for in a format that is not written; the message names those that are."""

    status = 406
    code = "not_acceptable"


class TooLarge(ServiceError):
    """The request has more bytes, arrays or work than the settings allow."""

    status = 413
    code = "too_large"


class TransportError(ServiceError):
    """The transport server refused, vanished or broke the protocol of the wire."""

    status = 502
    code = "transport"

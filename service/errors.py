"""What can go wrong in the service, as a tree; each class carries the HTTP status and a stable code.

ServiceError                  500 internal
├── InvalidRequest            422 invalid          a field that parsed but cannot be used
├── UnknownSession            404 unknown_session
├── SessionExists             409 session_exists
├── MoveRefused               409 move_refused     the stage table forbids the move
├── TooManySessions           429 too_many_sessions
├── PolicyError               422 policy           the policy cannot be loaded or does not fit the request
├── PolicyFailed              500 policy_failed    a loaded policy raised, or gave something that is not a chunk
└── TransportError            502 transport        the transport server refused, vanished or broke the wire
"""

from typing import ClassVar


class ServiceError(Exception):
    """Base of every error the service raises on purpose; its text is safe to send to a client."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"


class InvalidRequest(ServiceError):
    """A value that parsed but cannot be used.

    Attributes:
        loc: where it stands, as in a ValidationError, e.g. ``("body", "camera_names", 0)``.
    """

    status = 422
    code = "invalid"

    def __init__(self, message: str, loc: tuple[str | int, ...] = ("body",)):
        super().__init__(message)
        self.loc = loc


class UnknownSession(ServiceError):
    """No session has this id."""

    status = 404
    code = "unknown_session"


class SessionExists(ServiceError):
    """A live session already has this id."""

    status = 409
    code = "session_exists"


class MoveRefused(ServiceError):
    """The stage table forbids this move; the message names the allowed ones."""

    status = 409
    code = "move_refused"


class TooManySessions(ServiceError):
    """The configured number of sessions is reached."""

    status = 429
    code = "too_many_sessions"


class PolicyError(ServiceError):
    """A policy cannot be loaded, or does not fit what the session asks for."""

    status = 422
    code = "policy"


class PolicyFailed(ServiceError):
    """A loaded policy raised, or returned something that is not an action chunk."""

    status = 500
    code = "policy_failed"


class TransportError(ServiceError):
    """The transport server refused, vanished or broke the wire."""

    status = 502
    code = "transport"

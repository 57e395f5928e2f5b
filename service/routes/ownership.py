"""A caller's sessions: those of others are not there, for any route that takes a session's id."""

from service.auth.caller import caller_of
from service.errors import UnknownSession
from service.routes.context import Request
from service.sessions.sessions import Listed


def sessions_of(request: Request) -> list[Listed]:
    """All that this caller may see, oldest first."""
    caller = caller_of(request)
    return [session for session in request.app.ctx.sessions.list() if caller.sees(session.new.owner)]


def session_of(request: Request, session_id: str) -> Listed:
    """The session of this id.

    Raises:
        UnknownSession: there is none, or it is somebody else's: which of the two is not told.
    """
    session = request.app.ctx.sessions.get(session_id)
    if not caller_of(request).sees(session.new.owner):
        raise UnknownSession(f"Session {session_id} not found")
    return session

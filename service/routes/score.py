"""How a session's task goes, told by whoever judges it: the robot, a simulation, a person."""

import time
from collections.abc import Mapping

from sanic import HTTPResponse

from service.auth.roles import Role
from service.routes.answers import answer
from service.routes.body import read_body
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.route import Route
from service.schemas import ScoreRequest
from service.sessions.interrupted import Interrupted


class Score:
    """What was told last; one of a session's figures."""

    def __init__(self) -> None:
        self._told = ScoreRequest(tried=0, succeeded=0)
        self._at = 0.0

    def take(self, told: ScoreRequest, now: float) -> None:
        """Remember it in place of what was told before."""
        self._told, self._at = told, now

    def __call__(self) -> Mapping[str, object]:
        """The part of the stats."""
        return {"score": self._told.model_dump() | {"age_s": round(time.monotonic() - self._at, 1)}}


async def set_session_score(request: Request, session_id: str) -> HTTPResponse:
    """Say how many episodes of a session's task are over and how many of them did what was wanted.

    The server cannot know: a policy does not see whether it succeeded. The stats and the page show what was told last.
    """
    session = session_of(request, session_id)
    told = read_body(request, ScoreRequest)
    if isinstance(session, Interrupted):
        raise session.refusal()
    score = next((figures for figures in session.figures if isinstance(figures, Score)), None)
    if score is None:
        score = Score()
        session.figures.append(score)
    score.take(told, time.monotonic())
    return answer({"message": f"Score of session {session.id} taken", "session_id": session.id, **told.model_dump()})


ROUTES = (
    Route(
        "POST",
        "/sessions/{session_id}/score",
        set_session_score,
        "Control",
        body=ScoreRequest,
        errors=(404, 409),
        role=Role.OPERATOR,
    ),
)

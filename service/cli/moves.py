"""``robojax start``, ``restart``, ``adjust``, ``reset``, ``delete``: a session of a running server moved on by hand."""

import math
from typing import Annotated, Any
from urllib.parse import quote

import typer

from service.cli.failure import Code, fail
from service.cli.sessions import AsJson, Key, Url, base_url, call

SESSION = Annotated[str, typer.Argument(help="The session.")]
# Loading and compiling; a stalled download is given up before.
LOADED = 1800.0


def start(session_id: SESSION, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Let a session move its robot. One that is latched wants a reset first, one that was interrupted a restart."""
    _tell(_call("POST", session_id, "/start", url, key), as_json)


def restart(session_id: SESSION, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Stop a session and let it move its robot anew, also after an error.

    One that was interrupted (its server was ended) is only loaded again, in its old rooms: start then moves the robot.
    """
    _tell(_call("POST", session_id, "/restart", url, key, patience=LOADED), as_json)


def adjust(
    session_id: SESSION,
    overlap: Annotated[
        str | None,
        typer.Option(
            help="How a new chunk joins the plan: replace, weighted_average, latest_only, average, conservative, "
            "ensemble, crossfade, rtc; or default."
        ),
    ] = None,
    ask_ahead: Annotated[
        str | None, typer.Option(help="Seconds before it is needed that a chunk is asked for; or default (measured).")
    ] = None,
    action_steps: Annotated[
        str | None, typer.Option(help="Actions of a chunk to do before the next takes over; or default (the policy's).")
    ] = None,
    temporal_ensemble_coeff: Annotated[str | None, typer.Option(help="Of ensemble; or default.")] = None,
    language_instruction: Annotated[
        str | None, typer.Option(help="What the robot is to do, in words, for policies that read language.")
    ] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change what a session's policy is told and how its chunks are joined, from the next chunk on, while it moves."""
    asked = {
        "overlap": (overlap, str),
        "ask_ahead": (ask_ahead, float),
        "action_steps": (action_steps, int),
        "temporal_ensemble_coeff": (temporal_ensemble_coeff, float),
    }
    body: dict[str, object] = {}
    if language_instruction is not None:
        body["language_instruction"] = language_instruction
    for name, (text, kind) in asked.items():
        if text is None:
            continue
        try:
            body[name] = None if text == "default" else kind(text)
            if name != "overlap" and text != "default" and not math.isfinite(kind(text)):
                raise ValueError
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            fail(
                Code.USAGE, "nothing was changed", f"{flag} {text!r} is no number", f"give a number, or {flag} default"
            )
    if not body:
        fail(Code.USAGE, "nothing was changed", "nothing was asked for", "robojax adjust ID --overlap crossfade")
    place = f"/sessions/{quote(session_id, safe='')}"
    found = call(
        base_url(url),
        "PATCH",
        place,
        body,
        key=key,
        then="robojax sessions lists them, robojax adjust --help what can be changed",
    )
    _tell(found, as_json)


def reset(session_id: SESSION, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Take the latch of an emergency stop off, once you have seen that the robot is safe. Nothing moves by it."""
    _tell(_call("POST", session_id, "/reset", url, key, before="/debug"), as_json)


def delete(session_id: SESSION, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Stop a session and remove it with its rooms; recordings stay."""
    _tell(_call("DELETE", session_id, "", url, key), as_json)


def _call(
    method: str, session_id: str, move: str, url: str | None, key: str | None, before: str = "", patience: float = 10
) -> Any:
    place = f"{before}/sessions/{quote(session_id, safe='')}{move}"
    return call(base_url(url), method, place, key=key, patience=patience)


def _tell(found: Any, as_json: bool) -> None:
    import json

    typer.echo(json.dumps(found, indent=2) if as_json else found["message"])

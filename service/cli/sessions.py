"""``robojax sessions`` and ``robojax stop``: a running server from the command line."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from service.cli.failure import Code, fail
from service.cli.table import print_table

Url = Annotated[str | None, typer.Option(help="The server's URL; default: host and port of the settings.")]
Key = Annotated[
    str | None,
    typer.Option(
        help="Key or token for a server that wants one; default: ROBOJAX_KEY, which no list of processes shows."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="The server's answer as JSON.")]


def sessions(url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """List the sessions of a running server."""
    import json

    base = base_url(url)
    found = call(base, "GET", "/sessions", key=key)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    if not found:
        typer.echo(f"no sessions at {base}")
        return
    from rich.console import Console
    from rich.markup import escape

    print_table(("session", "status", "policy", "cameras", "rate", "commands"), map(_row, found))
    console = Console(highlight=False)
    # Below it: a column of a table this wide has no room for a sentence.
    for session in found:
        if why := _why(session, session["stats"]):
            console.print(f"[bold]{escape(session['session_id'])}[/bold]: {escape(why)}", soft_wrap=True)


def _row(session: Any) -> Sequence[str]:
    stats = session["stats"]
    return (
        session["session_id"],
        session["status"] + (", dry run" if stats.get("dry_run") else ""),
        session["policy_path"],
        " ".join(session["camera_names"]),
        f"{stats['rate']:g} Hz" if stats.get("rate") else "",
        str(stats.get("commands_sent", "")),
    )


def _why(session: Any, stats: Any) -> str:
    """Why it does not move, and the command that changes that."""
    name, error = session["session_id"], session["error_message"]
    if stats.get("emergency_stop"):
        return f"latched by an emergency stop ({stats['emergency_stop']}); once it is safe: robojax reset {name}"
    if session["status"] == "initializing":
        return stats.get("progress") or ""
    if session["status"] == "interrupted":
        return f"{error}; to load it again: robojax restart {name}"
    return error or stats.get("hold") or ""


def stop(
    session_id: Annotated[str | None, typer.Argument(help="The session to stop; it can be started again.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Emergency stop of every robot; latched until each session is reset.")
    ] = False,
    emergency: Annotated[
        bool, typer.Option("--emergency", help="Emergency stop of this one session; latched until it is reset.")
    ] = False,
    reason: Annotated[str | None, typer.Option(help="Of the emergency stop; shown in each session's status.")] = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Stop one session, or with --all every robot.

    One session is stopped as POST /sessions/ID/stop does: start moves it again. --all is the emergency stop: every
    session is latched and needs `robojax reset ID` before a start; ID --emergency does so with one.
    """
    import json
    from urllib.parse import quote

    if everything == (session_id is not None):
        fail(
            Code.USAGE, "nothing was stopped", "one of ID and --all is needed", "robojax stop ID, or robojax stop --all"
        )
    base = base_url(url)
    if session_id is not None:
        place = f"/sessions/{quote(session_id, safe='')}"
        if emergency:
            body = {"reason": reason or "robojax stop --emergency"}
            found = call(base, "POST", f"{place}/emergency_stop", body, key=key, silent=_BLOCKED)
        else:
            found = call(base, "POST", f"{place}/stop", key=key, silent=_BLOCKED)
    else:
        body = {"reason": reason or "robojax stop --all"}
        found = call(base, "POST", "/debug/emergency_stop", body, key=key, silent=_BLOCKED)
    typer.echo(json.dumps(found, indent=2) if as_json else _told(found))


def _told(found: Any) -> str:
    stopped = found.get("stopped")
    if stopped is None:
        return found["message"]
    names = f": {', '.join(stopped)}; each needs `robojax reset ID` before it can start" if stopped else ""
    return found["message"] + names


def base_url(url: str | None) -> str:
    """Where the server is: as said, or as the settings say."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            fail(
                Code.USAGE,
                f"{url!r} is no URL",
                "it has to begin with http:// or https://",
                "try http://127.0.0.1:8001",
            )
        return url.rstrip("/")
    from service.cli.serve import settings_or_end

    settings = settings_or_end()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def call(
    base: str,
    method: str,
    path: str,
    body: object = None,
    *,
    key: str | None = None,
    patience: float = 10,
    then: str | None = None,
    silent: str | None = None,
) -> Any:
    """The server's JSON answer, or the end of this command.

    Args:
        key: key or token of the caller's; ROBOJAX_KEY when None.
        then: what to do where there is no such thing, or it cannot be done now.
        silent: what to do when the server was reached and says nothing.
    """
    from robojax.client import Client, Garbled, Refused, Unreachable, Unusable

    try:
        with Client(base, key=key, timeout=patience) as client:
            return client.request(method, path, body)
    except Refused as error:
        usual = then or "robojax sessions shows what there is"
        advice = (
            usual if error.status in (400, 404, 409, 422) else _ADVICE.get(error.status, "look at the server's log")
        )
        fail(Code.TRANSPORT, f"the server at {base} refused", error.text, advice)
    except Unusable as error:
        fail(Code.USAGE, "the server cannot be called", str(error), "give another --url, or another key")
    except (Unreachable, Garbled) as error:
        why = error.why if isinstance(error, Unreachable) else str(error)
        if silent is not None and isinstance(error, Unreachable) and error.may_have_arrived:
            fail(Code.TRANSPORT, f"the server at {base} does not answer", why, silent)
        fail(
            Code.TRANSPORT, f"no robojax server answers at {base}", why, "start it with `robojax serve`, or give --url"
        )


def credentials(key: str | None) -> dict[str, str]:
    """The header of a key or token, as said or as ROBOJAX_KEY says; empty without one."""
    from robojax.client import Unusable
    from robojax.client.address import credentials as header_of

    try:
        return header_of(key)
    except Unusable as error:
        fail(Code.USAGE, "the key cannot be used", str(error), "robojax token new makes one")


# docs/safety.md says so too.
_BLOCKED = (
    "if it is blocked, no command leaves it and the stop is done before the next; robots hold by themselves after "
    "0.5 s. To stop them now, use the robot's own stop, or end the server: kill its process, or systemctl stop robojax"
)
_ADVICE = {
    401: "set ROBOJAX_KEY or give --key; `robojax token new --role operator` makes one on the server's machine",
    403: "use a key of that role; `robojax token new` makes one on the server's machine",
    429: "wait as long as it says, and try again",
}

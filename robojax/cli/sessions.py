"""Commands to a running server: `sessions`, `start`, `stop`, `policy`, `rollback` and others."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import typer

from robojax.cli.app import Code, fail, flatten, print_table
from robojax.client.http import SERVER_VARIABLE, server_url, session_path

Server = Annotated[
    str | None,
    typer.Option(
        envvar=SERVER_VARIABLE,
        help="URL of the server; default: this machine, with host and port of the settings (http://127.0.0.1:8001, or "
        "ROBOJAX_PORT).",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        help="Key or token for a server that wants one; default: ROBOJAX_KEY, which no list of processes shows."
    ),
]
# Entries of one page of a list.
PAGE = 100
AsJson = Annotated[bool, typer.Option("--json", help="The server's answer as JSON.")]


@dataclass(frozen=True)
class ServerOptions:
    """Options of a command that calls a running server."""

    server: Server = None
    key: Key = None
    as_json: AsJson = False

    @property
    def base(self) -> str:
        """URL of the server; ends the process when it cannot be used."""
        return base_url(self.server)

    def call(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """Call the server; ``more`` are arguments of ``call``."""
        return call(self.base, method, path, body, key=self.key, **more)

    def call_session(
        self, session_id: str, rest: str = "", body: object = None, *, method: str = "POST", **more: Any
    ) -> Any:
        """Call the server about one session; ``rest`` is the end of the path, ``more`` are arguments of ``call``."""
        return self.call(method, session_path(session_id, rest), body, session_id=session_id, **more)

    def show(self, answer: Any) -> None:
        """Print the answer to a request, or its message, and its warnings."""
        typer.echo(json.dumps(answer, indent=2) if self.as_json else answer["message"])
        for text in [*answer.get("warnings", {}).values(), *filter(None, [answer.get("warning")])]:
            typer.secho(f"warning: {text}", err=True, fg="yellow")

    def call_pages(self, path: str, key: str) -> list[Any]:
        """Return all entries of a list that the server answers in pages; ``key`` is the field that identifies one."""
        page = listed = self.call("GET", f"{path}?limit={PAGE}")
        while len(page) == PAGE:
            page = self.call("GET", f"{path}?limit={PAGE}&before={quote(page[-1][key], safe='')}")
            listed = [*listed, *page]
        return listed

    def show_list(
        self, listed: list[Any], empty: str, columns: Sequence[str], row: Callable[[Any], Sequence[str]]
    ) -> list[Any]:
        """Print a list of the server as a table or JSON; returns the list that a table was printed of."""
        if self.as_json:
            typer.echo(json.dumps(listed, indent=2))
            return []
        if listed:
            print_table(columns, map(row, listed))
        else:
            typer.echo(empty)
        return listed


@flatten
def sessions(*, at: ServerOptions) -> None:
    """List the sessions of a running server."""
    from rich.console import Console
    from rich.markup import escape

    columns = ("session", "status", "policy", "cameras", "rate", "commands")
    listed = at.show_list(at.call("GET", "/sessions"), f"no sessions at {at.base}", columns, _row)
    console = Console(highlight=False)
    # Below the table, because a column of a table this wide has no room for a sentence.
    for session in listed:
        if why := _explain_standstill(session, session["stats"]):
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


def _explain_standstill(session: Any, stats: Any) -> str:
    """Why it does not move, and the command that changes that."""
    name, error = session["session_id"], session["error_message"]
    if stats.get("emergency_stop"):
        return f"latched by an emergency stop ({stats['emergency_stop']}); once it is safe: robojax reset {name}"
    if session["status"] == "initializing":
        return stats.get("progress") or ""
    if session["status"] == "interrupted":
        return f"{error}; to load it again: robojax restart {name}"
    return error or stats.get("hold") or ""


@flatten
def stop(
    session_id: Annotated[str | None, typer.Argument(help="The session to stop; it can be started again.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Emergency stop of every robot; latched until each session is reset.")
    ] = False,
    emergency: Annotated[
        bool, typer.Option("--emergency", help="Emergency stop of this one session; latched until it is reset.")
    ] = False,
    reason: Annotated[str | None, typer.Option(help="Of the emergency stop; shown in each session's status.")] = None,
    *,
    at: ServerOptions,
) -> None:
    """Stop one session, or with --all every robot.

    One session is stopped as POST /sessions/ID/stop does: start moves it again. --all is the emergency stop: every
    session is latched and needs `robojax reset ID` before a start; ID --emergency does so with one.
    """
    if everything == (session_id is not None):
        fail(
            Code.USAGE, "nothing was stopped", "one of ID and --all is needed", "robojax stop ID, or robojax stop --all"
        )
    if session_id is None:
        body = {"reason": reason or "robojax stop --all"}
        answer = at.call("POST", "/debug/emergency_stop", body, silent=_BLOCKED)
    elif emergency:
        body = {"reason": reason or "robojax stop --emergency"}
        answer = at.call("POST", session_path(session_id, "/emergency_stop"), body, silent=_BLOCKED)
    else:
        answer = at.call_session(session_id, "/stop", silent=_BLOCKED)
    typer.echo(json.dumps(answer, indent=2) if at.as_json else _describe_stop(answer))


def _describe_stop(answer: Any) -> str:
    stopped = answer.get("stopped")
    if stopped is None:
        return answer["message"]
    names = f": {', '.join(stopped)}; each needs `robojax reset ID` before it can start" if stopped else ""
    return answer["message"] + names


def base_url(server: str | None) -> str:
    """URL of the server, from the option or the settings; ends the process when it cannot be used."""
    from robojax.client import Unusable

    if server is None:
        from robojax.cli.serve import settings_or_end

        server = settings_or_end().server.local_url
    try:
        return server_url(server)
    except Unusable as error:
        then = f"give the URL that the server printed as --server, or in {SERVER_VARIABLE}"
        fail(Code.USAGE, "the server's address cannot be used", str(error), then)


def call(
    base: str,
    method: str,
    path: str,
    body: object = None,
    *,
    key: str | None = None,
    timeout: float = 10,
    then: str | None = None,
    silent: str | None = None,
    session_id: str | None = None,
) -> Any:
    """Call the server; returns its JSON answer or ends the process.

    Args:
        key: key or token of the caller; ROBOJAX_KEY when None.
        then: what to do when the thing does not exist, or when this cannot be done now.
        silent: what to do when the server was reached and does not answer.
        session_id: the session that is asked to do something: when its stage forbids that, its stage says what to do.
    """
    from robojax.client import Client, Garbled, Refused, Unreachable, Unusable

    try:
        with Client(base, key=key, timeout=timeout) as client:
            return client.request(method, path, body)
    except Refused as error:
        usual = then or "robojax sessions shows what there is"
        advice = (
            usual if error.status in (400, 404, 409, 422) else _ADVICE.get(error.status, "look at the server's log")
        )
        if error.code == "move_refused" and session_id is not None:
            advice = _advise_after_refusal(base, key, session_id) or advice
        fail(Code.TRANSPORT, f"the server at {base} refused", error.text, advice)
    except Unusable as error:
        fail(Code.USAGE, "the server cannot be called", str(error), "give another --server, or another key")
    except (Unreachable, Garbled) as error:
        why = error.why if isinstance(error, Unreachable) else str(error)
        if silent is not None and isinstance(error, Unreachable) and error.may_have_arrived:
            fail(Code.TRANSPORT, f"the server at {base} does not answer", why, silent)
        then_start = f"start it with `robojax serve`, or give --server or {SERVER_VARIABLE} with its address"
        fail(Code.TRANSPORT, f"no robojax server answers at {base}", why, then_start)


def _advise_after_refusal(base: str, key: str | None, session_id: str) -> str | None:
    """Name the command that helps after a session refused to do something; None when its status cannot be read."""
    from robojax.client import Client, ClientError

    try:
        with Client(base, key=key) as client:
            session = client.request("GET", session_path(session_id))
    except ClientError:
        return None
    return _suggest_command(session, base)


def _is_default(base: str) -> bool:
    """Whether commands of this terminal reach this server without --server."""
    from robojax.client import Unusable

    try:
        return base == server_url(None)
    except Unusable:
        return False


def _suggest_command(session: Any, base: str) -> str | None:
    """Name the command that brings a session on from where it is; None when no single command does."""
    status = session["status"]
    at = "" if _is_default(base) else f" --server {base}"
    name = f"{session['session_id']}{at}"
    starting = "restart" if status == "interrupted" else "start"
    if session["stats"].get("emergency_stop"):
        return f"when the robot is safe: robojax reset {name}, then robojax {starting} {name}"
    moving = f"robojax restart {name} begins again, robojax stop {name} stops it"
    has_policy = (session.get("inference_stats") or {}).get("is_loaded", False)
    return {
        "initializing": f"wait until it is ready: robojax sessions{at} shows what it is doing",
        "interrupted": f"robojax restart {name} loads it again, then robojax start {name} moves the robot",
        "error": f"robojax restart {name}" if has_policy else f"robojax delete {name}, then create it again",
        "timeout": f"robojax restart {name}, once its cameras and joints are back",
        **dict.fromkeys(("running", "degraded", "reconnecting"), moving),
    }.get(status)


def credentials(key: str | None) -> dict[str, str]:
    """Authorization header of a key or token, from the option or ROBOJAX_KEY; empty without one."""
    from robojax.client import Unusable
    from robojax.client.http import credentials as header_of

    try:
        return header_of(key)
    except Unusable as error:
        fail(Code.USAGE, "the key cannot be used", str(error), "robojax token new makes one")


# docs/robots/safety.md says so too.
_BLOCKED = (
    "if it is blocked, no command leaves it and the stop is done before the next; robots hold by themselves after "
    "0.5 s. To stop them now, use the robot's own stop, or end the server: kill its process, or systemctl stop robojax"
)
_ADVICE = {
    401: "set ROBOJAX_KEY or give --key; `robojax token new --role operator` makes one on the server's machine",
    403: "use a key of that role; `robojax token new` makes one on the server's machine",
    429: "wait as long as it says, and try again",
}


SESSION = Annotated[str, typer.Argument(help="The session.")]
# Loading and compiling; a stalled download is given up before.
LOADED = 1800.0


@flatten
def start(session_id: SESSION, *, at: ServerOptions) -> None:
    """Let a session move its robot. One that is latched wants a reset first, one that was interrupted a restart."""
    at.show(at.call_session(session_id, "/start"))


@flatten
def restart(session_id: SESSION, *, at: ServerOptions) -> None:
    """Stop a session and let it move its robot anew, also after an error.

    One that was interrupted (its server was ended) is only loaded again, in its old rooms: start then moves the robot.
    """
    at.show(at.call_session(session_id, "/restart", timeout=LOADED))


@flatten
def adjust(
    session_id: SESSION,
    overlap: Annotated[
        str | None,
        typer.Option(
            help="How a new chunk joins the plan, by its name in the guide Motion, such as crossfade or replace; or "
            "default."
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
    accept_units: Annotated[
        bool | None,
        typer.Option(help="Accept a state that looks like another unit than the policy's (holds with joints_units)."),
    ] = None,
    *,
    at: ServerOptions,
) -> None:
    """Change what a session's policy is told and how its chunks are joined, from the next chunk on, while it moves."""
    changes = {
        "overlap": (overlap, str),
        "ask_ahead": (ask_ahead, float),
        "action_steps": (action_steps, int),
        "temporal_ensemble_coeff": (temporal_ensemble_coeff, float),
    }
    body: dict[str, object] = {}
    if language_instruction is not None:
        body["language_instruction"] = language_instruction
    if accept_units is not None:
        body["accept_units"] = accept_units
    for name, (text, kind) in changes.items():
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
    then = "robojax sessions lists them, robojax adjust --help what can be changed"
    at.show(at.call_session(session_id, "", body, method="PATCH", then=then))


@flatten
def reset(session_id: SESSION, *, at: ServerOptions) -> None:
    """Take the latch of an emergency stop off, once you have seen that the robot is safe. Nothing moves by it."""
    # A reset is refused only where no emergency stop is latched. Then no other command has to follow.
    at.show(at.call("POST", session_path(session_id, "/reset", "/debug")))


@flatten
def delete(session_id: SESSION, *, at: ServerOptions) -> None:
    """Stop a session and remove it with its rooms; recordings stay."""
    at.show(at.call_session(session_id, method="DELETE"))


@flatten
def deployments(
    session_id: Annotated[str | None, typer.Argument(help="Only those of this session.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 20,
    *,
    at: ServerOptions,
) -> None:
    """List what became of pushes to the policies of running sessions, the newest first."""
    path = f"/deployments?limit={limit}" + (f"&session_id={quote(session_id, safe='')}" if session_id else "")
    whose = f" of session {session_id!r}" if session_id else ""
    columns = ("deployment", "policy", "commit", "set off by", "sessions", "stages", "result", "why")
    at.show_list(at.call("GET", path), f"no policy updates{whose} at {at.base}", columns, _deployment_row)


def _deployment_row(deployment: Any) -> Sequence[str]:
    return (
        deployment["id"],
        deployment["repo"] + (f"@{deployment['ref']}" if deployment["ref"] else ""),
        (deployment["sha"] or "")[:12],
        deployment["trigger"],
        " ".join(deployment["sessions"]),
        " ".join(_stage(stage) for stage in deployment["stages"]),
        deployment["result"] or "under way",
        deployment["text"],
    )


@flatten
def policy(
    session_id: SESSION,
    revision: Annotated[
        str | None,
        typer.Argument(help="Branch, tag or commit; default: the one that is staged, else the newest it follows."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Take a commit out of the quarantine for it.")] = False,
    *,
    at: ServerOptions,
) -> None:
    """Bring a revision of its policy to a running session, checked first, at a chunk boundary."""
    body = {"revision": revision, "force": force}
    _deploy(at, session_id, "/policy", body, timeout=LOADED)


@flatten
def rollback(session_id: SESSION, *, at: ServerOptions) -> None:
    """Bring back the policy that a session ran before its last update."""
    _deploy(at, session_id, "/rollback", timeout=120)


def _deploy(at: ServerOptions, session_id: str, rest: str, body: object = None, *, timeout: float) -> None:
    then = f"robojax sessions shows what runs, robojax deployments {session_id} what was tried"
    answer = at.call_session(session_id, rest, body, timeout=timeout, then=then)
    if at.as_json:
        typer.echo(json.dumps(answer, indent=2))
    result = answer["result"] or "on probation"
    if result in ("rejected", "failed"):
        fail(
            Code.POLICY,
            f"session {session_id!r} goes on with the policy it has",
            answer["text"] or str(answer["reason"]),
            f"robojax deployments {session_id} shows the stages",
        )
    if not at.as_json:
        typer.echo(f"{session_id}: {result} {(answer['sha'] or '')[:12]} {answer['text']}".rstrip())


def _stage(stage: Any) -> str:
    return stage["name"] + (f" {stage['seconds']:.1f}s" if stage["seconds"] is not None else " ...")

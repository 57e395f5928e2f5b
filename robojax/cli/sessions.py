"""Commands to a running server: `sessions`, `start`, `stop`, `policy`, `rollback` and others."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import typer

from robojax.cli.app import Code, fail, flatten, print_table
from robojax.client.http import LOADED, SERVER_VARIABLE, server_url, session_path

Server = Annotated[
    str | None,
    typer.Option(
        envvar=SERVER_VARIABLE,
        help="URL of the server; default: http://127.0.0.1:8001, or the settings' port (ROBOJAX_PORT)",
    ),
]
Key = Annotated[str | None, typer.Option(help="Key or token; default: ROBOJAX_KEY, which process lists do not show")]
PAGE = 100  # entries of a page of a list
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON")]


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
        """Print the response or only its message, and its warnings."""
        typer.echo(json.dumps(answer, indent=2) if self.as_json else answer["message"])
        for text in [*answer.get("warnings", {}).values(), *filter(None, [answer.get("warning")])]:
            typer.secho(f"warning: {text}", err=True, fg="yellow")

    def call_pages(self, path: str, key: str) -> list[Any]:
        """Return all entries of a paginated list; ``key`` is the field that identifies an entry."""
        page = listed = self.call("GET", f"{path}?limit={PAGE}")
        while len(page) == PAGE:
            page = self.call("GET", f"{path}?limit={PAGE}&before={quote(page[-1][key], safe='')}")
            listed = [*listed, *page]
        return listed

    def show_list(
        self, listed: list[Any], empty: str, columns: Sequence[str], row: Callable[[Any], Sequence[str]]
    ) -> list[Any]:
        """Print a list of the server as JSON or a table; return the entries in the table."""
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
    # Below the table, which has no space for sentences.
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
    """Return why a session does not move, and the command that changes this."""
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
    session_id: Annotated[str | None, typer.Argument(help="Id of the session; it can be started again")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop and latch all robots, until each is reset")] = False,
    emergency: Annotated[bool, typer.Option("--emergency", help="Stop and latch ID, until it is reset")] = False,
    reason: Annotated[str | None, typer.Option(help="Reason of the emergency stop, which the sessions show")] = None,
    *,
    at: ServerOptions,
) -> None:
    """Stop one session, or all robots (--all).

    A stopped session can be started again. --all and --emergency are emergency stops: they latch the sessions, which
    then need `robojax reset ID` before a start.
    """
    if everything == (session_id is not None):
        fail(Code.USAGE, "nothing was stopped", "give either ID or --all", "robojax stop ID, or robojax stop --all")
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
    """Return the URL of the server from the option or the settings; ends the process if it is invalid."""
    from robojax.client import InvalidArgument

    if server is None:
        from robojax.cli.serve import settings_or_end

        server = settings_or_end().server.local_url
    try:
        return server_url(server)
    except InvalidArgument as error:
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
    """Call the server; return its JSON response or end the process.

    Args:
        key: key or token of the caller; ROBOJAX_KEY when None.
        then: advice if the resource does not exist, or its state forbids the request.
        silent: advice if the server was reached and does not respond.
        session_id: session of the request; if its state forbids the request, the advice depends on its state.
    """
    from robojax.client import Client, InvalidArgument, ProtocolError, RequestRefused, ServerUnreachable

    try:
        with Client(base, key=key, timeout=timeout) as client:
            return client.request(method, path, body)
    except RequestRefused as error:
        usual = then or "robojax sessions shows what there is"
        advice = usual if error.status in (400, 404, 409, 422) else _ADVICE.get(error.status, "read the server's log")
        if error.code == "move_refused" and session_id is not None:
            advice = _advise_after_refusal(base, key, session_id) or advice
        fail(Code.TRANSPORT, f"the server at {base} refused", error.text, advice)
    except InvalidArgument as error:
        fail(Code.USAGE, "the server cannot be called", str(error), "give another --server, or another key")
    except (ServerUnreachable, ProtocolError) as error:
        why = error.why if isinstance(error, ServerUnreachable) else str(error)
        if silent is not None and isinstance(error, ServerUnreachable) and error.may_have_arrived:
            fail(Code.TRANSPORT, f"the server at {base} does not answer", why, silent)
        then_start = f"start it with `robojax serve`, or give --server or {SERVER_VARIABLE} with its address"
        fail(Code.TRANSPORT, f"no robojax server answers at {base}", why, then_start)


def _advise_after_refusal(base: str, key: str | None, session_id: str) -> str | None:
    """Return the next command after a session refused a request; None if its status cannot be read."""
    from robojax.client import Client, RobojaxError

    try:
        with Client(base, key=key) as client:
            session = client.request("GET", session_path(session_id))
    except RobojaxError:
        return None
    return _suggest_command(session, base)


def _is_default(base: str) -> bool:
    """Whether this server is the default without --server."""
    from robojax.client import InvalidArgument

    try:
        return base == server_url(None)
    except InvalidArgument:
        return False


def _suggest_command(session: Any, base: str) -> str | None:
    """Return the next command for a session in its present state; None if there is no such command."""
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


# docs/robots/safety.md has the same text.
_BLOCKED = (
    "if it is blocked, no command leaves it and the stop is done before the next; robots hold by themselves after "
    "0.5 s. To stop them now, use the robot's own stop, or end the server: kill its process, or systemctl stop robojax"
)
_ADVICE = {
    401: "set ROBOJAX_KEY or give --key; `robojax token new --role operator` makes one on the server's machine",
    403: "use a key of that role; `robojax token new` makes one on the server's machine",
    429: "wait for the stated time, and try again",
}


SESSION = Annotated[str, typer.Argument(help="Id of the session")]


@flatten
def start(session_id: SESSION, *, at: ServerOptions) -> None:
    """Let a session move its robot. Reset a latched session first; restart an interrupted session first."""
    at.show(at.call_session(session_id, "/start"))


@flatten
def restart(session_id: SESSION, *, at: ServerOptions) -> None:
    """Stop a session and let it move its robot again, also after an error.

    An interrupted session (its server ended) is only loaded again, with its old rooms; then use `robojax start`.
    """
    at.show(at.call_session(session_id, "/restart", timeout=LOADED))


@flatten
def adjust(
    session_id: SESSION,
    overlap: Annotated[str | None, typer.Option(help="Way to join chunks, e.g. crossfade, or default")] = None,
    ask_ahead: Annotated[str | None, typer.Option(help="Seconds to request a chunk in advance, or default")] = None,
    action_steps: Annotated[str | None, typer.Option(help="Actions of a chunk to execute, or default")] = None,
    temporal_ensemble_coeff: Annotated[str | None, typer.Option(help="Coefficient of ensemble, or default")] = None,
    language_instruction: Annotated[str | None, typer.Option(help="Instruction for policies with language")] = None,
    accept_units: Annotated[bool | None, typer.Option(help="Accept a state that seems to be in another unit")] = None,
    *,
    at: ServerOptions,
) -> None:
    """Change the instruction and the motion of a session while it moves, from the next chunk on."""
    changes = {
        "overlap": (overlap, str),
        "ask_ahead": (ask_ahead, float),
        "action_steps": (action_steps, int),
        "temporal_ensemble_coeff": (temporal_ensemble_coeff, float),
    }
    plain = {"language_instruction": language_instruction, "accept_units": accept_units}
    body: dict[str, object] = {name: value for name, value in plain.items() if value is not None}
    for name, (text, kind) in changes.items():
        if text is None:
            continue
        try:
            body[name] = None if text == "default" else kind(text)
            if name != "overlap" and text != "default" and not math.isfinite(kind(text)):
                raise ValueError
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            why = f"{flag} {text!r} is not a number"
            fail(Code.USAGE, "nothing was changed", why, f"give a number, or {flag} default")
    if not body:
        fail(Code.USAGE, "nothing was changed", "no change was given", "robojax adjust ID --overlap crossfade")
    then = "robojax sessions lists the sessions, robojax adjust --help the settings"
    at.show(at.call_session(session_id, "", body, method="PATCH", then=then))


@flatten
def reset(session_id: SESSION, *, at: ServerOptions) -> None:
    """Release the latch of an emergency stop. Check first that the robot is safe. Nothing moves yet."""
    # A reset is refused only without a latched emergency stop, so no other command has to follow.
    at.show(at.call("POST", session_path(session_id, "/reset", "/debug")))


@flatten
def delete(session_id: SESSION, *, at: ServerOptions) -> None:
    """Stop a session and remove it with its rooms; recordings stay."""
    at.show(at.call_session(session_id, method="DELETE"))


@flatten
def deployments(
    session_id: Annotated[str | None, typer.Argument(help="Id of a session; default: all sessions")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Number of deployments")] = 20,
    *,
    at: ServerOptions,
) -> None:
    """List deployments (policy updates) of running sessions, newest first."""
    path = f"/deployments?limit={limit}" + (f"&session_id={quote(session_id, safe='')}" if session_id else "")
    whose = f" of session {session_id!r}" if session_id else ""
    columns = ("deployment", "policy", "commit", "trigger", "sessions", "stages", "result", "why")
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
        str | None, typer.Argument(help="Branch, tag or commit; default: the staged, else the newest commit")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Use the commit although it is in quarantine")] = False,
    *,
    at: ServerOptions,
) -> None:
    """Check another revision of a running session's policy, and switch to it after a chunk."""
    body = {"revision": revision, "force": force}
    _deploy(at, session_id, "/policy", body, timeout=LOADED)


@flatten
def rollback(session_id: SESSION, *, at: ServerOptions) -> None:
    """Restore the policy that a session ran before its last update."""
    _deploy(at, session_id, "/rollback", timeout=120)


def _deploy(at: ServerOptions, session_id: str, rest: str, body: object = None, *, timeout: float) -> None:
    then = f"robojax sessions shows what runs, robojax deployments {session_id} the updates"
    answer = at.call_session(session_id, rest, body, timeout=timeout, then=then)
    if at.as_json:
        typer.echo(json.dumps(answer, indent=2))
    result = answer["result"] or "on probation"
    if result in ("rejected", "failed"):
        fail(
            Code.POLICY,
            f"session {session_id!r} keeps its policy",
            answer["text"] or str(answer["reason"]),
            f"robojax deployments {session_id} shows the stages",
        )
    if not at.as_json:
        typer.echo(f"{session_id}: {result} {(answer['sha'] or '')[:12]} {answer['text']}".rstrip())


def _stage(stage: Any) -> str:
    return stage["name"] + (f" {stage['seconds']:.1f}s" if stage["seconds"] is not None else " ...")

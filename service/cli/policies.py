"""``robojax deployments``, ``policy`` and ``rollback``: another policy for a running session, from the command line."""

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from service.cli.failure import Code, fail
from service.cli.sessions import AsJson, Key, Url, base_url, call
from service.cli.table import print_table

SESSION = Annotated[str, typer.Argument(help="The session.")]


def deployments(
    session_id: Annotated[str | None, typer.Argument(help="Only those of this session.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 20,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List what became of pushes to the policies of running sessions, the newest first."""
    import json

    base = base_url(url)
    path = f"/deployments?limit={limit}" + (f"&session_id={quote(session_id, safe='')}" if session_id else "")
    found = call(base, "GET", path, key=key)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    if not found:
        whose = f" of session {session_id!r}" if session_id else ""
        typer.echo(f"no policy updates{whose} at {base}")
        return
    columns = ("deployment", "policy", "commit", "set off by", "sessions", "stages", "result", "why")
    print_table(columns, map(_row, found))


def _row(deployment: Any) -> Sequence[str]:
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


def policy(
    session_id: SESSION,
    revision: Annotated[
        str | None,
        typer.Argument(help="Branch, tag or commit; default: the one that is staged, else the newest it follows."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Take a commit out of the quarantine for it.")] = False,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Bring a revision of its policy to a running session, checked first, at a chunk boundary."""
    body = {"revision": revision, "force": force}
    path = f"/sessions/{quote(session_id, safe='')}/policy"
    found = call(base_url(url), "POST", path, body, key=key, patience=1800, then=_then(session_id))
    _tell(session_id, found, as_json)


def rollback(session_id: SESSION, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """Bring back the policy that a session ran before its last update."""
    path = f"/sessions/{quote(session_id, safe='')}/rollback"
    found = call(base_url(url), "POST", path, key=key, patience=120, then=_then(session_id))
    _tell(session_id, found, as_json)


def _then(session_id: str) -> str:
    return f"robojax sessions shows what runs, robojax deployments {session_id} what was tried"


def _tell(session_id: str, found: Any, as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(found, indent=2))
    result = found["result"] or "on probation"
    if result in ("rejected", "failed"):
        fail(
            Code.POLICY,
            f"session {session_id!r} goes on with the policy it has",
            found["text"] or str(found["reason"]),
            f"robojax deployments {session_id} shows the stages",
        )
    if not as_json:
        typer.echo(f"{session_id}: {result} {(found['sha'] or '')[:12]} {found['text']}".rstrip())


def _stage(stage: Any) -> str:
    return stage["name"] + (f" {stage['seconds']:.1f}s" if stage["seconds"] is not None else " ...")

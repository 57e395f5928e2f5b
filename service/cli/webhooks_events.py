"""``robojax webhooks events``: what came, from the file of events or from a running server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.failure import Code, fail
from service.cli.sessions import Key

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

DATABASE = Path("webhooks.sqlite")
STATUSES = "waiting, running, done, failed, dead, ignored, superseded"

File = Annotated[
    Path | None,
    typer.Option("--database", help=f"File of the events; default: ROBOJAX_WEBHOOKS_DATABASE or {DATABASE}."),
]
Url = Annotated[str | None, typer.Option(help="A running server instead of a file: http://127.0.0.1:7860.")]
SecretFile = Annotated[
    Path | None, typer.Option(help="File with the server's secret, for --url; default: WEBHOOK_SECRET.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Of the event.")]


@app.command("list")
def list_(
    database: File = None,
    url: Url = None,
    secret_file: SecretFile = None,
    key: Key = None,
    status: Annotated[str | None, typer.Option(help=f"Only these: {STATUSES}.")] = None,
    path: Annotated[str | None, typer.Option(help="Only of this endpoint, as /webhooks/NAME.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 50,
    before: Annotated[int | None, typer.Option(help="Only those before this number.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the newest events."""
    if status is not None and status not in STATUSES.split(", "):
        fail(Code.USAGE, "nothing was listed", f"there is no status {status!r}", f"give one of {STATUSES}")
    if url is None:
        from hooks.serving.event_routes import brief

        with _open(database) as inbox:
            found = [brief(event) for event in inbox.list(status=status, path=path, limit=limit, before=before)]
    else:
        from urllib.parse import urlencode

        given = {"status": status, "path": path, "limit": limit, "before": before}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        found = _call(url, "GET", f"?{query}", secret_file, key)
    if as_json:
        _print_json(found)
    else:
        _print_lines(found)


@app.command()
def show(
    event_id: Id,
    database: File = None,
    url: Url = None,
    secret_file: SecretFile = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show all of one event: headers, body, and why it failed."""
    if url is None:
        from hooks.serving.event_routes import whole

        with _open(database) as inbox:
            found = whole(inbox.get(event_id))
    else:
        found = _call(url, "GET", _quoted(event_id), secret_file, key)
    if as_json:
        _print_json(found)
        return
    for name, value in found.items():
        if name == "headers":
            typer.echo("headers:")
            for header, text in value.items():
                typer.echo(f"  {header}: {_printable(text)}")
        else:
            typer.echo(f"{name}: {'' if value is None else _printable(str(value))}")


@app.command()
def replay(
    event_id: Id,
    database: File = None,
    url: Url = None,
    secret_file: SecretFile = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Have an event handled again, whatever became of it; a running server begins within a second."""
    if url is None:
        from hooks.serving.event_routes import brief

        with _open(database) as inbox:
            found = brief(inbox.replay(event_id))
    else:
        found = _call(url, "POST", f"{_quoted(event_id)}/replay", secret_file, key)
    if as_json:
        _print_json(found)
    else:
        typer.echo(f"event {found['id']} is {found['status']}; its handler is {found['path']}")


def _open(database: Path | None) -> Any:
    """The inbox, whose errors end the command."""
    import os
    from collections.abc import Iterator
    from contextlib import contextmanager

    from hooks.errors import StoreError, UnknownEvent
    from hooks.receiving.inbox import Inbox

    path = database or Path(os.environ.get("ROBOJAX_WEBHOOKS_DATABASE") or DATABASE)

    @contextmanager
    def opened() -> Iterator[Inbox]:
        if not path.is_file():
            why = f"there is no file {str(path)!r}"
            fail(
                Code.USAGE, "the events cannot be read", why, "give --database, or --url of a running server" + _known()
            )
        try:
            with Inbox(path) as inbox:
                yield inbox
        except UnknownEvent as error:
            fail(Code.USAGE, "there is no such event", str(error), "robojax webhooks events list shows the newest")
        except StoreError as error:
            fail(Code.USAGE, "the events cannot be read", str(error), "give the --database that the server writes")

    return opened()


def _known() -> str:
    """Those files of events that scripts keep without being told where, the newest first."""
    from hooks.serving.configuration import usual_folder

    found = sorted(usual_folder().glob("*.sqlite3"), key=lambda path: path.stat().st_mtime, reverse=True)
    return f"; scripts keep theirs in {', '.join(map(str, found[:5]))}" if found else ""


def _call(url: str, method: str, path: str, secret_file: Path | None, key: str | None) -> Any:
    import json
    import os
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, Request, build_opener

    from hooks.errors import InvalidWebhook
    from hooks.management.webhook import find_secret
    from service.cli.sessions import base_url, credentials

    base = base_url(url)
    try:
        secret = find_secret(file=secret_file) or os.environ.get("WEBHOOK_SECRET")
    except InvalidWebhook as error:
        fail(Code.USAGE, "the secret cannot be read", str(error), "look at --secret-file")
    where = f"{base}/webhooks/_events" + (path if path.startswith("?") else f"/{path}")
    headers = credentials(key) | ({"x-webhook-secret": secret} if secret else {})
    request = Request(where, method=method, headers=headers)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=10) as answer:
            return json.load(answer)
    except HTTPError as error:
        try:
            told = json.load(error)
            why = str(told.get("error") or told["detail"])
        except (ValueError, KeyError, TypeError, AttributeError):
            why = f"status {error.code}"
        then = {401: "give --secret-file, or --key", 403: "give the server's own secret", 404: "look at events list"}
        fail(Code.TRANSPORT, f"the server at {base} refused", why, then.get(error.code, "look at the server's log"))
    except (URLError, TimeoutError, HTTPException, ValueError) as error:
        why = str(getattr(error, "reason", None) or error) or type(error).__name__
        fail(Code.TRANSPORT, f"no webhooks server answers at {base}", why, "start it with `robojax webhooks serve`")


def _quoted(event_id: str) -> str:
    from urllib.parse import quote

    return quote(event_id, safe="")


def _print_json(found: object) -> None:
    import json

    typer.echo(json.dumps(found, indent=2))


def _print_lines(found: Sequence[Mapping[str, Any]]) -> None:
    """Lines, because a table of all this folds every cell on a narrow terminal."""
    from datetime import UTC, datetime

    if not found:
        typer.echo("no events")
    for event in found:
        received = datetime.fromtimestamp(event["received_at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        happened = " ".join(event[name] for name in ("scope", "action", "repo") if event[name])
        line = f"{event['number']:>5} {event['id']} {received} {event['status']:<10} {event['path']}  {happened}"
        typer.echo(_printable(line))
        if event["error"]:
            typer.echo(f"{'':6}run {event['attempt']}: {_printable(event['error'])}")


def _printable(text: str) -> str:
    """Without what would change the terminal: senders wrote it."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)

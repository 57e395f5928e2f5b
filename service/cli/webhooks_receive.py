"""Receiving webhooks from the command line: ``serve``, ``send``, and ``events``, which shows what came."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from service.cli.failure import Code, fail
from service.cli.option_groups import flatten
from service.cli.sessions import Key

VARIABLE = "WEBHOOK_SECRET"
DATABASE = Path("webhooks.sqlite")
STATUSES = "waiting, running, done, failed, dead, ignored, superseded"

SecretFile = Annotated[Path | None, typer.Option(help=f"File with the secret; default: {VARIABLE}.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Of the event.")]

events = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(serve)
    app.command()(send)
    app.add_typer(events, name="events", help="What came: list it, show one, have one handled again.")


def escape(text: str) -> str:
    """Text that somebody else wrote, without what would change the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def serve(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="Or a .py file. Without :NAME, the only server in it.")
    ],
    host: Annotated[str | None, typer.Option(help="To listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: the first free one from 7860 on; 0: any.")] = None,
    secret_file: SecretFile = None,
    share: Annotated[
        bool | None, typer.Option("--share/--no-share", help="Whether to ask a tunnel program for a public address.")
    ] = None,
    database: Annotated[
        Path | None, typer.Option(help=f"File of the events; default: what the module says, or {DATABASE}.")
    ] = None,
) -> None:
    """Receive webhooks with the functions of a module until Ctrl-C."""
    from dataclasses import replace

    from hooks.errors import HooksError, InvalidWebhook, StoreError, TunnelFailed
    from hooks.management import find_secret
    from hooks.serving.loading import NoServer, load

    try:
        secret = find_secret(file=secret_file)
        server = load(target)
        kept = replace(server.settings, database=database or server.settings.database or DATABASE)
        server.settings = kept if secret is None else replace(kept, secrets=(secret,))
        server.launch(host=host, port=port, share=share)
    except HooksError as error:
        advice = {
            NoServer: "robojax webhooks serve app.py, or module:name",
            InvalidWebhook: "look at --secret-file and at the module",
            StoreError: "give another --database",
            TunnelFailed: "leave --share out, or install a tunnel program",
        }.get(type(error), "look at --host and --port; --port 0 takes a free one")
        code = Code.TRANSPORT if isinstance(error, TunnelFailed) else Code.USAGE
        fail(code, "the webhooks server cannot start", str(error), advice)


def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the endpoint: http://127.0.0.1:7860/webhooks/NAME.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="repo.content, discussion, repo:move, ...; repeatable. See --list-scopes.")
    ] = None,
    all_scopes: Annotated[bool, typer.Option("--all-scopes", help="One of every kind that the Hub documents.")] = False,
    list_scopes: Annotated[bool, typer.Option("--list-scopes", help="Print the kinds and end.")] = False,
    repo: Annotated[str, typer.Option(help="That it happened to.")] = "robotics-lab/pick-cubes",
    repo_type: Annotated[str, typer.Option(help="model, dataset, space or bucket.")] = "model",
    sha: Annotated[str | None, typer.Option(help="Commit that it is about; default: one made up.")] = None,
    secret_file: SecretFile = None,
    bad_secret: Annotated[bool, typer.Option("--bad-secret", help="Send a wrong secret.")] = False,
    standard_secret_file: Annotated[Path | None, typer.Option(help="Sign by Standard Webhooks too.")] = None,
    github_secret_file: Annotated[Path | None, typer.Option(help="Sign as GitHub does too.")] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Events of each kind.")] = 1,
    dup: Annotated[int, typer.Option(min=1, max=100, help="Copies of each event, with one id.")] = 1,
    reorder: Annotated[bool, typer.Option("--reorder", help="Shuffle them.")] = False,
    seed: Annotated[int, typer.Option(help="Of the shuffling.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, max=100, help="Requests under way at one time.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each delivery.")] = False,
) -> None:
    """Deliver made-up events as the Hub would. Ends with 1 when one of them was not answered by 2xx."""
    import asyncio
    import os
    import statistics
    from urllib.parse import urlsplit

    from hooks import simulator
    from hooks.errors import InvalidWebhook
    from hooks.management import find_secret
    from hooks.samples import SCOPES, sample

    if list_scopes:
        typer.echo("\n".join(SCOPES))
        return
    what = "nothing was sent"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        fail(Code.USAGE, what, f"{url!r} is no URL of an endpoint", "try http://127.0.0.1:7860/webhooks/NAME")
    try:
        secrets = {
            "secret": find_secret(file=secret_file) or os.environ.get(VARIABLE) or None,
            "standard_secret": find_secret(file=standard_secret_file),
            "github_secret": find_secret(file=github_secret_file),
        }
        kinds = [*SCOPES] if all_scopes else scope or ["repo.content"]
        made = [(kind, sample(kind, repo=repo, repo_type=repo_type, sha=sha)) for kind in kinds for _ in range(count)]
    except InvalidWebhook as error:
        fail(Code.USAGE, what, str(error), "see --help; --list-scopes names the kinds of events")
    if bad_secret:
        secrets["secret"] = "wrong-on-purpose"
    sent = simulator.deliveries(made, copies=dup, is_reordered=reorder, seed=seed)

    async def deliver() -> list[simulator.Outcome]:
        found = []
        async for outcome in simulator.send(url, sent, **secrets, at_once=at_once, timeout=timeout):
            row = {
                "id": outcome.delivery.id,
                "scope": outcome.delivery.what,
                "status": outcome.status,
                "milliseconds": round(outcome.seconds * 1000, 1),
                "answer": outcome.answer,
            }
            line = f"{outcome.status or '---'}  {row['milliseconds']:8.1f} ms  {row['scope']:<28} {row['id']}  "
            typer.echo(json.dumps(row) if as_json else line + escape(outcome.answer.replace("\n", " "))[:100])
            found.append(outcome)
        return found

    outcomes = asyncio.run(deliver())
    times = [outcome.seconds * 1000 for outcome in outcomes]
    accepted = sum(outcome.is_accepted for outcome in outcomes)
    if not as_json:
        middle = statistics.median_high(times)
        typer.echo(f"{accepted} of {len(times)} accepted; median {middle:.1f} ms, slowest {max(times):.1f} ms")
    if accepted < len(times):
        raise typer.Exit(Code.CHECK)


@dataclass(frozen=True)
class Log:
    """Options that say where the events are, a file or a running server, and how they are printed."""

    database: Annotated[
        Path | None, typer.Option(help=f"File of the events; default: ROBOJAX_WEBHOOKS_DATABASE or {DATABASE}.")
    ] = None
    url: Annotated[str | None, typer.Option(help="A running server instead of a file: http://127.0.0.1:7860.")] = None
    secret_file: Annotated[
        Path | None, typer.Option(help=f"File with the server's secret, for --url; default: {VARIABLE}.")
    ] = None
    key: Key = None
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False

    def ask(self, work: Callable[[Any], Any], method: str, path: str) -> Any:
        """What ``work`` finds in the file's inbox, or what the server answers; an error ends the command."""
        found = in_file(self.database, work) if self.url is None else self._call(self.url, method, path)
        if self.as_json:
            typer.echo(json.dumps(found, indent=2))
        return found

    def _call(self, url: str, method: str, path: str) -> Any:
        import os

        import httpx2

        from hooks.errors import InvalidWebhook
        from hooks.management import find_secret
        from service.cli.sessions import base_url, credentials

        base = base_url(url)
        try:
            secret = find_secret(file=self.secret_file) or os.environ.get(VARIABLE)
        except InvalidWebhook as error:
            fail(Code.USAGE, "the secret cannot be read", str(error), "look at --secret-file")
        headers = credentials(self.key) | ({"x-webhook-secret": secret} if secret else {})
        where = f"{base}/webhooks/_events{path}"
        try:
            answer = httpx2.request(method, where, headers=headers, timeout=10, trust_env=False)
            found = answer.json() if answer.is_success else None
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            why = str(error) or type(error).__name__
            fail(Code.TRANSPORT, f"no webhooks server answers at {base}", why, "start it with `robojax webhooks serve`")
        if not answer.is_success:
            try:
                why = str(answer.json().get("error") or answer.json()["detail"])
            except (ValueError, KeyError, AttributeError):
                why = f"status {answer.status_code}"
            then = {401: "give --secret-file, or --key", 403: "give the server's own secret", 404: "see events list"}
            advice = then.get(answer.status_code, "look at the server's log")
            fail(Code.TRANSPORT, f"the server at {base} refused", why, advice)
        return found


@events.command("list")
@flatten
def list_(
    log: Log,
    status: Annotated[str | None, typer.Option(help=f"Only these: {STATUSES}.")] = None,
    path: Annotated[str | None, typer.Option(help="Only of this endpoint, as /webhooks/NAME.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many.")] = 50,
    before: Annotated[int | None, typer.Option(help="Only those before this number.")] = None,
) -> None:
    """List the newest events."""
    from datetime import UTC, datetime
    from urllib.parse import urlencode

    from hooks.serving.event_routes import brief

    if status is not None and status not in STATUSES.split(", "):
        fail(Code.USAGE, "nothing was listed", f"there is no status {status!r}", f"give one of {STATUSES}")
    given = {"status": status, "path": path, "limit": limit, "before": before}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    found = log.ask(lambda inbox: [brief(event) for event in inbox.list(**given)], "GET", f"?{query}")
    if log.as_json:
        return
    if not found:
        typer.echo("no events")
    # Lines, because a table of all this folds every cell on a narrow terminal.
    for event in found:
        received = datetime.fromtimestamp(event["received_at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        happened = " ".join(event[name] for name in ("scope", "action", "repo") if event[name])
        line = f"{event['number']:>5} {event['id']} {received} {event['status']:<10} {event['path']}  {happened}"
        typer.echo(escape(line))
        if event["error"]:
            typer.echo(f"{'':6}run {event['attempt']}: {escape(event['error'])}")


@events.command()
@flatten
def show(event_id: Id, log: Log) -> None:
    """Show all of one event: headers, body, and why it failed."""
    from hooks.serving.event_routes import whole

    found = log.ask(lambda inbox: whole(inbox.get(event_id)), "GET", f"/{quote(event_id, safe='')}")
    for name, value in () if log.as_json else found.items():
        if name == "headers":
            typer.echo("\n".join(["headers:", *(f"  {header}: {escape(text)}" for header, text in value.items())]))
        else:
            typer.echo(f"{name}: {'' if value is None else escape(str(value))}")


@events.command()
@flatten
def replay(event_id: Id, log: Log) -> None:
    """Have an event handled again, whatever became of it; a running server begins within a second."""
    from hooks.serving.event_routes import brief

    path = f"/{quote(event_id, safe='')}/replay"
    found = log.ask(lambda inbox: brief(inbox.replay(event_id)), "POST", path)
    if not log.as_json:
        typer.echo(f"event {found['id']} is {found['status']}; its handler is {found['path']}")


def in_file(database: Path | None, work: Callable[[Any], Any]) -> Any:
    """What is done with the inbox of a file, whose errors end the command."""
    import os

    from hooks.errors import StoreError, UnknownEvent
    from hooks.receiving.inbox import Inbox
    from hooks.serving.configuration import usual_folder

    path = database or Path(os.environ.get("ROBOJAX_WEBHOOKS_DATABASE") or DATABASE)
    what = "the events cannot be read"
    if not path.is_file():
        # Scripts keep their events without being told where.
        kept = sorted(usual_folder().glob("*.sqlite3"), key=lambda path: path.stat().st_mtime, reverse=True)
        known = f"; scripts keep theirs in {', '.join(map(str, kept[:5]))}" if kept else ""
        fail(
            Code.USAGE, what, f"there is no file {str(path)!r}", f"give --database, or --url of a running server{known}"
        )
    try:
        with Inbox(path) as inbox:
            return work(inbox)
    except UnknownEvent as error:
        fail(Code.USAGE, "there is no such event", str(error), "robojax webhooks events list shows the newest")
    except StoreError as error:
        fail(Code.USAGE, what, str(error), "give the --database that the server writes")

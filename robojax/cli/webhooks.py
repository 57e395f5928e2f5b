"""Command `webhooks`: manage webhooks, send sample deliveries, list received events."""

import functools
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hooks
from hooks.errors import StoreError
from robojax.cli.app import Code, fail, flatten, print_table

if TYPE_CHECKING:
    from hooks.receiver.inbox import EventInbox

DATABASE = Path("webhooks.sqlite")
STATUSES = "waiting, running, done, failed, dead"

plain = functools.partial(typer.Typer, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app = plain(help="Manage webhooks of the Hub (or of a robojax server), send sample deliveries, list received events")
events = plain()


def option(text: str, *names: str, **more: Any) -> Any:
    """Return a Typer option with this help text."""
    return typer.Option(*names, help=text, **more)


Text = str | None
Texts = list[str] | None
File = Path | None
Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the webhook")]
EventId = Annotated[str, typer.Argument(metavar="ID", help="Id of the event")]
SecretFile = Annotated[File, option("File with the secret; default: WEBHOOK_SECRET")]
Events = Annotated[Path, option("Database file of the events")]
AsJson = Annotated[bool, option("Print JSON", "--json")]


@dataclass(frozen=True)
class Hub:
    """Options for the connection to the Hub."""

    endpoint: Annotated[Text, option("URL of a Hub or robojax server; default: HF_ENDPOINT, or huggingface.co")] = None
    timeout: Annotated[float, option("Time limit of a response, in seconds")] = 30.0
    as_json: Annotated[bool, option("Print JSON", "--json")] = False

    def connect(self, allow_http: Sequence[str] | None = None) -> "hooks.WebhooksClient":
        """Return a client of the Hub with these options."""
        return hooks.WebhooksClient(self.endpoint, timeout=self.timeout, allow_http=allow_http or ())

    def print_done(self, done: str, webhook: "hooks.WebhookInfo | Mapping[str, Any]", **more: Any) -> None:
        """Print what was done to a webhook; ``more`` are additional fields."""
        shape = webhook if isinstance(webhook, Mapping) else webhook_to_json(webhook)
        if self.as_json:
            typer.echo(json.dumps({**shape, "did": done, **more}, indent=2))
            return
        typer.echo(f"Webhook {done}")
        for name, value in {**(webhook_to_texts(shape) if "status" in shape else shape), **more}.items():
            typer.echo(f"  {name + ':':<9}{escape(str(value))}")


@dataclass(frozen=True)
class Content:
    """Options for the fields of a webhook."""

    url: Annotated[Text, option("URL that receives its deliveries")] = None
    job_id: Annotated[Text, option("Id of the job that it starts (job.id), instead of --url")] = None
    domain: Annotated[Texts, option("Domain: repo or discussion (on a robojax server also session); repeatable")] = None
    secret_file: Annotated[File, option("File with the secret of its deliveries")] = None
    generate: Annotated[bool, option("Create --secret-file if it is missing", "--generate-secret")] = False
    allow_http: Annotated[Texts, option("Host or network that is allowed without TLS; repeatable")] = None

    def read(self, watch: Sequence[str] | None) -> dict[str, Any]:
        """Return the client's arguments; None for options that were not given."""
        return {
            "url": self.url,
            "job_id": self.job_id,
            "watched": watch or None,
            "domains": self.domain or None,
            "secret": hooks.find_secret(file=self.secret_file, generate=self.generate),
        }


def command(
    failure: str, *names: str, group: typer.Typer = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command whose errors end the process with ``failure``."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            try:
                function(**arguments)
            except hooks.HooksError as error:
                code = Code.TRANSPORT if isinstance(error, hooks.HubTrouble) else Code.USAGE
                fail(code, failure, str(error), get_advice(error))

        for number, name in enumerate(names or (function.__name__,)):
            group.command(name, hidden=number > 0)(flatten(run))
        return run

    return register


def get_advice(error: hooks.HooksError) -> str:
    """Return the next step after an error."""
    if not isinstance(error, hooks.HubTrouble):
        return "see --help for the options"
    if isinstance(error, hooks.UnknownWebhook):
        return "`robojax webhooks list` shows the webhooks of the account"
    if error.status == 401:
        return "log in with `hf auth login`, or set HF_TOKEN; a robojax server logs the path of its token file"
    if error.status in (None, 408, 429) or error.status >= 500:
        return "try again later; check --endpoint and --timeout"
    return "correct the request; --endpoint must be a Hub, or a robojax server with --registry"


@command("the webhooks cannot be listed", "list", "ls")
def list_webhooks(hub: Hub, quiet: Annotated[bool, option("Print only the ids", "--quiet", "-q")] = False) -> None:
    """List the webhooks of the account."""
    client = hub.connect()
    shapes = [webhook_to_json(webhook) for webhook in client.list_webhooks()]
    if hub.as_json:
        typer.echo(json.dumps(shapes, indent=2))
    elif quiet:
        typer.echo("".join(f"{shape['id']}\n" for shape in shapes), nl=False)
    elif not shapes:
        typer.echo(f"No results found: no webhooks at {client.endpoint}")
    else:
        columns = ("id", "sends to", "status", "secret", "domains", "watched")
        rows = [webhook_to_texts(shape) | {"watched": "\n".join(shape["watched"])} for shape in shapes]
        # An id that is cut or folded cannot be copied.
        print_table(columns, (map(escape, row.values()) for row in rows), never_folded=("id",))


@command("no webhook was created")
def create(
    watch: Annotated[list[str], option("Watched item, as model:someone/arm or org:someone; repeatable")],
    content: Content,
    hub: Hub,
) -> None:
    """Create a webhook that sends to --url, or starts the job --job-id."""
    hub.print_done("created", hub.connect(content.allow_http).create_webhook(**content.read(watch)))


@command("the webhook was not changed")
def update(
    webhook_id: Id,
    content: Content,
    hub: Hub,
    watch: Annotated[Texts, option("Watched item of the new list; repeatable")] = None,
) -> None:
    """Change the given fields and keep the others."""
    given = content.read(watch)
    if all(value is None for value in given.values()):
        raise hooks.InvalidWebhook("no change was given")
    hub.print_done("updated", hub.connect(content.allow_http).update_webhook(webhook_id, **given))


@command("the webhook was not enabled")
def enable(webhook_id: Id, hub: Hub) -> None:
    """Enable the deliveries of a webhook."""
    hub.print_done("enabled", hub.connect().enable_webhook(webhook_id))


@command("the webhook was not disabled")
def disable(webhook_id: Id, hub: Hub) -> None:
    """Disable the deliveries of a webhook until it is enabled."""
    hub.print_done("disabled", hub.connect().disable_webhook(webhook_id))


@command("the webhook was not deleted")
def delete(webhook_id: Id, hub: Hub, yes: Annotated[bool, option("Do not ask", "--yes", "-y")] = False) -> None:
    """Delete a webhook permanently."""
    if hub.as_json and not yes:
        raise hooks.InvalidWebhook("--json cannot ask for confirmation; give --yes")
    if not yes:
        typer.confirm(f"Delete webhook {webhook_id!r} permanently?", abort=True)
    hub.connect().delete_webhook(webhook_id)
    hub.print_done("deleted", {"id": webhook_id})


@command("nothing was replayed")
def replay(
    webhook_id: Id,
    log_id: Annotated[str, typer.Argument(metavar="LOG_ID", help="Id of the delivery, from the activity page")],
    hub: Hub,
) -> None:
    """Deliver an event again. Exit code 1 if the receiver did not accept it."""
    status = hub.connect().replay(webhook_id, log_id)
    hub.print_done("replayed", {"id": webhook_id}, log_id=log_id, status_code=status)
    if not 200 <= status < 300:
        raise typer.Exit(Code.CHECK)


@command("nothing was sent")
def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the endpoint: http://127.0.0.1:7860/webhooks/NAME")],
    scope: Annotated[Texts, option("Scope of the event, as repo.config or discussion; repeatable")] = None,
    all_scopes: Annotated[bool, option("Deliver events of all scopes", "--all-scopes")] = False,
    repo: Annotated[str, option("Repo of the event")] = "robotics-lab/pick-cubes",
    sha: Annotated[Text, option("Commit of the event; default: an invented commit")] = None,
    secret_file: SecretFile = None,
    as_json: Annotated[bool, option("Print a line of JSON for each delivery", "--json")] = False,
) -> None:
    """Deliver sample events as the Hub does. Exit code 1 if a response is not 2xx."""
    import httpx2

    from hooks.payload import SAMPLES, sample

    secret = hooks.find_secret(file=secret_file) or os.environ.get("WEBHOOK_SECRET") or ""
    if not (secret.isascii() and secret.isprintable()):
        raise hooks.InvalidWebhook("the secret must be a line of visible ASCII, because it is sent in a header")
    accepted = 0
    scopes = SAMPLES if all_scopes else scope or ["repo.content"]
    samples = {kind: sample(kind, repo=repo, sha=sha) for kind in scopes}
    for kind, payload in samples.items():
        headers = {"Webhook-Id": str(uuid.uuid4())} | ({"X-Webhook-Secret": secret} if secret else {})
        row = {"id": headers["Webhook-Id"], "scope": kind, "status": None}
        try:
            answer = httpx2.post(url, json=payload, headers=headers, timeout=30, trust_env=False)
            row |= {"status": answer.status_code, "answer": answer.text[:2000]}
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL):
            text = f"{url!r} is not the URL of an endpoint, as http://127.0.0.1:7860/webhooks/NAME"
            raise hooks.InvalidWebhook(text) from None
        except httpx2.HTTPError as error:
            row["answer"] = str(error) or type(error).__name__
        accepted += str(row["status"]).startswith("2")
        line = f"{row['status'] or '---'}  {kind:<18} {row['id']}  "
        typer.echo(json.dumps(row) if as_json else line + escape(row["answer"].replace("\n", " "))[:100])
    if not as_json:
        typer.echo(f"{accepted} of {len(samples)} accepted")
    if accepted < len(samples):
        raise typer.Exit(Code.CHECK)


def open_inbox(database: Path) -> "EventInbox":
    """Open the events of a server, as a context manager."""
    from hooks.receiver.inbox import EventInbox
    from hooks.server.lifecycle import get_default_folder

    if not database.is_file():
        databases = ", ".join(sorted(map(str, get_default_folder().glob("*.sqlite3")))[:5])
        scripts = f"; scripts store their events in {databases}" if databases else ""
        raise StoreError(f"there is no file {str(database)!r}; give --database{scripts}")
    return EventInbox(database)


@command("the events cannot be listed", "list", group=events)
def list_events(
    database: Events = DATABASE,
    status: Annotated[Text, option(f"Status of the events: {STATUSES}; default: all")] = None,
    limit: Annotated[int, option("Number of events", min=1, max=500)] = 50,
    as_json: AsJson = False,
) -> None:
    """List the newest events."""
    from hooks.server.event_routes import summarize_event

    if status is not None and status not in STATUSES.split(", "):
        raise hooks.InvalidWebhook(f"there is no status {status!r}; wanted: {STATUSES}")
    with open_inbox(database) as inbox:
        listed = [summarize_event(event) for event in inbox.list(status=status, limit=limit)]
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    if not listed:
        typer.echo("no events")
    # Lines instead of a table, which would fold every cell on a narrow terminal.
    for event in listed:
        received = datetime.fromtimestamp(event["received_at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        happened = " ".join(event[name] for name in ("scope", "action", "repo") if event[name])
        line = f"{event['number']:>5} {event['id']} {received} {event['status']:<10} {event['path']}  {happened}"
        typer.echo(escape(line))
        if event["error"]:
            typer.echo(f"{'':6}run {event['attempt']}: {escape(event['error'])}")


@command("the event cannot be shown", "show", group=events)
def show_event(event_id: EventId, database: Events = DATABASE) -> None:
    """Show an event as JSON: headers, body, and error."""
    from hooks.server.event_routes import serialize_event

    with open_inbox(database) as inbox:
        typer.echo(json.dumps(serialize_event(inbox.get(event_id)), indent=2))


@command("the event was not replayed", "replay", group=events)
def replay_event(event_id: EventId, database: Events = DATABASE) -> None:
    """Handle an event of any status again; a running server begins within a second."""
    with open_inbox(database) as inbox:
        event = inbox.replay(event_id)
    typer.echo(f"event {event.id} is {event.status}; its handler is {event.path}")


app.add_typer(events, name="events", help="List, show and replay received events")


def webhook_to_json(webhook: "hooks.WebhookInfo") -> dict[str, Any]:
    """Return a webhook as JSON, without secrets."""
    from hooks.client.webhook import mask_job, mask_url

    job = None if webhook.job is None else {k: v for k, v in vars(mask_job(webhook.job)).items() if v is not None}
    return {
        "id": webhook.id,
        "url": None if webhook.url is None else mask_url(webhook.url),
        **({} if job is None else {"job": job}),
        "watched": [f"{item.type}:{item.name}" for item in webhook.watched],
        "domains": list(webhook.domains),
        "has_secret": webhook.has_secret,
        "disabled": webhook.disabled,
        "status": webhook.status,
    }


def webhook_to_texts(shape: Mapping[str, Any]) -> dict[str, str]:
    """Return a webhook as texts, in the order of the table's columns."""
    job = shape.get("job") or {}
    # A job of a robojax server has a name instead of an image.
    name = job.get("docker_image") or job.get("space_id") or (job.get("labels") or {}).get("id") or ""
    return {
        "id": shape["id"],
        **({"job": f"(job) {name}"} if job else {"url": shape["url"] or ""}),
        "status": shape["status"],
        "secret": "set" if shape["has_secret"] else "none",
        "domains": " ".join(shape["domains"]),
        "watched": " ".join(shape["watched"]),
    }


def escape(text: str) -> str:
    """Return a text without control characters, which could control the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)

"""Command `webhooks`: manages webhooks of the Hub."""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import typer

import hooks
from hooks.errors import StoreError, TunnelFailed, UnknownEvent
from robojax.cli.app import Code, fail, flatten, print_table
from robojax.cli.sessions import Key, base_url, credentials
from robojax.client.http import SERVER_VARIABLE

VARIABLE = "WEBHOOK_SECRET"
DATABASE = Path("webhooks.sqlite")
DATABASE_VARIABLE = "ROBOJAX_WEBHOOKS_DATABASE"
STATUSES = "waiting, running, done, failed, dead, ignored, superseded"

plain = functools.partial(typer.Typer, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app = plain(help="Manage webhooks of the Hub (or of a robojax server), receive them, look at what came.")
events = plain()


def option(text: str, *names: str, **more: Any) -> Any:
    """A Typer option with this help."""
    return typer.Option(*names, help=text, **more)


Text = str | None
Texts = list[str] | None
File = Path | None
Format = StrEnum("Format", ["AUTO", "HUMAN", "AGENT", "JSON", "QUIET"])
Id = Annotated[str, typer.Argument(metavar="ID", help="Of the webhook.")]
EventId = Annotated[str, typer.Argument(metavar="ID", help="Of the event.")]
Watch = Annotated[list[str], option("What to watch, as model:someone/arm or org:someone; repeatable.")]
SecretFile = Annotated[File, option("File with the secret.")]
SecretEnv = Annotated[Text, option("Environment variable with the secret.", metavar="NAME")]
ServedSecretFile = Annotated[File, option(f"File with the secret; default: {VARIABLE}.")]
AsJson = Annotated[bool, option("JSON, for programs.", "--json")]


@dataclass(frozen=True)
class Hub:
    """Options of where the webhooks are, and whose."""

    endpoint: Annotated[Text, option("Of a Hub or of a robojax server; default: HF_ENDPOINT, or huggingface.co.")] = (
        None
    )
    token_file: Annotated[File, option("File with the token; default: HF_TOKEN, or the one of `hf auth login`.")] = None
    token: Annotated[Text, option("As `hf` has it; it stays in the shell's history.", hidden=True)] = None
    timeout: Annotated[float, option("Seconds that the Hub has for an answer.")] = 30.0

    def connect(self, allow_http: Sequence[str] | None = None) -> "hooks.WebhooksClient":
        """A client of the Hub with these options."""
        token = self.token
        if token is not None:
            warn("--token stays in the shell's history and in process listings; log in once, or set HF_TOKEN")
        if self.token_file is not None:
            subject, then = f"token file {str(self.token_file)!r}", "write the token alone into it"
            try:
                token = self.token_file.read_text("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
                refuse(f"{subject} cannot be read: {why}", then)
            if not token:
                refuse(f"{subject} is empty", then)
        return hooks.WebhooksClient(self.endpoint, token, timeout=self.timeout, allow_http=allow_http or ())


@dataclass(frozen=True)
class Content:
    """Options of what a webhook contains."""

    url: Annotated[Text, option("Address that it sends to.")] = None
    job_id: Annotated[Text, option("Job that it starts (from job.id), instead of --url.")] = None
    domain: Annotated[Texts, option("repo or discussion (or session, of a robojax server); repeatable.")] = None
    secret: Annotated[Text, option("Secret of its deliveries; it stays in the shell's history.")] = None
    secret_file: SecretFile = None
    secret_env: SecretEnv = None
    generate: Annotated[
        bool, option("Make --secret-file with a new secret if it is not there.", "--generate-secret")
    ] = False
    secrets: Annotated[Texts, option("NAME (from the environment) or NAME=value for the job.", "--secrets", "-s")] = (
        None
    )
    secrets_file: Annotated[Text, option("File of NAME=value lines for the job; - for standard input.")] = None
    any_type: Annotated[bool, option("Send a type in --watch that is not known here.", "--any-type")] = False
    allow_http: Annotated[
        Texts, option("Host or network that may be sent to without TLS; repeatable.", metavar="HOST")
    ] = None

    def read(self, watch: list[str] | None) -> dict[str, Any]:
        """Arguments for the client; None for what was not given."""
        if self.secret is not None:
            warn("--secret stays in the shell's history and in process listings; --secret-file and --secret-env do not")
        secret = functools.partial(hooks.find_secret, variable=self.secret_env, file=self.secret_file)
        return {
            "url": self.url,
            "job_id": self.job_id,
            "watched": read_watch(watch, self.any_type) if watch else None,
            "domains": self.domain or None,
            "secret": secret(self.secret, generate=self.generate),
            "secrets": read_job_secrets(self.secrets, self.secrets_file),
        }


@dataclass(frozen=True)
class Output:
    """Options of how results are printed; the last two as in ``hf``."""

    as_json: AsJson = False
    form: Annotated[Format, option("As `hf` has it.", "--format", hidden=True)] = Format.AUTO
    quiet: Annotated[bool, option("Only the id.", "--quiet", "-q", hidden=True)] = False

    @property
    def format(self) -> Format:
        """The chosen format."""
        return Format.JSON if self.as_json else Format.QUIET if self.quiet else self.form

    def print(self, done: str, shape: Mapping[str, Any], **more: Any) -> None:
        """Print what was done to which webhook; ``more`` is in JSON, too."""
        if self.format is Format.JSON:
            print_json({**shape, "did": done, **more})
        elif self.format is Format.QUIET:
            typer.echo(shape["id"])
        else:
            typer.echo(f"Webhook {done}")
            print_lines(shape, more)


def command(failure: str, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that registers a command whose errors end the process and whose warnings are printed.

    Args:
        failure: what is said when an error ends it.
        names: of the command, when other than the function's; all but the first one are hidden.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                try:
                    function(**arguments)
                except hooks.InvalidWebhook as error:
                    fail(Code.USAGE, failure, str(error), "see --help for the options")
                except hooks.HubTrouble as error:
                    fail(Code.TRANSPORT, failure, str(error), get_advice(error))
                finally:
                    for warning in caught:
                        warn(str(warning.message))

        for number, name in enumerate(names or (function.__name__,)):
            app.command(name, hidden=number > 0)(flatten(run))
        return run

    return register


def get_advice(error: hooks.HubTrouble) -> str:
    """The next step after an error of the Hub."""
    if isinstance(error, hooks.UnknownWebhook):
        return "`robojax webhooks list` shows those there are"
    if error.status == 401:
        then = "log in with `hf auth login`, or set HF_TOKEN or --token-file"
        return f"{then}; a robojax server's log names its token file"
    if 400 <= (error.status or 0) < 500 and error.status not in (408, 429):
        return "change what it names; --endpoint has to be a Hub, or a robojax server with --registry"
    return "try again later; look at --endpoint and --timeout"


@command("the webhooks cannot be listed", "list", "ls")
def list_(hub: Hub, output: Output) -> None:
    """List the webhooks of the account."""
    client = hub.connect()
    shapes = [webhook_to_json(webhook) for webhook in client.list_webhooks()]
    if output.format is Format.JSON:
        print_json([{**shape, "watched": list_watched_names(shape)} for shape in shapes])
    elif output.format is Format.QUIET:
        for shape in shapes:
            typer.echo(shape["id"])
    elif not shapes:
        typer.echo(f"No results found: no webhooks at {client.endpoint}")
    else:
        columns = ("id", "sends to", "status", "secret", "domains", "watched")
        rows = [webhook_to_texts(shape) | {"watched": "\n".join(list_watched_names(shape))} for shape in shapes]
        # An id that is cut or folded cannot be copied.
        print_table(columns, (map(escape, row.values()) for row in rows), never_folded=("id",))


@command("the webhook cannot be shown")
def info(webhook_id: Id, hub: Hub, output: Output) -> None:
    """Show all of one webhook."""
    shape = webhook_to_json(hub.connect().get_webhook(webhook_id))
    if output.format is Format.QUIET:
        typer.echo(shape["id"])
    elif output.format is Format.HUMAN or (output.format is Format.AUTO and sys.stdout.isatty()):
        print_lines(shape)
    else:
        print_json(shape)


@command("no webhook was made")
def create(watch: Watch, content: Content, hub: Hub, output: Output) -> None:
    """Make a webhook that sends to --url, or starts the job --job-id. See `ensure` for one that may be there."""
    output.print("created", webhook_to_json(hub.connect(content.allow_http).create_webhook(**content.read(watch))))


@command("the webhook was not changed")
def update(
    webhook_id: Id,
    content: Content,
    hub: Hub,
    output: Output,
    watch: Annotated[Texts, option("All that is to be watched from now on; repeatable.")] = None,
    watch_nothing: Annotated[bool, option("Deliver nothing any more.", "--watch-nothing")] = False,
) -> None:
    """Change what is named; all else stays, what is watched too."""
    named = content.read(watch)
    if watch_nothing:
        if watch:
            fail(Code.USAGE, "the webhook was not changed", "--watch and --watch-nothing", "give one of them")
        named |= {"watched": [], "allow_empty": True}
    if all(value is None for value in named.values()):
        fail(Code.USAGE, "the webhook was not changed", "nothing was named that is to change", "see --help")
    output.print("updated", webhook_to_json(hub.connect(content.allow_http).update_webhook(webhook_id, **named)))


@command("it is not sure that there is such a webhook")
def ensure(
    watch: Watch,
    content: Content,
    hub: Hub,
    output: Output,
    webhook_id: Annotated[Text, option("Of the webhook, instead of looking for it.", "--id")] = None,
    enabled: Annotated[bool, option("Whether to enable one that is not.", "--enable/--no-enable")] = True,
) -> None:
    """Have exactly one webhook like this: it is made, changed or enabled as need be. Twice is once."""
    steps: list[str] = []
    named = content.read(watch)
    client = hub.connect(content.allow_http)
    webhook = client.ensure(**named, webhook_id=webhook_id, enable=enabled, tell=steps.append)
    output.print(" and ".join(steps), webhook_to_json(webhook))


@command("the webhook was not enabled")
def enable(webhook_id: Id, hub: Hub, output: Output) -> None:
    """Let a webhook deliver (again)."""
    output.print("enabled", webhook_to_json(hub.connect().enable_webhook(webhook_id)))


@command("the webhook was not disabled")
def disable(webhook_id: Id, hub: Hub, output: Output) -> None:
    """Let a webhook deliver nothing until it is enabled."""
    output.print("disabled", webhook_to_json(hub.connect().disable_webhook(webhook_id)))


@command("the webhooks were not healed")
def heal(
    hub: Hub,
    webhook_id: Annotated[Text, typer.Argument(metavar="[ID]", help="Only this one; default: all.")] = None,
    try_first: Annotated[
        bool, option("Enable only if its address takes a test payload from here.", "--try-first")
    ] = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    as_json: AsJson = False,
) -> None:
    """Enable the webhooks that the Hub suspended. Ends with 1 when one of them was left as it is."""
    secret = hooks.find_secret(variable=secret_env, file=secret_file)
    outcomes = hub.connect().heal(webhook_id, try_first=try_first, secret=secret)
    if as_json:
        print_json(
            [
                {**webhook_to_json(outcome.webhook), "is_healed": outcome.is_healed, "reason": outcome.reason}
                for outcome in outcomes
            ]
        )
    else:
        lines = [(outcome, "enabled" if outcome.is_healed else "left as it is") for outcome in outcomes]
        lines_of_text = [f"{outcome.webhook.id} {done}  {outcome.reason}".rstrip() for outcome, done in lines]
        typer.echo("\n".join(lines_of_text or ["no webhook is suspended"]))
    end_with_1_unless(all(outcome.is_healed for outcome in outcomes))


@command("the webhook was not deleted")
def delete(
    webhook_id: Id,
    hub: Hub,
    output: Output,
    yes: Annotated[bool, option("Do not ask.", "--yes", "-y")] = False,
) -> None:
    """Delete a webhook, for good."""
    if not yes:
        if output.format not in (Format.AUTO, Format.HUMAN):
            fail(Code.USAGE, "the webhook was not deleted", "nobody can be asked with this format", "give --yes")
        typer.confirm(f"Delete webhook {webhook_id!r} for good?", abort=True)
    hub.connect().delete_webhook(webhook_id)
    output.print("deleted", {"id": webhook_id})


@command("nothing was replayed")
def replay(
    webhook_id: Id,
    log_id: Annotated[str, typer.Argument(metavar="LOG_ID", help="Of the delivery, from the activity page.")],
    hub: Hub,
    output: Output,
) -> None:
    """Deliver something again. Ends with 1 when the receiver did not take it."""
    status = hub.connect().replay(webhook_id, log_id)
    output.print("replayed", {"id": webhook_id}, log_id=log_id, status_code=status)
    end_with_1_unless(200 <= status < 300)


@app.command()
def serve(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="Or a .py file. Without :NAME, the only server in it.")
    ],
    host: Annotated[Text, option("To listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, option("Default: the first free one from 7860 on; 0: any.")] = None,
    secret_file: ServedSecretFile = None,
    share: Annotated[
        bool | None, option("Whether to ask a tunnel program for a public address.", "--share/--no-share")
    ] = None,
    database: Annotated[File, option(f"File of the events; default: what the module says, or {DATABASE}.")] = None,
) -> None:
    """Receive webhooks with the functions of a module until Ctrl-C."""
    from dataclasses import replace

    from hooks.server.server import ServerNotFound, load_server

    try:
        secret = hooks.find_secret(file=secret_file)
        server = load_server(target)
        settings = replace(server.settings, database=database or server.settings.database or DATABASE)
        server.settings = settings if secret is None else replace(settings, secrets=(secret,))
        server.launch(host=host, port=port, share=share)
    except hooks.HooksError as error:
        advice = {
            ServerNotFound: "robojax webhooks serve app.py, or module:name",
            hooks.InvalidWebhook: "look at --secret-file and at the module",
            StoreError: "give another --database",
            TunnelFailed: "leave --share out, or install a tunnel program",
        }.get(type(error), "look at --host and --port; --port 0 takes a free one")
        code = Code.TRANSPORT if isinstance(error, TunnelFailed) else Code.USAGE
        fail(code, "the webhooks server cannot start", str(error), advice)


@app.command()
def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the endpoint: http://127.0.0.1:7860/webhooks/NAME.")],
    scope: Annotated[Texts, option("repo.content, discussion, repo:move, ...; repeatable. See --list-scopes.")] = None,
    all_scopes: Annotated[bool, option("One of every kind that the Hub documents.", "--all-scopes")] = False,
    list_scopes: Annotated[bool, option("Print the kinds and end.", "--list-scopes")] = False,
    repo: Annotated[str, option("That it happened to.")] = "robotics-lab/pick-cubes",
    repo_type: Annotated[str, option("model, dataset, space or bucket.")] = "model",
    sha: Annotated[Text, option("Commit that it is about; default: one made up.")] = None,
    secret_file: ServedSecretFile = None,
    bad_secret: Annotated[bool, option("Send a wrong secret.", "--bad-secret")] = False,
    standard_secret_file: Annotated[File, option("Sign by Standard Webhooks too.")] = None,
    github_secret_file: Annotated[File, option("Sign as GitHub does too.")] = None,
    count: Annotated[int, option("Events of each kind.", min=1, max=10_000)] = 1,
    dup: Annotated[int, option("Copies of each event, with one id.", min=1, max=100)] = 1,
    reorder: Annotated[bool, option("Shuffle them.", "--reorder")] = False,
    seed: Annotated[int, option("Of the shuffling.")] = 0,
    at_once: Annotated[int, option("Requests under way at one time.", min=1, max=100)] = 1,
    timeout: Annotated[float, option("Seconds for each.", min=0.1)] = 30.0,
    as_json: Annotated[bool, option("One line of JSON for each delivery.", "--json")] = False,
) -> None:
    """Deliver made-up events as the Hub would. Ends with 1 when one of them was not answered by 2xx."""
    import asyncio
    import statistics

    from hooks import testing
    from hooks.payload import SAMPLE_SCOPES, sample

    if list_scopes:
        typer.echo("\n".join(SAMPLE_SCOPES))
        return
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        refuse(f"{url!r} is no URL of an endpoint", "try http://127.0.0.1:7860/webhooks/NAME")
    try:
        secrets = {
            "secret": hooks.find_secret(file=secret_file) or os.environ.get(VARIABLE) or None,
            "standard_secret": hooks.find_secret(file=standard_secret_file),
            "github_secret": hooks.find_secret(file=github_secret_file),
        }
        kinds = [*SAMPLE_SCOPES] if all_scopes else scope or ["repo.content"]
        events = [(kind, sample(kind, repo=repo, repo_type=repo_type, sha=sha)) for kind in kinds for _ in range(count)]
    except hooks.InvalidWebhook as error:
        refuse(str(error), "see --help; --list-scopes names the kinds of events")
    if bad_secret:
        secrets["secret"] = "wrong-on-purpose"
    sent = testing.build_deliveries(events, copies=dup, is_reordered=reorder, seed=seed)

    async def deliver() -> list[testing.DeliveryOutcome]:
        outcomes = []
        async for outcome in testing.send_deliveries(url, sent, **secrets, at_once=at_once, timeout=timeout):
            row = {
                "id": outcome.delivery.id,
                "scope": outcome.delivery.kind,
                "status": outcome.status,
                "milliseconds": round(outcome.seconds * 1000, 1),
                "answer": outcome.answer,
            }
            line = f"{outcome.status or '---'}  {row['milliseconds']:8.1f} ms  {row['scope']:<28} {row['id']}  "
            typer.echo(json.dumps(row) if as_json else line + escape(outcome.answer.replace("\n", " "))[:100])
            outcomes.append(outcome)
        return outcomes

    outcomes = asyncio.run(deliver())
    times = [outcome.seconds * 1000 for outcome in outcomes]
    accepted = sum(outcome.is_accepted for outcome in outcomes)
    if not as_json:
        middle = statistics.median_high(times)
        typer.echo(f"{accepted} of {len(times)} accepted; median {middle:.1f} ms, slowest {max(times):.1f} ms")
    end_with_1_unless(accepted == len(times))


@dataclass(frozen=True)
class Log:
    """Options of where events are stored (a file or a running server), and how they are printed."""

    database: Annotated[File, option(f"File of the events; default: {DATABASE_VARIABLE} or {DATABASE}.")] = None
    server: Annotated[
        Text, option(f"A running server instead of a file: http://127.0.0.1:7860; default: {SERVER_VARIABLE}, if set.")
    ] = None
    secret_file: Annotated[File, option(f"File with the server's secret, for --server; default: {VARIABLE}.")] = None
    key: Key = None
    as_json: AsJson = False

    def ask(self, work: Callable[[Any], Any], method: str, path: str) -> Any:
        """Query the events in the file or on the server; an error ends the process."""
        if self.database is not None and self.server is not None:
            why = "--database reads a file, --server asks a running server"
            fail(Code.USAGE, "the events cannot be read", why, "give one of them")
        server = self.server
        if server is None and self.database is None and not os.environ.get(DATABASE_VARIABLE):
            server = os.environ.get(SERVER_VARIABLE) or None
        answer = self._read_inbox(work) if server is None else self._call(server, method, path)
        if self.as_json:
            print_json(answer)
        return answer

    def _read_inbox(self, work: Callable[[Any], Any]) -> Any:
        from hooks.receiver.inbox import Inbox
        from hooks.server.lifecycle import get_default_folder

        path = self.database or Path(os.environ.get(DATABASE_VARIABLE) or DATABASE)
        what = "the events cannot be read"
        if not path.is_file():
            # Scripts keep their events without being told where.
            databases = sorted(
                get_default_folder().glob("*.sqlite3"), key=lambda path: path.stat().st_mtime, reverse=True
            )
            then = "give --database, or --server with the URL of a running server"
            then += f"; scripts keep theirs in {', '.join(map(str, databases[:5]))}" if databases else ""
            fail(Code.USAGE, what, f"there is no file {str(path)!r}", then)
        try:
            with Inbox(path) as inbox:
                return work(inbox)
        except UnknownEvent as error:
            fail(Code.USAGE, "there is no such event", str(error), "robojax webhooks events list shows the newest")
        except StoreError as error:
            fail(Code.USAGE, what, str(error), "give the --database that the server writes")

    def _call(self, server: str, method: str, path: str) -> Any:
        import httpx2

        base = base_url(server)
        try:
            secret = hooks.find_secret(file=self.secret_file) or os.environ.get(VARIABLE)
        except hooks.InvalidWebhook as error:
            fail(Code.USAGE, "the secret cannot be read", str(error), "look at --secret-file")
        headers = credentials(self.key) | ({"x-webhook-secret": secret} if secret else {})
        where = f"{base}/webhooks/_events{path}"
        try:
            answer = httpx2.request(method, where, headers=headers, timeout=10, trust_env=False)
            content = answer.json() if answer.is_success else None
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
        return content


@events.command("list")
@flatten
def list_events(
    log: Log,
    status: Annotated[Text, option(f"Only these: {STATUSES}.")] = None,
    path: Annotated[Text, option("Only of this endpoint, as /webhooks/NAME.")] = None,
    limit: Annotated[int, option("How many.", min=1, max=500)] = 50,
    before: Annotated[int | None, option("Only those before this number.")] = None,
) -> None:
    """List the newest events."""
    from datetime import UTC, datetime

    from hooks.server.event_routes import summarize_event

    if status is not None and status not in STATUSES.split(", "):
        fail(Code.USAGE, "nothing was listed", f"there is no status {status!r}", f"give one of {STATUSES}")
    filters = {"status": status, "path": path, "limit": limit, "before": before}
    query = urlencode({name: value for name, value in filters.items() if value is not None})
    listed = log.ask(lambda inbox: [summarize_event(event) for event in inbox.list(**filters)], "GET", f"?{query}")
    if log.as_json:
        return
    if not listed:
        typer.echo("no events")
    # Lines, because a table of all this folds every cell on a narrow terminal.
    for event in listed:
        received = datetime.fromtimestamp(event["received_at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        happened = " ".join(event[name] for name in ("scope", "action", "repo") if event[name])
        line = f"{event['number']:>5} {event['id']} {received} {event['status']:<10} {event['path']}  {happened}"
        typer.echo(escape(line))
        if event["error"]:
            typer.echo(f"{'':6}run {event['attempt']}: {escape(event['error'])}")


@events.command("show")
@flatten
def show_event(event_id: EventId, log: Log) -> None:
    """Show all of one event: headers, body, and why it failed."""
    from hooks.server.event_routes import serialize_event

    event = log.ask(lambda inbox: serialize_event(inbox.get(event_id)), "GET", f"/{quote(event_id, safe='')}")
    for name, value in () if log.as_json else event.items():
        if name == "headers":
            typer.echo("\n".join(["headers:", *(f"  {header}: {escape(text)}" for header, text in value.items())]))
        else:
            typer.echo(f"{name}: {'' if value is None else escape(str(value))}")


@events.command("replay")
@flatten
def replay_event(event_id: EventId, log: Log) -> None:
    """Have an event handled again, whatever became of it; a running server begins within a second."""
    from hooks.server.event_routes import summarize_event

    event = log.ask(
        lambda inbox: summarize_event(inbox.replay(event_id)), "POST", f"/{quote(event_id, safe='')}/replay"
    )
    if not log.as_json:
        typer.echo(f"event {event['id']} is {event['status']}; its handler is {event['path']}")


app.add_typer(events, name="events", help="What came: list it, show one, have one handled again.")


def read_watch(watch: list[str], any_type: bool) -> list[Any]:
    """Parse what to watch; stricter than the library, as an unknown type on a command line is a typo."""
    from hooks.client.webhook import read_watched

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if any_type else "error", UserWarning)
        try:
            return read_watched(watch)
        except UserWarning as error:
            text = str(error).replace("it is sent as it is", "say --any-type to mean it")
            raise hooks.InvalidWebhook(text) from None


def read_job_secrets(named: list[str] | None, file: str | None) -> dict[str, str] | None:
    """Secrets of a job from a file's lines and from the options; None without any."""
    lines: list[str] = []
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text()
        except (OSError, UnicodeDecodeError):
            refuse(f"secrets file {file!r} cannot be read", "give a file of lines NAME=value")
        lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if any("=" in text for text in named or ()):
        warn("--secrets NAME=value stays in the shell's history; --secrets NAME reads it from the environment")
    secrets: dict[str, str] = {}
    for line in (*lines, *(named or ())):
        name, equals, value = (part.strip() for part in line.removeprefix("export ").partition("="))
        if not name.isidentifier():
            # Not quoted: without its name it may be nothing but a secret.
            refuse("a secret of the job has no name", "give NAME, or NAME=value")
        if equals:
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            secrets[name] = value[1:-1] if is_quoted else value
            continue
        known = os.environ.get(name)
        if known is None and name == "HF_TOKEN":
            from huggingface_hub import get_token

            known = get_token()
        if known is None:
            refuse(f"secret {name} of the job is not in the environment", f"set it, or give {name}=value")
        secrets[name] = known
    return secrets or None


def webhook_to_json(webhook: "hooks.WebhookInfo") -> dict[str, Any]:
    """A webhook as JSON, without secrets."""
    from hooks.client.webhook import mask_job, mask_url

    job = None if webhook.job is None else {k: v for k, v in vars(mask_job(webhook.job)).items() if v is not None}
    return {
        "id": webhook.id,
        "url": None if webhook.url is None else mask_url(webhook.url),
        **({} if job is None else {"job": job}),
        "watched": [{"type": item.type, "name": item.name} for item in webhook.watched],
        "domains": list(webhook.domains),
        "has_secret": webhook.has_secret,
        "disabled": webhook.disabled,
        "status": webhook.status,
    }


def list_watched_names(shape: Mapping[str, Any]) -> list[str]:
    """Watched things of a webhook as ``type:name``."""
    return [f"{item['type']}:{item['name']}" for item in shape["watched"]]


def webhook_to_texts(shape: Mapping[str, Any]) -> dict[str, str]:
    """A webhook as texts, in the order of the table's columns."""
    job = shape.get("job") or {}
    # A robojax server's jobs have no image, but a name.
    name = job.get("docker_image") or job.get("space_id") or (job.get("labels") or {}).get("id") or ""
    return {
        "id": shape["id"],
        **({"job": f"(job) {name}"} if job else {"url": shape["url"] or ""}),
        "status": shape["status"],
        "secret": "set" if shape["has_secret"] else "none",
        "domains": " ".join(shape["domains"]),
        "watched": " ".join(list_watched_names(shape)),
    }


def print_lines(shape: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
    """Print a line for each field of a webhook."""
    for name, value in {**(webhook_to_texts(shape) if "status" in shape else shape), **(more or {})}.items():
        typer.echo(f"  {name + ':':<9}{escape(str(value))}")


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def escape(text: str) -> str:
    """Text of strangers without control characters of terminals."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def warn(text: str) -> None:
    """Print a warning to standard error, apart from the JSON on standard output."""
    typer.secho(f"Warning: {text}", fg="yellow", err=True)


def refuse(why: str, then: str) -> NoReturn:
    """End the process with a usage error before anything was sent."""
    fail(Code.USAGE, "nothing was sent", why, then)


def end_with_1_unless(is_well: bool) -> None:
    """End the process with 1 when what was done shows a failure."""
    if not is_well:
        raise typer.Exit(Code.CHECK)

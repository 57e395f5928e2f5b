"""``robojax webhooks``: webhooks of the Hub managed by the verbs of ``hf webhooks``, received, and looked at."""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from service.cli import webhooks_receive
from service.cli.failure import Code, fail
from service.cli.option_groups import flatten
from service.cli.table import print_table
from service.cli.webhooks_receive import escape

if TYPE_CHECKING:
    from hooks.management import WebhooksClient

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Manage webhooks of the Hub (or of a robojax server), receive them, look at what came.",
)
Format = StrEnum("Format", ["AUTO", "HUMAN", "AGENT", "JSON", "QUIET"])
Id = Annotated[str, typer.Argument(metavar="ID", help="Of the webhook.")]
Watch = Annotated[list[str], typer.Option(help="What to watch, as model:someone/arm or org:someone; repeatable.")]
SecretFile = Annotated[Path | None, typer.Option(help="File with the secret.")]
SecretEnv = Annotated[str | None, typer.Option(metavar="NAME", help="Environment variable with the secret.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]


@dataclass(frozen=True)
class Hub:
    """Options that say where the webhooks are, and who asks."""

    endpoint: Annotated[
        str | None, typer.Option(help="Of a Hub or of a robojax server; default: HF_ENDPOINT, or huggingface.co.")
    ] = None
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token; default: HF_TOKEN, or the one of `hf auth login`.")
    ] = None
    token: Annotated[str | None, typer.Option(hidden=True, help="As `hf` has it; it stays in the shell's history.")] = (
        None
    )
    timeout: Annotated[float, typer.Option(help="Seconds that the Hub has for an answer.")] = 30.0

    def connect(self, allow_http: Sequence[str] | None = None) -> "WebhooksClient":
        """The client that the commands use."""
        from hooks.management import WebhooksClient

        token = self.token
        if token is not None:
            warn("--token stays in the shell's history and in process listings; log in once, or set HF_TOKEN")
        if self.token_file is not None:
            shown = f"token file {str(self.token_file)!r}"
            try:
                token = self.token_file.read_text("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
                refuse(f"{shown} cannot be read: {why}", "write the token alone into it")
            if not token:
                refuse(f"{shown} is empty", "write the token alone into it")
        return WebhooksClient(self.endpoint, token, timeout=self.timeout, allow_http=allow_http or ())


@dataclass(frozen=True)
class Content:
    """Options that say what a webhook is made of."""

    url: Annotated[str | None, typer.Option(help="Address that it sends to.")] = None
    job_id: Annotated[str | None, typer.Option(help="Job that it starts (from job.id), instead of --url.")] = None
    domain: Annotated[
        list[str] | None, typer.Option(help="repo or discussion (or session, of a robojax server); repeatable.")
    ] = None
    secret: Annotated[str | None, typer.Option(help="Secret of its deliveries; it stays in the shell's history.")] = (
        None
    )
    secret_file: SecretFile = None
    secret_env: SecretEnv = None
    generate: Annotated[
        bool, typer.Option("--generate-secret", help="Make --secret-file with a new secret if it is not there.")
    ] = False
    secrets: Annotated[
        list[str] | None, typer.Option("--secrets", "-s", help="NAME (from the environment) or NAME=value for the job.")
    ] = None
    secrets_file: Annotated[
        str | None, typer.Option(help="File of NAME=value lines for the job; - for standard input.")
    ] = None
    any_type: Annotated[bool, typer.Option("--any-type", help="Send a type in --watch that is not known here.")] = False
    allow_http: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Host or network that may be sent to without TLS; repeatable."),
    ] = None

    def read(self, watch: list[str] | None) -> dict[str, Any]:
        """The client's arguments; None is what was not given."""
        from hooks.management import find_secret

        if self.secret is not None:
            warn("--secret stays in the shell's history and in process listings; --secret-file and --secret-env do not")
        return {
            "url": self.url,
            "job_id": self.job_id,
            "watched": read_watch(watch, self.any_type) if watch else None,
            "domains": self.domain or None,
            "secret": find_secret(self.secret, variable=self.secret_env, file=self.secret_file, generate=self.generate),
            "secrets": read_job_secrets(self.secrets, self.secrets_file),
        }


@dataclass(frozen=True)
class Output:
    """Options that say how the outcome is printed; the last two as ``hf`` has them."""

    as_json: AsJson = False
    form: Annotated[Format, typer.Option("--format", help="As `hf` has it.", hidden=True)] = Format.AUTO
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the id.", hidden=True)] = False

    @property
    def format(self) -> Format:
        """The one format that they come to."""
        return Format.JSON if self.as_json else Format.QUIET if self.quiet else self.form

    def print(self, done: str, shape: Mapping[str, Any], **more: Any) -> None:
        """What was done, and to which webhook; ``more`` is for programs too."""
        if self.format is Format.JSON:
            print_json({**shape, "did": done, **more})
        elif self.format is Format.QUIET:
            typer.echo(shape["id"])
        else:
            typer.echo(f"Webhook {done}")
            print_lines(shape, more)


def command(failure: str, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command.

    Args:
        failure: what is said when an error ends it.
        names: of the command, when other than the function's; all but the first one are hidden.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            run_or_fail(functools.partial(function, **given), failure)

        for number, name in enumerate(names or (function.__name__,)):
            app.command(name, hidden=number > 0)(flatten(run))
        return run

    return register


def run_or_fail(work: Callable[[], None], failure: str) -> None:
    """Run a command whose errors end it and whose warnings are printed."""
    from hooks.errors import HubTrouble, InvalidWebhook, UnknownWebhook

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            work()
        except InvalidWebhook as error:
            fail(Code.USAGE, failure, str(error), "see --help for the options")
        except UnknownWebhook as error:
            fail(Code.TRANSPORT, failure, str(error), "`robojax webhooks list` shows those there are")
        except HubTrouble as error:
            advice = "try again later; look at --endpoint and --timeout"
            if error.status == 401:
                advice = "log in with `hf auth login`, or set HF_TOKEN or --token-file; a robojax server's log names "
                advice += "its token file"
            elif 400 <= (error.status or 0) < 500 and error.status not in (408, 429):
                advice = "change what it names; --endpoint has to be a Hub, or a robojax server with --registry"
            fail(Code.TRANSPORT, failure, str(error), advice)
        finally:
            for warning in caught:
                warn(str(warning.message))


@command("the webhooks cannot be listed", "list", "ls")
def list_(hub: Hub, output: Output) -> None:
    """List the webhooks of the account."""
    client = hub.connect()
    shapes = [shape_of(webhook) for webhook in client.list_webhooks()]
    if output.format is Format.JSON:
        print_json([{**shape, "watched": names_of(shape)} for shape in shapes])
    elif output.format is Format.QUIET:
        for shape in shapes:
            typer.echo(shape["id"])
    elif not shapes:
        typer.echo(f"No results found: no webhooks at {client.endpoint}")
    else:
        columns = ("id", "sends to", "status", "secret", "domains", "watched")
        rows = [texts_of(shape) | {"watched": "\n".join(names_of(shape))} for shape in shapes]
        # An id that is cut or folded cannot be copied.
        print_table(columns, (map(escape, row.values()) for row in rows), never_folded=("id",))


@command("the webhook cannot be shown")
def info(webhook_id: Id, hub: Hub, output: Output) -> None:
    """Show all of one webhook."""
    shape = shape_of(hub.connect().get_webhook(webhook_id))
    if output.format is Format.QUIET:
        typer.echo(shape["id"])
    elif output.format is Format.HUMAN or (output.format is Format.AUTO and sys.stdout.isatty()):
        print_lines(shape)
    else:
        print_json(shape)


@command("no webhook was made")
def create(watch: Watch, content: Content, hub: Hub, output: Output) -> None:
    """Make a webhook that sends to --url, or starts the job --job-id. See `ensure` for one that may be there."""
    output.print("created", shape_of(hub.connect(content.allow_http).create_webhook(**content.read(watch))))


@command("the webhook was not changed")
def update(
    webhook_id: Id,
    content: Content,
    hub: Hub,
    output: Output,
    watch: Annotated[list[str] | None, typer.Option(help="All that is to be watched from now on; repeatable.")] = None,
    watch_nothing: Annotated[bool, typer.Option("--watch-nothing", help="Deliver nothing any more.")] = False,
) -> None:
    """Change what is named; all else stays, what is watched too."""
    named = content.read(watch)
    if watch_nothing:
        if watch:
            fail(Code.USAGE, "the webhook was not changed", "--watch and --watch-nothing", "give one of them")
        named |= {"watched": [], "allow_empty": True}
    if all(value is None for value in named.values()):
        fail(Code.USAGE, "the webhook was not changed", "nothing was named that is to change", "see --help")
    output.print("updated", shape_of(hub.connect(content.allow_http).update_webhook(webhook_id, **named)))


@command("it is not sure that there is such a webhook")
def ensure(
    watch: Watch,
    content: Content,
    hub: Hub,
    output: Output,
    webhook_id: Annotated[str | None, typer.Option("--id", help="Of the webhook, instead of looking for it.")] = None,
    enabled: Annotated[bool, typer.Option("--enable/--no-enable", help="Whether to enable one that is not.")] = True,
) -> None:
    """Have exactly one webhook like this: it is made, changed or enabled as need be. Twice is once."""
    steps: list[str] = []
    named = content.read(watch)
    client = hub.connect(content.allow_http)
    found = client.ensure(**named, webhook_id=webhook_id, enable=enabled, tell=steps.append)
    output.print(" and ".join(steps), shape_of(found))


@command("the webhook was not enabled")
def enable(webhook_id: Id, hub: Hub, output: Output) -> None:
    """Let a webhook deliver (again)."""
    output.print("enabled", shape_of(hub.connect().enable_webhook(webhook_id)))


@command("the webhook was not disabled")
def disable(webhook_id: Id, hub: Hub, output: Output) -> None:
    """Let a webhook deliver nothing until it is enabled."""
    output.print("disabled", shape_of(hub.connect().disable_webhook(webhook_id)))


@command("the webhooks were not healed")
def heal(
    hub: Hub,
    webhook_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this one; default: all.")] = None,
    try_first: Annotated[
        bool, typer.Option("--try-first", help="Enable only if its address takes a test payload from here.")
    ] = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    as_json: AsJson = False,
) -> None:
    """Enable the webhooks that the Hub suspended. Ends with 1 when one of them was left as it is."""
    from hooks.management import find_secret

    secret = find_secret(variable=secret_env, file=secret_file)
    found = hub.connect().heal(webhook_id, try_first=try_first, secret=secret)
    if as_json:
        print_json([{**shape_of(one.webhook), "is_healed": one.is_healed, "reason": one.reason} for one in found])
    else:
        for one in found:
            done = "enabled" if one.is_healed else "left as it is"
            typer.echo(f"{one.webhook.id} {done}  {one.reason}".rstrip())
        if not found:
            typer.echo("no webhook is suspended")
    if not all(one.is_healed for one in found):
        raise typer.Exit(Code.CHECK)


@command("the webhook was not deleted")
def delete(
    webhook_id: Id,
    hub: Hub,
    output: Output,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
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
    if not 200 <= status < 300:
        raise typer.Exit(Code.CHECK)


webhooks_receive.add_to(app)


def read_watch(watch: list[str], any_type: bool) -> list[Any]:
    """What is watched; strict, other than the library: at a prompt an unknown type is a slip of the finger."""
    from hooks.errors import InvalidWebhook
    from hooks.management.webhook import read_watched

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if any_type else "error", UserWarning)
        try:
            return read_watched(watch)
        except UserWarning as error:
            raise InvalidWebhook(f"{str(error).replace('it is sent as it is', 'say --any-type to mean it')}") from None


def read_job_secrets(named: list[str] | None, file: str | None) -> dict[str, str] | None:
    """Secrets of a job: the lines of a file, then what was named; None when nothing was."""
    lines: list[str] = []
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text()
        except (OSError, UnicodeDecodeError):
            refuse(f"secrets file {file!r} cannot be read", "give a file of lines NAME=value")
        lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if any("=" in one for one in named or ()):
        warn("--secrets NAME=value stays in the shell's history; --secrets NAME reads it from the environment")
    found: dict[str, str] = {}
    for line in (*lines, *(named or ())):
        name, equals, value = (part.strip() for part in line.removeprefix("export ").partition("="))
        if not name.isidentifier():
            # Not quoted: without its name it may be nothing but a secret.
            refuse("a secret of the job has no name", "give NAME, or NAME=value")
        if equals:
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name] = value[1:-1] if is_quoted else value
            continue
        known = os.environ.get(name)
        if known is None and name == "HF_TOKEN":
            from huggingface_hub import get_token

            known = get_token()
        if known is None:
            refuse(f"secret {name} of the job is not in the environment", f"set it, or give {name}=value")
        found[name] = known
    return found or None


def shape_of(webhook: Any) -> dict[str, Any]:
    """A webhook as JSON, without secrets."""
    from hooks.management.webhook import mask_job, mask_url

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


def names_of(shape: Mapping[str, Any]) -> list[str]:
    """What a webhook watches, as ``type:name``."""
    return [f"{item['type']}:{item['name']}" for item in shape["watched"]]


def texts_of(shape: Mapping[str, Any]) -> dict[str, str]:
    """A webhook in words, in the order of its columns."""
    job = shape.get("job") or {}
    # A robojax server's jobs have no image, but a name.
    name = job.get("docker_image") or job.get("space_id") or (job.get("labels") or {}).get("id") or ""
    return {
        "id": shape["id"],
        **({"job": f"(job) {name}"} if job else {"url": shape["url"] or ""}),
        "status": shape["status"],
        "secret": "set" if shape["has_secret"] else "none",
        "domains": " ".join(shape["domains"]),
        "watched": " ".join(names_of(shape)),
    }


def print_lines(shape: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
    """A line for each thing that there is to say of a webhook, for people."""
    for name, value in {**(texts_of(shape) if "status" in shape else shape), **(more or {})}.items():
        typer.echo(f"  {name + ':':<9}{escape(str(value))}")


def print_json(found: object) -> None:
    """For programs."""
    typer.echo(json.dumps(found, indent=2))


def warn(text: str) -> None:
    """A warning on standard error, where no program reads its JSON."""
    typer.secho(f"Warning: {text}", fg="yellow", err=True)


def refuse(why: str, then: str) -> NoReturn:
    """End a command that sent nothing."""
    fail(Code.USAGE, "nothing was sent", why, then)

"""Webhooks of the Hub from the command line: ``list``, ``info``, ``create`` and so on, as in ``hf webhooks``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.failure import Code, fail
from service.cli.webhooks_given import job_secrets, token_of
from service.cli.webhooks_options import (
    AllowHttp,
    AnyType,
    AsJson,
    Domain,
    Endpoint,
    Form,
    Generate,
    Id,
    JobId,
    NewWatch,
    Quiet,
    Secret,
    SecretEnv,
    SecretFile,
    Secrets,
    SecretsFile,
    Timeout,
    Token,
    TokenFile,
    Url,
    Watch,
)
from service.cli.webhooks_shown import Format, print_done, print_list, print_one, warn

if TYPE_CHECKING:
    from hooks.management import WebhooksClient, WebhookWatchedItem


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("list")(list_)
    app.command("ls", hidden=True)(list_)
    for command in (info, create, update, ensure, enable, disable, heal, delete, replay):
        app.command()(command)


def connect(
    endpoint: str | None = None,
    token: str | None = None,
    *,
    timeout: float = 30.0,
    allow_http: list[str] | None = None,
) -> "WebhooksClient":
    """The client that the commands use."""
    from hooks.management import WebhooksClient

    return WebhooksClient(endpoint, token, timeout=timeout, allow_http=allow_http or ())


def list_(
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """List the webhooks of the account."""
    with _failing("the webhooks cannot be listed"):
        client = connect(endpoint, token_of(token_file, token), timeout=timeout)
        found = client.list_webhooks()
        print_list([_shape(webhook) for webhook in found], _form(as_json, form, quiet), str(client.endpoint))


def info(
    webhook_id: Id,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Show all of one webhook."""
    with _failing("the webhook cannot be shown"):
        found = connect(endpoint, token_of(token_file, token), timeout=timeout).get_webhook(webhook_id)
        print_one(_shape(found), _form(as_json, form, quiet), is_terminal=sys.stdout.isatty())


def create(
    watch: Watch,
    url: Url = None,
    job_id: JobId = None,
    domain: Domain = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    generate: Generate = False,
    secrets: Secrets = None,
    secrets_file: SecretsFile = None,
    any_type: AnyType = False,
    allow_http: AllowHttp = None,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Make a webhook that sends to --url, or starts the job --job-id. See `ensure` for one that may be there."""
    with _failing("no webhook was made"):
        made = connect(endpoint, token_of(token_file, token), timeout=timeout, allow_http=allow_http).create_webhook(
            url=url,
            job_id=job_id,
            watched=_watched(watch, any_type),
            domains=_domains(domain),
            secret=_secret(secret, secret_file, secret_env, generate),
            secrets=job_secrets(secrets, secrets_file),
        )
        print_done("created", _shape(made), _form(as_json, form, quiet))


def update(
    webhook_id: Id,
    url: Url = None,
    job_id: JobId = None,
    watch: NewWatch = None,
    watch_nothing: Annotated[bool, typer.Option("--watch-nothing", help="Deliver nothing any more.")] = False,
    domain: Domain = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    generate: Generate = False,
    secrets: Secrets = None,
    secrets_file: SecretsFile = None,
    any_type: AnyType = False,
    allow_http: AllowHttp = None,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Change what is named; all else stays, what is watched too."""
    with _failing("the webhook was not changed"):
        named = {
            "url": url,
            "job_id": job_id,
            "watched": [] if watch_nothing else _watched(watch, any_type) if watch else None,
            "domains": _domains(domain),
            "secret": _secret(secret, secret_file, secret_env, generate),
            "secrets": job_secrets(secrets, secrets_file),
        }
        if watch_nothing:
            if watch:
                fail(Code.USAGE, "the webhook was not changed", "--watch and --watch-nothing", "give one of them")
            named["allow_empty"] = True
        if all(value is None for value in named.values()):
            fail(Code.USAGE, "the webhook was not changed", "nothing was named that is to change", "see --help")
        client = connect(endpoint, token_of(token_file, token), timeout=timeout, allow_http=allow_http)
        print_done("updated", _shape(client.update_webhook(webhook_id, **named)), _form(as_json, form, quiet))


def ensure(
    watch: Watch,
    url: Url = None,
    job_id: JobId = None,
    domain: Domain = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    generate: Generate = False,
    secrets: Secrets = None,
    secrets_file: SecretsFile = None,
    webhook_id: Annotated[str | None, typer.Option("--id", help="Of the webhook, instead of looking for it.")] = None,
    enabled: Annotated[bool, typer.Option("--enable/--no-enable", help="Whether to enable one that is not.")] = True,
    any_type: AnyType = False,
    allow_http: AllowHttp = None,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Have exactly one webhook like this: it is made, changed or enabled as need be. Twice is once."""
    with _failing("it is not sure that there is such a webhook"):
        steps: list[str] = []
        found = connect(endpoint, token_of(token_file, token), timeout=timeout, allow_http=allow_http).ensure(
            url=url,
            job_id=job_id,
            watched=_watched(watch, any_type),
            domains=_domains(domain),
            secret=_secret(secret, secret_file, secret_env, generate),
            secrets=job_secrets(secrets, secrets_file),
            webhook_id=webhook_id,
            enable=enabled,
            tell=steps.append,
        )
        print_done(" and ".join(steps), _shape(found), _form(as_json, form, quiet))


def enable(
    webhook_id: Id,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Let a webhook deliver (again)."""
    with _failing("the webhook was not enabled"):
        found = connect(endpoint, token_of(token_file, token), timeout=timeout).enable_webhook(webhook_id)
        print_done("enabled", _shape(found), _form(as_json, form, quiet))


def disable(
    webhook_id: Id,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Let a webhook deliver nothing until it is enabled."""
    with _failing("the webhook was not disabled"):
        found = connect(endpoint, token_of(token_file, token), timeout=timeout).disable_webhook(webhook_id)
        print_done("disabled", _shape(found), _form(as_json, form, quiet))


def heal(
    webhook_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this one; default: all.")] = None,
    try_first: Annotated[
        bool, typer.Option("--try-first", help="Enable only if its address takes a test payload from here.")
    ] = False,
    secret_file: SecretFile = None,
    secret_env: SecretEnv = None,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Enable the webhooks that the Hub suspended. Ends with 1 when one of them was left as it is."""
    import json

    with _failing("the webhooks were not healed"):
        secret = _secret(None, secret_file, secret_env, False)
        client = connect(endpoint, token_of(token_file, token), timeout=timeout)
        found = client.heal(webhook_id, try_first=try_first, secret=secret)
    rows = [{**_shape(one.webhook), "is_healed": one.is_healed, "reason": one.reason} for one in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    for row in [] if as_json else rows:
        typer.echo(f"{row['id']} {'enabled' if row['is_healed'] else 'left as it is'}  {row['reason']}".rstrip())
    if not rows and not as_json:
        typer.echo("no webhook is suspended")
    if not all(one.is_healed for one in found):
        raise typer.Exit(Code.CHECK)


def delete(
    webhook_id: Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Delete a webhook, for good."""
    shown = _form(as_json, form, quiet)
    if not yes:
        if shown not in (Format.AUTO, Format.HUMAN):
            fail(Code.USAGE, "the webhook was not deleted", "nobody can be asked with this format", "give --yes")
        typer.confirm(f"Delete webhook {webhook_id!r} for good?", abort=True)
    with _failing("the webhook was not deleted"):
        connect(endpoint, token_of(token_file, token), timeout=timeout).delete_webhook(webhook_id)
        print_done("deleted", {"id": webhook_id}, shown)


def replay(
    webhook_id: Id,
    log_id: Annotated[str, typer.Argument(metavar="LOG_ID", help="Of the delivery, from the activity page.")],
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    token: Token = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    form: Form = Format.AUTO,
    quiet: Quiet = False,
) -> None:
    """Deliver something again. Ends with 1 when the receiver did not take it."""
    with _failing("nothing was replayed"):
        status = connect(endpoint, token_of(token_file, token), timeout=timeout).replay(webhook_id, log_id)
        done = {"log_id": log_id, "status_code": status}
        print_done("replayed", {"id": webhook_id}, _form(as_json, form, quiet), **done)
    if not 200 <= status < 300:
        raise typer.Exit(Code.CHECK)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Errors end the command, warnings are told."""
    import warnings

    from hooks.errors import HubTrouble, InvalidWebhook, UnknownWebhook

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except InvalidWebhook as error:
            fail(Code.USAGE, what, str(error), "see --help for the options")
        except UnknownWebhook as error:
            fail(Code.TRANSPORT, what, str(error), "`robojax webhooks list` shows those there are")
        except HubTrouble as error:
            fail(Code.TRANSPORT, what, str(error), _then(error.status or 0))
        finally:
            for warning in told:
                warn(str(warning.message))


def _then(status: int) -> str:
    if status == 401:
        return (
            "log in with `hf auth login`, or set HF_TOKEN or --token-file; a robojax server's log names its token file"
        )
    if 400 <= status < 500 and status not in (408, 429):
        return "change what it names; --endpoint has to be a Hub, or a robojax server with --registry"
    return "try again later; look at --endpoint and --timeout"


def _form(as_json: bool, form: Format, quiet: bool) -> Format:
    return Format.JSON if as_json else Format.QUIET if quiet else form


def _watched(watch: list[str], any_type: bool) -> "list[WebhookWatchedItem]":
    """Strict, other than the library: at a prompt an unknown type is a slip of the finger."""
    import warnings

    from hooks.errors import InvalidWebhook
    from hooks.management.webhook import read_watched

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if any_type else "error", UserWarning)
        try:
            return read_watched(watch)
        except UserWarning as error:
            raise InvalidWebhook(f"{str(error).replace('it is sent as it is', 'say --any-type to mean it')}") from None


def _domains(domain: list[str] | None) -> list[str] | None:
    from hooks.management.webhook import read_domains

    return read_domains(domain) if domain else None


def _secret(given: str | None, file: Path | None, variable: str | None, generate: bool) -> str | None:
    from hooks.management import find_secret

    if given is not None:
        warn("--secret stays in the shell's history and in process listings; --secret-file and --secret-env do not")
    return find_secret(given, variable=variable, file=file, generate=generate)


def _shape(webhook: Any) -> dict[str, Any]:
    """A webhook as JSON.

    Args:
        webhook: ours, or huggingface_hub's.
    """
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

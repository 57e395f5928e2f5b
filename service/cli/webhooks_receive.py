"""Receiving from the command line: ``serve``, ``events``, ``send``."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from service.cli.failure import Code, fail
from service.cli.webhooks_events import DATABASE
from service.cli.webhooks_events import app as events

VARIABLE = "WEBHOOK_SECRET"

SecretFile = Annotated[Path | None, typer.Option(help=f"File with the secret; default: {VARIABLE}.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(serve)
    app.command()(send)
    app.add_typer(events, name="events", help="What came: list it, show one, have one handled again.")


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
    from hooks.management.webhook import find_secret
    from hooks.serving.loading import NoServer, load

    what = "the webhooks server cannot start"
    try:
        secret = find_secret(file=secret_file)
        server = load(target)
        kept = replace(server.settings, database=database or server.settings.database or DATABASE)
        server.settings = kept if secret is None else replace(kept, secrets=(secret,))
        server.launch(host=host, port=port, share=share)
    except NoServer as error:
        fail(Code.USAGE, what, str(error), "robojax webhooks serve app.py, or module:name")
    except InvalidWebhook as error:
        fail(Code.USAGE, what, str(error), "look at --secret-file and at the module")
    except StoreError as error:
        fail(Code.USAGE, what, str(error), "give another --database")
    except TunnelFailed as error:
        fail(Code.TRANSPORT, what, str(error), "leave --share out, or install a tunnel program")
    except HooksError as error:
        fail(Code.USAGE, what, str(error), "look at --host and --port; --port 0 takes a free one")


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

    from hooks.errors import InvalidWebhook
    from hooks.management.webhook import find_secret
    from hooks.samples import SCOPES, sample
    from hooks.simulator import deliveries

    if list_scopes:
        typer.echo("\n".join(SCOPES))
        return
    _check(url)
    try:
        secret = find_secret(file=secret_file) or os.environ.get(VARIABLE) or None
        standard, github = find_secret(file=standard_secret_file), find_secret(file=github_secret_file)
        kinds = [*SCOPES] if all_scopes else scope or ["repo.content"]
        made = [(kind, sample(kind, repo=repo, repo_type=repo_type, sha=sha)) for kind in kinds for _ in range(count)]
    except InvalidWebhook as error:
        _refuse(str(error), "see --help; --list-scopes names the kinds of events")
    if bad_secret:
        secret = "wrong-on-purpose"
    sent = deliveries(made, copies=dup, is_reordered=reorder, seed=seed)
    secrets = {"secret": secret, "standard_secret": standard, "github_secret": github}
    refused = asyncio.run(_send(url, sent, secrets, at_once=at_once, timeout=timeout, as_json=as_json))
    if refused:
        raise typer.Exit(Code.CHECK)


async def _send(
    url: str, sent: Any, secrets: dict[str, str | None], *, at_once: int, timeout: float, as_json: bool
) -> int:
    """Send and print; how many were not accepted."""
    import json

    from hooks.simulator import send as deliver

    refused, times = 0, []
    async for outcome in deliver(url, sent, **secrets, at_once=at_once, timeout=timeout):
        refused += not outcome.is_accepted
        times.append(outcome.seconds)
        row = {
            "id": outcome.delivery.id,
            "scope": outcome.delivery.what,
            "status": outcome.status,
            "milliseconds": round(outcome.seconds * 1000, 1),
            "answer": outcome.answer,
        }
        typer.echo(json.dumps(row) if as_json else _line(row))
    if not as_json:
        ranked = sorted(times)
        slowest, middle = ranked[-1] * 1000, ranked[len(ranked) // 2] * 1000
        typer.echo(f"{len(times) - refused} of {len(times)} accepted; median {middle:.1f} ms, slowest {slowest:.1f} ms")
    return refused


def _line(row: dict[str, Any]) -> str:
    answer = "".join(letter if letter.isprintable() else " " for letter in row["answer"])[:100]
    status = "---" if row["status"] is None else row["status"]
    return f"{status}  {row['milliseconds']:8.1f} ms  {row['scope']:<28} {row['id']}  {answer}"


def _check(url: str) -> None:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        _refuse(f"{url!r} is no URL of an endpoint", "try http://127.0.0.1:7860/webhooks/NAME")


def _refuse(why: str, then: str) -> NoReturn:
    fail(Code.USAGE, "nothing was sent", why, then)

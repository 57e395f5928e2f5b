"""What a server says on the console."""

import sys
from collections.abc import Sequence
from pathlib import Path

OPEN = (
    "Webhook secret is not defined. This means your webhook endpoints will be open to everyone.\n"
    "To add a secret, set `WEBHOOK_SECRET` as environment variable or pass it at initialization:\n"
    "    WebhooksServer(webhook_secret='...')\n"
    "For more details about webhook secrets, see https://huggingface.co/docs/hub/webhooks#webhook-secret"
)
CLOSED = "Webhook secret is correctly defined."
SHARED = "A share link lives for 72 hours at most and changes with every start"
SPACE = "A Space on free hardware sleeps after 48 hours without traffic: deliveries then fail"
CHANGES = "This interface may still change: pin the version you use (robojax=={version})"


def say(text: str) -> None:
    """One notice."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def ready(local: str, public: str | None, paths: Sequence[str]) -> str:
    """The addresses, once the server answers."""
    url = public or local
    lines = ["", f"Running on local URL: {local}"]
    if public is not None:
        lines.append(f"Running on public URL: {public}")
    lines.append("Webhooks are correctly setup and ready to use:")
    lines += [f"  - POST {url}{path}" for path in paths] or ["  (none yet: decorate a function with add_webhook)"]
    lines.append("Go to https://huggingface.co/settings/webhooks to setup your webhooks.")
    return "\n".join(lines)


def limits(database: Path | None, version: str) -> str:
    """What users would else find out by a loss."""
    kept = "in memory and forgotten when this ends; database='webhooks.sqlite3' keeps them"
    lines = [
        SHARED,
        SPACE,
        CHANGES.format(version=version),
        f"Events are kept {f'in {database}' if database else kept}",
    ]
    return "Good to know:\n" + "\n".join(f"  - {line}." for line in lines)


def generated(secret: str) -> str:
    """The one time that a secret is shown: it was made here, and the Hub has to be told."""
    return (
        "The address is public and no secret was set, so one was made for this run. Give it to the Hub with the "
        f"webhook:\n    {secret}"
    )

"""What a server is told by its arguments, and else by the environment."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hooks.receiving.settings import ReceiverSettings

SECRET, DATABASE = "WEBHOOK_SECRET", "ROBOJAX_WEBHOOKS_DATABASE"


def settings_of(
    given: ReceiverSettings | None, secret: str | Sequence[str] | None, database: str | Path | None
) -> ReceiverSettings:
    """The settings with a secret and a database; what is empty counts as not given."""
    settings = given or ReceiverSettings()
    if secret is not None and not isinstance(secret, str):
        settings = replace(settings, secrets=tuple(secret))
    elif secret := secret or (None if settings.secrets else os.environ.get(SECRET)):
        settings = replace(settings, secrets=(secret,))
    database = database or (None if settings.database else os.environ.get(DATABASE))
    return replace(settings, database=Path(database)) if database else settings

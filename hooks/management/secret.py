"""Where the secret of a webhook comes from: an argument, the environment, a file, or chance."""

import base64
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from hooks.errors import InvalidWebhook
from hooks.signatures import STANDARD_PREFIX


def generate_secret() -> str:
    """256 random bits, good as a shared secret (``X-Webhook-Secret``) and as a key of Standard Webhooks."""
    return STANDARD_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def find_secret(
    given: str | None = None,
    *,
    variable: str | None = None,
    file: str | Path | None = None,
    generate: bool = False,
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """The secret from the one place that was named; None when none was.

    Args:
        given: the secret itself.
        variable: of the environment.
        file: that holds it; blanks around it do not count.
        generate: make one when the file is not there yet, and write it there for its owner alone.
        environment: instead of this process's.

    Raises:
        InvalidWebhook: several places are named, or there is nothing at the one that is.
    """
    named = [name for name, value in (("secret", given), ("variable", variable), ("file", file)) if value is not None]
    if len(named) > 1:
        raise InvalidWebhook(f"the secret is given by {' and by '.join(named)}; wanted one of them")
    if generate and file is None:
        raise InvalidWebhook("a generated secret is never shown: name the file that it is to be written to")
    if variable is not None:
        found = (os.environ if environment is None else environment).get(variable, "")
        if not found:
            raise InvalidWebhook(f"environment variable {variable} has no secret: it is empty or not set")
        return found
    if file is not None:
        return _of_file(Path(file), generate)
    return given


def _of_file(path: Path, generate: bool) -> str:
    if generate:
        try:
            # Exclusively: two that start at once agree on the secret of the first.
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        except OSError as error:
            raise InvalidWebhook(f"secret file {str(path)!r} cannot be made: {error.strerror}") from None
        else:
            made = generate_secret()
            with os.fdopen(opened, "w") as file:
                file.write(made + "\n")
            return made
    try:
        found = path.read_text("ascii").strip()
    except OSError as error:
        raise InvalidWebhook(
            f"secret file {str(path)!r} cannot be read: {error.strerror}; let it be made with generate "
            "(--generate-secret), or write the secret into it"
        ) from None
    except UnicodeDecodeError:
        raise InvalidWebhook(f"secret file {str(path)!r} is not ASCII text; wanted the secret alone in it") from None
    if not found:
        raise InvalidWebhook(f"secret file {str(path)!r} is empty; wanted the secret alone in it")
    return found

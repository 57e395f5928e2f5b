"""Where a server is, and who calls it."""

import os
from urllib.parse import quote, urlsplit

from robojax.client.errors import Unusable

USUAL = "http://127.0.0.1:8001"


def server_url(url: str | None) -> str:
    """The server's URL without a slash at its end; one on this machine when None.

    Raises:
        Unusable: it is no URL of a server.
    """
    url = (url or USUAL).rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Unusable(f"{url!r} is no URL ({error}); try {USUAL}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise Unusable(f"{url!r} is no URL of a server: it has to begin with http:// or https://; try {USUAL}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise Unusable(f"the URL of {parts.hostname} holds more than an address; give a key as key, or as ROBOJAX_KEY")
    return url


def credentials(key: str | None) -> dict[str, str]:
    """The header of a key or token, as given or as ROBOJAX_KEY says; empty without one.

    Raises:
        Unusable: it has characters that no key has.
    """
    sent = (key or os.environ.get("ROBOJAX_KEY") or "").strip()
    if not sent:
        return {}
    if not sent.isascii() or not sent.isprintable() or " " in sent:
        raise Unusable("the key has characters that no key has")
    # Bearer takes both keys and tokens.
    return {"authorization": f"Bearer {sent}"}


def session_path(session_id: str, rest: str = "", before: str = "") -> str:
    """The path of a session, or of something of it."""
    return f"{before}/sessions/{quote(session_id, safe='')}{rest}"


def socket_url(base: str, path: str, ticket: str | None = None) -> str:
    """The WebSocket's URL beside an http(s) one."""
    scheme, rest = base.split("://", 1)
    asked = "" if ticket is None else f"?ticket={quote(ticket, safe='')}"
    return f"{'wss' if scheme == 'https' else 'ws'}://{rest}{path}{asked}"

"""The key with which this process enters its own rooms; it is nowhere but in its memory."""

import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import quote, unquote

from service.auth.caller import Caller
from service.auth.roles import Role

PREFIX = "rjo_"
HEADER = "x-api-key"
FOR = "x-robojax-for"
NAME = "this server"


class OwnKey:
    """A session's rooms are made and joined with it, on behalf of the session's owner and with no more rights."""

    def __init__(self) -> None:
        self._key = PREFIX + secrets.token_urlsafe(32)

    def headers(self, owner: str | None) -> Mapping[str, str]:
        """What is sent to this process's own address, never to another."""
        return {HEADER: self._key} | ({} if owner is None else {FOR: quote(owner, safe="")})

    def caller(self, sent: str, behalf: str | None) -> Caller | None:
        """Whom a key that was sent stands for, if it is this one."""
        if not hmac.compare_digest(sent.encode(errors="replace"), self._key.encode()):
            return None
        owner = None if behalf is None else unquote(behalf)
        return Caller(owner or NAME, Role.OPERATOR, owner)

"""Bearer tokens (JWT), which expire or end with the server's secret, and one-time tickets."""

import hashlib
import secrets
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from service.auth.caller import Admission, Caller, Role
from service.reloading_file import FileUnusable, ReloadingFile, write_private_file
from service.setting_types import NAME

ALGORITHM = "HS256"
ISSUER = AUDIENCE = "robojax"
# RFC 7518, 3.2: a key of the hash's size or larger. PyJWT only warns.
MIN_SECRET = 32
MAX_TOKEN = 4096
CLAIMS = ("exp", "iat", "sub", "iss", "aud")
LEEWAY = 10  # seconds by which two clocks may differ
FORBIDDEN_MODE = 0o027


class BadToken(Exception):
    """The token is not accepted; the text says why, without any part of the token."""


class TokenExpired(BadToken):
    """The token was valid, and has expired."""


@dataclass(frozen=True)
class Bearer:
    """Holder of a token, and when the token expires, in seconds since 1970."""

    caller: Caller
    expires_at: float


@dataclass(frozen=True)
class Tokens:
    """Signs and verifies tokens with one secret; they live for at most ``max_lifetime`` seconds."""

    secret: bytes = field(repr=False)
    max_lifetime: float = 86400.0

    def sign(self, name: str, role: Role, seconds: float, now: float, owner: str | None = None) -> str:
        """Sign a token.

        Raises:
            BadToken: the token would not be accepted: it lives too long, or the name cannot be used.
        """
        import jwt

        begins = int(now)
        claims = {"sub": name, "role": str(role), "iss": ISSUER, "aud": AUDIENCE, "iat": begins}
        token = jwt.encode(
            {**claims, "exp": begins + int(seconds), **({"owner": owner} if owner else {})}, self.secret, ALGORITHM
        )
        self.verify(token, now)
        return token

    def verify(self, token: str, now: float | None) -> Bearer:
        """Return the holder of a valid token.

        Args:
            now: seconds since 1970; None accepts an expired token, and a token that is not valid yet.

        Raises:
            BadToken: the token has no signature of this secret and algorithm, lacks a claim, has expired, is not valid
                yet, or lives too long.
        """
        import jwt

        if len(token) > MAX_TOKEN or not token.isascii():
            raise BadToken("it is not a token")
        try:
            if "crit" in jwt.get_unverified_header(token):
                raise BadToken("it requires unknown extensions (crit)")
            # Times are looked at below: PyJWT takes any number for exp, and reads a clock of its own.
            claims = jwt.decode(
                token,
                self.secret,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                issuer=ISSUER,
                options={"require": list(CLAIMS), "verify_exp": False, "verify_iat": False, "verify_nbf": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise BadToken(f"it is not accepted ({type(error).__name__})") from None
        return Bearer(_caller(claims), self._check_times(claims, now))

    def _check_times(self, claims: dict[str, Any], now: float | None) -> float:
        """Check the times of a token, and return when it expires; without ``now``, only types and lifetime."""
        times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
        # bool is an int to Python, and 1e308 a number to JSON.
        if not all(type(value) is int and abs(value) < 1 << 53 for value in times.values()):
            raise BadToken(f"{', '.join(times)} have to be whole numbers")
        longest = times["exp"] - times["iat"]
        if now is not None:
            if times["exp"] <= now:
                raise TokenExpired("it has expired")
            if max(times["iat"], times.get("nbf", times["iat"])) > now + LEEWAY:
                raise BadToken("it is not valid yet")
            longest = max(longest, times["exp"] - now)
        if longest > self.max_lifetime:
            raise BadToken(f"it lives for {longest:.0f} s; at most {self.max_lifetime:g} s are allowed")
        return times["exp"]


def _caller(claims: dict[str, Any]) -> Caller:
    name, owner = claims["sub"], claims.get("owner", claims["sub"])
    for value, what in ((name, "sub"), (owner, "owner")):
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise BadToken(f"{what} is no name of 1 to 64 letters, digits, '_', '.' or '-'")
    try:
        role = Role.parse(claims["role"])
    except (KeyError, ValueError, AttributeError):
        raise BadToken(f"role should be {', '.join(map(str, Role))}") from None
    return Caller(name, role, owner)


class SecretFile:
    """File of the tokens' secret; a new secret is used at once, and ends all earlier tokens."""

    def __init__(self, path: Path, max_lifetime: float = 86400.0):
        self.path = path
        self._max_lifetime = max_lifetime
        self._file = ReloadingFile(path, self._parse, FORBIDDEN_MODE)

    def tokens(self) -> Tokens | None:
        """Return the signer and verifier of tokens; None if there is no file.

        Raises:
            FileUnusable: it cannot be read, others may read it, or its secret is too short.
        """
        try:
            return self._file.read()
        except FileUnusable as error:
            raise FileUnusable(f"the file of the tokens' secret {error}") from error

    def last_tokens(self) -> Tokens | None:
        """Return the tokens of the newest usable file, also while the file is missing or unusable."""
        return self._file.last

    def create(self) -> Tokens:
        """Return the signer and verifier of tokens, with a new secret if there was none.

        Raises:
            FileUnusable: as ``tokens``, or it cannot be written.
        """
        if self.tokens() is None:
            write_private_file(self.path, f"{secrets.token_urlsafe(48)}\n".encode())
        made = self.tokens()
        assert made is not None, "it was just written"
        return made

    def _parse(self, content: bytes) -> Tokens:
        secret = content.strip()
        if len(secret) < MIN_SECRET:
            raise FileUnusable(
                f"has a secret of {len(secret)} bytes; wanted at least {MIN_SECRET}, as "
                "`python -c 'import secrets; print(secrets.token_urlsafe(48))'` makes"
            )
        import_module("jwt")  # It takes 40 ms, for which a request would delay robots.
        return Tokens(secret, self._max_lifetime)


PREFIX = "rjt_"
LIFETIME = 30.0
MAX_TICKETS = 4096
MAX_TICKETS_OF_CALLER = 64


class Tickets:
    """Issued tickets that were not used. Each counts once, because it is part of a URL, which proxies log."""

    def __init__(self) -> None:
        # Digest to the admission and the monotonic time at which the ticket expires; oldest first.
        self._issued: dict[bytes, tuple[Admission, float]] = {}

    def issue(self, admission: Admission, now: float) -> str:
        """Issue a ticket to an admitted caller; when there are too many, the caller's oldest is dropped."""
        self._issued = {key: ticket for key, ticket in self._issued.items() if ticket[1] > now}
        own = [key for key, (issued, _) in self._issued.items() if issued.caller == admission.caller]
        if len(own) >= MAX_TICKETS_OF_CALLER or len(self._issued) >= MAX_TICKETS:
            del self._issued[own[0] if own else next(iter(self._issued))]
        text = PREFIX + secrets.token_urlsafe(32)
        self._issued[_digest(text)] = (admission, now + LIFETIME)
        return text

    def redeem(self, text: str, now: float) -> Admission | None:
        """Use up a ticket; returns the admission that it was issued for, if both are still valid."""
        admission, expires_at = self._issued.pop(_digest(text), (None, 0.0))
        return admission if admission is not None and now < expires_at and admission.is_still_authorized() else None


def _digest(text: str) -> bytes:
    # Looked up by its hash, so that the time of the lookup reveals nothing about other tickets.
    return hashlib.sha256(text.encode(errors="replace")).digest()

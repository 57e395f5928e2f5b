import base64
import json
import os
import stat
import time

import jwt
import pytest

from service.auth.caller import Admission, Caller, Role
from service.auth.tokens import MAX_TICKETS_OF_CALLER, BadToken, SecretFile, Tickets, Tokens
from service.reloading_file import FileUnusable

NOW = 1_700_000_000.0
SECRET = b"0123456789abcdef" * 3
TOKENS = Tokens(SECRET)
CLAIMS = {"sub": "ann", "role": "operator", "iss": "robojax", "aud": "robojax", "iat": int(NOW), "exp": int(NOW) + 60}


def signed(secret=SECRET, algorithm="HS256", headers=None, **changes):
    claims = {name: value for name, value in (CLAIMS | changes).items() if value is not None}
    return jwt.encode(claims, secret, algorithm, headers)


def raw(header, claims=CLAIMS, signature="") -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, claims))
    return ".".join((*parts, signature))


def test_a_token_identifies_its_subject_until_it_expires():
    token = TOKENS.sign("ann", Role.OPERATOR, 3600, NOW, owner="lab")
    assert TOKENS.verify(token, NOW).caller == Caller("ann", Role.OPERATOR, "lab")
    assert TOKENS.verify(signed(), NOW).caller == Caller("ann", Role.OPERATOR, "ann")
    token = TOKENS.sign("ann", Role.ADMIN, 60, NOW)
    TOKENS.verify(token, NOW + 59)
    with pytest.raises(BadToken, match="expired"):
        TOKENS.verify(token, NOW + 60)


ATTACKS = {
    "empty": "",
    "not base64": "a.b.c",
    "alg none": raw({"alg": "none", "typ": "JWT"}),
    "alg None": raw({"alg": "None", "typ": "JWT"}),
    "no alg": raw({"typ": "JWT"}),
    "another secret": signed(b"x" * 48),
    "another algorithm": signed(b"0123456789abcdef" * 4, "HS512"),
    "HS384": signed(SECRET, "HS384"),
    "embedded key": signed(b"x" * 48, headers={"jwk": {"kty": "oct", "k": "eHh4"}, "kid": "../../dev/null"}),
    "unknown crit": signed(headers={"crit": ["exp2"], "exp2": 1}),
    "crit b64": signed(headers={"crit": ["b64"], "b64": True}),
    "no signature": ".".join(signed().split(".")[:2]) + ".",
    "another payload": signed().split(".")[0] + "." + raw({}, CLAIMS | {"role": "admin"}).split(".")[1]
    + "." + signed().split(".")[2],
    "no exp": signed(exp=None),
    "no iat": signed(iat=None),
    "no sub": signed(sub=None),
    "no iss": signed(iss=None),
    "no aud": signed(aud=None),
    "no role": signed(role=None),
    "exp text": signed(exp=str(int(NOW) + 60)),
    "exp 1e308": signed(exp=1e308),
    "exp inf": signed(exp=float("inf")),
    "exp nan": signed(exp=float("nan")),
    "exp true": signed(exp=True),
    "exp huge": signed(exp=10**300),
    "expired": signed(exp=int(NOW)),
    "long": signed(exp=int(NOW) + 86402),
    "long from iat": signed(iat=int(NOW) - 86400),
    "iat ahead": signed(iat=int(NOW) + 60, exp=int(NOW) + 120),
    "iat text": signed(iat="now"),
    "nbf ahead": signed(nbf=int(NOW) + 60),
    "nbf text": signed(nbf="0"),
    "another issuer": signed(iss="robotjax"),
    "another audience": signed(aud="hub"),
    "role king": signed(role="king"),
    "role 3": signed(role=3),
    "role list": signed(role=["admin"]),
    "sub path": signed(sub="../root"),
    "owner star": signed(owner="*"),
    "owner null": raw({"alg": "HS256"}, CLAIMS | {"owner": None}),
    "huge": "e" * 100_000,
    "not ascii": signed() + "é",
}  # fmt: skip


# Tokens with a correct signature whose times only the clock refuses.
CLOCK_REFUSALS = {"expired", "iat ahead", "nbf ahead"}


@pytest.mark.filterwarnings("ignore::jwt.InsecureKeyLengthWarning")
@pytest.mark.parametrize("name", ATTACKS)
def test_invalid_tokens_are_refused_even_without_a_clock(name):
    for now in (NOW,) if name in CLOCK_REFUSALS else (NOW, None):
        with pytest.raises(BadToken) as refused:
            TOKENS.verify(ATTACKS[name], now)
        assert SECRET.decode() not in str(refused.value)
    if name in CLOCK_REFUSALS:
        assert TOKENS.verify(ATTACKS[name], None).caller == Caller("ann", Role.OPERATOR, "ann")


def test_a_token_that_would_be_refused_is_not_signed():
    with pytest.raises(BadToken, match="at most 86400 s"):
        TOKENS.sign("ann", Role.ADMIN, 86400 * 2, NOW)
    with pytest.raises(BadToken, match="sub"):
        TOKENS.sign("ann smith", Role.ADMIN, 60, NOW)


def test_a_changed_secret_invalidates_all_tokens(tmp_path):
    file = SecretFile(tmp_path / "state" / "jwt-secret")
    assert file.tokens() is None
    tokens = file.create()
    assert file.create() == tokens
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    assert tokens.secret.decode() not in repr(tokens)
    token = tokens.sign("ann", Role.VIEWER, 60, time.time())
    file.path.write_bytes(b"another-secret-of-more-than-32-bytes")
    changed = file.tokens()
    with pytest.raises(BadToken):
        changed.verify(token, time.time())


@pytest.mark.parametrize(("content", "mode", "what"), [(b"short" * 6, 0o600, "32"), (SECRET, 0o644, "chmod 640")])
def test_a_short_or_readable_secret_is_refused(tmp_path, content, mode, what):
    path = tmp_path / "jwt-secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(FileUnusable, match=what):
        SecretFile(path).tokens()


ANN = Caller("ann", Role.VIEWER, "lab")


def test_a_ticket_is_redeemed_once_within_30_s_of_a_valid_key():
    tickets = Tickets()
    text = tickets.issue(Admission(ANN, lambda: True), 0.0)
    assert tickets.redeem("rjt_another", 1.0) is None
    found = tickets.redeem(text, 29.9)
    assert found.caller == ANN
    assert tickets.redeem(text, 29.9) is None
    tickets, is_valid = Tickets(), [True]
    late, revoked = (tickets.issue(Admission(ANN, lambda: is_valid[0]), 0.0) for _ in range(2))
    assert tickets.redeem(late, 30.0) is None
    is_valid[0] = False
    assert tickets.redeem(revoked, 1.0) is None


def test_too_many_tickets_drop_the_oldest_of_the_same_caller():
    tickets = Tickets()
    others = tickets.issue(Admission(Caller("bob", Role.VIEWER, "bob"), lambda: True), 0.0)
    texts = [tickets.issue(Admission(ANN, lambda: True), 1.0) for _ in range(MAX_TICKETS_OF_CALLER + 1)]
    assert tickets.redeem(texts[0], 2.0) is None
    assert tickets.redeem(texts[1], 2.0)
    assert tickets.redeem(others, 2.0)

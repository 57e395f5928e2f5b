"""Delivery by HTTP: the request, the stored response, and the wait before a retry."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from hooks.addresses import TargetRules
from hooks.registry.delivery import (
    HOUR,
    MAX_EXCERPT,
    MAX_SECRET,
    WAITS,
    DeliveryOutcome,
    DeliveryRequest,
    Destination,
    get_wait,
    make_excerpt,
    parse_retry_after,
)
from hooks.registry.http_delivery import HttpDeliverer
from tests.testing.pauses import Pauses
from tests.testing.target import TargetServer

NOW = 1_700_000_000.7
SECRET = "a-secret-of-some-length"
REQUEST = DeliveryRequest("msg_1", b'{"hello": "robot"}')
LOOPBACK = TargetRules((ip_network("127.0.0.0/8"),))


async def deliver(url: str, secret: str | None = None, **options: Any) -> DeliveryOutcome:
    return await HttpDeliverer(LOOPBACK, **options).deliver(Destination("1", url, secret=secret), REQUEST, NOW)


def resolver(*addresses: str, names: list[str]) -> Callable[[str, int], Awaitable[list[str]]]:
    """Return a resolver that answers with these addresses in turn and records the names."""
    left = list(addresses)

    async def resolve(host: str, port: int) -> list[str]:
        names.append(host)
        return [left.pop(0)]

    return resolve


async def test_a_delivery_carries_the_hubs_headers(target: TargetServer) -> None:
    outcome = await deliver(f"{target.url}/hook", SECRET)
    assert (outcome.status, outcome.excerpt, outcome.error) == (200, "fine", None)
    [got] = target.got
    assert got.body == REQUEST.body
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-webhook-secret"] == SECRET
    assert got.id == "msg_1"
    assert got.headers["webhook-timestamp"] == "1700000000"


async def test_a_redirect_is_not_followed(target: TargetServer) -> None:
    target.answers = [web.Response(status=302, headers={"Location": f"{target.url}/other"})]
    outcome = await deliver(target.url)
    assert outcome.status == 302
    assert not outcome.is_delivered
    assert len(target.got) == 1


async def test_a_silent_target_ends_the_delivery_in_time(target: TargetServer, pauses: Pauses) -> None:
    target.gate.clear()
    began = time.monotonic()
    outcome = await deliver(target.url, timeout=0.1)
    assert outcome.error == "no answer within 0.1 s"
    assert 0.1 <= outcome.seconds < 1 + pauses.lost(began)


async def test_a_closed_port_is_an_outcome_with_a_reason(unused_tcp_port: int) -> None:
    outcome = await deliver(f"http://127.0.0.1:{unused_tcp_port}/")
    assert outcome.error is not None
    assert outcome.error.startswith("no connection: ")


async def test_a_long_answer_is_cut_and_its_secret_is_masked(target: TargetServer) -> None:
    target.answers = [web.Response(status=500, text=SECRET + "x" * 1_000_000, headers={"Retry-After": "30"})]
    outcome = await deliver(target.url, SECRET)
    assert len(outcome.excerpt) <= MAX_EXCERPT
    assert outcome.excerpt.startswith("***xxx")
    assert (outcome.status, outcome.retry_after) == (500, 30.0)


async def test_each_attempt_resolves_the_name_once_and_checks_its_address(target: TargetServer) -> None:
    names: list[str] = []
    # No real name server knows this name, so the connection cannot resolve it a second time.
    destination = Destination("1", target.url.replace("127.0.0.1", "robot.invalid"))
    deliverer = HttpDeliverer(LOOPBACK, resolve=resolver("127.0.0.1", "10.0.0.1", names=names))
    assert (await deliverer.deliver(destination, REQUEST, NOW)).status == 200
    assert names == ["robot.invalid"]
    assert target.got[0].headers["host"].startswith("robot.invalid:")
    again = await deliverer.deliver(destination, REQUEST, NOW)
    assert again.error is not None
    assert "10.0.0.1, which is private" in again.error
    assert len(target.got) == 1


async def test_proxies_of_the_environment_are_not_used(target: TargetServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert (await deliver(target.url)).status == 200


async def test_an_unverified_certificate_is_refused_with_a_message(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "robot.invalid")])
    begin = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("robot.invalid")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "robot.pem"
    pem.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        resolve = resolver("127.0.0.1", names=[])
        outcome = await deliver(f"https://robot.invalid:{port}/", resolve=resolve)
    assert outcome.error == "the target's certificate cannot be verified"


@pytest.mark.parametrize(
    ("outcome", "is_delivered"),
    [
        *((DeliveryOutcome(status=status), status < 300) for status in (200, 204, 302, 404)),
        *((DeliveryOutcome(exit_status=status), status == 0) for status in (0, 3)),
        *((DeliveryOutcome(**named, error="no answer"), False) for named in ({}, {"exit_status": 0})),
    ],
)
def test_what_counts_as_delivered(outcome: DeliveryOutcome, is_delivered: bool) -> None:
    assert outcome.is_delivered is is_delivered


def test_a_secret_is_masked_even_if_it_is_cut_at_the_end() -> None:
    secret = "s3cret-" * 8
    assert make_excerpt(f"you sent {secret}!".encode(), (secret, None)) == "you sent ***!"
    assert secret not in repr(Destination("1", "http://x", secret=secret, secrets={"A": secret}))
    for begin in range(MAX_EXCERPT - 80, MAX_EXCERPT + MAX_SECRET):
        data = (b"x" * begin + secret.encode() + b"y" * 2000)[: MAX_EXCERPT + MAX_SECRET]
        assert "s3c" not in make_excerpt(data, (secret,))
        assert "ret-" not in make_excerpt(data[::-1], (secret[::-1],), is_end=True)[::-1]


def test_an_excerpt_is_bounded_text_for_any_bytes() -> None:
    assert len(make_excerpt(bytes(range(256)) * 6).encode()) <= MAX_EXCERPT
    assert "\0" not in make_excerpt(b"a\0b")
    assert make_excerpt(b"begin" + b"." * 100 + b"end", is_end=True, max_bytes=10) == ".......end"


@pytest.mark.parametrize(
    ("failed", "chance", "retry_after", "wait"),
    [
        *((failed, 0.5, None, wait) for failed, wait in enumerate((*WAITS, None))),
        *((1, chance, None, pytest.approx(wait)) for chance, wait in ((0.0, 4.0), (1.0, 6.0))),
        *((1, 0.5, retry_after, wait) for retry_after, wait in ((1.0, 5.0), (60.0, 60.0), (1e9, 10 * HOUR))),
        (len(WAITS), 0.5, 3.0, None),
    ],
)
def test_waits_have_jitter_and_follow_retry_after(
    failed: int, chance: float, retry_after: float | None, wait: float | None
) -> None:
    assert get_wait(WAITS, failed, lambda: chance, retry_after) == wait


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120.0),
        *((f"Tue, 14 Nov 2023 22:14:20 {zone}", 60.0) for zone in ("GMT", "-0000")),
        ("Tue, 14 Nov 2000 22:14:20 GMT", 0.0),
        *((header, None) for header in (None, "soon", "-5", "", "²")),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, 1_700_000_000.0) == seconds

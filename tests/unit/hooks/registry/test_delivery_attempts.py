"""One attempt by HTTP: what is sent, what is taken for an answer, and where it never goes."""

import asyncio
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from hooks.addresses import TargetRules
from hooks.registry.delivery import MAX_EXCERPT, DeliveryRequest, Destination, HttpDeliverer
from tests.testing.pauses import Pauses
from tests.testing.target import TargetServer

NOW = 1_700_000_000.7
SECRET = "a-secret-of-some-length"
PARCEL = DeliveryRequest("msg_1", b'{"hello": "robot"}')
LOOPBACK = TargetRules.from_networks(["127.0.0.0/8"])


async def test_a_delivery_carries_the_hubs_headers(target: TargetServer) -> None:
    outcome = await HttpDeliverer(LOOPBACK).deliver(Destination("1", f"{target.url}/hook", secret=SECRET), PARCEL, NOW)
    assert (outcome.status, outcome.excerpt, outcome.error) == (200, "fine", None)
    [got] = target.got
    assert got.body == PARCEL.body
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-webhook-secret"] == SECRET
    assert got.id == "msg_1"
    assert got.headers["webhook-timestamp"] == "1700000000"


async def test_a_redirect_is_an_answer_and_is_not_followed(target: TargetServer) -> None:
    target.answers = [web.Response(status=302, headers={"Location": f"{target.url}/other"})]
    outcome = await HttpDeliverer(LOOPBACK).deliver(Destination("1", target.url), PARCEL, NOW)
    assert outcome.status == 302
    assert not outcome.is_delivered
    assert len(target.got) == 1


async def test_a_target_that_says_nothing_ends_in_time(target: TargetServer, pauses: Pauses) -> None:
    target.gate.clear()
    began = time.monotonic()
    outcome = await HttpDeliverer(LOOPBACK, timeout=0.1).deliver(Destination("1", target.url), PARCEL, NOW)
    assert outcome.error == "no answer within 0.1 s"
    assert 0.1 <= outcome.seconds < 1 + pauses.lost(began)


async def test_a_closed_port_is_a_reason_and_no_exception(unused_tcp_port: int) -> None:
    outcome = await HttpDeliverer(LOOPBACK).deliver(
        Destination("1", f"http://127.0.0.1:{unused_tcp_port}/"), PARCEL, NOW
    )
    assert outcome.error is not None
    assert outcome.error.startswith("no connection: ")


async def test_a_long_answer_is_cut_and_a_secret_in_it_struck_out(target: TargetServer) -> None:
    target.answers = [web.Response(status=500, text=SECRET + "x" * 1_000_000, headers={"Retry-After": "30"})]
    outcome = await HttpDeliverer(LOOPBACK).deliver(Destination("1", target.url, secret=SECRET), PARCEL, NOW)
    assert len(outcome.excerpt) <= MAX_EXCERPT
    assert outcome.excerpt.startswith("***xxx")
    assert (outcome.status, outcome.retry_after) == (500, 30.0)


async def test_a_name_is_connected_to_by_exactly_the_address_that_was_checked(target: TargetServer) -> None:
    asked = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    # No name server knows it: the connection cannot have asked one a second time.
    url = target.url.replace("127.0.0.1", "robot.invalid")
    outcome = await HttpDeliverer(LOOPBACK, resolve=resolve).deliver(Destination("1", url), PARCEL, NOW)
    assert outcome.status == 200
    assert asked == ["robot.invalid"]
    assert target.got[0].headers["host"].startswith("robot.invalid:")


async def test_a_name_that_moves_inside_between_two_attempts_is_refused(target: TargetServer) -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def resolve(host: str, port: int) -> list[str]:
        return answers.pop(0)

    courier = HttpDeliverer(LOOPBACK, resolve=resolve)
    destination = Destination("1", target.url.replace("127.0.0.1", "robot.invalid"))
    assert (await courier.deliver(destination, PARCEL, NOW)).status == 200
    again = await courier.deliver(destination, PARCEL, NOW)
    assert again.error is not None
    assert "10.0.0.1, which is private" in again.error
    assert len(target.got) == 1


async def test_proxies_of_the_environment_are_not_used(target: TargetServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert (await HttpDeliverer(LOOPBACK).deliver(Destination("1", target.url), PARCEL, NOW)).status == 200


async def test_a_certificate_of_nobody_is_refused_in_words(tmp_path: Path) -> None:
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

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        courier = HttpDeliverer(LOOPBACK, resolve=resolve)
        outcome = await courier.deliver(Destination("1", f"https://robot.invalid:{port}/"), PARCEL, NOW)
    assert outcome.error == "the target's certificate cannot be verified"

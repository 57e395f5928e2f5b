"""Refused target addresses in all spellings, and the effect of an allowed network."""

from ipaddress import ip_network

import pytest

from hooks.addresses import TargetRules
from hooks.errors import UnsafeTarget

PUBLIC = "93.184.215.14"

# Text of each refusal and the refused URLs. A text without a slash is a host for "http://HOST/".
REFUSED = {
    "loopback": ["127.0.0.1", "127.8.9.1:8000", "[::1]", "[::ffff:127.0.0.1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]"],
    "unspecified": ["0.0.0.0", "[::]"],
    "metadata": ["169.254.169.254", "[fd00:ec2::254]", "100.100.100.200", "[::ffff:a9fe:a9fe]"],
    "link-local": ["169.254.1.1", "[fe80::1]"],
    "interface|none": ["[fe80::1%25eth0]"],
    "private": ["10.0.0.1", "172.16.3.4", "192.168.1.20", "[fd12:3456::1]"],
    "not public": ["100.64.0.1"],
    "private|not public": [
        *("240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1"),
        *("[fec0::1]", "[64:ff9b:1::7f00:1]", "[2001:0:7f00:1::]", "[::127.0.0.1]"),
    ],
    "multicast": ["224.0.0.1", "[ff02::1]"],
    "in disguise": [
        *("2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "3232235777"),
        str(int.from_bytes(bytes([93, 184, 215, 14]), "big")),
    ],
    "user name": ["user:pass@example.com", "example.com@127.0.0.1", "@example.com"],
    "scheme": ["ftp://example.com/", "file:///etc/passwd", "gopher://example.com/", "example.com/hook"],
    "no host": ["http:///hook"],
    "port 0": ["example.com:0"],
    "[Pp]ort": ["example.com:99999"],
    "backslashes": ["example.com\\@127.0.0.1"],
    "ASCII": ["exa mple.com", "１２７.0.0.1", "http://example.com/\r\nX-Other: 1"],
    "url:": ["http://[::1"],
    "not a host name": ["exa$mple.com"],
    "characters": ["http://example.com/" + "a" * 3000],
}


@pytest.mark.parametrize(
    ("url", "reason"), [(url, reason) for reason, urls in REFUSED.items() for url in urls], ids=lambda text: text[:40]
)
def test_an_unsafe_url_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(UnsafeTarget, match=reason):
        TargetRules().parse_url(url if "/" in url else f"http://{url}/")


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook?x=1",
        f"http://{PUBLIC}:8080/",
        "http://[2606:2800::1]/",
        "http://[2002:5db8:d70e::]/",  # This 6to4 address contains a public address.
    ],
)
def test_a_public_url_is_accepted(url: str) -> None:
    assert TargetRules().parse_url(url).url == url


@pytest.mark.parametrize(
    ("network", "url"),
    [
        ("127.0.0.0/8", "http://127.0.0.1:8000/"),
        ("127.0.0.0/8", "http://2130706433/"),
        ("127.0.0.0/8", "http://[::ffff:127.0.0.1]/"),
        ("192.168.1.0/24", "http://192.168.1.20/"),
        ("fd12::/16", "http://[fd12:3456::1]/"),
        ("169.254.169.254/32", "http://169.254.169.254/"),
    ],
)
def test_addresses_of_an_allowed_network_are_accepted(network: str, url: str) -> None:
    with pytest.raises(UnsafeTarget):
        TargetRules().parse_url(url)
    assert TargetRules((ip_network(network),)).parse_url(url).addresses


@pytest.mark.parametrize(
    ("network", "url"),
    [
        ("192.168.1.0/24", "http://192.168.2.20/"),
        ("0.0.0.0/0", "http://169.254.169.254/"),
        ("fd00::/8", "http://[fd00:ec2::254]/"),
        ("0.0.0.0/0", "http://[::1]/"),
    ],
)
def test_an_allowed_network_permits_no_other_address(network: str, url: str) -> None:
    with pytest.raises(UnsafeTarget, match="--registry-allow "):
        TargetRules((ip_network(network),)).parse_url(url)


async def test_a_name_is_refused_if_one_of_its_addresses_is_refused() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("robot.example", 443)
        return [PUBLIC, "10.0.0.7"]

    rules = TargetRules()
    target = rules.parse_url("https://robot.example/")
    with pytest.raises(UnsafeTarget, match=r"'robot.example' is 10.0.0.7, which is private.*10.0.0.0/24"):
        await rules.resolve_target(target, resolve)
    assert await TargetRules((ip_network("10.0.0.0/8"),)).resolve_target(target, resolve) == (PUBLIC, "10.0.0.7")

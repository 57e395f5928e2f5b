"""Which addresses are refused, in whatever way they are written, and what an allowed network changes."""

import pytest

from hooks.addresses import TargetRules
from hooks.errors import UnsafeTarget

PUBLIC = "93.184.215.14"

# url -> what the refusal says
REFUSED = {
    "http://127.0.0.1/": "loopback",
    "http://127.8.9.1:8000/x": "loopback",
    "http://[::1]/": "loopback",
    "http://0.0.0.0/": "unspecified",
    "http://[::]/": "unspecified",
    "http://169.254.169.254/latest/meta-data/": "metadata",
    "http://[fd00:ec2::254]/latest/": "metadata",
    "http://100.100.100.200/": "metadata",
    "http://169.254.1.1/": "link-local",
    "http://[fe80::1]/": "link-local",
    "http://[fe80::1%25eth0]/": "interface|none",
    "http://10.0.0.1/": "private",
    "http://172.16.3.4/": "private",
    "http://192.168.1.20/": "private",
    "http://[fd12:3456::1]/": "private",
    "http://100.64.0.1/": "not public",
    "http://224.0.0.1/": "multicast",
    "http://[ff02::1]/": "multicast",
    "http://240.0.0.1/": "private|not public",
    "http://255.255.255.255/": "private|not public",
    "http://[fec0::1]/": "private|not public",
    "http://[64:ff9b:1::7f00:1]/": "not public|private",
    "http://[2001:0:7f00:1::]/": "private|not public",
    "http://192.0.0.8/": "private|not public",
    "http://198.18.0.1/": "private|not public",
    "http://[::ffff:127.0.0.1]/": "loopback",
    "http://[::ffff:a9fe:a9fe]/": "metadata",
    "http://[::127.0.0.1]/": "not public|private",
    "http://[2002:7f00:1::]/": "loopback",
    "http://[64:ff9b::7f00:1]/": "loopback",
    "http://2130706433/": "in disguise",
    "http://0x7f000001/": "in disguise",
    "http://0x7f.1/": "in disguise",
    "http://0177.0.0.1/": "in disguise",
    "http://127.1/": "in disguise",
    "http://3232235777/": "in disguise",
    f"http://{int.from_bytes(bytes([93, 184, 215, 14]), 'big')}/": "in disguise",
    "http://user:pass@example.com/": "user name",
    "http://example.com@127.0.0.1/": "user name",
    "http://@example.com/": "user name",
    "ftp://example.com/": "scheme",
    "file:///etc/passwd": "scheme",
    "gopher://example.com/": "scheme",
    "example.com/hook": "scheme",
    "http:///hook": "no host",
    "http://example.com:0/": "port 0",
    "http://example.com:99999/": "[Pp]ort",
    "http://example.com\\@127.0.0.1/": "backslashes",
    "http://exa mple.com/": "ASCII",
    "http://１２７.0.0.1/": "ASCII",
    "http://example.com/\r\nX-Other: 1": "ASCII",
    "http://[::1": "url:",
    "http://exa$mple.com/": "no name",
    "http://example.com/" + "a" * 3000: "characters",
}


@pytest.mark.parametrize(("url", "reason"), REFUSED.items(), ids=[url[:40] for url in REFUSED])
def test_an_unsafe_url_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(UnsafeTarget, match=reason):
        TargetRules().parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook?x=1",
        f"http://{PUBLIC}:8080/",
        "http://[2606:2800::1]/",
        "http://[2002:5db8:d70e::]/",  # 6to4 of a public address: as what it leads to, on every Python
    ],
)
def test_a_public_url_is_taken(url: str) -> None:
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
def test_an_allowed_network_is_sent_to(network: str, url: str) -> None:
    with pytest.raises(UnsafeTarget):
        TargetRules().parse_url(url)
    assert TargetRules.from_networks([network]).parse_url(url).addresses


@pytest.mark.parametrize(
    ("network", "url"),
    [
        ("192.168.1.0/24", "http://192.168.2.20/"),
        ("0.0.0.0/0", "http://169.254.169.254/"),
        ("fd00::/8", "http://[fd00:ec2::254]/"),
        ("0.0.0.0/0", "http://[::1]/"),
    ],
)
def test_allowed_network_permits_no_other_and_no_metadata_server(network: str, url: str) -> None:
    with pytest.raises(UnsafeTarget, match="--registry-allow "):
        TargetRules.from_networks([network]).parse_url(url)


async def test_a_name_is_refused_when_any_of_its_addresses_is() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("robot.example", 443)
        return [PUBLIC, "10.0.0.7"]

    rules = TargetRules()
    target = rules.parse_url("https://robot.example/")
    with pytest.raises(UnsafeTarget, match=r"'robot.example' is 10.0.0.7, which is private.*10.0.0.0/24"):
        await rules.resolve_target(target, resolve)
    assert await TargetRules.from_networks(["10.0.0.0/8"]).resolve_target(target, resolve) == (PUBLIC, "10.0.0.7")

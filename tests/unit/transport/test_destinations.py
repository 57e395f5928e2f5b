import ipaddress
import socket

import aiohttp
import pytest
from aiohttp import web

from hooks.addresses import describe_danger, unwrap_ipv4
from hooks.registry.http_delivery import PinnedResolver
from service.app import create_app
from service.errors import InvalidRequest, TransportError
from service.setting_types import SettingsError
from service.settings import Settings
from service.transport.address import AddressRules, AllowedHost, Destinations
from service.transport.client.rest import http_session
from tests.testing.doubles import ScriptedLoader
from tests.testing.rig import REAL, started
from tests.testing.rooms_server import serve_transport

NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "robot.lan": ["192.168.1.7"],
    "other.lan": ["192.168.2.7"],
    "public.example": ["93.184.216.34"],
    "xn--bcher-kva.example": ["93.184.216.35"],
    "to-here.example": ["127.0.0.1"],
    "to-metadata.lan": ["169.254.169.254"],
    "half-metadata.lan": ["192.168.1.8", "169.254.169.254"],
    "mapped.lan": ["::ffff:169.254.169.254"],
    "both.lan": ["192.168.1.9", "10.9.9.9"],
}


async def look_up(host, port):
    if host not in NAMES:
        raise OSError(-2, "Name or service not known")
    return NAMES[host]


def destinations(*listed, resolve=look_up, own_port=None):
    return Destinations(listed, AddressRules(describe_danger, unwrap_ipv4, resolve, PinnedResolver), own_port)


# Only this machine by its plain names is allowed if there is no list.
ALLOWED = [
    "http://127.0.0.1:8000",
    "ws://127.0.0.1:8000/api",
    "http://127.8.8.8",
    "http://[::1]:8000",
    "http://localhost:8000",
    "HTTP://LOCALHOST:8000",
    "https://localhost./api",
]
REFUSED = [
    # Metadata services of clouds, also in other spellings of their addresses.
    *("http://169.254.169.254/latest/meta-data", "http://[::ffff:169.254.169.254]/", "http://[fd00:ec2::254]/"),
    *("http://100.100.100.200/", "http://to-metadata.lan/"),
    # This machine, in spellings that parsers disagree about.
    *("http://[::ffff:127.0.0.1]:8000", "http://[64:ff9b::7f00:1]/", "http://0x7f.1/", "http://0177.0.0.1/"),
    *("http://2130706433/", "http://127.1/", "http://0/", "http://0.0.0.0:8001", "http://[::]:8001"),
    *("http://127。0。0。1/", "http://local%68ost/", "http://localhost..:8000", "http://to-here.example:8000"),
    # Other networks.
    *("http://224.0.0.1/", "http://255.255.255.255/", "http://192.168.1.7:8000", "http://10.0.0.1"),
    *("http://[fe80::1%25eth0]/", "http://[fe80::1]/", "http://93.184.216.34", "http://robot.lan:8000"),
    # Another host behind a confusing URL.
    *("http://a@b/", "http://127.0.0.1@evil.example/", "http://evil.example#@127.0.0.1/"),
    *("http://evil.example\\@127.0.0.1/", "http://bücher.example/", "http://127.0.0.1%2eevil.example/"),
    # URLs that are not the address of a server.
    *("http:///x", "file:///etc/passwd", "gopher://127.0.0.1:6379/_x", "javascript:alert(1)"),
    *("http://127.0.0.1:99999", "http://127.0.0.1:8000/?next=http://evil.example", "http://local host/"),
    "http://127.0.0.1\r\nx-a: b/",
]


@pytest.mark.parametrize("url", ALLOWED)
async def test_this_machine_is_a_destination_without_a_list(url):
    _, found = await destinations().resolve_addresses(url)
    assert all(ipaddress.ip_address(address).is_loopback for address in found)


@pytest.mark.parametrize("url", REFUSED)
async def test_other_hosts_are_refused_without_a_list(url):
    with pytest.raises(InvalidRequest) as caught:
        await destinations().resolve_addresses(url)
    assert caught.value.loc == ("body", "transport_server_url")


@pytest.mark.parametrize("url", [url for url in REFUSED if "robot.lan" not in url and "192.168.1.7" not in url])
async def test_a_list_allows_only_its_hosts_and_networks(url):
    rules = destinations("robot.lan:8000", "192.168.1.0/24", "169.254.0.0/16", "0.0.0.0/8", "fe80::/10", "*.lan")
    with pytest.raises(InvalidRequest):
        await rules.resolve_addresses(url)


@pytest.mark.parametrize(
    ("listed", "url", "is_allowed"),
    [
        ("robot.lan", "http://ROBOT.lan.:1234", True),
        ("robot.lan:8000", "http://robot.lan:8000", True),
        ("robot.lan:8000", "http://robot.lan:8001", False),
        ("*.lan", "https://robot.lan", True),
        ("*.lan", "https://public.example", False),
        ("192.168.1.0/24", "http://robot.lan", True),
        ("192.168.1.0/24", "http://other.lan", False),
        ("192.168.1.0/24", "http://both.lan", False),
        ("192.168.1.7", "http://192.168.1.7", True),
        ("[fd00::1]:8000", "http://[fd00::1]:8000", True),
        ("[fd00::1]:8000", "http://[fd00::1]:8001", False),
        ("*.lan", "http://half-metadata.lan", False),
        ("*.lan", "http://mapped.lan", False),
        ("*", "http://public.example", True),
        ("*", "http://to-metadata.lan", False),
        ("xn--bcher-kva.example", "http://xn--bcher-kva.example", True),
        # A robot on a direct cable has a link-local address. It must be listed by itself, not by its network.
        ("169.254.10.20", "http://169.254.10.20:8000", True),
        ("169.254.10.0/24", "http://169.254.10.20:8000", False),
    ],
)
async def test_an_entry_of_the_list_allows_matching_urls(listed, url, is_allowed):
    if is_allowed:
        await destinations(listed).resolve_addresses(url)
    else:
        with pytest.raises(InvalidRequest):
            await destinations(listed).resolve_addresses(url)


@pytest.mark.parametrize("text", ["", "a b", "host:0", "host:http", "192.168.1.1/24", "http://host", "[::1", "::1]:5"])
def test_an_invalid_entry_of_the_list_is_an_error(text):
    with pytest.raises(ValueError, match="wanted"):
        AllowedHost.parse(text)


def test_the_server_does_not_start_with_an_invalid_entry():
    with pytest.raises(SettingsError, match=r"transport_hosts: 'http://host'"):
        create_app(Settings.from_values(transport_hosts=("http://host",)), load=ScriptedLoader())


async def test_this_server_is_a_destination_at_its_own_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    await destinations(own_port=8001).resolve_addresses(f"http://{address}:8001")
    for url in (f"http://{address}:8002", "http://93.184.216.34:8001"):
        with pytest.raises(InvalidRequest):
            await destinations(own_port=8001).resolve_addresses(url)


async def test_an_unknown_host_is_a_transport_error():
    with pytest.raises(TransportError, match="not known"):
        await destinations("*.lan").resolve_addresses("http://unknown.lan")


async def test_a_name_that_changes_after_the_check_is_not_resolved_again():
    """An attacker's name server returns a harmless address to the check and another address to the connection."""
    answers = iter([["127.0.0.1"], ["169.254.169.254"]])

    async def rebinding(host, port):
        return next(answers)

    async with serve_transport() as url:
        port = url.rpartition(":")[2]
        rules = destinations("moving.lan", resolve=rebinding)
        async with http_session(await rules.create_connector(f"http://moving.lan:{port}")) as session:
            for _ in range(3):  # Each request has a new connection, as after a lost link.
                async with session.get(f"http://moving.lan:{port}/health", headers={"connection": "close"}) as answer:
                    assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://elsewhere.lan:{port}/health")
        assert len(list(answers)) == 1


async def test_a_redirect_to_this_machine_is_not_followed():
    async def elsewhere(request):
        raise web.HTTPFound("http://localhost:1/")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    async with http_session(await destinations().create_connector(url)) as session:
        with pytest.raises(TransportError, match="redirect"):
            await session.get(url)
    await runner.cleanup()


async def test_a_refused_host_is_422_and_names_the_setting():
    async with started(transport=REAL) as server:
        for host, message in (("169.254.169.254:8000", "metadata"), ("10.0.0.1", "--transport-hosts")):
            status, answer = await server.create(transport_server_url=f"http://{host}")
            assert (status, answer["detail"][0]["loc"]) == (422, ["body", "transport_server_url"])
            assert message in answer["detail"][0]["msg"]
        assert await server.call("GET", "/sessions") == (200, [])
        assert not server.load.loads

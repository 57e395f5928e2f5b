"""WebRTC signals and Hub responses that name other machines: no packet reaches a forbidden address."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from service.transport.webrtc.ice import MAX_CANDIDATES
from tests.faults.processes import ROOT
from tests.hostile.closed_network import MDNS, METADATA, NETWORK, OTHER, PUBLIC, ROBOT

NAMESPACE = ("unshare", "--map-root-user", "--net")
ROBOTS, OTHERS = f"{ROBOT}:50000", f"{OTHER}:50000"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the recorded result of each attack on a server in a network namespace."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("unshare (util-linux) and ip (iproute2) are needed for a network namespace")
    made = subprocess.run([*NAMESPACE, "ip", "-batch", "-"], input=NETWORK, text=True, capture_output=True)
    if made.returncode:
        pytest.skip(f"this kernel gives no network namespace with a veth pair: {made.stderr.strip()}")
    folder = str(tmp_path_factory.mktemp("addresses"))
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    ended = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.hostile.closed_network", folder],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=env,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("attack", "sent"),
    [
        ("described", {ROBOTS}),
        ("trickled", {ROBOTS}),
        ("forged", {ROBOTS, OTHERS}),
        ("named", {ROBOTS, MDNS}),
        ("relayed", {ROBOTS, OTHERS}),
    ],
)
def test_candidates_of_forbidden_addresses_get_no_packet(found: dict[str, Any], attack: str, sent: set[str]) -> None:
    assert found[attack]["status"] == 200
    assert set(found[attack]["sent"]) == sent


def test_offer_sends_packets_to_a_bounded_number_of_addresses(found: dict[str, Any]) -> None:
    assert len(found["many"]["sent"]) == MAX_CANDIDATES


def test_huge_offer_is_refused_without_any_packet(found: dict[str, Any]) -> None:
    assert found["huge"] == {"status": 413, "sent": []}


def test_ice_servers_of_a_client_are_refused(found: dict[str, Any]) -> None:
    refused = found["chosen servers"]
    assert (refused["status"], refused["sent"]) == (422, [])
    assert [(each["type"], each["loc"]) for each in refused["answer"]["detail"]] == [
        ("extra_forbidden", ["body", "ice_servers"])
    ]


@pytest.mark.parametrize(
    ("attack", "host"),
    [
        ("listing-metadata", METADATA),
        ("metadata", METADATA),
        ("mapped-metadata", f"::ffff:{METADATA}"),
        ("number-metadata", "2852039166"),
        ("private", "10.0.0.1"),
        ("loopback", "localhost"),
    ],
)
def test_redirect_of_a_hub_to_a_forbidden_address_is_refused(found: dict[str, Any], attack: str, host: str) -> None:
    refused = found[attack]
    assert (refused["status"], refused["sent"]) == (422, [])
    (problem,) = refused["answer"]["detail"]
    assert (problem["type"], problem["loc"]) == ("policy", ["body", "policy_path"])
    assert repr(host) in problem["msg"]


def test_redirect_of_a_hub_to_a_public_address_is_followed(found: dict[str, Any]) -> None:
    """This shows that the recording includes the packets of downloads."""
    assert found["public"]["sent"] == [f"{PUBLIC}:80"]

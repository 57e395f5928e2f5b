"""Who may join the hosts of a server, and what a host does with the runs and the files that it is given."""

import queue
import socket
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.testing.peers import skip_reason

pytest.importorskip("ray", reason=skip_reason("ray"))

from jaxmodels.errors import ObservationError
from service.distributed import host_worker
from service.distributed.artifacts import make_listing, pack
from service.distributed.follow import follow_server
from service.distributed.host_worker import MISSING, HostActor
from service.distributed.ray_node import Credentials, RayNode

pytestmark = [pytest.mark.needs_peers, pytest.mark.timed]

SECRET, OTHER = b"a secret of some length", b"another one of that length"
HERE = "127.0.0.1"


def context(side: ssl.Purpose, credentials: Credentials) -> ssl.SSLContext:
    """As Ray's connections have it: certificates on both sides."""
    files = credentials.environment
    made = ssl.create_default_context(side, cafile=files["RAY_TLS_CA_CERT"])
    made.load_cert_chain(files["RAY_TLS_SERVER_CERT"], files["RAY_TLS_SERVER_KEY"])
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def shake_hands(server: Credentials, client: Credentials) -> list[Exception | None]:
    """What became of both sides."""
    here, there = socket.socketpair()
    outcome: list[Exception | None] = []

    def shake(connection: socket.socket, made: ssl.SSLContext, **more: Any) -> None:
        try:
            with connection, made.wrap_socket(connection, **more) as secured:
                secured.sendall(b"x")
                assert secured.recv(1) == b"x"
            outcome.append(None)
        except OSError as error:
            outcome.append(error)

    serving = threading.Thread(
        target=shake, args=(here, context(ssl.Purpose.CLIENT_AUTH, server)), kwargs={"server_side": True}
    )
    serving.start()
    shake(there, context(ssl.Purpose.SERVER_AUTH, client), server_hostname=HERE)
    serving.join(30)
    return outcome


@pytest.mark.parametrize(("secret", "is_let_in"), [(SECRET, True), (OTHER, False)])
def test_whoever_has_the_secret_is_let_in_and_nobody_else(secret: bytes, is_let_in: bool) -> None:
    server, client = Credentials(SECRET, [HERE]), Credentials(secret, [HERE])
    try:
        assert all(error is None for error in shake_hands(server, client)) is is_let_in
        tokens = {Path(one.environment["RAY_AUTH_TOKEN_PATH"]).read_text() for one in (server, client)}
        assert (len(tokens) == 1) is is_let_in
    finally:
        server.remove()
        client.remove()


def test_nothing_that_is_written_down_is_the_secret_or_for_others_to_read() -> None:
    credentials = Credentials(SECRET, [HERE])
    files = [*credentials.folder.iterdir()]
    assert len(files) == 4
    for file in files:
        assert file.stat().st_mode & 0o077 == 0
        assert SECRET not in file.read_bytes()
    assert credentials.folder.stat().st_mode & 0o077 == 0
    assert SECRET.decode() not in str(credentials.environment)
    credentials.remove()
    assert not credentials.folder.exists()


def test_a_node_that_cannot_begin_says_why() -> None:
    said: queue.Queue[str] = queue.Queue()
    RayNode(["--no-such-flag"], {}, said.put)
    assert "--no-such-flag" in said.get(timeout=60)


def test_a_host_without_a_server_gives_up_after_its_patience() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    why = follow_server(HERE, port, SECRET, 0.1, lambda text: None)
    assert why is not None
    assert why.startswith(f"the server at {HERE}:{port}: none that knows this secret for 0.1 s")


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without Ray, and without JAX."""
    made: Any = object.__new__(HostActor)
    made._policies, made._early_runs, made._next_run, made._device, made._cache = {}, {}, 1, "", tmp_path / "cache"
    monkeypatch.setattr(host_worker.ray, "get", lambda piece: piece)
    return made


def test_runs_are_done_in_their_order_though_one_overtakes(actor: Any) -> None:
    acted: list[int] = []

    class Policy:
        def act(self, observation: Mapping[str, Any]) -> None:
            acted.append(observation["number"])
            if observation["number"] == 2:
                raise ObservationError("state is missing")

    actor._policies[1] = Policy()
    words = {"do": "act", "policy": 1, "texts": {}}
    assert actor.run(2, words, {"number": 2}) == []
    assert acted == []
    assert actor.run(1, words, {"number": 1}) == [(2, "state is missing")]
    assert acted == [1, 2]


def test_files_are_sent_to_a_host_that_has_none_like_them(
    actor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(host_worker.jaxmodels, "load_policy", lambda folder, *_, **__: loaded.append(folder))
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    listing = make_listing(folder)
    words = {"do": "load", "policy": 1, "like": 0, "dtype": None, "sha": listing.sha}
    words |= {"files": [list(file) for file in listing.files], "folder": str(folder)}
    assert actor.build(words) is None
    elsewhere = words | {"folder": str(tmp_path / "elsewhere")}
    assert actor.build(elsewhere) == MISSING
    assert actor.build(elsewhere, pack(folder, lambda piece: piece)) is None
    assert actor.build(elsewhere) is None
    kept = tmp_path / "cache" / listing.sha
    assert loaded == [folder, kept, kept]
    assert make_listing(kept) == listing
    why = actor.build(words | {"files": [["../config.json", 2]]})
    assert why is not None
    assert "is no file of a policy" in why

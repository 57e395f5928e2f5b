"""A Hub that is slow, lies or redirects: time, memory and disk are bounded, and no partial file remains."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from jaxmodels import hub, hub_process
from jaxmodels.errors import HubError
from service.rollout.sources import FolderSource, SourceError
from tests.testing.stub_hub import StubHub
from tests.testing.waiting import wait_until

FILES = {"config.json": b'{"type": "act"}', "model.safetensors": bytes(range(256)) * 400}
API, FILE = r"GET /api/models/", r"/resolve/"
DEEP = b"[" * 100_000
# Far above all limits below, and below the waiting time without limits.
PROMPT = 30.0


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # Telemetry calls the real Hub.
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {"STALLED": 0.5, "ANSWER": 4.0, "GRACE": 2.5, "QUIET": 1.0, "MAX_ANSWER": 1 << 20}.items():
        monkeypatch.setattr(hub, name, value)
    with StubHub() as stub:
        stub.push("someone/arm", FILES)
        yield stub


@pytest.fixture
def fetch(stub: StubHub, tmp_path: Path):
    def call(revision: str | None = None, **options: Any) -> Path:
        where = {"endpoint": stub.url, "cache": tmp_path / "cache"}
        return hub.fetch("someone/arm", revision, largest=1 << 30, **{**where, **options})

    return call


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def assert_is_clean(folder: Path) -> None:
    """Assert that the repo's folder alone was written, and that it has no incomplete policy."""
    # A thread that outlives the fetch removes its own file.
    wait_until(lambda: not [path for path in files_of(folder) if path.name.endswith(".incomplete")], PROMPT)
    inside = folder / "cache" / "models--someone--arm"
    assert not [path for path in files_of(folder) if not path.is_relative_to(folder / "cache")]
    assert not [path for path in files_of(inside / "refs") if path.is_file()]
    assert not [path for path in files_of(inside / "snapshots") if path.name == "model.safetensors"]


def listing(stub: StubHub, **other: Any) -> bytes:
    repo = stub.repo("someone/arm")
    return json.dumps({**repo._info("main", True), **other}).encode()


def sibling(name: str, size: Any = 10) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": "0" * 40}


TRANSFERS: list[tuple[str, str, int | str, dict[str, Any], str]] = [
    ("drip", FILE + ".*model", "drip", {}, "too slow"),
    ("stall", FILE + ".*model", "stall", {}, "cannot be reached|too slow"),
    ("endless file", "GET .*" + FILE + ".*model", "endless", {}, "more bytes than it announced"),
    ("endless answer", API, "endless", {}, "more bytes than an answer may have"),
    ("slow answer", API, "drip", {}, "too slow"),
    ("other bytes", FILE + ".*model", "corrupt", {}, "came with other bytes than the commit has"),
    ("half", FILE + ".*model", "short", {}, "other bytes|did not answer as expected"),
    ("retry after", FILE, 429, {"retry_after": 10**9}, "too slow|cannot be reached"),
    ("retry after junk", FILE, 503, {"more": {"Retry-After": "-1, 1e9"}}, "too slow|cannot be reached"),
    ("gzip", API, "body", {"more": {"Content-Encoding": "gzip"}}, "did not answer as expected"),
    ("metadata address", API, 302, {"more": {"Location": "http://169.254.169.254/latest"}}, "not on the public"),
    ("private address", "GET .*" + FILE, 302, {"more": {"Location": "http://10.0.0.1/"}}, "not on the public"),
    ("file", API, 302, {"more": {"Location": "file:///etc/passwd"}}, "cannot be reached"),
    ("loop", API, 302, {"more": {"Location": "/api/models/someone/arm"}}, "cannot be reached"),
    ("deep", API, "body", {"body": DEEP}, "makes no sense"),
    ("no object", API, "body", {"body": b"[1]"}, "makes no sense"),
    ("error page", API, 500, {"more": {"X-Error-Message": "\x1b]0;x" * 100}}, "did not answer as expected"),
]


@pytest.mark.parametrize(("pattern", "how", "details", "words"), [one[1:] for one in TRANSFERS],
                         ids=[one[0] for one in TRANSFERS])  # fmt: skip
def test_hostile_answer_is_an_error_and_the_next_fetch_works(
    fetch, stub: StubHub, tmp_path: Path, pattern: str, how: int | str, details: dict[str, Any], words: str
) -> None:
    failure = stub.script(pattern, how, times=None, **details)
    began = time.monotonic()
    with pytest.raises(HubError, match=words) as raised:
        fetch()
    assert time.monotonic() - began < PROMPT
    assert len(str(raised.value)) < 600
    failure.times = 0
    failure.released.set()
    assert_is_clean(tmp_path)
    folder = fetch()
    assert folder.name == stub.head("someone/arm")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("ETag", '"../../../../escaped"'),
        ("X-Linked-Etag", '"/tmp/escaped"'),
        ("X-Repo-Commit", "../../../escaped"),
        ("X-Repo-Commit", "a" * 40),
        ("Content-Disposition", 'attachment; filename="../../../escaped"'),
    ],
)
def test_response_header_never_names_a_file(fetch, stub: StubHub, tmp_path: Path, header: str, value: str) -> None:
    stub.script(FILE, "body", times=None, more={header: value})
    folder = fetch()
    assert folder.name == stub.head("someone/arm")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    inside = tmp_path / "cache" / "models--someone--arm"
    hashes = {file.etag for file in stub.repo("someone/arm").at("main").files.values()}
    others = {inside / "refs" / "main", inside / ".robojax" / f"{folder.name}.json"}
    links = {folder / name for name in FILES}
    assert files_of(tmp_path) == links | others | {inside / "blobs" / name for name in hashes}


LISTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "commit": ({"sha": "../../../../escaped"}, "names commit"),
    "no commit": ({"sha": None}, "names commit"),
    "way out": ({"siblings": [sibling("policy_preprocessor_step_/../../../x.safetensors")]}, "names a file"),
    "backslash": ({"siblings": [sibling("policy_preprocessor_step_\\..\\x.safetensors")]}, "names a file"),
    "null": ({"siblings": [sibling("policy_preprocessor_step_\0.safetensors")]}, "names a file"),
    "long": ({"siblings": [sibling(f"policy_preprocessor_step_{'x' * 999}.safetensors")]}, "names a file"),
    "negative size": ({"siblings": [sibling("config.json", -(1 << 60))]}, "does not say how large"),
    "no size": ({"siblings": [sibling("config.json", None)]}, "does not say how large"),
    "too large": ({"siblings": [sibling("config.json", 1 << 60)]}, "allowed are"),
    "text for a list": ({"siblings": "config.json"}, "makes no sense|lacks"),
    "too many": ({"siblings": [sibling(f"{number}.txt") for number in range(20_000)]}, "more bytes than"),
}  # fmt: skip


@pytest.mark.parametrize("what", LISTINGS)
def test_false_listing_is_refused_before_any_fetch(fetch, stub: StubHub, tmp_path: Path, what: str) -> None:
    other, words = LISTINGS[what]
    stub.script(API, "body", body=listing(stub, **other))
    with pytest.raises(HubError, match=words):
        fetch()
    assert not [request for request in stub.requests if FILE in request.path]
    assert_is_clean(tmp_path)


@pytest.mark.parametrize(
    "revision", ["../../../../escaped", "/etc/passwd", "a/../b", ".hidden", "a\0b", "x" * 300, "a/"]
)
def test_revision_is_not_a_path(fetch, stub: StubHub, tmp_path: Path, revision: str) -> None:
    with pytest.raises(HubError, match="is no revision"):
        fetch(revision)
    assert not stub.requests
    assert not files_of(tmp_path)


def test_commit_between_listing_and_fetching_is_not_mixed_in(fetch, stub: StubHub) -> None:
    first = stub.head("someone/arm")

    def push(progress: Any) -> None:
        # The total is 0 until the listing has arrived.
        if progress.total and stub.head("someone/arm") == first:
            stub.push("someone/arm", {"model.safetensors": b"another"})

    folder = fetch(on_progress=push)
    assert (folder.name, (folder / "model.safetensors").read_bytes()) == (first, FILES["model.safetensors"])
    folder = fetch()
    assert (folder.name, (folder / "model.safetensors").read_bytes()) == (stub.head("someone/arm"), b"another")


def test_files_of_a_killed_download_are_verified_before_use(fetch, stub: StubHub) -> None:
    folder = fetch()
    note = folder.parents[1] / ".robojax" / f"{folder.name}.json"
    note.unlink()  # As if killed between the last byte and the comparison.
    (folder / "model.safetensors").resolve().write_bytes(b"half")
    assert (fetch() / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize("event", ["crash", "variable"])
def test_process_of_the_hub_is_kept_and_replaced(stub: StubHub, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    def ask() -> int:
        assert hub.ask_hub("head", "someone/arm", endpoint=stub.url) == stub.head("someone/arm")
        assert hub_process._server is not None
        return hub_process._server._process.pid

    first = ask()
    assert ask() == first
    if event == "crash":
        os.kill(first, signal.SIGKILL)
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert ask() != first


def test_process_of_the_hub_ends_with_its_parent(stub: StubHub) -> None:
    program = """if True:
        import os, sys
        from jaxmodels import hub, hub_process
        hub.ask_hub("head", "someone/arm", endpoint=sys.argv[1])
        print(hub_process._server._process.pid, flush=True)
        os.kill(os.getpid(), 9)"""
    ended = subprocess.run([sys.executable, "-c", program, stub.url], stdout=subprocess.PIPE, check=False)
    wait_until(lambda: not is_running(int(ended.stdout)), PROMPT)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return b"hub_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class SessionDeleted(Exception):
    """Raised from the progress callback of a deleted session."""


def test_download_ends_when_its_caller_is_gone(fetch, stub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "GRACE", 600.0)
    monkeypatch.setattr(hub, "STALLED", 600.0)
    stub.script(FILE + ".*model", "drip", times=None)
    is_unwanted = threading.Event()
    threading.Timer(0.5, is_unwanted.set).start()

    def tell(word: str) -> None:
        if is_unwanted.is_set():
            raise SessionDeleted

    began = time.monotonic()
    with pytest.raises(SessionDeleted):
        fetch(on_progress=tell)
    assert time.monotonic() - began < PROMPT
    wait_until(lambda: all(thread.name != "hub-download" for thread in threading.enumerate()), PROMPT)


def test_link_changed_during_a_copy_mixes_no_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "model.safetensors").write_text(name)
    link, source = tmp_path / "policy", FolderSource(tmp_path / "cache")
    open_file = source._open

    def open_and_exchange(path: Path) -> BinaryIO:
        file = open_file(path)
        point_to("b")
        return file

    def point_to(name: str) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    async def load() -> Path:
        sha = await source.head(str(link), None)
        point_to("a")
        return await source.fetch(str(link), sha, lambda word: None)

    point_to("a")
    monkeypatch.setattr(source, "_open", open_and_exchange)
    folder = asyncio.run(load())
    assert [(folder / name).read_text() for name in ("config.json", "model.safetensors")] == ["a", "a"]


@pytest.mark.parametrize(("target", "code"), [("/secret/place", "unknown_repo"), ("policy", "disk")])
def test_broken_link_is_refused_and_hides_its_target(tmp_path: Path, target: str, code: str) -> None:
    link, source = tmp_path / "policy", FolderSource(tmp_path / "cache")
    link.symlink_to(target)
    for read in (source.head(str(link), None), source.fetch(str(link), "a" * 40, lambda word: None)):
        with pytest.raises(SourceError) as raised:
            asyncio.run(read)
        assert raised.value.code == code
        assert "secret" not in str(raised.value)


def test_folder_larger_than_allowed_is_not_copied(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(1 << 20)

    async def load() -> None:
        source = FolderSource(tmp_path / "cache", largest=1 << 19)
        await source.fetch(str(folder), await source.head(str(folder), None), lambda word: None)

    with pytest.raises(SourceError, match="allowed are 524288") as raised:
        asyncio.run(load())
    assert raised.value.code == "too_large"
    assert not files_of(tmp_path / "cache")

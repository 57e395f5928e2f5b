import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.auth.caller import Role
from service.auth.keys import KeyFile, KeyRefused
from service.reloading_file import FileUnusable

NOW = 1_000_000.0


@pytest.fixture
def file(tmp_path):
    return KeyFile(tmp_path / "state" / "keys.json")


def test_a_key_is_stored_as_a_hash_in_a_private_file(file):
    text = file.create("alice", Role.OPERATOR, "alice", NOW)
    assert text.startswith("rjk_")
    assert len(text) == 47  # 256 bits in base64
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    for hidden in (file.path.read_text(), repr(file.read_keys()), str(file.read_keys()[0].caller)):
        assert text[4:] not in hidden
        assert text not in hidden
    assert file.find(text) == file.read_keys()[0]


@pytest.mark.parametrize("sent", ["", "rjk_", "rjk_" + "a" * 43, "rjk_é", "rjk_" + "a" * 10_000, "\0", "rjk_x\n"])
def test_an_unknown_key_is_not_found(file, sent):
    file.create("alice", Role.OPERATOR, "alice", NOW)
    assert file.find(sent) is None


def test_changes_by_another_process_apply_immediately(file):
    other = KeyFile(file.path)
    assert other.read_keys() == ()
    first = file.create("a", Role.VIEWER, "a", NOW)
    assert other.find(first)
    second = file.create("b", Role.ADMIN, None, NOW)
    found = other.find(second)
    assert found.caller.sees_all
    file.revoke("a")
    assert other.find(first) is None
    assert other.find(second)


def test_a_key_expires_and_revoking_an_unknown_key_is_refused(file):
    file.create("a", Role.VIEWER, "a", NOW, days=2)
    (key,) = file.read_keys()
    assert not key.is_expired(NOW + 2 * 86400 - 1)
    assert key.is_expired(NOW + 2 * 86400)
    with pytest.raises(KeyRefused, match="there is a"):
        file.revoke("b")


@pytest.mark.parametrize(
    ("name", "days"), [("a", None), ("", 1), ("../x", 1), ("b", 0), ("b", float("nan")), ("..", 1)]
)
def test_a_taken_or_invalid_name_or_expiry_is_refused(file, name, days):
    file.create("a", Role.VIEWER, "a", NOW)
    with pytest.raises(KeyRefused):
        file.create(name, Role.VIEWER, "a", NOW, days)
    assert [key.name for key in file.read_keys()] == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(role="king"),
        lambda entry: entry.update(sha256="00"),
        lambda entry: entry.update(name="a b"),
        lambda entry: entry.update(expires_at="never"),
        lambda entry: entry.update(made_at=None),
        lambda entry: entry.pop("owner"),
    ],
)
def test_a_key_file_with_an_invalid_entry_admits_no_key(file, change):
    text = file.create("a", Role.VIEWER, "a", NOW)
    content = json.loads(file.path.read_text())
    change(content["keys"][0])
    file.path.write_text(json.dumps(content))
    for call in (lambda: file.find(text), lambda: file.create("b", Role.VIEWER, "b", NOW)):
        with pytest.raises(FileUnusable, match=r"keys\.json"):
            call()


@pytest.mark.parametrize(("mode", "is_accepted"), [(0o600, True), (0o644, True), (0o620, False), (0o602, False)])
def test_a_file_that_others_can_write_is_refused_with_a_remedy(file, mode, is_accepted):
    file.create("a", Role.VIEWER, "a", NOW)
    file.path.chmod(mode)
    if is_accepted:
        assert file.read_keys()
    else:
        with pytest.raises(FileUnusable, match="chmod 600"):
            file.read_keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: os.mkfifo(path, 0o600),
        lambda path: path.mkdir(mode=0o700),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (path.touch(0o600), os.truncate(path, 6 << 30)),  # A sparse file.
    ],
    ids=["pipe", "folder", "device", "large"],
)
def test_a_pipe_folder_device_or_large_file_is_refused_at_once(file, make):
    file.path.parent.mkdir()
    make(file.path)
    with pytest.raises(FileUnusable, match=r"keys\.json"):
        file.read_keys()


def test_concurrent_commands_lose_no_key(file):
    names = [f"key-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: KeyFile(file.path).create(name, Role.VIEWER, name, NOW), names))
    assert sorted(key.name for key in file.read_keys()) == names

"""Where a secret comes from, and who may read the file that it was written to."""

import stat

import pytest

from hooks.errors import InvalidWebhook
from hooks.management import find_secret, generate_secret
from hooks.management.arguments import check_secret
from hooks.signatures import is_standard, sign_standard


def test_a_generated_secret_is_good_and_another_each_time():
    one, other = generate_secret(), generate_secret()
    assert one != other
    check_secret(one, shortest=40)
    signature = sign_standard(one, "id", 1000, b"{}")
    assert is_standard([one], "id", "1000", signature, b"{}", now=1000)
    assert not is_standard([other], "id", "1000", signature, b"{}", now=1000)


def test_it_comes_from_the_place_that_was_named(tmp_path):
    file = tmp_path / "secret"
    file.write_text(" of-the-file\n")
    assert find_secret() is None
    assert find_secret("given") == "given"
    assert find_secret(file=file) == "of-the-file"
    assert find_secret(variable="HOOK", environment={"HOOK": "of-the-environment"}) == "of-the-environment"


def test_a_file_is_made_once_for_its_owner_alone(tmp_path):
    file = tmp_path / "secret"
    made = find_secret(file=file, generate=True)
    assert find_secret(file=file, generate=True) == made
    assert file.read_text().strip() == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"given": "one", "variable": "TWO"}, "by secret and by variable"),
        ({"variable": "NOT_SET"}, "NOT_SET has no secret"),
        ({"generate": True}, "name the file"),
        ({"file": "not-there"}, "let it be made"),
        ({"file": "no/folder", "generate": True}, "cannot be made"),
        ({"file": "empty"}, "is empty"),
        ({"file": "binary"}, "not ASCII"),
    ],
)
def test_a_place_without_a_secret_is_said(named, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidWebhook) as caught:
        find_secret(**named, environment={})
    assert said in str(caught.value)

"""Where what can be made again is kept, by what the environment says and what was asked for."""

from pathlib import Path

import pytest

from jaxmodels.cache_dirs import OFF, cache_folder, user_cache


@pytest.mark.parametrize(
    ("said", "wanted"), [(None, "/h/.cache"), ("", "/h/.cache"), ("/x", "/x"), ("~/kept", "/h/kept")]
)
def test_the_users_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, said: str | None, wanted: str
) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if said is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", said)
    assert user_cache() == Path(wanted)
    assert cache_folder("xla") == Path(wanted) / "robojax" / "xla"


def test_a_folder_that_was_asked_for_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder("xla", "/c") == Path("/c")
    assert cache_folder("xla", "~/c") == Path("/h/c")


@pytest.mark.parametrize("word", [*OFF, "Off"])
def test_none_is_used_where_none_is_wanted(word: str) -> None:
    assert cache_folder("xla", word) is None

"""Folders of caches, by the environment and the request."""

from pathlib import Path

import pytest

from jaxmodels.cache_dirs import OFF, cache_folder, user_cache


@pytest.mark.parametrize(
    ("variable", "asked", "cache", "wanted"),
    [
        (None, None, "/h/.cache", "/h/.cache/robojax/xla"),
        ("", None, "/h/.cache", "/h/.cache/robojax/xla"),
        ("/x", None, "/x", "/x/robojax/xla"),
        ("~/kept", None, "/h/kept", "/h/kept/robojax/xla"),
        (None, "/c", "/h/.cache", "/c"),
        (None, "~/c", "/h/.cache", "/h/c"),
    ],
)
def test_a_cache_is_in_the_requested_or_the_users_folder(monkeypatch, variable, asked, cache, wanted) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert user_cache() == Path(cache)
    assert cache_folder("xla", *([] if asked is None else [asked])) == Path(wanted)


@pytest.mark.parametrize("word", [*OFF, "Off"])
def test_none_is_used_where_none_is_wanted(word: str) -> None:
    assert cache_folder("xla", word) is None

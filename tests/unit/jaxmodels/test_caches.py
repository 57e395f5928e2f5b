"""Folders of caches, selected by the environment and the request."""

from pathlib import Path

import pytest

from jaxmodels.cache_dirs import OFF, cache_folder, user_cache


@pytest.mark.parametrize(
    ("variable", "requested", "cache", "expected"),
    [
        (None, None, "/h/.cache", "/h/.cache/robojax/xla"),
        ("", None, "/h/.cache", "/h/.cache/robojax/xla"),
        ("/x", None, "/x", "/x/robojax/xla"),
        ("~/kept", None, "/h/kept", "/h/kept/robojax/xla"),
        (None, "/c", "/h/.cache", "/c"),
        (None, "~/c", "/h/.cache", "/h/c"),
    ],
)
def test_cache_is_in_the_requested_folder_or_the_users_cache(monkeypatch, variable, requested, cache, expected) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert user_cache() == Path(cache)
    assert cache_folder("xla", *([] if requested is None else [requested])) == Path(expected)


@pytest.mark.parametrize("word", [*OFF, "Off"])
def test_cache_can_be_switched_off(word: str) -> None:
    assert cache_folder("xla", word) is None

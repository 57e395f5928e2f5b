"""Lazy exports of a package."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def list_homes(names: Mapping[str, str]) -> dict[str, str]:
    """Return public name to module, from module to public names that are separated by spaces."""
    return {name: module for module, listed in names.items() for name in listed.split()}


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its names on first use (PEP 562).

    Type checkers follow neither, so the package also imports the names under ``TYPE_CHECKING``.

    Args:
        package: its ``__name__``.
        homes: public name to the module that defines it.
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *homes})

    return look_up, names

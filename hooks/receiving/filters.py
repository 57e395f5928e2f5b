"""Which deliveries an endpoint wants; every other one is answered and left alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from hooks.payload import within
from hooks.receiving.payloads import Facts

Names = str | Iterable[str] | None


@dataclass(frozen=True)
class Filter:
    """Every one that is not empty has to hold.

    Attributes:
        events: ``scope`` or ``scope:action``; narrower scopes are included.
        repos: names as shell patterns, ``robots/*``.
        repo_types: ``model``, ``dataset``, ``space``, ``bucket``.
        scopes: with narrower ones: ``repo`` is ``repo.content`` too, ``session`` a registry's ``session.created``.
        actions: ``create``, ``delete``, ``move``, ``update``.
        refs: of those that moved, one has to fit; patterns, whole (``refs/tags/v*``) or short (``main``, a branch
            or tag).
    """

    events: tuple[str, ...] = ()
    repos: tuple[str, ...] = ()
    repo_types: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()

    @classmethod
    def of(cls, **names: Names) -> Self:
        """From one name or several of each."""
        return cls(
            **{
                key: () if value is None else (value,) if isinstance(value, str) else tuple(value)
                for key, value in names.items()
            }
        )

    def wants(self, facts: Facts) -> bool:
        """Whether this delivery passes; one that does not say what is asked for does not."""
        scope, action = facts.scope or "", facts.action or ""
        return (
            (not self.events or any(_is_event(event, scope, action) for event in self.events))
            and (not self.repos or any(fnmatchcase(facts.repo or "", pattern) for pattern in self.repos))
            and (not self.repo_types or facts.repo_type in self.repo_types)
            and (not self.scopes or within(scope, self.scopes))
            and (not self.actions or action in self.actions)
            and (not self.refs or any(_is_ref(ref, pattern) for ref in facts.refs for pattern in self.refs))
        )


def _is_event(event: str, scope: str, action: str) -> bool:
    wanted_scope, _, wanted_action = event.partition(":")
    return within(scope, (wanted_scope,)) and wanted_action in ("", action)


def _is_ref(ref: str, pattern: str) -> bool:
    if pattern.startswith("refs/"):
        return fnmatchcase(ref, pattern)
    return any(fnmatchcase(ref, f"refs/{kind}/{pattern}") for kind in ("heads", "tags"))

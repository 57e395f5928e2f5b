"""Where refs point to, asked again and again; a Hub that does not answer is said once, not every time."""

import logging
from collections.abc import Callable

from hooks.deployment.source import Source
from hooks.deployment.trigger import Target
from hooks.errors import SourceError

logger = logging.getLogger(__name__)


class Heads:
    """The heads of what is followed."""

    def __init__(self, sources: Callable[[str], Source]):
        """Nothing is asked yet; ``sources`` gives the source of a repo."""
        self._sources = sources
        self._unknown: set[Target] = set()

    async def ask(self, target: Target) -> str | None:
        """The commit, or None when it cannot be told now."""
        what = f"{target.repo} at {target.ref!r}"
        try:
            head = await self._sources(target.repo).head(target.repo, target.ref)
        except SourceError as error:
            if target not in self._unknown:
                self._unknown.add(target)
                logger.warning("the head of %s is not known; it is asked for silently from now on: %s", what, error)
            return None
        except Exception:
            if target not in self._unknown:
                self._unknown.add(target)
                logger.exception("asking for the head of %s crashed", what)
            return None
        if target in self._unknown:
            self._unknown.discard(target)
            logger.info("the head of %s is known again", what)
        return head

"""The one of several hosts that serves: it gathers the others, and loads policies everywhere."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.edge.policy_places import copies_in
from service.hosts.crew import Asked, Crew
from service.hosts.options import HostOptions
from service.hosts.ray_node import own_credentials
from service.hosts.shared_policy import SharedPolicy
from service.policy_files.listing import listing_of

if TYPE_CHECKING:
    from service.hosts.ray_hosts import RayHosts

logger = logging.getLogger(__name__)


class Front:
    """Begun and closed by whoever made it; policies are loaded in between.

    Args:
        inspect: given the folder of a policy before it is read, or sent.
        roots: as of `jaxmodels.load_policy`.

    Attributes:
        told: called once, in some thread, with why nothing can be computed any more.
    """

    def __init__(
        self,
        options: HostOptions,
        inspect: Callable[[jaxmodels.PolicyFolder], None],
        roots: Sequence[Path] | None = None,
    ):
        self.told: Callable[[str], None] = lambda why: None
        self._options = options
        self._inspect = inspect
        self._roots = roots
        self._hosts: RayHosts | None = None
        self._crew: Crew | None = None
        self._place = ""
        self._numbers = count(1)
        self._folders: dict[str, Path] = {}

    def begin(self) -> str:
        """Wait for the others, in a thread; the place of all devices, as policies call it.

        Raises:
            HostsLost: they did not come, or one of them is gone again.
            ConfigError: JAX cannot bring them together.
        """
        options = self._options
        credentials = own_credentials(options.secret, options.host, options.port)
        os.environ.update(credentials.environment)
        # Ray reads its environment when it is imported, and once only.
        from service.hosts.ray_hosts import RayHosts

        self._hosts = RayHosts(options, credentials, self._folders.__getitem__, self._hear_end)
        crew = self._crew = Crew(self._hosts.gather(), lambda why: self.told(why))
        words = {
            "do": "join",
            "count": options.count,
            "coordinator": options.coordinator,
            "patience": options.patience,
        }
        number = None if options.coordinator is None else 0

        def join() -> tuple[str, int]:
            return jaxmodels.join_hosts(options.count, number, options.coordinator, patience=options.patience)

        self._place, devices = crew.run(words, join, limit=math.inf)  # it has a patience of its own
        logger.info("%d hosts with %d devices have joined", options.count, devices)
        return self._place

    def load(
        self, path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None
    ) -> SharedPolicy:
        """As `jaxmodels.load_policy`, on all hosts.

        Raises:
            JaxModelsError: this host cannot load it, or another one (`HostRefused`), or one is gone (`HostsLost`).
        """
        assert self._crew is not None, "begun before"
        crew, number = self._crew, next(self._numbers)
        loading = _Loading()

        def share(opened: jaxmodels.PolicyFolder) -> None:
            self._inspect(opened)
            folder = opened.path
            listing = listing_of(folder)
            self._folders[listing.sha] = folder
            loading.asked = crew.ask(
                {
                    "do": "load",
                    "policy": number,
                    "like": like.number if isinstance(like, SharedPolicy) else 0,
                    "sha": listing.sha,
                    "files": [list(file) for file in listing.files],
                    "folder": str(folder.absolute()),
                    "dtype": self._options.dtype,
                }
            )

        try:
            local = jaxmodels.load_policy(
                path,
                revision,
                self._options.dtype,
                self._place,
                like=like.local if isinstance(like, SharedPolicy) else None,
                on_progress=on_progress,
                inspect=share,
                largest=self._options.policy_bytes,
                roots=self._roots if like is None else copies_in(path),
            )
            if loading.asked is not None:
                loading.asked.wait()
        except BaseException:
            if loading.asked is not None:
                with suppress(JaxModelsError):
                    loading.asked.wait()  # what is being loaded cannot be dropped yet
            crew.tell({"do": "drop", "policy": number})
            raise
        return SharedPolicy(crew, local, number)

    def check(self) -> None:
        """
        Raises:
            HostsLost: nothing can be computed any more.
        """
        if self._crew is not None:
            self._crew.check()

    def close(self) -> None:
        """Send the followers home, and end Ray here."""
        if self._crew is not None:
            self._crew.close()
        if self._hosts is not None:
            self._hosts.close()

    def _hear_end(self, why: str) -> None:
        if self._crew is not None:
            self._crew.lose(why)


@dataclass
class _Loading:
    asked: Asked | None = None

"""The one of several hosts that serves: it gathers the others, and loads policies everywhere."""

import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.edge.policy_places import copies_in
from service.hosts.channel import BEAT, SILENCE, greet_follower
from service.hosts.crew import Asked, Crew, Link
from service.hosts.errors import ChannelClosed, HostsLost
from service.hosts.files import read_piece
from service.hosts.follower import versions
from service.hosts.shared_policy import SharedPolicy
from service.policy_files.listing import listing_of

logger = logging.getLogger(__name__)

# Seconds that somebody who connects has to show who it is.
MANNERS = 3.0
# JAX finds out by itself who is there: on TPU pods, under Slurm and Open MPI.
AUTO = "auto"


@dataclass(frozen=True)
class HostOptions:
    """What hosts have to know.

    Attributes:
        count: of all hosts, the front included.
        host, port: where the front listens, as the others reach it.
        coordinator: ``address:port`` for JAX's own connections; None where JAX finds out by itself.
        secret: that all of them know.
        patience: seconds in which the others have to come.
        dtype, policy_bytes: as the settings of these names.
    """

    count: int
    host: str
    port: int
    coordinator: str | None
    secret: bytes
    patience: float = 300.0
    dtype: str | None = None
    policy_bytes: int | None = None


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
        crew = self._crew = Crew(self._gather(), self._piece, lambda why: self.told(why))
        options = self._options
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
        """Send the followers home."""
        if self._crew is not None:
            self._crew.close()

    def _piece(self, sha: str, name: str, at: int, length: int) -> bytes:
        return read_piece(self._folders[sha], name, at, length)

    def _gather(self) -> list[Link]:
        options = self._options
        until = time.monotonic() + options.patience
        links: dict[int, Link] = {}
        try:
            listener = socket.create_server((options.host, options.port), family=_family(options.host))
        except OSError as error:
            raise HostsLost(f"{options.host}:{options.port} cannot be listened on: {error.strerror}") from error
        logger.info("waiting for %d more hosts at %s:%d", options.count - 1, options.host, options.port)
        with listener:
            listener.settimeout(BEAT)
            while True:
                _drop_silent(links)
                free = set(range(1, options.count)) - links.keys()
                if not free:
                    return [links[number] for number in sorted(links)]
                if time.monotonic() > until:
                    for link in links.values():
                        link.channel.end({"do": "end", "why": "other hosts did not come"})
                    came = f"{len(links)} of {options.count - 1} other hosts came"
                    raise HostsLost(f"{came} within {options.patience:g} s; start robojax follow on them")
                with suppress(TimeoutError):
                    connection, address = listener.accept()
                    if link := self._welcome(connection, address[0], min(free)):
                        links[min(free)] = link

    def _welcome(self, connection: socket.socket, address: str, number: int) -> Link | None:
        """A follower, if it is one."""
        connection.settimeout(MANNERS)
        try:
            channel = greet_follower(connection, self._options.secret)
            connection.settimeout(MANNERS)
            words, _ = channel.receive()
            theirs, mine = words.get("versions"), versions()
            if theirs != mine:
                why = f"it has other versions: {theirs}; the front has {mine}"
                channel.end({"do": "end", "why": why})
                raise ChannelClosed(why)
            channel.send({"do": "welcome", "number": number, "count": self._options.count})
        except ChannelClosed as error:
            logger.warning("%s is no host of this front: %s", address, error)
            connection.close()
            return None
        connection.settimeout(SILENCE)
        return Link(f"host {number} ({address})", channel)


@dataclass
class _Loading:
    asked: Asked | None = None


def _drop_silent(links: dict[int, Link]) -> None:
    """Those who came may have gone again; who comes next takes their place."""
    for number, link in tuple(links.items()):
        try:
            link.channel.beat()
        except ChannelClosed as error:
            logger.warning("%s is gone again: %s", link.name, error)
            link.channel.close()
            del links[number]


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]

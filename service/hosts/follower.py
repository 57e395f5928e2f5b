"""A process that does what the front of several hosts says, with its own devices; it serves nobody itself."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.hosts.channel import BEAT, Arrays, Channel, Words, greet_front
from service.hosts.errors import ChannelClosed
from service.hosts.files import find_files
from service.policy_files.listing import Listing

logger = logging.getLogger(__name__)

# Seconds between looks for a front that is not there.
PAUSE = 0.5


def versions() -> dict[str, str]:
    """What has to be the same on all hosts, or their programs may differ."""
    return {name: version(name) for name in ("robojax", "jax", "jaxlib", "flax")}


def find_front(host: str, port: int, secret: bytes, patience: float) -> Channel:
    """A connection to the front, as soon as there is one.

    Raises:
        ChannelClosed: it did not come within so many seconds.
    """
    until = time.monotonic() + patience
    while True:
        connection = None
        try:
            connection = socket.create_connection((host, port), timeout=5.0)
            return greet_front(connection, secret)
        except (OSError, ChannelClosed) as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > until:
                raise ChannelClosed(f"no front at {host}:{port} for {patience:g} s: {error}") from error
        time.sleep(PAUSE)


class Follower:
    """Programs over the devices of all hosts in one thread, in the order in which they come; loading and compiling,
    which asks nothing of the devices of others, in another one.

    Args:
        cache: folder for policies that are not at the same place as on the front.
        told: called with each thing that a person may want to know.
    """

    def __init__(self, channel: Channel, cache: Path, told: Callable[[str], None]):
        self._channel = channel
        self._cache = cache
        self._told = told
        self._place, self._dtype = "", None
        self._number = 0
        self._policies: dict[int, jaxmodels.Policy] = {}
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._runs: queue.SimpleQueue[tuple[Words, Arrays]] = queue.SimpleQueue()
        self._builds: queue.SimpleQueue[Words] = queue.SimpleQueue()

    def follow(self) -> str | None:
        """Until the front says that it is over; why it is, None where it simply ended.

        Raises:
            ChannelClosed: the front is gone. A thread may still wait for what never comes: the process has to end.
        """
        try:
            self._channel.send({"versions": versions()})
            for work in (self._run, self._build, self._beat):
                threading.Thread(target=work, name=work.__name__, daemon=True).start()
            return self._listen()
        finally:
            self._channel.close()

    def _listen(self) -> str | None:
        while True:
            words, arrays = self._channel.receive()
            match words["do"]:
                case "end":
                    return words["why"]
                case "welcome":
                    self._number = words["number"]
                    self._told(f"Host {self._number} of {words['count']}.")
                case "piece":
                    self._pieces.put(words["piece"])
                case "load" | "build":
                    self._builds.put(words)
                case _:
                    self._runs.put((words, arrays))

    def _beat(self) -> None:
        with suppress(ChannelClosed):
            while True:
                time.sleep(BEAT)
                self._channel.beat()

    def _run(self) -> None:
        while True:
            words, arrays = self._runs.get()
            try:
                self._do(words, arrays)
            except JaxModelsError as error:
                self._say({"is": "refused", "run": words["run"], "why": str(error)})
            except Exception as error:
                logger.exception("%s failed", words["do"])
                self._say({"is": "failed", "why": f"{type(error).__name__}; its log says more"})
            del words, arrays

    def _do(self, words: Words, arrays: Arrays) -> None:
        match words["do"]:
            case "join":
                self._place, count = jaxmodels.join_hosts(
                    words["count"],
                    None if words["coordinator"] is None else self._number,
                    words["coordinator"],
                    patience=words["patience"],
                )
                self._told(
                    f"Joined: {count} devices on {words['count']} hosts. Ctrl-C ends it, and the front's policies."
                )
            case "act":
                self._policies[words["policy"]].act(_observation(words, arrays))
            case "prepare":
                self._policies[words["policy"]].prepare_task(words["text"])
            case "compile":
                self._policies[words["policy"]].compile(words["batch"], _sizes(words))
            case "rehearse":
                self._policies[words["policy"]].rehearse(words["batch"], _sizes(words))
            case "drop":
                self._policies.pop(words["policy"], None)

    def _build(self) -> None:
        while True:
            words = self._builds.get()
            why = None
            try:
                if words["do"] == "load":
                    self._load(words)
                else:
                    self._policies[words["policy"]].build(words["batch"], _sizes(words))
            except JaxModelsError as error:
                why = str(error)
            except Exception as error:
                logger.exception("%s failed", words["do"])
                why = f"it failed ({type(error).__name__}); its log says more"
            self._say({"is": "answer", "asked": words["asked"], "why": why})

    def _load(self, words: Words) -> None:
        began = time.monotonic()
        listing = Listing(words["sha"], tuple((name, size) for name, size in words["files"]))
        folder = find_files(listing, Path(words["folder"]), self._cache, partial(self._fetch, listing.sha))
        policy = jaxmodels.load_policy(
            folder, None, words["dtype"], self._place, like=self._policies.get(words["like"])
        )
        self._policies[words["policy"]] = policy
        logger.info("policy %s from %s in %.1f s", listing.sha[:8], folder, time.monotonic() - began)

    def _fetch(self, sha: str, name: str, at: int, length: int) -> bytes:
        self._channel.send({"is": "want", "sha": sha, "name": name, "at": at, "length": length})
        return self._pieces.get()

    def _say(self, words: Words) -> None:
        with suppress(ChannelClosed):  # whoever receives here is told, too
            self._channel.send(words)


def _observation(words: Words, arrays: Arrays) -> Mapping[str, Any]:
    return {**arrays, **words["texts"]}


def _sizes(words: Words) -> Mapping[str, tuple[int, int]] | None:
    cameras = words["cameras"]
    return None if cameras is None else {name: (height, width) for name, (height, width) in cameras.items()}

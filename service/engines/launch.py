"""Start of a child process that answers the calls of the server."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from service.engines.shared_memory import SharedMemory
from service.inference.config import PolicySettings, set_cache_folders

# Bytes of addresses for frames on their way to an engine, and for answers; the system gives pages only to what is used.
MEMORY_BYTES = 1 << 30
ENGINE_MODULE, ENGINE_NICENESS = "service.engines.process", 5
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEYS?($|_)|^ROBOJAX_|^PG", re.IGNORECASE)
# Variables that children need although their names look like names of secrets.
PASSED = frozenset({"ROBOJAX_COMPILE_CACHE", "ROBOJAX_TRUSTED_BUNDLES"})


@dataclass(frozen=True)
class Launched:
    """A process that was started, the socket to it, and the memory for arrays of calls and of answers."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    calls: SharedMemory
    answers: SharedMemory


def launch(module: str, niceness: int = 0, variables: Mapping[str, str] | None = None) -> Launched:
    """Start a process, which ends with the thread that calls this; blocks for some milliseconds.

    Args:
        module: main module of the process.
        niceness: by how much the process lowers its priority.
        variables: added to its environment.

    Raises:
        OSError: the process cannot be started.
    """
    ours, theirs = socket.socketpair()
    calls, answers = (SharedMemory(SharedMemory.create_descriptor(MEMORY_BYTES), MEMORY_BYTES) for _ in range(2))
    descriptors = (theirs.fileno(), calls.descriptor, answers.descriptor)
    arguments = (*descriptors, MEMORY_BYTES, os.getpid(), niceness)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            env=make_environment(variables or {}),
            pass_fds=descriptors,
            # Ctrl-C is for the server, which ends its children in order. The session stays the same, because Linux may
            # schedule each session as a group, and a niceness counts only within its group.
            process_group=0,
        )
    calls.close()
    answers.close()
    return Launched(process, ours, calls, answers)


def launch_engine(policies: PolicySettings) -> Launched | None:
    """Start the process of the only engine before the server is imported, so that JAX is imported at the same time.

    Returns:
        None if the settings name devices, whose engines need more variables.
    """
    if policies.devices or policies.device:
        return None
    set_cache_folders(policies)
    return launch(ENGINE_MODULE, ENGINE_NICENESS)


def make_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: the environment of this process without secrets, and with these variables."""
    own = {name: value for name, value in os.environ.items() if name in PASSED or not _SECRET.search(name)}
    return own | dict(variables)

"""A policy's files are read by a process of its own, with a limit on its memory, before this one trusts them."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jaxmodels
from jaxmodels.errors import CheckpointError

log = logging.getLogger(__name__)

# Seconds, and what a disk gives at least: a file that takes longer is a device or a fault.
PATIENCE = 30.0
BYTES_PER_SECOND = 20e6
# The limits stand before anything is imported; what it prints is bounded too.
_BEGINNING = """
import resource, sys
memory, paths = int(sys.argv[1]), sys.argv[2].split(chr(0x1f))
resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path[:] = paths
"""
_READING = """
from jaxmodels.checkpoints.proof import main
main(sys.argv[3])
"""
# How libraries say it before they end the process.
_NO_MEMORY = ("memory allocation of", "bad_alloc", "MemoryError", "Cannot allocate memory", "Unable to allocate")


class Inspection:
    """Reads the folders of policies in child processes.

    Args:
        memory: bytes that a child may have for data.
        patience: seconds it may take, besides those for reading at the slowest; then it is killed.
        program: what the child runs, for tests.
    """

    def __init__(self, memory: int = 1 << 30, *, patience: float = PATIENCE, program: str = _READING):
        self._memory = memory
        self._patience = patience
        self._program = program

    def __call__(self, folder: Path) -> None:
        """Called in a loader's thread; the folder is named by its last part only.

        Raises:
            CheckpointError: with what is wrong with the files, or what became of the process that read them.
        """
        began = time.monotonic()
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        found = self._run([str(folder.absolute())], self._patience + size / BYTES_PER_SECOND, folder.name)
        if found.get("out_of_memory"):
            raise self._out_of_memory(folder.name)
        if "error" in found:
            raise CheckpointError(f"{folder.name}: {found['error']}")
        log.info(
            "policy folder %s: %s tensors, %s bytes read in %.2f s",
            folder.name,
            found.get("tensors"),
            found.get("bytes"),
            time.monotonic() - began,
        )

    def _run(self, arguments: Sequence[str], seconds: float, name: str) -> dict[str, object]:
        paths = [str(Path(jaxmodels.__file__).parents[1]), *filter(None, sys.path)]
        command = [sys.executable, "-I", "-S", "-c", _BEGINNING + self._program]
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as complained:
            child = subprocess.Popen(
                [*command, str(self._memory), "\x1f".join(paths), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=complained,
                # Nothing of this process' secrets; and no threads, each of which would reserve memory.
                env={"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                raise CheckpointError(f"{name}: reading its files took over {seconds:.0f} s") from None
            finally:
                child.kill()
                child.wait()
            complained.seek(0)
            complaint = complained.read(65536).decode(errors="replace")
            if code == 0:
                told.seek(0)
                return json.loads(told.read(65536))
        log.error("reading policy folder %s ended its process with %d: %s", name, code, complaint[-2000:])
        if any(words in complaint for words in _NO_MEMORY) or code == -signal.SIGKILL:
            raise self._out_of_memory(name)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise CheckpointError(f"{name}: the process that read its files was ended {how}; they are not used")

    def _out_of_memory(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{name}: out of memory: reading its files needs more than {self._memory} bytes (setting load_memory)"
        )

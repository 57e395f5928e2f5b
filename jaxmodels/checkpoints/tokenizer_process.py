"""Tokenizers in child processes, for a process that serves several robots.

The package tokenizers keeps Python's lock for 1.2 s while it opens a file with 256,000 tokens, and a hostile file makes
it compute for hours on a text. A child process has limits of memory and processor time and delays no other robot.
"""

import hashlib
import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxmodels.checkpoints.tokenizer_files import OPEN_SECONDS, PROMPT_CHARACTERS, TOKENIZER, LocalTokenizer
from jaxmodels.errors import CheckpointError, ConfigError, JaxModelsError, ObservationError

# Bytes of memory of a child: a file of 27 MB with a million merges needs 0.83 GB, and 32 MiB are the limit of a file.
MEMORY = 3 << 29
# CPU seconds for a text, of which the longest needs 0.03 s, and seconds after which a child counts as stopped:
# less than the 5 s after which an engine counts as stuck (setting stuck_after).
ENCODE_SECONDS, ANSWER_SECONDS = 0.5, 4.0
_PROGRAM = """
import sys
sys.path[:] = sys.argv[1].split(chr(0x1f))
from jaxmodels.checkpoints.tokenizer_process import serve
serve(int(sys.argv[2]))
"""
_ERRORS: dict[str, type[JaxModelsError]] = {
    one.__name__: one for one in (CheckpointError, ConfigError, ObservationError)
}


class IsolatedTokenizer:
    """Tokenizer with the methods of `LocalTokenizer`, in a child process that ends with it.

    Raises:
        CheckpointError: the file is malformed, or opening it needs too much memory or time.
        ConfigError: the package tokenizers is not installed.
    """

    def __init__(self, file: bytes):
        self._file, self._lock = file, threading.Lock()
        self._has_exceeded = False
        self._start()

    def encode(self, text: str, length: int | None = None) -> list[int]:
        """Return the tokens of a text; see `LocalTokenizer.encode`.

        Raises:
            ObservationError: the text cannot be encoded, the child was killed or is stopped, or a text exceeded the
                limits. After that no text is encoded.
        """
        if len(text) > PROMPT_CHARACTERS:
            raise ObservationError(f"a prompt has {len(text)} characters; wanted at most {PROMPT_CHARACTERS}")
        with self._lock:
            if self._process.poll() is not None and not self._has_exceeded:
                self._end()
                self._start()  # It was killed, for example because the machine was short of memory.
            answer = None if self._has_exceeded else self._ask([text, length], ANSWER_SECONDS)
            if answer is not None:
                return answer["tokens"]
            if self._process.returncode == -signal.SIGKILL:
                raise ObservationError(
                    f"the process of the policy's {TOKENIZER} was killed, or did not answer in {ANSWER_SECONDS:g} s; "
                    "try again"
                )
            self._has_exceeded = True
            raise ObservationError(
                f"the policy's {TOKENIZER} needs over {ENCODE_SECONDS} s or {MEMORY} bytes to encode a text; it is not "
                "used any more"
            )

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, "\x1f".join(paths), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                cwd="/",
            )
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        try:
            answer = self._ask(self._file, OPEN_SECONDS + ANSWER_SECONDS)
            if answer is None:
                raise CheckpointError(f"{TOKENIZER}: opening it needs over {OPEN_SECONDS:g} s or {MEMORY} bytes")
        except JaxModelsError:
            self._end()  # The error's traceback refers to this object.
            raise
        self.largest: int = answer["largest"]

    def _ask(self, question: Any, seconds: float) -> Any:
        """Return the child's answer, or raise its error; None if it ended. A late child is killed."""
        with suppress(OSError, EOFError):
            is_file = isinstance(question, bytes)
            self._connection.send_bytes(question if is_file else json.dumps(question).encode())
            if self._connection.poll(seconds):
                answer = json.loads(self._connection.recv_bytes())
                if "error" in answer:
                    raise _ERRORS[answer["kind"]](answer["error"])
                return answer
        self._process.kill()
        self._process.wait()
        return None


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


# Tokenizers in use, by the hash of their file. A push seldom changes it, so the new policy opens no other one.
_opened: weakref.WeakValueDictionary[bytes, IsolatedTokenizer] = weakref.WeakValueDictionary()
_is_isolated = False


def isolate_tokenizers() -> None:
    """Open tokenizers in child processes from now on.

    Example:
        >>> isolate_tokenizers()  # doctest: +SKIP
    """
    global _is_isolated
    _is_isolated = True


def open_tokenizer(file: bytes, reader: str, vocabulary: int | None = None) -> LocalTokenizer | IsolatedTokenizer:
    """Open a tokenizer, in this process unless `isolate_tokenizers` was called.

    Args:
        file: content of a ``tokenizer.json``.
        reader: what reads texts with it, for messages.
        vocabulary: number of tokens that the reader knows; None for any.

    Raises:
        CheckpointError: the file is malformed, or has more tokens than the reader knows.
        ConfigError: the package tokenizers is not installed.
    """
    if _is_isolated:
        key = hashlib.sha256(file).digest()
        if (opened := _opened.get(key)) is None:
            opened = _opened[key] = IsolatedTokenizer(file)
    else:
        opened = LocalTokenizer(file)
    if vocabulary is not None and opened.largest >= vocabulary:
        raise CheckpointError(
            f"{TOKENIZER}: has a token {opened.largest}, and {reader} a vocabulary of {vocabulary}; they are not of "
            "one model"
        )
    return opened


def serve(number: int) -> None:
    """Answer an `IsolatedTokenizer` over a connection until it is closed. SIGPROF ends this process when it is slow."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(number)
    tokenizer: LocalTokenizer | None = None
    with suppress(EOFError, OSError):
        while True:
            question = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, OPEN_SECONDS if tokenizer is None else ENCODE_SECONDS)
            answer: dict[str, Any]
            try:
                if tokenizer is None:
                    tokenizer = LocalTokenizer(question)
                    answer = {"largest": tokenizer.largest}
                else:
                    answer = {"tokens": tokenizer.encode(*json.loads(question))}
            except JaxModelsError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(answer).encode())

"""The log of events in a SQLite file, which a receiver writes and any other process may read and replay from."""

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from hooks.database import Database, alone
from hooks.receiving import ledger
from hooks.receiving.event import Event


class Inbox:
    """Events of a file, or of memory when ``path`` is None.

    The methods here wait for the database: they are for programs that read and replay beside a running receiver.

    Raises:
        StoreError: it cannot be opened.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self.database = Database(path, ledger.SCHEMA)
        self._owned = ExitStack()

    def own(self) -> None:
        """Be the one receiver of this file, until it is closed or the process ends.

        Raises:
            StoreError: another one has it: both would run the same events.
        """
        taken = "another receiver works on it; end that one, give this one a file of its own, and serve with one "
        self._owned.enter_context(alone(self.path, taken + "worker process"))

    def list(
        self, *, status: str | None = None, path: str | None = None, limit: int = 50, before: int | None = None
    ) -> list[Event]:
        """Newest first, without headers and bodies.

        Args:
            status: one of ``Status``; ``dead`` lists the dead letters.
            before: the ``number`` of the last one of the page before.
        """
        return self.database.run_now(ledger.newest, status=status, path=path, limit=limit, before=before)

    def get(self, event_id: str) -> Event:
        """One event, whole.

        Raises:
            UnknownEvent: there is none of this id.
        """
        return self.database.run_now(ledger.get, event_id)

    def replay(self, event_id: str) -> Event:
        """Have it run again; a running receiver begins within a second, else the next one that starts.

        Raises:
            UnknownEvent: there is none of this id.
        """
        return self.database.run_now(ledger.replay, event_id, now=time.time())

    def close(self) -> None:
        """Let go of the file."""
        self.database.close()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

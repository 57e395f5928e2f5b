"""One process per database: two senders on one queue would send everything twice."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hooks.errors import StoreError


@contextmanager
def alone(database: Path | None) -> Iterator[None]:
    """Hold the database's lock file, which the system lets go of whenever this process ends.

    Raises:
        StoreError: another process holds it, or it cannot be made.
    """
    if database is None:
        yield
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(database.with_name(database.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"database {str(database)!r}: its lock file cannot be made ({error.strerror})") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(
                f"database {str(database)!r}: another process sends from it; end that, run one process, "
                "or give this one another file"
            ) from None
        yield
    finally:
        os.close(file)

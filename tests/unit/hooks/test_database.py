"""Database of events: versions, atomic transactions and unusable files."""

import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from hooks.database import Database
from hooks.errors import StoreError

SCHEMA = ["CREATE TABLE words (word TEXT PRIMARY KEY) STRICT"]


def add(connection: sqlite3.Connection, word: str, *, then_fail: bool = False) -> int:
    connection.execute("INSERT INTO words VALUES (?)", (word,))
    if then_fail:
        raise KeyError(word)
    return connection.execute("SELECT count(*) FROM words").fetchone()[0]


def words(connection: sqlite3.Connection) -> list[str]:
    return [row["word"] for row in connection.execute("SELECT word FROM words ORDER BY word")]


def test_a_failed_transaction_changes_nothing() -> None:
    database = Database(None, SCHEMA)
    with pytest.raises(KeyError):
        database.run_blocking(add, "one", then_fail=True)
    assert database.run_blocking(add, "two") == 1
    with pytest.raises(StoreError, match="UNIQUE"):
        database.run_blocking(add, "two")
    database.close()


def test_a_newer_version_migrates_and_an_older_version_refuses(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite3"
    Database(path, SCHEMA).close()
    assert path.stat().st_mode & 0o077 == 0, "only the owner can read the file"
    newer = Database(path, [*SCHEMA, "CREATE TABLE more (n INTEGER);\nCREATE INDEX more_n ON more (n)"])
    newer.run_blocking(add, "kept")
    newer.close()
    with pytest.raises(StoreError, match="version 2, this robojax knows 1"):
        Database(path, SCHEMA)


def test_a_file_that_is_not_a_database_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but notes that must be kept")
    with pytest.raises(StoreError, match="not a database"):
        Database(path, SCHEMA)
    assert path.read_text().startswith("not a database")


def test_a_deleted_or_replaced_file_refuses_writes(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite3"
    with closing(Database(path, SCHEMA)) as database:
        path.unlink()
        with pytest.raises(StoreError, match="deleted or replaced"):
            database.run_blocking(add, "one")
        with closing(Database(path, SCHEMA)) as another:
            with pytest.raises(StoreError, match="deleted or replaced"):
                database.run_blocking(add, "two")
            assert another.run_blocking(words) == []


def test_acknowledged_writes_survive_a_kill(tmp_path: Path) -> None:
    script = f"""
        from hooks.database import Database
        database = Database({str(tmp_path / "events.sqlite3")!r}, {SCHEMA!r})
        for number in range(1000):
            text = f"{{number:04}}"
            database.run_blocking(lambda connection: connection.execute("INSERT INTO words VALUES (?)", (text,)))
            print(f"{{number:04}}", flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(20)]
        process.kill()
        acknowledged += process.stdout.read().split()
    database = Database(tmp_path / "events.sqlite3", SCHEMA)
    assert set(database.run_blocking(words)) >= {word for word in acknowledged if len(word) == 4}
    database.close()

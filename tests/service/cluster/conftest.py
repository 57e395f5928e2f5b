"""A policy's folder, which nobody loads, and a PostgreSQL database with nothing in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.postgres import PostgresServer, postgres, programs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"type": "act"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running one, with what earlier tests left."""
    if programs() is None:
        pytest.skip("no PostgreSQL; on Debian: apt-get install postgresql")
    with postgres() as server:
        yield server


def emptied(server: PostgresServer) -> PostgresServer:
    """Without what earlier tests left: the emergency stop of an id is there for the next session of it."""
    server.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server


@pytest.fixture
def database(postgres_server: PostgresServer) -> PostgresServer:
    """With nothing in it."""
    return emptied(postgres_server)


@pytest.fixture(scope="module")
def database_of_module(postgres_server: PostgresServer) -> PostgresServer:
    """Likewise, for all tests of a module."""
    return emptied(postgres_server)

"""A PostgreSQL database with nothing in it."""

from collections.abc import Iterator

import pytest

from benchmarks.postgres import PostgresServer, postgres
from tests.testing.peers import require_peers


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running one, with what earlier tests left."""
    require_peers("postgresql")
    with postgres() as server:
        yield server


def emptied(server: PostgresServer) -> PostgresServer:
    """Without what earlier tests left: the emergency stop of an id is there for the next session of it."""
    server.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server


@pytest.fixture
def database(postgres_server: PostgresServer) -> PostgresServer:
    return emptied(postgres_server)


@pytest.fixture(scope="module")
def database_of_module(postgres_server: PostgresServer) -> PostgresServer:
    """Likewise, for all tests of a module."""
    return emptied(postgres_server)

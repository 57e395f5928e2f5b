"""An empty PostgreSQL database."""

from collections.abc import Iterator

import pytest

from benchmarks.postgres import PostgresServer, postgres
from tests.testing.peers import require_peers


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Yield a running server, which may contain data of earlier tests."""
    require_peers("postgresql")
    with postgres() as server:
        yield server


def emptied(server: PostgresServer) -> PostgresServer:
    """Delete the data of earlier tests: an emergency stop of an id applies to the next session with this id."""
    server.sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server


@pytest.fixture
def database(postgres_server: PostgresServer) -> PostgresServer:
    return emptied(postgres_server)


@pytest.fixture(scope="module")
def database_of_module(postgres_server: PostgresServer) -> PostgresServer:
    """Return an empty database for all tests of a module."""
    return emptied(postgres_server)

"""Fixtures: stub Hubs that return the secret of a webhook, or only whether it has a secret."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from hooks import WebhooksClient
from hooks.threads import start_in_thread
from tests.testing.stub_hub import StubHub
from tests.testing.stub_hub.failures import Failure

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path) -> None:
    """Hide the developer's own token and settings."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WEBHOOK_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("hooks.client.client.FIRST_WAIT", 0.01)


@pytest.fixture(params=[True, False], ids=["secret echoed", "has secret only"])
def hub(request) -> Iterator[StubHub]:
    with StubHub(token="hf_token", echoes_secrets=request.param) as hub:
        yield hub


@pytest.fixture
def stub() -> Iterator[StubHub]:
    """Hub for tests that do not depend on secrets."""
    with StubHub(token="hf_token") as hub:
        yield hub


@pytest.fixture
def client(stub) -> WebhooksClient:
    return WebhooksClient(stub.url, "hf_token")


@pytest.fixture
def limit_ends_at(monkeypatch) -> Callable[[Failure], None]:
    """End the time limit of a call when this failure delays its answer, because a busy machine may send late."""

    def set_limit(failure: Failure) -> None:
        def within(seconds: float, work: Callable[[], Result]) -> Result:
            held, future = failure.held, start_in_thread(work)
            while not future.done():
                if failure.held > held:
                    raise TimeoutError(f"not done in {seconds:g} s")
                time.sleep(0.002)
            return future.result()

        monkeypatch.setattr("hooks.client.client.run_with_timeout", within)

    return set_limit

"""Main module of the process that holds the models of a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from service.engines.process import Answer, SendEvent, main
from service.inference.model_host import ModelHost

METHODS = frozenset({"begin", "append", "forward", "read"})


@asynccontextmanager
async def open_models(send_event: SendEvent) -> AsyncIterator[Answer]:
    """Open a host of models, which are loaded with the first call."""
    host = ModelHost()

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        if method not in METHODS:
            raise ValueError(f"no method {method!r}")
        return await getattr(host, method)(*arguments)

    yield answer


if __name__ == "__main__":
    main(open_models)

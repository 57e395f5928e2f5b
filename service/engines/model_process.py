"""Main module of the process that holds the models of a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from service.engines.messages import ModelRefusal
from service.engines.model_host import ModelHost
from service.engines.process import Answer, AnswerNow, SendEvent, main
from service.errors import ServiceError


@asynccontextmanager
async def open_models(send_event: SendEvent) -> AsyncIterator[tuple[Answer, AnswerNow]]:
    """Open a host of models, which are loaded with the first call."""
    host = ModelHost()

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return await host.call(method, *arguments)
        except ServiceError as error:
            return ModelRefusal(error.code, str(error), getattr(error, "loc", ()))

    yield answer, lambda method, arguments: None


if __name__ == "__main__":
    main(open_models)

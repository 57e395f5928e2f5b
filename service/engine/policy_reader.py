"""What policies need, read before anything of them is loaded."""

import asyncio
import logging
from collections.abc import Callable

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from service.engine.loading import Load
from service.engine.store import cut
from service.engine.worker import call_in_thread
from service.errors import PolicyError, ServiceError

logger = logging.getLogger(__name__)

# Called in a thread: path or repo id, revision.
ReadRequirements = Callable[[str, str | None], Requirements]
# Looks at a time; each may wait for the Hub.
AT_ONCE = 2


class PolicyReader:
    """Reads what policies need, away from the event loop and below it."""

    def __init__(self, read: ReadRequirements, at_once: int = AT_ONCE):
        self._read = read
        self._places = asyncio.Semaphore(at_once)

    async def read(self, path: str, revision: str | None) -> Requirements:
        """What a policy needs.

        Raises:
            PolicyError: it cannot be read.
        """
        async with self._places:
            load = Load()
            try:
                return await call_in_thread(lambda: load.run(lambda: self._read(path, revision)), "policy-reader", 5)
            except asyncio.CancelledError:
                load.end("nobody waits for it any more")
                raise
            except JaxModelsError as error:
                raise PolicyError(f"policy {path!r} cannot be used: {cut(error)}") from error
            except ServiceError:
                raise  # a place that is not allowed
            except Exception as error:
                # Its text may hold anything, so only its kind goes to the client.
                logger.exception("reading what policy %r needs failed", path)
                raise PolicyError(
                    f"policy {path!r} cannot be used ({type(error).__name__}); the server's log says more"
                ) from error

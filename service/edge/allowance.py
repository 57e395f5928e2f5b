"""What a session is refused for before anything is loaded or connected on its behalf."""

import asyncio
from collections.abc import Awaitable, Callable

from service.edge.destinations import Destinations
from service.edge.policy_places import PolicyPlaces
from service.sessions.request import NewSession

Admit = Callable[[NewSession], Awaitable[None]]


class Allowance:
    """The places that a request names, asked for at once and not only when they are come to.

    Args:
        destinations: None where links do not leave this process.
    """

    def __init__(self, places: PolicyPlaces, destinations: Destinations | None = None):
        self.places = places
        self._destinations = destinations

    async def check(self, new: NewSession) -> None:
        """
        Raises:
            InvalidRequest: a place is not allowed; says which setting allows it.
            TransportError: nobody knows the transport server's host.
        """
        await asyncio.to_thread(self.places.check, new.policy_path, revision=new.revision)
        if new.shadow_policy_path is not None:
            shadow, revision = new.shadow_policy_path, new.shadow_revision
            await asyncio.to_thread(self.places.check, shadow, "shadow_policy_path", revision)
        if self._destinations is not None and not new.is_direct:
            await self._destinations.addresses(new.transport_server_url)

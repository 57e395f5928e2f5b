"""Public names of robojax: policies, clients, robots and webhooks, each imported on first use.

``import robojax`` imports neither JAX nor Sanic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks import WebhookPayload as WebhookPayload
    from hooks import WebhooksServer as WebhooksServer
    from hooks import webhook_endpoint as webhook_endpoint
    from jaxmodels import Policy as Policy
    from jaxmodels import Transformer2DModel as Transformer2DModel
    from jaxmodels import load_policy as load_policy
    from robojax.client import AsyncClient as AsyncClient
    from robojax.client import Client as Client
    from service.transport.client.robot import connect_robot as connect_robot
    from service.transport.link import Rooms as Rooms

_HOMES = {
    "AsyncClient": "robojax.client",
    "Client": "robojax.client",
    "Policy": "jaxmodels",
    "Rooms": "service.transport.link",
    "Transformer2DModel": "jaxmodels",
    "WebhookPayload": "hooks",
    "WebhooksServer": "hooks",
    "connect_robot": "service.transport.client.robot",
    "load_policy": "jaxmodels",
    "webhook_endpoint": "hooks",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Public names of robojax: policies, clients, robots and webhooks, each imported on first use.

``import robojax`` imports neither JAX nor Sanic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks import WebhookPayload, WebhooksServer, webhook_endpoint
    from jaxmodels import Policy, Transformer2DModel, load_policy
    from robojax.client import AsyncClient, Client
    from service.transport.client.robot import connect_robot
    from service.transport.link import Rooms

__all__ = [
    "AsyncClient",
    "Client",
    "Policy",
    "Rooms",
    "Transformer2DModel",
    "WebhookPayload",
    "WebhooksServer",
    "connect_robot",
    "load_policy",
    "webhook_endpoint",
]

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

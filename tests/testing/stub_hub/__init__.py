"""A small Hub on this machine that the real huggingface_hub client and its CLI talk to unchanged.

``with StubHub() as hub: hub.push("someone/arm", {"config.json": b"{}"})``. Nothing of it needs a network or an event
loop.
"""

from tests.testing.stub_hub.deliveries import Delivery, DeliveryPlan
from tests.testing.stub_hub.failures import Failure
from tests.testing.stub_hub.hub import Request, StubHub
from tests.testing.stub_hub.receiver import Receiver

__all__ = ["Delivery", "DeliveryPlan", "Failure", "Receiver", "Request", "StubHub"]

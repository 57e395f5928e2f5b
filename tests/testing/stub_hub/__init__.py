"""A small Hub on this machine that the real huggingface_hub client and its CLI talk to unchanged.

``with StubHub() as hub: hub.push("someone/arm", {"config.json": b"{}"})``
"""

from tests.testing.stub_hub.deliveries import DeliveryPlan
from tests.testing.stub_hub.failures import Failure
from tests.testing.stub_hub.hub import StubHub

__all__ = ["DeliveryPlan", "Failure", "StubHub"]

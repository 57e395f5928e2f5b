"""example_policy: what the policy does, in one line."""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(is_trained=True)

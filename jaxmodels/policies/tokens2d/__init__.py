"""tokens2d: action chunks as tokens, decoded by confidence on the 2D transformer."""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(is_trained=True)

"""diffusion2d: action chunks by flow matching or diffusion on the 2D transformer."""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(is_trained=True)

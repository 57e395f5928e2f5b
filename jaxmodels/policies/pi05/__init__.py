"""pi0.5: pi0 with the time in its norms and the state in its prompt."""

from jaxmodels.policies import pi0

FACTS = pi0.FACTS

"""ACT, the Action Chunking Transformer, as LeRobot 0.4.4 defines it.

Source: lerobot/policies/act (https://github.com/huggingface/lerobot); paper https://arxiv.org/abs/2304.13705.
"""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(is_trained=True)

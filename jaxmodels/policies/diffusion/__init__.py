"""Diffusion Policy, as LeRobot defines it: a U-Net over time denoises a chunk of actions.

Sources: https://arxiv.org/abs/2303.04137; lerobot/policies/diffusion (https://github.com/huggingface/lerobot, 0.6.1).
"""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(is_trained=True)

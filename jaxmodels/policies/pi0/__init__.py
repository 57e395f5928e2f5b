"""pi0, as LeRobot and openpi define it: PaliGemma encodes images and words, and an action expert follows a flow.

Sources: https://arxiv.org/abs/2410.24164; lerobot/policies/pi0 (https://github.com/huggingface/lerobot, 0.6.1).
"""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(
    sizes=("architecture", "architecture.json"),
    tokenizer="google/paligemma-3b-pt-224",
)

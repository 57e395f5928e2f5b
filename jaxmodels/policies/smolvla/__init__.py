"""SmolVLA, as LeRobot defines it: a small vision-language model, and an action expert that follows a flow.

Sources: https://arxiv.org/abs/2506.01844; lerobot/policies/smolvla (https://github.com/huggingface/lerobot, 0.6.1).
"""

from jaxmodels.policies import PolicyFacts

FACTS = PolicyFacts(sizes=("vlm", "{vlm_model_name}/config.json"))

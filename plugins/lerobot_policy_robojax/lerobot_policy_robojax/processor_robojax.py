"""Processors of the policy ``robojax``, which change nothing, because the server normalizes."""

from typing import Any

from lerobot.processor import PolicyProcessorPipeline, policy_action_to_transition, transition_to_policy_action

from lerobot_policy_robojax.configuration_robojax import RobojaxConfig


def make_robojax_pre_post_processors(config: RobojaxConfig, **_: Any) -> tuple[Any, Any]:
    """Return a preprocessor and a postprocessor without steps."""
    actions = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
    return PolicyProcessorPipeline(steps=[]), PolicyProcessorPipeline(steps=[], **actions)

"""Between a policy and a robot: limits, watchdogs, and who may command."""

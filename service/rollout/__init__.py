"""Rollout: how a push becomes the policy of running sessions, and is taken back."""

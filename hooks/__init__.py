"""Webhooks: management, receiving, and delivery of policies. Nothing here yet but the place."""

__all__: list[str] = []

"""Receiver of webhooks: from a raw POST to a handler's effect."""

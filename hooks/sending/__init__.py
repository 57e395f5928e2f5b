"""Sends events to webhooks: durable, signed, in order, and never to an address that is not allowed."""

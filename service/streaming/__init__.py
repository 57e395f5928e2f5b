"""Doors for clients that need no rooms: act, stream, and openpi's protocol."""

"""Streaming for clients without rooms: act, stream, openpi's protocol."""

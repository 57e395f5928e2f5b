"""Rooms: how frames and joints come in and commands go out."""

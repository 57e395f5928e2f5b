"""Recordings of sessions: written while a robot moves, read, exported as datasets, replayed against policies."""

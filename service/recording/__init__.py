"""Recordings of sessions: written while a robot moves, read again, turned into datasets, held against policies."""

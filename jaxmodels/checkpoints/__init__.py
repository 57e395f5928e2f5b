"""Formats of policies on disk; each is read and written whole, nothing is skipped."""

"""Engines on other machines, and several front servers that share them, on Ray."""

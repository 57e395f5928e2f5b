"""Engines in processes of their own: how they are started, asked and replaced."""

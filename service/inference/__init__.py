"""Policies in memory: loading, compiling, and the threads they run in."""

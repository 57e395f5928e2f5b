"""The HTTP routes: parse, call, render."""

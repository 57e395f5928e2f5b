"""How a policy takes over in a running session, and is taken back."""

"""From what a session hears and what a policy plans to one command a tick."""

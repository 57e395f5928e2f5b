"""Authentication and roles: keys, tokens, tickets."""

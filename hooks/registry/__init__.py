"""Registry of webhooks with the Hub's API: for closed networks, and for events of our own."""

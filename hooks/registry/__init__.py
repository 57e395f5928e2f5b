"""The Hub's management API for webhooks, served by us: for closed networks, and for events of our own."""

"""Client for the Hub's webhook API."""

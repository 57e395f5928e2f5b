"""The page at /ui: its files, and the one socket that tells it what happens."""

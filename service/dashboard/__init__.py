"""Dashboard at /ui: its files, and the socket that updates it."""

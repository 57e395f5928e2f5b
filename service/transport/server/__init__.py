"""Transport server: rooms over REST and WebSocket, mounted in the service or alone."""

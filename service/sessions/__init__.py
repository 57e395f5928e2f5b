"""Sessions: what one is made of, which there are, and what survives the server."""

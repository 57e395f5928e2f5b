"""Neural network layers that several models share."""

"""Models for robot policies in JAX: arrays in, arrays out."""

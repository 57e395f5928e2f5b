"""Inference: policies in memory, batches, and the threads of devices."""

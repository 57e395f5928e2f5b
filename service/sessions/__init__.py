"""Sessions: which exist, what each does, and what survives the process."""

"""Sessions: their list, their life, and their records on disk."""

"""Models that are no policies, served over HTTP."""

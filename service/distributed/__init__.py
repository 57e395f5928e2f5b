"""Inference on other machines, and servers that share it."""

import os

# Ray's handlers print the stacks of all threads at a SIGTERM, which is how a server is ended in order. It reads this
# when it is imported, which is after this.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")

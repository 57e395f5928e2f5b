"""Processes that end with their parent, also when it was killed: ``-m service.demo.leash PARENT MODULE ARGUMENTS``."""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """From now on this process is asked to end when `parent`, which started it, is gone; on Linux only."""
    # In the child and not between fork and exec, where Python code must not run beside other threads.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before
            sys.exit(1)


def main() -> None:
    """Runs the module, with the arguments that follow it."""
    parent, module = sys.argv[1:3]
    end_with_parent(int(parent))
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

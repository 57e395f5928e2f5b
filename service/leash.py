"""Processes that end with their parent, also when it was killed: ``-m service.leash PARENT MODULE ARGUMENTS``.

psutil looks at processes and ends them, but has nothing that a killed parent leaves behind.
"""

import ctypes
import os
import runpy
import signal
import sys


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """From now on this process gets a signal when the thread of `parent` that started it is gone; on Linux only."""
    # In the child and not between fork and exec, where Python code must not run beside other threads.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, by its number: `service.engine.loading` copies this
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

"""Simulated SO-100 arm, an ordinary client of the server."""

import ctypes
import os
import sys


def _is_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


# MuJoCo picks its way to draw once, while it is being imported; without a screen its own choice fails, and a choice
# whose library is missing makes the import itself fail. So the choice is made here, before any module of this package
# can import it: with neither library physics still runs, and drawing says what to install. A set MUJOCO_GL is left.
if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
    available = [
        name for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")) if _is_library(library)
    ]
    os.environ["MUJOCO_GL"] = available[0] if available else "disabled"

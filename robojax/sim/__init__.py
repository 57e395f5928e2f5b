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


# MuJoCo's import fails if the chosen renderer is missing. Without EGL and OSMesa physics runs, and drawing fails.
if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
    available = [
        name for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")) if _is_library(library)
    ]
    os.environ["MUJOCO_GL"] = available[0] if available else "disabled"

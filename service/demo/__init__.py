"""A simulated arm that is an ordinary client of the service."""

import ctypes.util
import os
import sys

# MuJoCo picks its way to draw once, while it is being imported, and without a screen its own choice fails; so the
# choice is made here, before any module of this package can import it. A set MUJOCO_GL is left alone.
if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
    has_egl, has_osmesa = (ctypes.util.find_library(name) is not None for name in ("EGL", "OSMesa"))
    os.environ["MUJOCO_GL"] = "osmesa" if has_osmesa and not has_egl else "egl"

"""The simulated arm: targets in, joint angles and pictures out, one step per tick of its clock."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's names come from a compiled module without stubs.

import os

import mujoco
import numpy as np

from service.demo import scene
from service.demo.units import HIGH, JOINTS, LOW, to_radians, to_wire

RATE = 25.0  # Hz
HORIZON = 110  # ticks of an episode: the expert needs 90, a policy may hesitate
LIFTED = 0.06  # metres; a cube above this at the end of an episode counts
HOME = np.array([0.0, -2.2, 2.2, 1.2, 0.0, 0.3])  # radians: folded, the jaw a little open
RADIUS, BEARING, YAW = (0.20, 0.28), 0.6, 0.25  # where cubes may lie: metres from the base, radians

DEBIAN_PACKAGES = "libegl1 libgles2 libgl1-mesa-dri"


class Arm:
    """One arm over one cube; every method is synchronous and everything is decided by the seed and the targets."""

    def __init__(self) -> None:
        self.model = scene.build()
        self.data = mujoco.MjData(self.model)
        self._steps = round(1 / RATE / self.model.opt.timestep)
        joints = [self.model.joint(f"{scene.ARM}/{joint}") for joint in JOINTS]
        self.addresses = np.array([joint.qposadr[0] for joint in joints])
        self._cube = self.model.joint(scene.CUBE).qposadr[0]
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}

    def reset(self, seed: int) -> None:
        """Folds the arm and lays the cube somewhere in reach; the same seed, the same place."""
        random = np.random.default_rng(seed)
        radius, bearing, yaw = random.uniform(*RADIUS), random.uniform(-BEARING, BEARING), random.uniform(-YAW, YAW)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[self.addresses] = HOME
        self.data.ctrl[:] = HOME
        place = (radius * np.sin(bearing), -radius * np.cos(bearing), scene.CUBE_SIZE / 2 + 0.0005)
        self.data.qpos[self._cube : self._cube + 7] = [*place, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]
        mujoco.mj_forward(self.model, self.data)

    def step(self, target: np.ndarray) -> None:
        """Moves on by one tick (40 ms) towards `target`, six wire values."""
        self.data.ctrl[:] = np.clip(to_radians(target), LOW, HIGH)
        mujoco.mj_step(self.model, self.data, self._steps)

    @property
    def joints(self) -> np.ndarray:
        """The measured pose, six wire values."""
        return to_wire(self.data.qpos[self.addresses])

    @property
    def cube(self) -> np.ndarray:
        """Where the cube's centre is, in metres. For the expert and the score, never for a policy."""
        return self.data.qpos[self._cube : self._cube + 3].copy()

    @property
    def is_lifted(self) -> bool:
        return bool(self.cube[2] > LIFTED)

    def picture(self, camera: str, height: int, width: int) -> np.ndarray:
        """What a camera sees: uint8 (height, width, 3), RGB.

        Raises:
            RuntimeError: nothing here can draw without a screen; says what to install.
        """
        renderer = self._renderers.get((height, width))
        if renderer is None:
            renderer = self._renderers[height, width] = _renderer(self.model, height, width)
        renderer.update_scene(self.data, camera)
        return renderer.render()

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def _renderer(model: mujoco.MjModel, height: int, width: int) -> mujoco.Renderer:
    try:
        return mujoco.Renderer(model, height, width)
    except (ImportError, RuntimeError, AttributeError, mujoco.FatalError) as error:
        # PyOpenGL raises AttributeError when what it wraps is not there; so does MuJoCo when drawing is disabled.
        raise RuntimeError(
            f"cannot draw here without a screen (MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}: {error}); "
            f"EGL or OSMesa is needed. On Debian or Ubuntu: apt-get install {DEBIAN_PACKAGES}"
        ) from error

"""The simulated arm: targets in, joint angles and pictures out, one step per tick of its clock."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's names come from a compiled module without stubs.

import os

import mujoco
import numpy as np

from service.demo import scene
from service.demo.tasks import PICK, Task
from service.demo.units import HIGH, JOINTS, LOW, to_radians, to_wire

RATE = 25.0  # Hz
HORIZON = 110  # ticks of an episode: the expert needs 90, a policy may hesitate
LIFTED = 0.06  # metres; a cube above this at the end of an episode counts
HOME = np.array([0.0, -2.2, 2.2, 1.2, 0.0, 0.3])  # radians: folded, the jaw a little open
CAMERA, FRAME = "front", (240, 240)  # what the arm sends to whoever drives it: height and width in pixels

DEBIAN_PACKAGES = "libegl1 libgles2 libgl1-mesa-dri"


class Arm:
    """One arm over a task's cubes; every method is synchronous, everything is decided by the seed and the targets.

    Attributes:
        task: what may be asked of it.
        asked: the cube that is to be lifted in this episode.
        wrong: the name of another cube that was up at any moment of this episode; None when there was none.
    """

    def __init__(self, task: Task = PICK) -> None:
        self.task, self.asked = task, task.cubes[0]
        self.wrong: str | None = None
        self.model = scene.build(task.cubes)
        self.data = mujoco.MjData(self.model)
        self._steps = round(1 / RATE / self.model.opt.timestep)
        joints = [self.model.joint(f"{scene.ARM}/{joint}") for joint in JOINTS]
        self.addresses = np.array([joint.qposadr[0] for joint in joints])
        self._cubes = {cube.name: self.model.joint(scene.body_of(cube)).qposadr[0] for cube in task.cubes}
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}

    def reset(self, seed: int) -> None:
        """Folds the arm, lays the cubes somewhere in reach and asks for one; all decided by the seed."""
        self.asked, self.wrong = self.task.asked(seed), None
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[self.addresses] = HOME
        self.data.ctrl[:] = HOME
        for address, place in zip(self._cubes.values(), self.task.places(seed), strict=True):
            turn = place.yaw / 2
            pose = [*place.centre, scene.CUBE_SIZE / 2 + 0.0005, np.cos(turn), 0, 0, np.sin(turn)]
            self.data.qpos[address : address + 7] = pose
        mujoco.mj_forward(self.model, self.data)

    def step(self, target: np.ndarray) -> None:
        """Moves on by one tick (40 ms) towards `target`, six wire values."""
        self.data.ctrl[:] = np.clip(to_radians(target), LOW, HIGH)
        mujoco.mj_step(self.model, self.data, self._steps)
        others = (name for name in self._cubes if name != self.asked.name and self._is_up(name))
        self.wrong = self.wrong or next(others, None)

    @property
    def joints(self) -> np.ndarray:
        """The measured pose, six wire values."""
        return to_wire(self.data.qpos[self.addresses])

    @property
    def cube(self) -> np.ndarray:
        """Where the centre of the asked cube is, in metres. For the expert and the score, never for a policy."""
        return self._place(self.asked.name)

    @property
    def is_lifted(self) -> bool:
        """Whether the asked cube is up, and no other ever was."""
        return self._is_up(self.asked.name) and self.wrong is None

    def _place(self, cube: str) -> np.ndarray:
        address = self._cubes[cube]
        return self.data.qpos[address : address + 3].copy()

    def _is_up(self, cube: str) -> bool:
        return bool(self._place(cube)[2] > LIFTED)

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

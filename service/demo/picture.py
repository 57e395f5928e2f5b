"""A picture of the arm at work, for people."""

from pathlib import Path

from PIL import Image

from service.demo.arm import Arm
from service.demo.expert import Kinematics, plan, targets

CAMERA, HEIGHT, WIDTH = "side", 540, 960
SHARPNESS = 2  # drawn so much larger and scaled down: the scene itself is drawn without anti-aliasing
MOMENT = 76  # tick at which the cube is on its way up


def save_picture(path: Path, *, seed: int = 3) -> None:
    """Draws the expert lifting the cube of `seed`.

    Raises:
        RuntimeError: nothing here can draw without a screen.
    """
    arm = Arm()
    try:
        arm.model.vis.global_.offwidth, arm.model.vis.global_.offheight = WIDTH * SHARPNESS, HEIGHT * SHARPNESS
        # Shadows are too slow for 25 pictures a second, and worth it for one.
        arm.model.vis.quality.shadowsize = 4096
        arm.model.light_castshadow[:] = True
        arm.reset(seed)
        for tick, target in enumerate(targets(plan(arm, Kinematics(arm)))):
            arm.step(target)
            if tick == MOMENT:
                break
        drawn = Image.fromarray(arm.picture(CAMERA, HEIGHT * SHARPNESS, WIDTH * SHARPNESS))
        drawn.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(path)
    finally:
        arm.close()

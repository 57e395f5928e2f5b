"""Record the last feature map of torchvision's ResNets with generated weights in tests/golden/torchvision_resnet."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
import torchvision

SIDE, SEED = 64, 0
NAMES = ("resnet18", "resnet50")


def seeded(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a tensor by the rule of ../lerobot_act/README.md."""
    generator = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if name.endswith("running_var"):
        return np.float32(0.5 + generator.random(shape))
    values = generator.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return values / np.float32(np.sqrt(np.prod(shape[1:])))
    return np.float32(1) * name.endswith("weight") + np.float32(0.1) * values


def main() -> None:
    image = np.random.default_rng(SEED).normal(size=(1, SIDE, SIDE, 3)).astype(np.float32)
    arrays, keys = {"image": image}, {}
    for name in NAMES:
        model = getattr(torchvision.models, name)(weights=None).eval()
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        model.load_state_dict({key: torch.from_numpy(seeded(key, shape)) for key, shape in shapes.items()})
        layers = torch.nn.Sequential(*list(model.children())[:-2])  # Without the pooling and the classifier.
        with torch.no_grad():
            arrays[name] = layers(torch.from_numpy(image).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
        keys[name] = {key: list(shape) for key, shape in shapes.items()}
    here = Path(__file__).parents[2] / "tests" / "golden" / "torchvision_resnet"
    described = {"seed": SEED, "torch": torch.__version__, "torchvision": torchvision.__version__}
    lines = [json.dumps(described)[:-1], *(f' "{name}": {json.dumps(shapes)}' for name, shapes in keys.items())]
    (here / "keys.json").write_text(",\n".join(lines) + "}\n")
    np.savez_compressed(here / "features.npz", **arrays)


if __name__ == "__main__":
    main()

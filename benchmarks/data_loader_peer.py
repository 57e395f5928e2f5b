"""LeRobot's side of benchmarks/data_loader.py: run by a Python that has lerobot 0.4.4, which ours never has.

``write`` converts the rows and frames of another dataset to LeRobot's own format. ``load`` reads a number from each
line of standard input and gives that number of batches, in the form that ``lerobot-train`` takes.
"""

import json
import logging
import sys
import time

import torch  # pyright: ignore[reportMissingImports]


def say(**what: object) -> None:
    sys.__stdout__.write(json.dumps(what) + "\n")  # pyright: ignore[reportOptionalMemberAccess]
    sys.__stdout__.flush()  # pyright: ignore[reportOptionalMemberAccess]


def write(source: str, target: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # pyright: ignore[reportMissingImports]

    given = LeRobotDataset("robojax/given", root=source, video_backend="pyav")
    own = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    features = {name: feature for name, feature in given.features.items() if name not in own}
    made = LeRobotDataset.create("robojax/made", fps=given.fps, root=target, features=features)
    episode = 0
    for number in range(len(given)):
        row = given[number]
        if int(row["episode_index"]) != episode:
            made.save_episode()
            episode += 1
        frame = {"task": row["task"]}
        for name, feature in features.items():
            value = row[name]
            if feature["dtype"] == "video":
                value = (value * 255).round().byte().permute(1, 2, 0)
            frame[name] = value.numpy()
        made.add_frame(frame)
    made.save_episode()
    made.finalize()
    say(event="ready")


def backend() -> str:
    """LeRobot's choice, unless FFmpeg's libraries are missing: it only looks whether the package is there."""
    try:
        from torchcodec.decoders import VideoDecoder  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError):
        return "pyav"
    return "torchcodec"


def load(folder: str, workers: int, chunk: int, batch: int, skipped: int) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # pyright: ignore[reportMissingImports]

    fps = LeRobotDataset("robojax/arm", root=folder).fps
    dataset = LeRobotDataset(
        "robojax/arm",
        root=folder,
        delta_timestamps={"action": [step / fps for step in range(chunk)]},
        video_backend=backend(),
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=batch, shuffle=True, num_workers=workers, prefetch_factor=2, persistent_workers=True
    )

    def forever():
        while True:
            # The last batch of an epoch is smaller; as in training, it counts as what it is.
            yield from loader

    batches = forever()
    next(batches)
    cameras = dataset.meta.camera_keys
    say(event="ready", backend=dataset.video_backend)
    for line in sys.stdin:
        for _ in range(skipped):
            next(batches)
        began = time.perf_counter()
        images = 0
        for _ in range(json.loads(line)["batches"]):
            one = next(batches)
            images += sum(len(one[camera]) for camera in cameras)
        say(images=images, seconds=time.perf_counter() - began)


def main() -> None:
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr  # LeRobot prints while it works
    if sys.argv[1] == "write":
        write(*sys.argv[2:4])
    else:
        load(sys.argv[2], *map(int, sys.argv[3:7]))


if __name__ == "__main__":
    main()

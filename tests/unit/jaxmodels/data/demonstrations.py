"""Demonstrations that identify their rows: distinct numbers, and frames of one grey level each."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image

from jaxmodels.data import DatasetWriter
from jaxmodels.types import Feature

NAMES = ("shoulder.pos", "elbow.pos")
LENGTHS, TASKS = (6, 9, 5), ("pick", "place", "pick")
FPS, SIZE, FRONT = 20, (32, 48), "observation.images.front"
ROWS = sum(LENGTHS)
STATE = np.stack((np.arange(ROWS), np.arange(ROWS) ** 2 / 7), axis=1).astype(np.float32)
ACTION = STATE + np.float32(0.5)


def level(row: int) -> int:
    return 15 + 11 * row


def frames(rows: range, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.stack([np.full((*size, 3), level(row), np.uint8) for row in rows])


def spans() -> list[range]:
    ends = np.cumsum(LENGTHS).tolist()
    return [range(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


def write(folder: Path) -> Path:
    """Write demonstrations with this package's own writer."""
    with DatasetWriter(folder, fps=FPS, joint_names=NAMES, cameras=["front"], robot_type="arm") as writer:
        for span, task in zip(spans(), TASKS, strict=True):
            arrays = {"observation.state": STATE[span], "action": ACTION[span], FRONT: frames(span)}
            writer.add_episode(arrays, task)
    return folder


def write_old(folder: Path, *, kind: str = "video", chunk_files: int = 2) -> Path:
    """Write version 2.1 in the layout of lerobot 0.3: a parquet file and a video, or pictures, for each episode."""
    (folder / "meta").mkdir(parents=True)
    tasks = list(dict.fromkeys(TASKS))
    for number, (span, task) in enumerate(zip(spans(), TASKS, strict=True)):
        columns: dict[str, Any] = {
            "observation.state": pa.array(STATE[span].tolist(), pa.list_(pa.float32(), 2)),
            "action": pa.array(ACTION[span].tolist(), pa.list_(pa.float32())),
            "timestamp": pa.array(np.arange(len(span), dtype=np.float32) / np.float32(FPS)),
            "frame_index": np.arange(len(span)),
            "episode_index": np.full(len(span), number),
            "index": np.asarray(span),
            "task_index": np.full(len(span), tasks.index(task)),
        }
        if kind == "image":
            columns[FRONT] = [{"bytes": png(frame), "path": f"frame_{number:06d}.png"} for frame in frames(span)]
        else:
            write_video(folder / f"videos/chunk-{number // chunk_files:03d}/{FRONT}/episode_{number:06d}.mp4", span)
        path = folder / f"data/chunk-{number // chunk_files:03d}/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(columns), path, row_group_size=4)
    episodes = [
        {"episode_index": number, "tasks": [task], "length": length}
        for number, (task, length) in enumerate(zip(TASKS, LENGTHS, strict=True))
    ]
    lines(folder / "meta/episodes.jsonl", episodes)
    lines(folder / "meta/tasks.jsonl", [{"task_index": number, "task": task} for number, task in enumerate(tasks)])
    single = {"dtype": "int64", "shape": [1], "names": None}
    vector = {"dtype": "float32", "shape": [2], "names": {"motors": list(NAMES)}}
    info = {
        **{"codebase_version": "v2.1", "robot_type": "arm", "total_episodes": len(LENGTHS), "total_frames": ROWS},
        **{"total_tasks": len(tasks), "total_chunks": 2, "chunks_size": chunk_files, "fps": FPS},
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            **{"observation.state": vector, "action": vector},
            FRONT: {"dtype": kind, "shape": [*SIZE, 3], "names": ["height", "width", "channel"]},
            "next.done": {"dtype": "bool", "shape": [1], "names": None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), single),
        },
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def write_video(
    path: Path, rows: range, *, codec: str = "libx264", size: tuple[int, int] = SIZE, **options: str
) -> None:
    """Write a video with LeRobot's options, unless ``options`` change them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options={"g": "2", "crf": "23"} | options)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for frame in frames(rows, size):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode(None))


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def policy(
    *,
    size: tuple[int, int] = SIZE,
    chunk: int = 4,
    width: int = 2,
    camera: str = FRONT,
    looks: int = 1,
    dropped: int = 0,
) -> Any:
    """Return the fields of a config that determine the shape of batches."""
    return SimpleNamespace(
        cameras=(Feature(camera, "VISUAL", (3, *size)),),
        state=Feature("observation.state", "STATE", (2,)),
        environment_state=None,
        action=Feature("action", "ACTION", (width,)),
        observation_steps=looks,
        action_delta_indices=range(1 - looks, 1 - looks + chunk),
        drop_n_last_frames=dropped,
    )

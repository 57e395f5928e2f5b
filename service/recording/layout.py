"""Where things are in a LeRobotDataset v3.0 folder, and what its columns are called."""

import re

VERSION = "v3.0"
CHUNK_FILES = 1000
DATA_MEGABYTES, VIDEO_MEGABYTES = 100, 200

INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES = f"meta/episodes/{_FILE}.parquet"
DATA = f"data/{_FILE}.parquet"
VIDEO = f"videos/{{video_key}}/{_FILE}.mp4"

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
# feature -> type of its one value, in every dataset
INDICES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
# Names of features become names of folders.
FEATURE_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}")

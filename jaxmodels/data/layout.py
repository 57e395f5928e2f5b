"""Where things are in the folder of a LeRobotDataset, and what its columns are called."""

import re

from jaxmodels.features import ACTION, ENVIRONMENT_STATE, IMAGES, STATE

__all__ = ["ACTION", "ENVIRONMENT_STATE", "IMAGES", "STATE"]

INFO, STATS = "meta/info.json", "meta/stats.json"

# Version 3.0: many episodes in one file.
VERSION = "v3.0"
CHUNK_FILES = 1000
DATA_MEGABYTES, VIDEO_MEGABYTES = 100, 200
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
TASKS = "meta/tasks.parquet"
EPISODES = f"meta/episodes/{_FILE}.parquet"
DATA = f"data/{_FILE}.parquet"
VIDEO = f"videos/{{video_key}}/{_FILE}.mp4"

# Version 2.1: a file for each episode.
OLD_VERSION = "v2.1"
OLD_TASKS, OLD_EPISODES = "meta/tasks.jsonl", "meta/episodes.jsonl"
OLD_DATA = "data/chunk-{chunk:03d}/episode_{episode:06d}.parquet"
OLD_VIDEO = "videos/chunk-{chunk:03d}/{video_key}/episode_{episode:06d}.mp4"

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

# Larger frames are not decoded: whoever made the file may want to fill the memory.
MOST_PIXELS = 3840 * 2160
# Only what datasets come in, so that a stranger's file does not choose among all of FFmpeg's decoders.
CODECS = ("av1", "h264", "hevc", "libdav1d", "vp9")

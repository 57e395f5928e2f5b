"""Demonstrations on disk, and batches out of them."""

from jaxmodels.data.episodes import Episodes, EpisodeWriter
from jaxmodels.data.frames import resize_frames

__all__ = ["EpisodeWriter", "Episodes", "resize_frames"]

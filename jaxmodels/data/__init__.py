"""Demonstrations on disk, and batches out of them; pure NumPy."""

from jaxmodels.data.episodes import EpisodeWriter, Episodes

__all__ = ["EpisodeWriter", "Episodes"]

"""Datasets of the Hugging Face Hub: what describes one first, then the files of the episodes that are wanted."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmodels import hub
from jaxmodels.data import layout
from jaxmodels.data.info import read_info
from jaxmodels.data.places import choose, read_places

META = (
    layout.INFO,
    layout.STATS,
    layout.TASKS,
    "meta/episodes/chunk-*/file-*.parquet",
    layout.OLD_TASKS,
    layout.OLD_EPISODES,
)
ALL = ("data/chunk-*/*.parquet", "videos/*/*.mp4")


def fetch_dataset(
    repo_id: str,
    revision: str | None,
    episodes: Sequence[int] | None,
    on_progress: Callable[[str], None] | None,
) -> Path:
    """The folder of a dataset's files at one commit.

    Raises:
        HubError: the repo cannot be fetched.
        DatasetError: what it holds is no dataset.
    """
    folder = hub.fetch(repo_id, revision, files=META, kind="dataset", on_progress=on_progress)
    places = choose(folder, read_places(folder, read_info(folder)), episodes)
    files = {place.rows for place in places} | {file for place in places for file, _ in place.videos.values()}
    # Each name is compared with each pattern: of a whole dataset two are enough.
    wanted = sorted(files) if episodes is not None else ALL
    # The same commit, even when somebody pushes meanwhile: a snapshot's folder is called after it.
    commit = folder.name
    return hub.fetch(repo_id, commit, files=(*META, *wanted), kind="dataset", on_progress=on_progress)

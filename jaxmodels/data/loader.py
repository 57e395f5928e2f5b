"""Loader of training batches, each decided by seed and step and prepared by threads."""

import os
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmodels.cache_dirs import cache_folder
from jaxmodels.data.dataset import Dataset
from jaxmodels.data.frames import VARIABLE, cache_frames, resize_frames
from jaxmodels.errors import DatasetError
from jaxmodels.types import Feature


class Sampler:
    """Sampler that draws each of `rows` (ascending) once in every epoch, in a newly shuffled order."""

    def __init__(self, rows: np.ndarray, batch_size: int, seed: int):
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        # Threads prepare several steps at once, which may belong to different epochs.
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def at(self, step: int) -> np.ndarray:
        """Rows (b,) of a step, ascending, so that neighbours in a file are read together."""
        positions = np.arange(step * self._batch_size, (step + 1) * self._batch_size)
        epochs, within = np.divmod(positions, len(self._rows))
        return np.sort(np.concatenate([self._order(int(e))[within[epochs == e]] for e in np.unique(epochs)]))

    def _shuffle(self, epoch: int) -> np.ndarray:
        return self._rows[np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))]


class Batch(NamedTuple):
    """Training batch: observations that are not normalised, the actions that follow, and tasks.

    If the policy reads several observations, pictures and states have a time axis after the batch axis, oldest first;
    before the first row of an episode this row is repeated.

    Attributes:
        images: per camera of the policy, in its order and size, uint8 (b, h, w, 3).
        state: (b, s) float32, or None when the policy reads none.
        environment_state: (b, e) float32, or None.
        actions: (b, t, a) float32; steps beyond an episode's ends repeat its last (or first) action.
        is_pad: (b, t) bool, True for those repeated steps.
        tasks: (b,) int32, numbers of `Dataset.tasks`.

    Example:
        >>> pose = np.zeros((4, 6), np.float32)
        >>> chunk, is_pad = np.zeros((4, 20, 6), np.float32), np.zeros((4, 20), bool)
        >>> Batch((), pose, None, chunk, is_pad, np.zeros(4, np.int32)).actions.shape
        (4, 20, 6)
    """

    images: tuple[np.ndarray, ...]
    state: np.ndarray | None
    environment_state: np.ndarray | None
    actions: np.ndarray
    is_pad: np.ndarray
    tasks: np.ndarray


class Loader:
    """Batches of a dataset for a policy; each depends on the seed and the step only.

    Attributes:
        waited: seconds that the consumer of `batches` waited.
        is_cached: whether all frames are read decoded from the disk.

    Example:
        >>> import tempfile
        >>> from jaxmodels.data import DatasetWriter, open_dataset
        >>> from jaxmodels.training import new_policy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with DatasetWriter(f"{folder}/demos", fps=10, joint_names=["x"]) as writer:
        ...         for x in range(3):
        ...             pose = np.float32([x])
        ...             writer.add({"observation.state": pose, "action": pose + 1})
        ...         writer.end_episode("go right")
        ...     dataset = open_dataset(f"{folder}/demos")
        ...     config = new_policy(dataset, "diffusion2d", values={"chunk_size": 2, "n_action_steps": 2}).policy
        ...     Loader(dataset, config, batch_size=4, seed=0).at(0).actions.shape
        (4, 2, 1)
    """

    def __init__(
        self,
        dataset: Dataset,
        policy: Any,
        *,
        batch_size: int,
        seed: int,
        workers: int | None = None,
        cache: str | os.PathLike[str] | bool = True,
        shard: tuple[int, int] = (0, 1),
        on_progress: Callable[[int, int], None] | None = None,
    ):
        """Check that the dataset has the features of the policy, and decode its frames into the cache.

        Args:
            policy: the policy's config.
            batch_size: examples of all shards together.
            workers: number of threads; None for the number of processors, at most eight.
            cache: folder for decoded frames; True is `ROBOJAX_FRAME_CACHE`, False decodes frames for each batch.
            shard: index of this process's part of each batch, from 0, and number of parts.
            on_progress: receives the number of decoded frames of a camera, and of all its frames.

        Raises:
            DatasetError: features are missing or have another width, the parts are not equal, or frames cannot be read.
        """
        index, count = shard
        if batch_size < 1 or count < 1 or batch_size % count or not 0 <= index < count:
            raise DatasetError(
                f"a batch of {batch_size} for part {index} of {count}: wanted parts of equal size, counted from 0"
            )
        _check(dataset, policy)
        self.dataset, self.policy, self.waited = dataset, policy, 0.0
        self._part = slice(index * batch_size // count, (index + 1) * batch_size // count)
        self._sampler = Sampler(dataset.rows_without_ends(policy.drop_n_last_frames), batch_size, seed)
        self._looks = range(1 - policy.observation_steps, 1)
        self._workers = workers or min(os.cpu_count() or 1, 8)
        self._ahead = self._workers + 2  # Batches that are prepared in advance.
        # ``ROBOJAX_FRAME_CACHE``, or ``robojax/frames`` in the user's cache; None for ``off``.
        users = cache_folder("frames", os.environ.get(VARIABLE))
        folder = users if cache is True else Path(cache) if cache else None
        self._sizes = {camera.name: (camera.shape[1], camera.shape[2]) for camera in policy.cameras}
        self._cached = {
            name: None
            if folder is None
            else cache_frames(folder, dataset, name, size, workers=self._workers, on_progress=on_progress)
            for name, size in self._sizes.items()
        }
        self.is_cached = all(frames is not None for frames in self._cached.values())

    def at(self, step: int) -> Batch:
        """Return the batch of one training step."""
        rows = self._sampler.at(step)[self._part]
        dataset, policy = self.dataset, self.policy
        actions, is_pad = dataset.window(policy.action.name, rows, policy.action_delta_indices)
        seen = rows if len(self._looks) == 1 else dataset.window_rows(rows, self._looks)[0]

        def vector(feature: Feature | None) -> np.ndarray | None:
            return None if feature is None else dataset.vectors(feature.name)[seen]

        return Batch(
            images=tuple(self._frames(name, seen) for name in self._sizes),
            state=vector(policy.state),
            environment_state=vector(policy.environment_state),
            actions=actions,
            is_pad=is_pad,
            tasks=dataset.task_index[rows],
        )

    def batches(self, first: int, last: int) -> Generator[Batch, None, None]:
        """Yield the batches of steps ``first`` to ``last - 1``; raises DatasetError if frames cannot be read."""
        pool = ThreadPoolExecutor(self._workers, "batch")
        waiting: deque[Future[Batch]] = deque()
        try:
            for step in range(first, last):
                while len(waiting) < self._ahead and step + len(waiting) < last:
                    waiting.append(pool.submit(self.at, step + len(waiting)))
                started = time.monotonic()
                batch = waiting.popleft().result()
                self.waited += time.monotonic() - started
                # Begin the next batch before the caller uses this batch.
                if step + 1 + len(waiting) < last:
                    waiting.append(pool.submit(self.at, step + 1 + len(waiting)))
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _frames(self, name: str, rows: np.ndarray) -> np.ndarray:
        cached = self._cached[name]
        if cached is not None:
            return np.asarray(cached[rows])
        distinct, places = np.unique(rows, return_inverse=True)  # Each frame of overlapping windows is decoded once.
        return resize_frames(self.dataset.frames(name, distinct), self._sizes[name])[places.reshape(rows.shape)]


def _check(dataset: Dataset, policy: Any) -> None:
    wrong = []
    for feature in (*policy.cameras, policy.state, policy.environment_state, policy.action):
        if feature is None:
            continue
        try:
            available = dataset.feature(feature.name)
        except DatasetError as error:
            wrong.append(str(error))
            continue
        if available.type != feature.type or (feature.type != "VISUAL" and available.shape != feature.shape):
            wrong.append(
                f"{feature.name} is {available.type} {list(available.shape)}; the policy has {feature.type} "
                f"{list(feature.shape)}"
            )
        elif feature.type != "VISUAL":
            dataset.vectors(feature.name)  # Read once, before several threads need it.
    if wrong:
        raise DatasetError(f"{dataset.folder.name} does not fit the policy: " + "; ".join(wrong))

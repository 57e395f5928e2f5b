"""Training loop: writes checkpoints, metrics and a policy, and resumes interrupted runs."""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.data import Dataset, Loader
from jaxmodels.devices import Layout, find_layout
from jaxmodels.errors import TrainingError
from jaxmodels.normalization import Normalization
from jaxmodels.training.config import TrainingConfig
from jaxmodels.training.initial_policy import Start
from jaxmodels.training.progress import Reports, Throughput, TrainingProgress, draw_curve
from jaxmodels.training.run_folder import (
    METRICS,
    POLICY_FOLDER,
    Snapshots,
    claim_folder,
    cut_metrics,
    derive_normalization,
    explain_write_errors,
    write_policy,
)
from jaxmodels.training.run_folder import POLICY as SNAPSHOT
from jaxmodels.training.train_state import (
    COUNT,
    PlacedTraining,
    State,
    describe_training,
    gather_weights,
    put_on_devices,
    resolve_config,
)

CHECKPOINTS, CURVE = "checkpoints", "loss.png"


def train(
    dataset: Dataset,
    start: Start,
    config: TrainingConfig,
    output: str | os.PathLike[str],
    *,
    resume: bool = False,
    device: str | None = None,
    on_progress: Callable[[TrainingProgress], None] | None = None,
    on_decoding: Callable[[int, int], None] | None = None,
) -> Path:
    """Train a policy and write it to ``output/policy`` in LeRobot's layout.

    ``output`` also gets ``training.json`` (the set-up), ``metrics.jsonl``, ``checkpoints/<step>`` (state, policy),
    and ``loss.png``. A resumed run gets the same weights, because batches and noise depend only on seed and step.
    Each of several processes (`jax.distributed.initialize`) calls this with the same `output`.

    Args:
        resume: resume the run in `output` from its newest checkpoint, if there is one.
        device: a kind (``cpu``, ``gpu``, ``tpu``) or a device (``cuda:1``); JAX's first choice when None.
        on_progress: called every `log_freq` steps.
        on_decoding: called with the number of decoded frames of a camera, and of all its frames.

    Returns:
        The policy's folder.

    Raises:
        TrainingError: the loss is NaN or infinite, or `output` holds another run.
        ConfigError: the devices do not divide the batch.
        DatasetError: the dataset does not fit the policy, or frames cannot be read.
        CheckpointError: weights to start from do not fit the policy.
        OSError: a file cannot be written, e.g. because the disk is full; a later run can resume.

    Example:
        >>> from jaxmodels.data import open_dataset
        >>> from jaxmodels.training import new_policy
        >>> config = TrainingConfig(steps=10_000, batch_size=32)
        >>> dataset = open_dataset("datasets/demos")  # doctest: +SKIP
        >>> train(dataset, new_policy(dataset, "act", preset="small"), config, "runs/demos")  # doctest: +SKIP
        PosixPath('runs/demos/policy')
    """
    output = Path(output)
    with explain_write_errors(output):
        use_compile_cache()
        config = resolve_config(config, start.policy)
        layout = find_layout(device, config.data, config.fsdp, config.batch_size, config.gradient_accumulation_steps)
        is_first = jax.process_index() == 0
        if is_first:
            claim_folder(output, describe_training(dataset, start.policy, config), resume=resume)
        loader = _loader(dataset, start.policy, config, on_decoding)
        normalization = derive_normalization(dataset, start, use_imagenet_stats=config.use_imagenet_stats)
        example = layout.put_batch(loader.at(0))
        training = put_on_devices(dataset, start, normalization, config, layout, example)
        run = _Run(dataset, start, config, output, layout, normalization, training)
        with Snapshots(output / CHECKPOINTS, keep=config.keep_checkpoints) as snapshots:
            newest = snapshots.newest
            state = training.state if newest is None else snapshots.restore(newest, training.state)
            first = 0 if newest is None else newest
            if newest is not None:
                # A killed run may lack the policy of its checkpoint; every process must gather the weights.
                run.write(snapshots.folder(newest) / SNAPSHOT, state)
            before = cut_metrics(output, first) if is_first else 0.0
            with Reports(output, first=first, tensorboard=config.tensorboard, is_writing=is_first) as reports:
                state = run.run_steps(state, first, before, loader, snapshots, reports, on_progress)
            if newest != config.steps:
                run.save(snapshots, state)
        run.write(output / POLICY_FOLDER, state)
        if is_first:
            draw_curve(output / METRICS, output / CURVE)
        return output / POLICY_FOLDER


@dataclass(frozen=True)
class _Run:
    """A running training: everything that does not change between steps."""

    dataset: Dataset
    start: Start
    config: TrainingConfig
    output: Path
    layout: Layout
    normalization: Normalization
    training: PlacedTraining

    def run_steps(
        self,
        state: State,
        first: int,
        before: float,
        loader: Loader,
        snapshots: Snapshots,
        reports: Reports,
        on_progress: Callable[[TrainingProgress], None] | None,
    ) -> State:
        """Run all steps from the first, after `before` seconds of earlier runs; returns the last state."""
        config = self.config
        watch = Throughput(config.steps, config.batch_size, first, before)
        running: jax.Array | None = None
        with closing(loader.batches(first, config.steps)) as batches:
            for number in range(first, config.steps):
                with watch.waiting(running):
                    batch = next(batches)
                state, loss = self.training.step(state, self.training.fixed, self.layout.put_batch(batch))
                if running is not None:
                    running.block_until_ready()  # At most two steps ahead, because batches take memory.
                running, done = loss, number + 1
                if done % config.log_freq == 0 or done == config.steps:
                    values = self._measure(state, done)
                    progress = watch.progress(done, values.pop("loss"), float(self._rate(number)))
                    reports.write(progress, values)
                    if on_progress is not None:
                        on_progress(progress)
                if done % config.save_freq == 0 and done < config.steps:
                    self._measure(state, done)  # A state with NaN is not saved.
                    self.save(snapshots, state)
        return state

    def save(self, snapshots: Snapshots, state: State) -> None:
        """Save a checkpoint of this state, which is mostly written during the next steps."""
        step = int(state.step)
        snapshots.save(step, state)
        self.write(snapshots.folder(step) / SNAPSHOT, state)

    def write(self, folder: Path, state: State) -> None:
        """Write the policy of this state."""
        weights = gather_weights(state, self.training.fixed, self.layout)
        if jax.process_index() == 0:
            write_policy(folder, weights, self.start, self.normalization, self.dataset)

    def _rate(self, step: int) -> Any:
        optimizer, scheduler = self.config.optimizer, self.config.scheduler
        assert optimizer is not None
        assert scheduler is not None
        return optimizer.lr * scheduler.factor(step, self.config.steps)

    def _measure(self, state: State, done: int) -> dict[str, float]:
        """Return means over the steps since the last line of metrics."""
        sums: Mapping[str, Any] = jax.device_get(state.sums)
        values = {name: float(value / sums[COUNT]) for name, value in sums.items() if name != COUNT}
        if not math.isfinite(values["loss"]):
            raise TrainingError(
                f"the loss is {values['loss']} within the {int(sums[COUNT])} steps before step {done}"
                f"{self._last_line()}. Try a lower learning rate (--policy.optimizer_lr), a longer warm-up "
                "(--scheduler.num_warmup_steps) or float32; earlier checkpoints are complete"
            )
        return values

    def _last_line(self) -> str:
        path = self.output / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            return ""
        last = json.loads(lines[-1])
        return f"; at step {last['step']} it was {last['loss']:.4g}, the gradient's norm {last['gradient_norm']:.4g}"


def _loader(
    dataset: Dataset, policy: Any, config: TrainingConfig, on_decoding: Callable[[int, int], None] | None
) -> Loader:
    index, count = jax.process_index(), jax.process_count()

    def make() -> Loader:
        return Loader(
            dataset,
            policy,
            batch_size=config.batch_size,
            seed=config.seed,
            workers=config.num_workers or None,
            shard=(index, count),
            on_progress=on_decoding,
        )

    if count == 1:
        return make()
    # The first process decodes the frames that all processes then read.
    loader = make() if index == 0 else None
    multihost_utils.sync_global_devices("frames")
    return loader or make()

"""Does a new chunk continue the robot's motion, or does it change direction at the seam?

    python -m benchmarks.real_time_chunking                # 512 episodes for each of 8 delays and 4 ways, 10 s

The robot may pass an obstacle on either side (the bifurcation of https://arxiv.org/abs/2506.07339): a demonstration is
one number per step, ``side * bump(step)``, with a random side for each demonstration and a little noise. The optimal
flow policy for this has a closed form, so nothing is trained. It sees the current step and gives chunks of 16 actions,
of which 8 are executed; its answer arrives 0 to 7 actions late. Four ways to compute the next chunk:

- ``unguided``: the new chunk does not depend on the plan (replace);
- ``rtc``: `jaxmodels.samplers.continuing`;
- ``rtc, not through the model``: the same without the model's gradient, as in lerobot 0.4.4;
- ``trained prefix``: `jaxmodels.samplers.given`, with timesteps of each action's own.

Figures: the jump at the seam, and the share of new chunks that change sides.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from benchmarks.measured import RESULTS, result, write
from jaxmodels.samplers import FlowSchedule, begin_with, continuing, flow_euler, given
from jaxmodels.types import Prefix

CHUNK, EXECUTED, STEPS = 16, 8, 5
EPISODE, MIDDLE, WIDTH = 64, 32, 9.0
SPREAD = 0.03
VISIBLE = 0.3
SCHEDULE = FlowSchedule(spacing="uniform")
WAYS = ("unguided", "rtc", "rtc, not through the model", "trained prefix")


def bump(step: Any) -> Any:
    """How far to the side a demonstration is at a step."""
    return np.exp(-np.square((np.asarray(step, np.float32) - MIDDLE) / np.float32(WIDTH)))


def velocity(ways: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
    """The exact flow (noise - sample) of a mixture of Gaussians, for a timestep or one for each action.

    Args:
        ways: (m, t, a), what chunks are around.
    """
    sigma = jnp.broadcast_to(t / SCHEDULE.num_train_timesteps, x.shape[:2])[:, None, :, None]
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    away = x[:, None] - (1 - sigma) * ways[None]
    share = jax.nn.softmax(-0.5 * (away**2 / variance).sum((2, 3)), axis=1)[:, :, None, None]
    sample = (share * (ways[None] + (1 - sigma) * SPREAD**2 / variance * away)).sum(1)
    return (x - sample) / jnp.maximum(sigma[:, 0], 1e-6)


@partial(jax.jit, static_argnames="way")
def answer(way: str, ways: jax.Array, prefix: Prefix, key: jax.Array) -> jax.Array:
    """Chunks (b, t, a), one for each row of the batch."""
    predict = Partial(velocity, ways)
    if way == "trained prefix":
        predict = given(predict, prefix, SCHEDULE)
    elif way != "unguided":
        predict = continuing(predict, prefix, SCHEDULE, through_model=way == "rtc")
    chunk = flow_euler(predict, prefix.actions.shape, key, SCHEDULE, steps=STEPS)
    return chunk if way == "unguided" else begin_with(prefix, chunk)


class Seams(NamedTuple):
    """What came of the seams between chunks.

    Attributes:
        jump: mean distance of the first action of a new chunk from where the plan would have gone.
        changes: share of new chunks that pass on the other side than the plan, of those whose plan had taken a side.
    """

    jump: float
    changes: float


def seams(way: str, delay: int, count: int, seed: int = 0) -> Seams:
    """Drives `count` robots past the obstacle, with each answer `delay` actions late."""
    overlap = CHUNK - EXECUTED
    key = jax.random.key(seed)
    plan, jumps, changes = None, [], []
    for step in range(0, EPISODE - CHUNK + 1, EXECUTED):
        height = bump(np.arange(step, step + CHUNK))[None, :, None]
        left = np.zeros((count, CHUNK, 1), np.float32)
        if plan is not None:
            left[:, :overlap] = plan[:, EXECUTED:]
        prefix = Prefix(left, np.full(count, delay, np.int32), np.full(count, 0 if plan is None else overlap, np.int32))
        key, own = jax.random.split(key)
        chunk = np.asarray(answer(way, np.concatenate((-height, height)), prefix, own))
        if plan is not None:
            jumps.append(np.abs(chunk[:, delay] - left[:, delay]))
            if min(height[0, :overlap].max(), height[0, overlap:].max()) > VISIBLE:
                before, after = left[:, :overlap] * height[:, :overlap], chunk[:, overlap:] * height[:, overlap:]
                changes.append(np.sign(before.sum((1, 2))) != np.sign(after.sum((1, 2))))
            # The plan continues until the new chunk arrives.
            chunk = np.concatenate((left[:, :delay], chunk[:, delay:]), axis=1)
        plan = chunk
    return Seams(float(np.mean(jumps)), float(np.mean(changes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS / "real_time_chunking.json")
    arguments = parser.parse_args()
    began = time.perf_counter()
    delays = range(EXECUTED)
    table = {way: {delay: seams(way, delay, arguments.episodes)._asdict() for delay in delays} for way in WAYS}
    print(f"{'':28}" + "".join(f"{f'delay {delay}':>16}" for delay in delays))
    for way, rows in table.items():
        cells = (f"{row['jump']:.3f} {100 * row['changes']:5.1f} %" for row in rows.values())
        print(f"{way:28}" + "".join(f"{cell:>16}" for cell in cells))
    question = (__doc__ or "").splitlines()[0]
    found = {
        "chunk": CHUNK,
        "executed": EXECUTED,
        "steps": STEPS,
        "episodes": arguments.episodes,
        "seconds": round(time.perf_counter() - began, 1),
        "ways": table,
    }
    write(arguments.output, result(question, "python -m benchmarks.real_time_chunking", {}, **found))


if __name__ == "__main__":
    main()

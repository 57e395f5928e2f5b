"""Would Ray Serve be the better pool of engines: what does a call through it cost, and how soon does it grow?

    pip install 'ray[serve]==2.60.0'          # or whatever Ray is there: Serve is needed for this benchmark only
    python benchmarks/ray_serve.py

Calls: one asker, one call after the other, to an actor and through a handle of Serve's to a replica that does the same,
on one Ray, by turns in short rounds; with nothing, with a picture of 96x96 and with one of 480x640. Growing: 24 askers
keep one engine with the shipped policy busy, and what counts is when the second one gave its first answer; our pool and
Serve, by turns, each on a Ray of its own, with the same patience (3 s) and the same places. Serve's own settings are
more patient: 30 s.

Last result: benchmarks/results/ray_serve.json
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import pictures
from benchmarks.measured import RESULTS, percentiles, quietness, result, write
from benchmarks.processes import child

ACTOR, SERVE = "an actor", "through Serve"
POOL, AUTOSCALER = "our pool", "Serve's autoscaler"
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}


def calls(rounds: int, count: int) -> dict[str, Any]:
    """Milliseconds of a call on either way, by what it carries, and Serve's share of the actor's."""
    with child("-m", "benchmarks.ray_serve_calls", str(rounds), str(count), env=SETTINGS) as one:
        found: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = one.told("called")["found"]
    return {payload: compared(sides) for payload, sides in found.items()}


def compared(sides: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Of seconds in rounds: all of them together, and the median of the rounds' ratios."""
    told: dict[str, Any] = {
        side: percentiles([seconds for one in rounds for seconds in one]) for side, rounds in sides.items()
    }
    told["ratios"] = {}
    for name in ("p50", "p99"):
        each = [
            percentiles(through)[name] / percentiles(plain)[name]
            for plain, through in zip(sides[ACTOR], sides[SERVE], strict=True)
        ]
        told["ratios"][name] = round(statistics.median(each), 2)
    return told


def growing(rounds: int) -> dict[str, Any]:
    """Seconds until the second one answers, of both, by turns."""
    found: dict[str, list[dict[str, Any]]] = {POOL: [], AUTOSCALER: []}
    for _ in range(rounds):
        for side, word in ((POOL, "pool"), (AUTOSCALER, "serve")):
            with child("-m", "benchmarks.ray_serve_growing", word, env=SETTINGS) as one:
                found[side].append(one.told("grown")["found"])
            print(f"{side}: {found[side][-1]}", flush=True)
    return {
        side: {
            "second_answers_after_s": {
                "median": round(statistics.median(one["second_answers_after_s"] for one in runs), 2),
                "longest": round(max(one["second_answers_after_s"] for one in runs), 2),
            },
            "runs": runs,
        }
        for side, runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="of calls")
    parser.add_argument("--count", type=int, default=100, help="calls of each way, payload and round")
    parser.add_argument("--grow-rounds", type=int, default=3, help="of growing; 0 leaves it out")
    parser.add_argument("--output", "--out", type=Path, default=RESULTS / "ray_serve.json")
    options = parser.parse_args()
    if find_spec("ray") is None:
        parser.error("Ray is not installed: pip install -e '.[ray]'")
    if missing := [name for name in ("fastapi", "starlette", "uvicorn") if find_spec(name) is None]:
        parser.error(f"Ray Serve cannot run without {', '.join(missing)}: pip install 'ray[serve]=={version('ray')}'")
    quiet = quietness()
    figures: dict[str, Any] = {"calls": calls(options.rounds, options.count)}
    for payload, told in figures["calls"].items():
        print(f"{payload}: {told}", flush=True)
    if options.grow_rounds:
        figures["growing"] = growing(options.grow_rounds)
    question = (__doc__ or "").splitlines()[0]
    write(options.output, result(question, "python benchmarks/ray_serve.py", quiet, "ray", **figures))
    rows = {f"{what}, {side}": told[side]["p50"] for what, told in figures["calls"].items() for side in (ACTOR, SERVE)}
    ours = [name for name in rows if name.endswith(ACTOR)]
    pictures.bars(options.output.with_suffix(".png"), "One call, median", rows, "ms", ours)


if __name__ == "__main__":
    main()

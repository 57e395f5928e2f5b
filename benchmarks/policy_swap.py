"""Does a policy that is loaded, judged and swapped in cost the running robots ticks?

    python -m benchmarks.policy_swap                         # the shipped policy, 4 sessions at 50 Hz

Two kinds of rounds take turns in one process: in ``steady`` rounds, real sessions run; in ``swapping`` rounds, the same
sessions get another policy, one after the other. It is loaded, compiled, tried on recent observations, compared, and
swapped in at a chunk boundary. The weights of the two policies differ by 0.01 %.

Target: no missed tick, no empty queue and no late action because of it, and a p99 of tick lateness of at most 1.5 times
that of steady rounds, or 5 ms. Last figure, AMD EPYC, 2 cores: p99 1.5 ms, steady 1.5 ms; 28 swaps, no tick missed.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from safetensors.numpy import load_file, save_file

from benchmarks.control_jitter import SocketTransport, open_engines, robot, sink
from benchmarks.measured import RESULTS, SHIPPED, machine, percentiles, write
from service.control.config import SafetySettings
from service.rollout.gates import ProbationSettings
from service.rollout.rollout import Rollout, RolloutSettings
from service.sessions.store import NewSession, Sessions, SessionSettings
from service.stats import Recent

# Of one session and round; a larger ring would take longer to make than a tick.
SAMPLES = 10_000
COSTS = ("missed_ticks", "starvations", "late_actions_because")


def twin(policy: Path, folder: Path) -> None:
    """Another policy that does nearly the same."""
    shutil.copytree(policy, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: (array * 1.0001).astype(np.float32) for name, array in weights.items()}, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")


def fresh_lateness(sessions: Sessions) -> list[Recent]:
    recents = []
    for session in sessions.list():
        assert session.robot_io is not None
        session.robot_io.controller.lateness = Recent(SAMPLES)
        recents.append(session.robot_io.controller.lateness)
    return recents


def totals(sessions: Sessions) -> dict[str, int]:
    controls = [session.robot_io.controller for session in sessions.list() if session.robot_io is not None]
    return {
        "missed_ticks": sum(control.missed_ticks for control in controls),
        "starvations": sum(control.starvations for control in controls),
        "holds": sum(control.holds.total for control in controls),
    }


async def swap_all(sessions: Sessions, rollout: Rollout, folder: Path, sha: str) -> list[dict[str, Any]]:
    done = []
    for session in sessions.list():
        began = time.monotonic()
        verdict = await rollout.prepare(session.id, session.new.policy_path, sha, folder, lambda stage: None)
        prepared = time.monotonic() - began
        assert verdict.reason is None, verdict
        verdict = await rollout.swap(session.id, sha)
        assert verdict.reason is None, verdict
        done.append({"prepare_s": prepared, "swap_s": time.monotonic() - began - prepared, **verdict.figures})
        verdict = await rollout.probation(session.id, sha)
        assert verdict.reason is None, verdict
    return done


async def main(options: argparse.Namespace) -> dict[str, Any]:
    server = await asyncio.start_server(sink, "127.0.0.1", 0)
    transport = SocketTransport(server.sockets[0].getsockname()[1])
    engines = AsyncExitStack()
    engine, load = await engines.enter_async_context(open_engines())
    sessions = Sessions(
        transport=transport,
        load=load,
        engine=engine,
        # The robots show and report the same all the time.
        settings=SessionSettings(samples=SAMPLES, safety=SafetySettings(frozen="warn")),
    )
    rollout = Rollout(sessions, RolloutSettings(probation=ProbationSettings(seconds=0.5)))
    tasks = []
    for number in range(options.sessions):
        session = await sessions.create(NewSession(f"s{number}", str(options.policy), "loopback", rate=options.rate))
        assert session.robot_io is not None
        sizes = dict(session.robot_io.runner.loaded.requirements.cameras)
        names = session.robot_io.buffer.joints.names
        tasks.append(asyncio.create_task(robot(transport.links[-1], names, sizes, number * 0.04 / options.sessions)))
        await sessions.start(session.id)
    await asyncio.sleep(3)  # not counted: first use of everything

    lateness: dict[str, list[np.ndarray]] = {"steady": [], "swapping": []}
    counted: dict[str, dict[str, int]] = {kind: dict.fromkeys(totals(sessions), 0) for kind in lateness}
    swaps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch) / "other"
        twin(options.policy, other)
        turns = cycle([(other, "b" * 40), (options.policy, "a" * 40)])
        for _ in range(options.rounds):
            for kind in lateness:
                recents, before, began = fresh_lateness(sessions), totals(sessions), time.monotonic()
                if kind == "swapping":
                    swaps += await swap_all(sessions, rollout, *next(turns))
                await asyncio.sleep(max(options.seconds - (time.monotonic() - began), 0))
                lateness[kind].append(np.concatenate([recent.samples for recent in recents]))
                for name, count in totals(sessions).items():
                    counted[kind][name] += count - before[name]
                print(kind, percentiles(lateness[kind][-1]), flush=True)
    for task in tasks:
        task.cancel()
    await sessions.close()
    await engines.aclose()
    server.close()
    typical = {
        kind: {
            name: round(float(np.median([percentiles(one)[name] for one in rounds])), 3)
            for name in ("p50", "p99", "max")
        }
        for kind, rounds in lateness.items()
    }
    costs = {name: sum(swap.get(name, 0) for swap in swaps) for name in COSTS}
    missed = counted["swapping"]["missed_ticks"] - counted["steady"]["missed_ticks"]
    is_late = missed > 0 or typical["swapping"]["p99"] > max(1.5 * typical["steady"]["p99"], 5.0)
    return {
        "question": "lateness of control ticks in ms while policies are swapped, and while nothing is",
        "sessions": options.sessions,
        "rate_hz": options.rate,
        "rounds": options.rounds,
        "machine": machine(),
        "swaps": len(swaps),
        "cost_of_all_swaps": costs,
        "prepare_s": round(float(np.median([swap["prepare_s"] for swap in swaps])), 3),
        "waited_for_the_boundary_s": round(float(np.median([swap["waited_s"] for swap in swaps])), 3),
        "lateness_ms_of_the_median_round": typical,
        "counted": counted,
        "p99_over_steady": round(typical["swapping"]["p99"] / typical["steady"]["p99"], 2),
        "is_met": not any(costs.values()) and not is_late,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=SHIPPED)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one round, at least")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS / "policy_swap.json")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(main(options))
    write(options.output, result)
    print(json.dumps(result))

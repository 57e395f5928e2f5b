"""Does the server keep its times under load? The table L1 to L9, each row beside bare loops that send the same.

    python benchmarks/load.py                              # everything, about seven minutes
    python benchmarks/load.py --only L1,L8 --seconds 20
    python benchmarks/load.py --only L6 --soak 30          # minutes

Real processes: the server (``robojax serve`` with its policy replaced by one that needs no computing where a row says
so, ``load_server.py``), a rooms server (``robojax transport``), and the robots (``load_robots.py``). Bare loops are a
process with the same links to the same rooms, whose loops know a deadline and a message and nothing else. Both take
turns.

A row passes when its figures are within the target, or, where it is about lateness, when the target is missed by the
bare loops too and the server's p99 is at most 1.5 times theirs: then the machine was busy, and ``is_quiet`` says so.

L5, 1,000 sessions made and deleted, is ``benchmarks/session_cycles.py``.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.load_cameras import l2_l4_l6, l3
from benchmarks.load_scene import Row, row
from benchmarks.load_start import l7
from benchmarks.load_ticks import l1_l8_l9
from benchmarks.measured import RESULTS, machine, write


def l5(options: argparse.Namespace) -> list[Row]:
    """1,000 sessions made and deleted: another program."""
    file = RESULTS / "session_cycles.json"
    target = "1,000 cycles: 0 errors, RSS +5 % after the 100th, descriptors, threads, tasks, rooms back"
    if not file.is_file():
        return [row("L5", target, {"see": "python benchmarks/session_cycles.py"}, False)]
    found = json.loads(file.read_text())
    return [row("L5", target, {"see": "benchmarks/results/session_cycles.json"}, bool(found.get("is_met", True)))]


GROUPS: Sequence[tuple[frozenset[str], Callable[[argparse.Namespace], list[Row]]]] = (
    (frozenset({"L7"}), l7),
    (frozenset({"L1", "L8", "L9"}), l1_l8_l9),
    (frozenset({"L2", "L4", "L6"}), l2_l4_l6),
    (frozenset({"L3"}), l3),
    (frozenset({"L5"}), l5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="L1,L2,L3,L4,L5,L7,L8,L9", help="rows, with commas between")
    parser.add_argument("--seconds", type=float, default=60.0, help="of L1; the others take a third of it")
    parser.add_argument("--sessions", type=int, default=32, help="of L1")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of L6")
    parser.add_argument("--output", type=Path, default=RESULTS / "load.json")
    options = parser.parse_args()
    options.only = {name.strip().upper() for name in options.only.split(",")} | ({"L6"} if options.soak else set())
    began = time.monotonic()
    rows: list[Row] = []
    for names, measure in GROUPS:
        if names & options.only:
            rows += measure(options)
    known = {}
    if options.output.exists():
        known = {one["row"]: one for one in json.loads(options.output.read_text())["rows"]}
    known |= {one["row"]: one | {"machine": machine(), "seconds": options.seconds} for one in rows}
    found = {
        "question": "are the times of the server kept under load?",
        "command": "python benchmarks/load.py",
        "took_s": round(time.monotonic() - began),
        "rows": [known[name] for name in sorted(known)],
    }
    write(options.output, found)
    print(f"{sum(one['passes'] for one in rows)} of {len(rows)} rows pass, in {found['took_s']} s")


if __name__ == "__main__":
    main()

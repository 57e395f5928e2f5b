"""One sentence per benchmark that states its result, made from the results."""

from collections.abc import Mapping
from typing import Any


def glass(found: Mapping[str, Any]) -> str:
    ways = {name: one["light_to_motion_ms"] for name, one in found["cases"].items()}
    return "; ".join(f"{name}: {way['p50']:.0f} ms (p99 {way['p99']:.0f})" for name, way in ways.items())


def jitter(found: Mapping[str, Any]) -> str:
    typical = found["lateness_ms_of_the_median_round"]
    own, bare = typical["sessions"]["p99"], typical["bare"]["p99"]
    return f"{found['sessions']} sessions at {found['rate_hz']:g} Hz: p99 {own:.1f} ms; bare loops {bare:.1f} ms"


def robots(found: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{rate}: " + ", ".join(f"{count} {way}" for way, count in ways.items())
        for rate, ways in found["most_robots"].items()
    )


def fleets(found: Mapping[str, Any]) -> str:
    rows = found["plans"]["by deadline"]["fleets"]
    return "machines like this one: " + ", ".join(f"{row['machines']} for {row['robots']:,} robots" for row in rows)


def ray_latency(found: Mapping[str, Any]) -> str:
    added = {size: sides["added_ms"]["p50"] for size, sides in found["sizes"].items()}
    return "added to a chunk, median: " + ", ".join(f"{ms:.1f} ms at {size}" for size, ms in added.items())


def ray_serve(found: Mapping[str, Any]) -> str:
    told = found["calls"]["nothing"]
    plain, through = told["an actor"]["p50"], told["through Serve"]["p50"]
    grown = {side: one["second_answers_after_s"]["median"] for side, one in found.get("growing", {}).items()}
    soon = "; a second engine answers after " + ", ".join(f"{s:.1f} s ({side})" for side, s in grown.items())
    return f"a call: {plain:.1f} ms to an actor, {through:.1f} ms through Serve" + (soon if grown else "")


def ray_cluster(found: Mapping[str, Any]) -> str:
    broken = found["failures"]
    node, listed = broken["a node is killed"], broken["listed"]
    return (
        f"a machine: {node['robots_held']} of {node['robots']} held, the longest pause "
        f"{node['longest_pause_s'] * 1e3:.0f} ms; a front: {len(listed['interrupted'])} sessions interrupted, "
        f"{len(listed['lost'])} lost, adopted in {broken['adopted_in_s']:g} s"
    )


def isolation(found: Mapping[str, Any]) -> str:
    beside = {case: one.get("p99_ratio_to_seven_alone") for case, one in found["cases"].items()}
    said = [f"{ratio:.2f} when it {case}" for case, ratio in beside.items() if ratio is not None]
    return "p99 of the seven others, as a multiple of them alone: " + ", ".join(said)


def seams(found: Mapping[str, Any]) -> str:
    delay = "4"
    said = [f"{way} {one[delay]['changes']:.0%}" for way, one in found["ways"].items()]
    return f"chunks that change their mind, {delay} actions late: " + ", ".join(said)


def peers(found: Mapping[str, Any]) -> str:
    sides = [(case, side, one) for case, rows in found["cases_ms"].items() for side, one in rows.items()]
    said = [f"{case}: {side} takes {one['ratio']:.1f} times ours" for case, side, one in sides if side != "robojax"]
    return "; ".join(said or [f"{case}: {one['p50']:.1f} ms, no peer to compare with" for case, _, one in sides])


def start(found: Mapping[str, Any]) -> str:
    rows = found["since_process_start"].items()
    return "; ".join(f"{name}: {row['first_action_s']:.1f} s to the first action" for name, row in rows)


def act(found: Mapping[str, Any]) -> str:
    name, sides = next(iter(found["cases"].items()))
    return f"{name}: " + ", ".join(f"{side} {one['p50_ms']:.0f} ms" for side, one in sides.items())


def vla(found: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{case}: " + ", ".join(f"{side} {one['p50_ms'] / 1e3:.1f} s" for side, one in sides.items())
        for case, sides in found["cases"].items()
    )


def gpu(found: Mapping[str, Any]) -> str:
    return f"{found['machine']['accelerator']}: " + "; ".join(
        f"{case} {one['alone']['p50_ms']:.1f} ms, four together {one['4 together']['chunks_per_s']:.0f} chunks a second"
        for case, one in found["cases"].items()
        if "4 together" in one
    )


def load(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    return f"{sum(bool(row['passes']) for row in rows)} of {len(rows)} rows hold: " + ", ".join(
        row["row"] for row in rows
    )


def swap(found: Mapping[str, Any]) -> str:
    typical, counted = found["lateness_ms_of_the_median_round"], found["counted"]["swapping"]
    late = f"p99 {typical['swapping']['p99']:.1f} ms, steady {typical['steady']['p99']:.1f} ms"
    return f"{found['swaps']} swaps, {counted['missed_ticks']} ticks missed; {late}"


def webhooks(found: Mapping[str, Any]) -> str:
    waits = {side: one["while_3_slow_handlers_run"]["unrelated"]["p99"] for side, one in found["waits_ms"].items()}
    return "p99: " + ", ".join(f"{side} {wait:.1f} ms" for side, wait in waits.items())


def transformer(found: Mapping[str, Any]) -> str:
    cases = next(iter(found.values()))["cases"]
    name = next(one for one in cases if "DiT" in one)
    return f"{name}: " + ", ".join(f"{side} {one['p50_ms']:.0f} ms" for side, one in cases[name].items())


def compile(found: Mapping[str, Any]) -> str:
    return "; ".join(f"{way}: {found[way]['ratio']:.1f} times" for way in ("ahead", "on first call"))


def kills(found: Mapping[str, Any]) -> str:
    faults = ("lost", "ghosts", "moved_by_themselves", "latches_wrong")
    counts = ", ".join(f"{found[name]} {name.replace('_', ' ')}" for name in faults)
    return f"{found['kills']} kills: {counts}"


def cycles(found: Mapping[str, Any]) -> str:
    return f"{found['cycles']} cycles: memory {found['memory_growth']:+.1%}, {found['sessions_growth']:g} sessions left"


def hostile(found: Mapping[str, Any]) -> str:
    beside = found["session_beside"]["during_requests"]
    missed = beside["missed_ticks"]
    return f"{found['requests']} requests, {len(found['wrong'])} wrong answers, {missed} ticks missed beside"


def floods(found: Mapping[str, Any]) -> str:
    kinds = found["kinds"].values()
    late, slowest = sum(one["late_by_more_than_a_period"] for one in kinds), max(one["stop_ms"]["max"] for one in kinds)
    return f"{late} of {sum(one['commands'] for one in kinds)} commands late, slowest stop {slowest:.0f} ms"


def data(found: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{case}: " + ", ".join(f"{side} {speed:.0f} images/s" for side, speed in one["images_per_s"].items())
        for case, one in found["cases"].items()
    )


def faults(found: Mapping[str, Any]) -> str:
    return f"{found['lifted']} of {found['of']} cubes lifted"


def page(found: Mapping[str, Any]) -> str:
    looking, alone = found["two_pages_look"]["p99_ms"], found["nobody_looks"]["p99_ms"]
    return f"tick p99 {looking:.1f} ms with two pages, {alone:.1f} ms without"


def smooth(found: Mapping[str, Any]) -> str:
    rows = [row for row in found["rows"] if row["overlap"] == found["default"]]
    lifted = ", ".join(f"{row['delay_ms']} ms: {row['lifted']} of {row['episodes']}" for row in rows)
    return f"{found['default']} (the default) lifts, by delay: {lifted}"


def transport(found: Mapping[str, Any]) -> str:
    sides = {name.removeprefix("clients_"): one for name, one in found.items() if name.startswith("clients_")}
    return "; ".join(f"{many} at once: {one['ratio']:.2f} times openpi's round trip" for many, one in sides.items())

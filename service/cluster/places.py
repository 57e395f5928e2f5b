"""Whether Ray has a place for the engines that have not begun, as far as its figures tell."""

from collections.abc import Mapping

# Seconds after which it is said that there is none, where engines that run leave too little; and that Ray does not
# start one, where it is not known who has what is missing.
NO_PLACE = 20.0
SLOW = 90.0


def lack(
    wanted: Mapping[str, float],
    there: Mapping[str, float],
    free: Mapping[str, float],
    *,
    running: int,
    waiting: int,
    seconds: float,
) -> str:
    """Why engines have not begun; nothing as long as they still may.

    What an engine wants is taken from `free` as soon as Ray has chosen its place, long before its process answers: too
    little that is free says nothing by itself.

    Args:
        wanted: what one engine takes.
        there, free: all that the cluster has, and what of it nobody has.
        running, waiting: engines that have answered, and that have not.
        seconds: how long one has been waited for.
    """
    names = [*wanted]
    has = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in names)
    takes = ", ".join(f"{value:g} {name}" for name, value in wanted.items())
    figures = f"an engine wants {takes} (engine_resources), and free in the cluster are {has}"
    if seconds > NO_PLACE and any(there.get(name, 0) < (running + waiting) * wanted[name] for name in names):
        return f"Ray has had no place for an engine for {NO_PLACE:g} s; {figures}"
    if seconds > SLOW:
        is_enough = all(free.get(name, 0) >= wanted[name] for name in names)
        why = "though not all on one node" if is_enough else "which others may have, or an engine that does not answer"
        return f"Ray has not started an engine for {SLOW:g} s; {figures}, {why}"
    return ""

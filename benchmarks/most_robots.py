"""Search for the largest number of robots without a missed deadline, for measurements and simulations."""

from collections.abc import Awaitable, Callable

FIRST = 8


async def most_without_a_miss(misses: Callable[[int], Awaitable[int]], largest: int) -> int:
    """Twice as many until there is a miss, then halfway between; 0 for none.

    A number counts as too many when it fails twice.

    Args:
        misses: of so many robots.
    """

    async def holds(robots: int) -> bool:
        return not await misses(robots) or not await misses(robots)

    low, high = 0, FIRST
    while high <= largest and await holds(high):
        low, high = high, 2 * high
    high = min(high, largest + 1)
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return low

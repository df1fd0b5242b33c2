"""The largest size that fits, from a test that costs a run each time it is asked."""

from collections.abc import Callable

MOST = 1 << 14


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """The largest n for which `fits(n)`, found by doubling and then halving the gap, to within a sixteenth; 0 for none.

    A size that fits is taken to mean that every smaller one does.
    """
    good, bad = 0, most + 1
    size = 1
    while size <= most and good < size:
        if not fits(size):
            bad = size
            break
        good, size = size, size * 2
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good

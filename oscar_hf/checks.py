"""Checks of whole numbers. True and False, which Python counts as 1 and 0, are none. Imports nothing heavy."""

import argparse
import operator
from collections.abc import Callable

from .errors import CacheStateError, OscarError

_LARGEST_ARGUMENT = (1 << 31) - 1


def is_whole_number(value: object, minimum: int, maximum: int | None = None) -> bool:
    """Whether a value is an int from `minimum` to `maximum`."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return minimum <= value and (maximum is None or value <= maximum)


def check_token_count(name: str, given: object) -> None:
    """Raise OscarError for anything but a positive int."""
    if not is_whole_number(given, 1):
        raise OscarError(f"{name} must be a positive number of tokens, got {given!r}")


def at_least(minimum: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `minimum` on."""

    def number(text: str) -> int:
        value = int(text)
        if not is_whole_number(value, minimum, _LARGEST_ARGUMENT):
            raise argparse.ArgumentTypeError(f"{text} is not between {minimum} and {_LARGEST_ARGUMENT}")
        return value

    return number


def check_whole_number(what: str, given: object, minimum: int | None = None) -> None:
    """Raise CacheStateError for anything but a whole number (an int, or what Python takes for an index) from `minimum` on."""
    try:
        value = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        value = None
    if value is None or (minimum is not None and value < minimum):
        allowed = "a whole number" if minimum is None else f"a whole number from {minimum} on"
        raise CacheStateError(f"{what} takes {allowed}, got {given!r}")

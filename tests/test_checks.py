"""Checks of whole numbers and token counts, and of the types that argparse is given."""

import argparse

import pytest

from oscar_hf import OscarError
from oscar_hf.checks import at_least, check_token_count, is_whole_number


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], float("nan")])
def test_only_ints_are_whole_numbers(value):
    assert not is_whole_number(value, 0)
    with pytest.raises(OscarError, match="context must be a positive number of tokens, got"):
        check_token_count("context", value)


def test_bounds_belong_to_the_range():
    assert [is_whole_number(value, 1, 3) for value in range(5)] == [False, True, True, True, False]
    assert is_whole_number(1 << 70, 1)
    check_token_count("context", 1)
    with pytest.raises(OscarError):
        check_token_count("context", 0)


def test_arguments_of_the_command_line():
    assert at_least(2)("2") == 2 and at_least(0)("2147483647") == (1 << 31) - 1
    for text in ("1", "-5", "2147483648"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not between 2 and 2147483647"):
            at_least(2)(text)
    with pytest.raises(ValueError):
        at_least(2)("two")

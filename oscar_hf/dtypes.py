"""Keep the dtypes that this package chose, also inside somebody's autocast."""

import contextlib
import functools

import torch


def without_autocast(device: torch.device):
    """A context in which torch keeps the dtypes of its operands, also inside somebody's autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def keeps_dtypes(function):
    """Decorator for functions and methods whose first argument has a `device`: they run `without_autocast`."""

    @functools.wraps(function)
    def wrapped(store, *args, **kwargs):
        with without_autocast(store.device):
            return function(store, *args, **kwargs)

    return wrapped

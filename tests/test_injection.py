"""An interrupt at any line of this package, or no memory at any allocation, while a cache takes tokens or is changed: afterwards it
refuses, or goes on as if the call had not been or had been whole. OSCAR_HF_INJECT=all tries every place, else some are drawn."""

import copy
import os
import sys

import pytest
import torch
from tiny_models import prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import oscar_hf
from oscar_hf import CacheStateError, OscarCache
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

pytestmark = pytest.mark.filterwarnings("ignore")
PACKAGE = os.path.dirname(oscar_hf.__file__)
EVERY = os.environ.get("OSCAR_HF_INJECT") == "all"
SAMPLES = 14


class Interrupt(KeyboardInterrupt):
    pass


class AtLine:
    """Raises at the n-th line of the package that runs; counts them."""

    def __init__(self, place: int | None = None):
        self.place, self.seen = place, 0

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.seen += 1
            if self.seen - 1 == self.place:
                sys.settrace(None)
                raise Interrupt
        return self._trace

    def __enter__(self):
        self.former = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self.former)


class AtAllocation(TorchDispatchMode):
    """Raises at the n-th operation that makes a tensor; counts them."""

    def __init__(self, place: int | None = None):
        super().__init__()
        self.place, self.seen = place, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.is_mutable:
            self.seen += 1
            if self.seen - 1 == self.place:
                raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def forward(model, cache, ids):
    return model(input_ids=ids, **{CACHE_ARGUMENT: cache}).logits


IDS = prompt(2, 140)[0]
HELD = 61
# What is done to a cache of 61 tokens, 48 of them packed.
CALLS = {
    "step": lambda model, cache: forward(model, cache, IDS[:, HELD : HELD + 1]),
    "turn": lambda model, cache: forward(model, cache, IDS[:, HELD : HELD + 40]),
    "crop": lambda model, cache: cache.crop(-5),
    "select": lambda model, cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "reorder": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda model, cache: cache.batch_repeat_interleave(2),
    "reset": lambda model, cache: cache.reset(),
}


def continuation(model, cache):
    """What the model says next, whatever the cache holds."""
    rows = int(cache.layers[0].batch_size)
    following = IDS[:, 110:113].repeat(max(1, rows // 2), 1)
    return torch.cat([forward(model, cache, following[:, :2]), forward(model, cache, following[:, 2:])], 1)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=2)


@pytest.mark.parametrize("injector", [AtLine, AtAllocation])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_silent(name, static, injector, model):
    base = OscarCache(
        model.config, max_cache_len=160 if static else None, recipe="hadamard", sink_tokens=4, recent_tokens=8
    )
    forward(model, base, IDS[:, :60])
    forward(model, base, IDS[:, 60:HELD])
    whole = copy.deepcopy(base)
    with injector() as counter:
        CALLS[name](model, whole)
    outcomes = [continuation(model, copy.deepcopy(base)), continuation(model, whole)]
    places = range(counter.seen)
    if not EVERY:
        places = places[:: max(1, counter.seen // SAMPLES)]
    silent = []
    for place in places:
        cache = copy.deepcopy(base)
        with pytest.raises((Interrupt, torch.OutOfMemoryError)), injector(place):
            CALLS[name](model, cache)
        try:
            got = continuation(model, cache)
        except CacheStateError:
            cache.reset()
            forward(model, cache, IDS[:, :60])
            forward(model, cache, IDS[:, 60:HELD])
            got = continuation(model, cache)
        if not any(got.shape == one.shape and torch.allclose(got, one, atol=1e-5, rtol=1e-5) for one in outcomes):
            silent.append(place)
    print(f"{name}: {len(places)} of {counter.seen} places, {len(silent)} silent")
    assert not silent

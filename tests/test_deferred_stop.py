"""deferred_stop: transformers' own way to ask one step late whether generate() is done, with our caches."""

import contextlib

import pytest
import torch
from test_static import SMALL, static
from tiny_models import prompt, tiny_model
from transformers import DynamicCache, EncoderDecoderCache

from oscar_hf import OscarCache, OscarError, deferred_stop
from oscar_hf.attention import static_ops as ops
from oscar_hf.kernels.decode_step import place_tokens_reference
from oscar_hf.transformers_compat import deferred_stop as deferral
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

pytestmark = pytest.mark.skipif(
    not hasattr(deferral.generation_utils, "DeferredStopCheck"), reason="needs transformers 5.17 or later"
)


def grown(model, cache, ids, defer, **options):
    """Greedy tokens, those of a second turn, and how many tokens the cache holds after each."""
    counted, tokens = [], ids
    for _ in range(2):
        with deferred_stop() if defer else contextlib.nullcontext():
            tokens = model.generate(
                tokens,
                do_sample=False,
                disable_compile=True,
                pad_token_id=0,
                **{CACHE_ARGUMENT: cache},
                **options,
            )
        counted.append(int(cache.get_seq_length()))
        tokens = torch.cat([tokens, ids[:, :3]], 1)
    return tokens, counted


class Event:
    """A CPU's event: everything has happened."""

    def __init__(self, **options):
        pass

    def record(self):
        pass

    synchronize = record


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_same_tokens_and_same_length(kind, stops_early, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(deferral, "_works_beside_host", lambda device: True)
    model = tiny_model("qwen3").to(device)
    ids = prompt(1, 40)[0].to(device)

    def cache():
        return OscarCache(model.config, **SMALL) if kind == "growing" else static(model, 256)

    options = dict(max_new_tokens=30)
    if stops_early:
        plain, _ = grown(model, cache(), ids, False, **options)
        options["eos_token_id"] = int(plain[0, 52])
    (expected, lengths), (got, got_lengths) = (grown(model, cache(), ids, defer, **options) for defer in (False, True))
    assert torch.equal(expected, got)
    # A step that takes the last token as its input belongs to no token that came out: both leave it out.
    assert lengths == got_lengths


def test_a_full_cache_at_the_end(monkeypatch):
    """The step that is one too many does not fit; on a GPU it only leaves a flag, and then there is nothing to take back."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(deferral, "_works_beside_host", lambda device: True)

    def place(regions, layout, keys, values):
        sides = (regions.keys, regions.values)
        place_tokens_reference(*sides, keys, values, regions.counters, layout.recent, regions.start, layout.limit)

    monkeypatch.setattr(ops, "_place", place)
    model, ids = tiny_model("qwen3"), prompt(1, 40)[0]
    options = dict(do_sample=False, disable_compile=True, pad_token_id=0, max_new_tokens=30)
    plain = model.generate(ids, **{CACHE_ARGUMENT: static(model, 256)}, **options)
    options["eos_token_id"] = int(plain[0, 62])
    expected = model.generate(ids, **{CACHE_ARGUMENT: static(model, 256)}, **options)
    cache = static(model, expected.shape[1] - 1)
    with deferred_stop():
        assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options), expected)
    assert [layer.store.tokens for layer in cache.oscar_layers] == [expected.shape[1] - 1] * 3
    cache.check_overflow()


def test_pairs_of_caches_are_left_alone():
    model = tiny_model("t5")
    pair = EncoderDecoderCache(OscarCache(model.config, **SMALL), DynamicCache())
    assert not deferral.can_defer_stop(pair, torch.device("cuda"))
    with deferred_stop():
        supported = deferral.generation_utils.DeferredStopCheck.is_supported
        assert not supported(torch.device("cuda"), pair, True, False)


@pytest.mark.filterwarnings("error:oscar_hf")
def test_a_cache_that_nobody_passed_is_deferred_without_a_word():
    with deferred_stop():
        supported = deferral.generation_utils.DeferredStopCheck.is_supported
        assert supported(torch.device("cuda"), static(tiny_model("gemma3"), 128), False, False)


def test_it_ends_with_the_block():
    before = deferral.generation_utils.DeferredStopCheck.is_supported
    with pytest.raises(ZeroDivisionError), deferred_stop():
        supported = deferral.generation_utils.DeferredStopCheck.is_supported
        assert supported(torch.device("cuda"), None, True, False)
        assert not supported(torch.device("cpu"), None, True, False)
        assert not supported(torch.device("cuda"), None, True, is_assistant=True)
        raise ZeroDivisionError
    assert deferral.generation_utils.DeferredStopCheck.is_supported is before


def test_blocks_that_overlap_end_with_the_last_one():
    check = deferral.generation_utils.DeferredStopCheck
    before, first, second = check.is_supported, deferred_stop(), deferred_stop()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert check.is_supported(torch.device("cuda"), None, True, False)
    second.__exit__(None, None, None)
    assert check.is_supported is before


def test_a_cache_that_cannot_be_cropped_is_named():
    cache = static(tiny_model("gemma3"), 128)
    with deferred_stop(), pytest.warns(UserWarning, match="StaticOscarCache, which cannot be cropped"):
        assert not deferral.generation_utils.DeferredStopCheck.is_supported(torch.device("cuda"), cache, True, False)


def test_an_older_transformers_is_named(monkeypatch):
    monkeypatch.delattr(deferral.generation_utils, "DeferredStopCheck")
    with pytest.raises(OscarError, match="needs transformers 5.17 or later"), deferred_stop():
        pass

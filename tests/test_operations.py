"""Operations that random sequences on one layer cannot show: what a copy costs, whole hybrid caches, drafts on a static cache."""

import copy

import pytest
import torch
from test_cache import new_cache, one_layer, states
from tiny_models import prompt, tiny_model
from transformers import DynamicCache

from oscar_hf import Artifact, CacheStateError, OscarCache
from oscar_hf.cache.native_layers import tensors_of
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

SMALL = dict(sink_tokens=4, recent_tokens=8)
# Nothing is learned from the queries of a call, not even of one that is taken back.
UNLEARNED = dict(SMALL, recipe="hadamard", key_scale="search")
HYBRIDS = ["gemma3", "qwen3_next"]


@torch.no_grad()
def forward(model, cache, ids, mask=None):
    positions = {}
    if mask is not None:
        positions = dict(position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :])
    return model(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **positions).logits


def pair(model, ids, static=False, options=SMALL):
    """Two caches of one kind that were fed the same tokens."""
    options = dict(options, max_cache_len=128) if static else options
    caches = [OscarCache(model.config, **options) for _ in range(2)]
    for cache in caches:
        forward(model, cache, ids)
        cache.commit()
    return caches


def test_fifty_random_reorders_are_bit_identical_gathers():
    layer = one_layer()
    layer.update(*states(120, batch=4))
    layer.update(*states(1, batch=4, seed=1))
    original, rows = copy.deepcopy(layer), torch.arange(4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        index = torch.randint(0, 4, (4,), generator=generator)
        if len(set(index.tolist())) < 3:
            index = torch.randperm(4, generator=generator)
        layer.reorder_cache(index)
        rows = rows[index]
        for got, expected in zip(stored(layer), stored(original)):
            assert torch.equal(got, expected[rows])


def stored(layer):
    return [
        tensor for side in layer.store.sides for tensor in (*side.rows.named.values(), side.sink, side.ring)
    ]  # fmt: skip


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("options", [SMALL, UNLEARNED], ids=["learned", "given"])
def test_a_copy_costs_what_is_stored(options, static):
    """Every tensor of a copy is either stored data of its own or shared with the original; but a static cache may learn its
    constants anew, in place, and has a buffer of its own for them."""
    model = tiny_model("llama")
    cache = pair(model, prompt(1, 60)[0], static, options)[0]
    twin = copy.deepcopy(cache)
    for layer, copied in zip(cache.layers, twin.layers):
        own_constants = static and options is SMALL
        assert (copied.constants is layer.constants) != own_constants and copied.artifact is layer.artifact
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in all_tensors(copied)}
        for tensor in all_tensors(layer):
            own.pop(tensor.untyped_storage().data_ptr(), None)
        # A static layer's tensors are views of one buffer.
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored(copied)}
        constants = copied.store.flat_constants.nbytes if own_constants else 0
        assert sum(own.values()) == sum(held.values()) + constants


def all_tensors(layer):
    """Tensors reachable from a layer, its constants included."""
    found, waiting, seen = [], [vars(layer), vars(layer.constants)], set()
    while waiting:
        for value in waiting.pop().values():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list)):
                waiting.append(dict(enumerate(value)))
            elif (
                type(value).__module__.startswith("oscar_hf")
                and not isinstance(value, Artifact)
                and id(value) not in seen
            ):
                seen.add(id(value))
                waiting.append(vars(value))
    return found


def test_iteration_gives_what_dynamic_cache_gives():
    model = tiny_model("gemma3")
    ids = prompt(2, 20)[0]
    ours, theirs = OscarCache(model.config), DynamicCache(config=model.config)
    assert [keys for keys, _, _ in ours] == [None] * 3
    for cache in (ours, theirs):
        forward(model, cache, ids)
    for got, expected in zip(ours, theirs):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        assert (got[2] is None) == (expected[2] is None)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("options", [dict(key_center="none"), dict(recent_tokens=32), dict(recent_tokens=40)])
def test_drafts_that_cross_the_window_leave_the_codes_of_a_run_without(options, static):
    """A block of 32 keys is no longer than the window."""
    room = dict(max_cache_len=160) if static else {}
    plain, drafts = (one_layer(**options, **room) for _ in range(2))
    (keys, values), wrong = states(120), states(120, seed=1)
    for layer in (plain, drafts):
        layer.update(keys[:, :, :40], values[:, :, :40])
    for at in range(40, 120):
        plain.update(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    at = 40
    for burst, accepted in [(5, 2), (10, 1), (12, 7), (16, 3), (25, 9), (32, 30), (3, 3), (8, 1), (9, 9), (20, 15)]:
        right, rest = slice(at, at + accepted), burst - accepted
        drafts.update(*(torch.cat([x[:, :, right], w[:, :, :rest]], 2) for x, w in zip((keys, values), wrong)))
        drafts.crop(accepted - burst)
        at += accepted
    assert at == plain.store.tokens == drafts.store.tokens == 120
    first, second = plain, drafts
    both = min(first.store.history, second.store.history)
    assert both >= 120 - 4 - options.get("recent_tokens", 8) - 20
    for ours, theirs in zip(second.store.sides, first.store.sides):
        for got, expected in zip(ours.rows.in_use(both).values(), theirs.rows.in_use(both).values()):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_reset_of_a_hybrid_then_another_prompt(family, static):
    model = tiny_model(family)
    used, fresh = pair(model, prompt(2, 60)[0], static)
    other = prompt(2, 33, seed=1)[0]
    used.reset()
    assert used.get_seq_length() == 0
    fresh = OscarCache(model.config, **(dict(SMALL, max_cache_len=128) if static else SMALL))
    for ids in (other, other[:, :1], other[:, :1]):
        assert torch.equal(forward(model, used, ids), forward(model, fresh, ids))
    if not static:
        # A batch of another size is a new sequence like any other.
        used.reset()
        fresh = OscarCache(model.config, **SMALL)
        assert torch.equal(forward(model, used, other[:1]), forward(model, fresh, other[:1]))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_gathers_of_a_hybrid(family, static):
    """Rows that are reordered, selected and repeated go on like the same rows fed on their own."""
    model = tiny_model(family)
    ids, more = prompt(3, 60)[0], prompt(3, 4, seed=1)[0]
    cache, _ = pair(model, ids, static)
    expected = forward(model, copy.deepcopy(cache), more[:, :1])
    for operation, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([-1])), [2]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed = copy.deepcopy(cache)
        operation(changed)
        assert changed.get_seq_length() == 60
        got = forward(model, changed, more[rows, :1])
        torch.testing.assert_close(got, expected[rows], atol=1e-4, rtol=1e-3)
        assert changed.batch_size == len(rows)
    # What was copied before did not change.
    torch.testing.assert_close(forward(model, cache, more[:, :1]), expected)


def test_crop_of_a_hybrid_is_whole_or_refused():
    model = tiny_model("gemma3")
    ids = prompt(1, 60)[0]
    cache, fresh = pair(model, ids)
    with pytest.raises(CacheStateError, match="layer 0.*last 24 tokens.*activate_past_recording"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [60] * 3
    cache.crop(0)
    cache.activate_past_recording()
    forward(model, cache, ids[:, 7:12])
    cache.crop(-5)
    assert torch.equal(forward(model, cache, ids[:, :1]), forward(model, fresh, ids[:, :1]))
    # Before the sliding window is full there is nothing to refuse.
    cache = OscarCache(model.config, **UNLEARNED)
    forward(model, cache, ids[:, :20])
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    expected = OscarCache(model.config, **UNLEARNED)
    forward(model, expected, ids[:, :15])
    torch.testing.assert_close(forward(model, cache, ids[:, 15:16]), forward(model, expected, ids[:, 15:16]))


RECURRENT, STATIC = "recurrent state", "static cache cannot be cropped"


def test_crop_of_a_static_hybrid_whose_window_holds_everything():
    """Since transformers 5.24; before, static layers cannot be cropped at all."""
    model = tiny_model("gemma3")
    cache, fresh = (OscarCache(model.config, max_cache_len=24, **UNLEARNED) for _ in range(2))
    if not hasattr(cache.layers[0], "crop"):
        pytest.skip("static layers have no crop in this version of transformers")
    ids = prompt(1, 20)[0]
    forward(model, cache, ids)
    cache.crop(-6)
    forward(model, fresh, ids[:, :14])
    assert int(cache.layers[0].get_seq_length()) == 14
    torch.testing.assert_close(
        forward(model, cache, ids[:, :1]), forward(model, fresh, ids[:, :1]), atol=1e-5, rtol=1e-4
    )
    cache.crop(-500)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [0] * 3


@pytest.mark.parametrize(
    "family, static, message",
    [("qwen3_next", False, RECURRENT), ("qwen3_next", True, RECURRENT), ("gemma3", True, STATIC)],
)
def test_what_cannot_be_cropped_is_refused_before_anything_changes(family, static, message):
    model = tiny_model(family)
    ids = prompt(1, 60)[0]
    cache, expected = pair(model, ids, static)
    with pytest.raises(CacheStateError, match=message):
        cache.crop(-3)
    assert torch.equal(forward(model, cache, ids[:, :1]), forward(model, expected, ids[:, :1]))


def test_copies_of_a_hybrid_are_independent():
    for family in HYBRIDS:
        model = tiny_model(family)
        ids = prompt(1, 60)[0]
        cache, expected = pair(model, ids)
        twin = copy.deepcopy(cache)
        forward(model, cache, ids[:, :9])
        assert torch.equal(forward(model, twin, ids[:, :1]), forward(model, expected, ids[:, :1]))
        shared = {t.data_ptr() for layer in cache.layers for t in tensors_of(layer)}
        assert not any(t.data_ptr() in shared for layer in twin.layers for t in tensors_of(layer) if t.numel())


def test_empty_caches_take_every_operation():
    for cache in (new_cache(), OscarCache(tiny_model("gemma3").config, **SMALL)):
        cache.reset()
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([0]))
        cache.batch_select_indices(torch.tensor([0]))
        cache.batch_repeat_interleave(2)
        cache.commit()
        assert cache.get_seq_length() == 0 and not cache.is_initialized


@pytest.mark.parametrize("static", [False, True])
def test_padding_stated_for_another_batch_survives_operations_on_the_empty_cache(static):
    model = tiny_model("llama")
    options = dict(SMALL, max_cache_len=128) if static else SMALL
    used, fresh = OscarCache(model.config, **options), OscarCache(model.config, **options)
    forward(model, used, prompt(2, 30)[0])
    used.reset()
    ids, mask = prompt(3, 50, (0, 7, 20))
    for cache in (used, fresh):
        cache.set_padding(mask)
    used.crop(0)
    used.reorder_cache(torch.tensor([0, 1]))
    assert torch.equal(forward(model, used, ids, mask), forward(model, fresh, ids, mask))
    mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
    assert torch.equal(forward(model, used, ids[:, :1], mask), forward(model, fresh, ids[:, :1], mask))
    assert used.layers[0].store.padding.rows == [0, 7, 20]


def test_stated_padding_beyond_the_first_call():
    """A prompt in chunks of which the first is shorter than a row's padding."""
    model = tiny_model("llama")
    ids, mask = prompt(2, 60, (0, 9))
    whole, chunks = OscarCache(model.config, **UNLEARNED), OscarCache(model.config, **UNLEARNED)
    for cache in (whole, chunks):
        cache.set_padding(mask)
    forward(model, whole, ids, mask)
    forward(model, chunks, ids[:, :3], mask[:, :3])
    forward(model, chunks, ids[:, 3:], mask)
    assert chunks.layers[0].store.padding.rows == whole.layers[0].store.padding.rows == [0, 9]
    for cache in (whole, chunks):
        cache.commit()
    step = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    got, expected = (forward(model, cache, ids[:, :1], step) for cache in (chunks, whole))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)

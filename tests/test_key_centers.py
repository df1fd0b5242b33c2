"""What keys are centered by, in growing and in static caches: blocks, a calibrated mean, nothing; and every operation on them.

The twin of test_properties.py covers random sequences of operations; these say in the open what they must give.
"""

import copy

import pytest
import torch
from helpers import calibrated_artifact
from test_prompt_statistics import DIM, HEADS, equal, feed, new_cache, one_by_one, steps, store, stored, tokens

from oscar_hf import OscarCache
from oscar_hf.quantization.quantizer import dequantize, quantize_rows

ARTIFACT = calibrated_artifact(layers=1)
WINDOWS = dict(sink_tokens=4, recent_tokens=40)
each_kind = pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
each_center = pytest.mark.parametrize("center", ["block", "mean", "none"])
each_block = pytest.mark.parametrize("block", [32, 64, 128])


def cache_of(static, center="block", **options):
    return new_cache(static, artifact=ARTIFACT, key_center=center, **{**WINDOWS, **options})


def packed_keys(cache, keys):
    """float64 [B, H, T, D]: what a naive packing makes of history tokens, the centers of blocks being those in the store."""
    s, constants = store(cache), ARTIFACT.layers[0]
    config, count = s.config, s.history
    rows = keys[:, :, config.sink_tokens : config.sink_tokens + count].float()
    if config.key_center == "none":
        center = torch.zeros(1, HEADS, 1, DIM)
    elif config.key_center == "mean":
        center = constants.key_mean[None, :, None]
    else:
        center = s.keys.rows.centers[:, :, : -(-count // config.center_block)].float()
        center = center.repeat_interleave(config.center_block, 2)[:, :, :count]
    metric = constants.for_rule(config.key_rule).key_metric
    made = quantize_rows((rows - center) @ constants.key_transform, DIM, config.key_rule, config.key_symmetric, metric)
    return dequantize(*made, dtype=torch.float64) @ constants.key_inverse.double() + center.double()


@each_kind
@each_center
@pytest.mark.parametrize("rule", ["feedback", "search", "weighted_search_both_ends", "percentile(0.96)"])
def test_what_is_taken_off_comes_back(rule, center, static):
    cache = cache_of(static, center, key_scale=rule, key_symmetric=rule == "feedback")
    states = tokens(300, 2)
    feed(cache, [x[:, :, :250] for x in states])
    one_by_one(cache, [x[:, :, 250:] for x in states])
    s = store(cache)
    assert s.history == 300 - 4 - 40
    got = s.dense("k")[:, :, 4 : 4 + s.history].double()
    close = torch.isclose(got, packed_keys(cache, states[1]), atol=1e-4)
    # A code on the edge of its range may tip, and with feedback some of its row.
    assert close.all(-1).double().mean() > 0.995
    assert torch.equal(s.dense("k")[:, :, :4], states[1][:, :, :4])
    assert (s.keys.rows.centers is not None) == (center == "block") and (s.keys.mean is not None) == (center == "mean")
    assert s.values.rows.centers is None and s.values.mean is None


@each_kind
@pytest.mark.parametrize("start", ["prompt", "steps"])
@each_block
def test_a_center_is_the_mean_of_its_whole_block(block, start, static):
    """However its tokens came: the window is as long as a block."""
    cache = cache_of(static, recent_tokens=block, key_block=block)
    states = tokens(430)
    begin = 430 if start == "prompt" else 20
    feed(cache, [x[:, :, :begin] for x in states])
    one_by_one(cache, [x[:, :, begin:] for x in states])
    s = store(cache)
    keys, centers = states[1][:, :, 4:], s.keys.rows.centers
    count = -(-s.history // block)
    assert s.keys.center_block == block and count >= 2
    for index in range(count):
        expected = keys[:, :, block * index : block * (index + 1)].mean(2)
        torch.testing.assert_close(centers[:, :, index].float(), expected, atol=2e-3, rtol=1e-3)


@each_kind
@pytest.mark.parametrize("inside", [1, 5, 31])
@each_block
def test_crop_into_the_middle_of_a_block(inside, block, static):
    """What is left stays as it is; what comes after it is centered as the block was."""
    cache = cache_of(static, recent_tokens=block, key_block=block)
    feed(cache, tokens(430))
    steps(cache, 20)
    dense, history = store(cache).dense("k"), store(cache).history
    kept = history // block - 1
    keep = 4 + block * kept + inside
    cache.crop(keep - 450)
    s = store(cache)
    assert s.history == keep - 4 and s.tokens == keep
    centers = s.keys.rows.centers[:, :, : kept + 1].clone()
    assert torch.equal(s.dense("k"), dense[:, :, :keep])
    states = tokens(2 * block + 30, seed=3)
    one_by_one(cache, states)
    s = store(cache)
    assert s.history == keep + 2 * block + 30 - 4 - block
    assert torch.equal(s.keys.rows.centers[:, :, : kept + 1], centers)
    assert torch.equal(s.dense("k")[:, :, :keep], dense[:, :, :keep])
    # The next block is a new one, with a center of the new tokens.
    first = block - inside
    expected = states[1][:, :, first : first + block].mean(2)
    torch.testing.assert_close(s.keys.rows.centers[:, :, kept + 1].float(), expected, atol=2e-3, rtol=1e-3)
    # All new tokens are packed as differences from what is stored for their block.
    got = s.dense("k")[:, :, keep : 4 + s.history].double()
    expected = packed_keys(cache, torch.cat([dense[:, :, :keep], states[1]], 2))[:, :, keep - 4 :]
    assert torch.isclose(got, expected, atol=1e-4).all(-1).double().mean() > 0.99


@each_kind
def test_crop_to_a_blocks_edge_opens_it_anew(static):
    cache = cache_of(static)
    feed(cache, tokens(200))
    steps(cache, 3)
    old = store(cache).keys.rows.centers[:, :, 3].clone()
    cache.crop(4 + 96 - 203)
    assert store(cache).history == 96
    states = tokens(100, seed=4)
    feed(cache, states)
    new = store(cache).keys.rows.centers[:, :, 3]
    assert not torch.equal(new, old)
    torch.testing.assert_close(new.float(), states[1][:, :, :32].mean(2), atol=2e-3, rtol=1e-3)


@each_kind
@each_center
def test_gathers_take_centers_along(center, static):
    cache = cache_of(static, center)
    feed(cache, tokens(200, 3))
    steps(cache, 3, 3)
    for gather, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 1])), [1, 1, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([False, True, False])), [1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed = copy.deepcopy(cache)
        gather(changed)
        assert equal(stored(changed), [tensor[rows] for tensor in stored(cache)])
        assert torch.equal(store(changed).dense("k"), store(cache).dense("k")[rows])
        # Rows that are alike go on alike, with blocks of their own.
        more, expected = tokens(80, 3, seed=5), copy.deepcopy(cache)
        one_by_one(expected, more)
        one_by_one(changed, [x[rows] for x in more])
        assert equal(stored(changed), [tensor[rows] for tensor in stored(expected)])


@each_kind
@each_center
def test_reset_and_another_sequence(center, static):
    used, fresh = cache_of(static, center), cache_of(static, center)
    feed(used, tokens(300, seed=1))
    steps(used, 5)
    used.reset()
    assert store(used).history == 0
    for cache in (used, fresh):
        feed(cache, tokens(150, seed=2))
        steps(cache, 60)
    assert equal(stored(used), stored(fresh)) and torch.equal(store(used).dense("k"), store(fresh).dense("k"))


@each_center
def test_growing_and_static_caches_hold_the_same(center):
    caches = [cache_of(static, center) for static in (False, True)]
    for cache in caches:
        feed(cache, tokens(150, 2))
        steps(cache, 40, 2)
        cache.crop(-25)
        feed(cache, tokens(30, 2, seed=5))
        steps(cache, 40, 2, seed=6)
    assert equal(*(stored(cache) for cache in caches))
    assert torch.equal(*(store(cache).dense("k") for cache in caches))


@each_kind
@each_center
@pytest.mark.parametrize("again", [False, True])
def test_saved_and_loaded(center, static, again, tmp_path):
    cache = cache_of(static, center)
    feed(cache, tokens(200, 2))
    steps(cache, 3, 2)
    cache.crop(-60)
    kind = static != again
    cache.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache", max_cache_len=400 if kind else None)
    assert equal(stored(loaded), stored(cache)) and torch.equal(store(loaded).dense("k"), store(cache).dense("k"))
    for each in (cache, loaded):
        steps(each, 60, 2, seed=4)
    assert equal(stored(loaded), stored(cache))


def test_keys_far_from_zero_cost_no_more_with_centers():
    """An offset of a hundred deviations; without centers two bits would have to span it."""
    query, keys, values = tokens(300)
    errors = {}
    for center in ("block", "none"):
        for offset in (0.0, 300.0):
            cache = new_cache(recipe="hadamard", key_center=center, key_scale="search", **WINDOWS)
            feed(cache, (query, keys + offset, values))
            errors[center, offset] = float((store(cache).dense("k") - keys - offset).square().mean())
    assert errors["block", 300.0] < 1.2 * errors["block", 0.0]
    assert errors["none", 300.0] > 100 * errors["block", 300.0]


def test_bytes_of_centers_are_in_the_report():
    cache = cache_of(False)
    feed(cache, tokens(200, 2))
    report = cache.memory_report()
    centers = store(cache).keys.rows.centers
    assert report.by_region["centers"] == centers.nbytes == 2 * 2 * HEADS * DIM * centers.shape[2]
    assert "centers" in str(report)
    none = cache_of(False, "none")
    feed(none, tokens(200, 2))
    assert none.memory_report().by_region["centers"] == 0

"""What a cache learns from the first tokens of its sequence: the formulas against naive float64 ones, when it is learned, what
keeps it, what forgets it, and that nothing but real tokens enters."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import calibrated_artifact
from test_registry import FLASH, flash  # noqa: F401 (a fixture)
from test_static import Counting
from tiny_models import prompt, tiny_config, tiny_model

from oscar_hf import OscarCache, OscarConfig, StaticOscarCache
from oscar_hf.attention.flash import register_attention
from oscar_hf.quantization.rotation import hadamard
from oscar_hf.storage.prompt_statistics import KEY_RIDGE, QUERY_RIDGE, SAMPLE_TOKENS, PromptStatistics
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

HEADS, GROUP, DIM, LIMIT = 2, 2, 16, 1200
SMALL = dict(sink_tokens=4, recent_tokens=8)
DEFAULT = dict(sink_tokens=64, recent_tokens=256)
each_kind = pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
each_window = pytest.mark.parametrize("windows", [SMALL, DEFAULT], ids=["small", "default"])


def new_cache(static=False, dim=DIM, **options):
    config = tiny_config("llama", num_hidden_layers=1, head_dim=dim, num_attention_heads=HEADS * GROUP)
    return OscarCache(config, **(SMALL | options), **(dict(max_cache_len=LIMIT) if static else {}))


def tokens(count, batch=1, seed=0, dim=DIM, dtype=torch.float32):
    """Queries, keys and values whose channels differ in size and mix, with a drift over the positions."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(HEADS, dim, dim, generator=torch.Generator().manual_seed(99)) / dim**0.5
    keys = torch.randn(batch, HEADS, count, dim, generator=generator) * torch.linspace(0.2, 3, dim) @ mix
    keys = keys + torch.linspace(0, 2, count)[:, None] + 3
    query = torch.randn(batch, HEADS * GROUP, count, dim, generator=generator) * torch.linspace(3, 0.1, dim)
    values = torch.randn(batch, HEADS, count, dim, generator=generator)
    return tuple(x.to(dtype) for x in (query, keys, values))


def feed(cache, states, mask=None, attn="sdpa"):
    """A call as a model makes it. mask: bool [B, T] of all slots held, False for padding."""
    query, keys, values = states
    count, width = query.shape[2], cache.get_mask_sizes(query.shape[2], 0)[0]
    held = int(cache.get_seq_length()) + count
    causal = torch.arange(width) <= torch.arange(held - count, held)[:, None]
    seen = causal.expand(len(query), 1, -1, -1)
    if mask is not None:
        seen = seen & F.pad(mask, (0, width - held))[:, None, None]
    key, value = cache.update(keys, values, 0)
    if attn == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    scores = torch.matmul(query, key.repeat_interleave(GROUP, dim=1).transpose(2, 3)) * DIM**-0.5
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.matmul(weights, value.repeat_interleave(GROUP, dim=1))


def steps(cache, count, batch=1, seed=1, dim=DIM):
    one_by_one(cache, tokens(count, batch, seed, dim))


def one_by_one(cache, states):
    """Decode steps. Those of a static cache learn nothing from queries, so that attention, which takes long here, is left out."""
    for i in range(states[0].shape[2]):
        step = [x[:, :, i : i + 1] for x in states]
        if isinstance(cache, StaticOscarCache):
            cache.get_mask_sizes(1, 0)
            cache.update(*step[1:], 0)
        else:
            feed(cache, step)


def store(cache):
    cache.commit()
    return cache.layers[0].store


def constants(cache):
    return {name: tensor.clone() for name, tensor in store(cache).constants.tensors().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stored(cache):
    """What is packed: codes, scales, centers of keys and values."""
    return [x.clone() for side in store(cache).sides for x in side.rows.in_use(store(cache).history).values()]


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


# ------------------------------------------------------------------------------------------------ the formulas
def naive(config, keys, query, first):
    """(C with its ridge, C_Q with its ridge), [H, D, D], of keys [B, H, T, D] of the history, and of the query of one call that
    begins at slot `first`."""
    keys, query, block = keys.double(), query.double(), config.center_block
    count, dim = keys.shape[2:]
    whole = [slice(at, at + block) for at in range(0, count - block + 1, block)] if block else [slice(0, count)]
    rows = []
    for part in whole or [slice(0, count)]:
        mean = keys[:, :, part].mean(2, keepdim=True) if block else 0
        rows.append(keys[:, :, part] - mean)
    rows = torch.cat(rows, 2).transpose(0, 1).flatten(1, 2)
    spread = rows.mT @ rows / rows.shape[1]
    skip = max(0, min(config.sink_tokens - first, query.shape[2] // 2))
    asked = query[:, :, skip:].unflatten(1, (HEADS, GROUP)).transpose(0, 1).flatten(1, 3)
    moment = asked.mT @ asked

    def ridged(matrix, ridge):
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        # One key less its mean is 0.
        return matrix / torch.where(mean > 0, mean, 1) + ridge * torch.eye(dim)

    return ridged(spread, KEY_RIDGE + dim / (4 * rows.shape[1])), ridged(
        moment, QUERY_RIDGE + dim / (4 * asked.shape[1])
    )


def check_formulas(made, spread, queries, whitened):
    """The constants are what design and docs say of C and C_Q."""
    transform, inverse, feedback = (made[name].double() for name in ("key_transform", "key_inverse", "key_metric"))
    eye = torch.eye(transform.shape[-1]).double().expand_as(transform)
    torch.testing.assert_close(transform @ inverse, eye, atol=1e-5, rtol=0)
    mix = hadamard(eye.shape[-1])
    if whitened:
        # All channels of a whitened row are alike, but for how large C is.
        white = transform.mT @ spread @ transform
        torch.testing.assert_close(white / white[:, :1, :1], eye, atol=1e-4, rtol=0)
        factor = mix @ inverse
        assert factor.tril(-1).abs().max() < 1e-5 * factor.abs().max(), "G^T of a Cholesky factor"
    else:
        torch.testing.assert_close(transform, mix.expand_as(transform), atol=1e-6, rtol=0)
    # M = (I + L) D (I + L)^T.
    assert not feedback.triu().any()
    metric = inverse @ queries @ inverse.mT
    metric = metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    left = torch.linalg.inv(eye + feedback)
    diagonal = left @ (metric + 1e-6 * eye) @ left.mT
    off = diagonal - torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4 and (diagonal.diagonal(dim1=-2, dim2=-1) > 0).all()


@each_window
@each_kind
@pytest.mark.parametrize("recipe", ["default", "hadamard"])
@pytest.mark.parametrize("batch", [1, 3])
def test_constants_are_the_formulas(batch, recipe, static, windows):
    cache = new_cache(static, recipe=recipe, **windows)
    states = tokens(700, batch)
    feed(cache, states)
    made, config = constants(cache), store(cache).config
    assert store(cache).history > 0
    naive_of = naive(config, states[1][:, :, config.sink_tokens :], states[0], 0)
    check_formulas(made, *naive_of, recipe == "default")


@pytest.mark.parametrize("key_center", ["none", "block"])
def test_a_prompt_of_more_tokens_than_are_looked_at(key_center):
    """A sample stands for it."""
    count = 2 * SAMPLE_TOKENS + 300
    cache = new_cache(key_center=key_center)
    states = tokens(count)
    feed(cache, states)
    made, config = constants(cache), store(cache).config
    # The sample is close to the whole, not the same.
    spread, _ = naive(config, states[1][:, :, 4:], states[0], 0)
    transform = made["key_transform"].double()
    white = transform.mT @ spread @ transform
    scale = white.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    assert (white / scale - torch.eye(DIM)).abs().max() < 0.2
    assert store(cache).statistics.queries == GROUP * SAMPLE_TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    cache = new_cache()
    states = tokens(300, dtype=dtype)
    feed(cache, states)
    made = constants(cache)
    assert all(tensor.dtype == torch.float32 for tensor in made.values())
    check_formulas(made, *naive(store(cache).config, states[1][:, :, 4:], states[0], 0), True)


@pytest.mark.parametrize("key_center", ["block", "none"])
@pytest.mark.parametrize("what", ["zeros", "constant", "one channel", "one token", "no queries", "huge", "tiny"])
def test_keys_that_tell_little_give_finite_constants(what, key_center):
    cache = new_cache(key_center=key_center, recent_tokens=1, sink_tokens=0)
    query, keys, values = tokens(1 if what == "one token" else 60)
    if what in ("zeros", "constant"):
        query, keys = query * 0, keys * 0 + (0 if what == "zeros" else 7)
    if what == "one channel":
        keys[..., 1:], query[..., 2:] = 0, 0
    if what in ("huge", "tiny"):
        keys, query = (x * (1e4 if what == "huge" else 1e-6) for x in (keys, query))
    if what == "no queries":
        cache.update(keys, values, 0)
    else:
        feed(cache, (query, keys, values))
    cache.commit()
    feed(cache, tokens(1, seed=2))
    made = constants(cache)
    assert store(cache).history > 0 and all(tensor.isfinite().all() for tensor in made.values())
    product = made["key_transform"].double() @ made["key_inverse"].double()
    torch.testing.assert_close(product, torch.eye(DIM).double().expand_as(product), atol=1e-4, rtol=0)
    assert store(cache).dense("k").isfinite().all()


def test_the_error_that_counts_is_less_than_without_learning():
    """Scores of keys like those of the prompt lose less than by a fixed rotation and a search, at the same bits."""
    errors = {}
    for name, options in (
        ("default", {}),
        ("hadamard", dict(recipe="hadamard")),
        ("unlearned", dict(recipe="hadamard", key_scale="search")),
    ):
        cache = new_cache(dim=64, **options)
        query, keys, values = tokens(600, dim=64)
        feed(cache, (query, keys, values))
        cache.commit()
        error = (store(cache).dense("k") - keys).double()
        asked = query.double().unflatten(1, (HEADS, GROUP)).flatten(2, 3)
        errors[name] = float((asked @ error.mT).square().mean())
    assert errors["default"] < errors["hadamard"] < errors["unlearned"]


# ------------------------------------------------------------------------------------------------ when it is learned
@each_kind
@pytest.mark.parametrize("length", [64, 65, 319, 320, 321, 351, 352, 700])
def test_learned_once_at_the_first_packing(length, static):
    """Default windows. A static cache learns from its prompt in any case, for steps cannot."""
    cache = new_cache(static, **DEFAULT)
    blank = None
    states = tokens(length)
    feed(cache, states)
    s = store(cache)
    assert s.history == max(0, length - 64 - 255 - 32)
    if not s.history and not static:
        blank = constants(cache)
        assert torch.equal(blank["key_transform"], constants(new_like(cache))["key_transform"])
        # Up to the step before the first that packs.
        steps(cache, 319 - length if length < 319 else 0)
        assert store(cache).history == 0 and same(constants(cache), blank)
    steps(cache, 2, seed=3)
    if static and length < 318:
        steps(cache, 320 - length)
    learned = constants(cache)
    assert store(cache).history > 0
    assert blank is None or not same(learned, blank)
    assert not torch.equal(learned["key_transform"], constants(new_like(cache))["key_transform"])
    # Neither steps nor another turn, nor queries of either, change them.
    steps(cache, 5, seed=4)
    feed(cache, tokens(400, seed=5))
    feed(cache, tokens(1, seed=6))
    assert same(constants(cache), learned)


def new_like(cache):
    """A cache of the same kind that has seen nothing yet but zeros."""
    made = copy.deepcopy(cache)
    made.reset()
    made.layers[0].lazy_initialization(*(x[:, :, :1] for x in tokens(1)[1:]))
    return made


@pytest.mark.parametrize("length", [1, 3, 5, 20, 64, 65, 100])
def test_a_static_cache_learns_from_a_short_prompt(length):
    cache = new_cache(True, **DEFAULT)
    states = tokens(length)
    feed(cache, states)
    cache.commit()
    config = store(cache).config
    begin = 64 if length > 128 else min(4, length - 1)
    check_formulas(constants(cache), *naive(config, states[1][:, :, begin:], states[0], 0), True)
    learned = constants(cache)
    steps(cache, 330 - length)
    assert store(cache).history == 330 - 64 - 256 and same(constants(cache), learned)


def test_a_growing_cache_learns_from_its_steps_where_the_prompt_is_short():
    cache = new_cache(**DEFAULT)
    parts = [tokens(20), tokens(301, seed=1)]
    feed(cache, parts[0])
    one_by_one(cache, parts[1])
    s = store(cache)
    assert s.history == 1
    # Keys of the window, the first to be packed included, and not the step's own.
    keys = torch.cat([part[1] for part in parts], 2)[:, :, 64:320]
    spread, _ = naive(s.config, keys, parts[0][0], 0)
    transform = constants(cache)["key_transform"].double()
    white = transform.mT @ spread @ transform
    torch.testing.assert_close(white / white[:, :1, :1], torch.eye(DIM).double().expand_as(white), atol=1e-4, rtol=0)
    # Half of the prompt's queries are the sink's; then each step's, but for the one that packs.
    assert s.statistics.queries == GROUP * (10 + 300)


@each_kind
@each_window
def test_chunks_of_a_prompt_are_seen_one_after_the_other(windows, static):
    cache = new_cache(static, **windows)
    query, keys, values = tokens(600)
    for begin, end in ((0, 50), (50, 100), (100, 101), (101, 600)):
        if static and end - begin == 1:
            # A step learns nothing.
            continue
        feed(cache, [x[:, :, begin:end] for x in (query, keys, values)])
    s = store(cache)
    assert s.history > 0 and s.statistics.queries > 0
    assert all(tensor.isfinite().all() for tensor in constants(cache).values())


@each_window
@pytest.mark.parametrize("length", [352, 420, 700])
def test_growing_and_static_caches_agree(length, windows):
    caches = [new_cache(static, **windows) for static in (False, True)]
    for cache in caches:
        feed(cache, tokens(length, 2))
        steps(cache, 40, 2)
        feed(cache, tokens(90, 2, seed=7))
        steps(cache, 3, 2, seed=8)
        cache.commit()
    assert same(*(constants(cache) for cache in caches)) and equal(*(stored(cache) for cache in caches))


# ------------------------------------------------------------------------------------------------ what forgets, what keeps
@each_kind
@each_window
def test_reset_forgets(windows, static):
    used, fresh = new_cache(static, **windows), new_cache(static, **windows)
    feed(used, tokens(500, seed=1))
    steps(used, 5)
    before = constants(used)
    used.reset()
    s = used.layers[0].store
    assert s.statistics.query_moment is None and s.statistics.queries == 0
    for cache in (used, fresh):
        feed(cache, tokens(400, seed=2))
        steps(cache, 40)
    assert same(constants(used), constants(fresh)) and not same(constants(used), before)
    assert equal(stored(used), stored(fresh))


@each_kind
def test_crop_keeps_what_was_learned_as_long_as_anything_is_packed(static):
    cache = new_cache(static)
    feed(cache, tokens(200))
    steps(cache, 5)
    learned, before = constants(cache), store(cache).dense("k")
    cache.crop(-150)
    assert same(constants(cache), learned)
    torch.testing.assert_close(store(cache).dense("k"), before[:, :, :55], rtol=0, atol=0)
    feed(cache, tokens(100, seed=2))
    steps(cache, 5, seed=3)
    assert same(constants(cache), learned)


@pytest.mark.parametrize("keep", [1, 3, 4, 0])
def test_crop_to_before_the_history(keep):
    """Nothing is packed any more, so what comes next is learned from, by both kinds of cache alike."""
    caches = [new_cache(static) for static in (False, True)]
    more = tokens(150, seed=2)
    for cache in caches:
        feed(cache, tokens(200))
        steps(cache, 5)
        learned = constants(cache)
        cache.crop(keep - 205)
        assert int(cache.get_seq_length()) == keep and store(cache).history == 0
        feed(cache, more)
        cache.commit()
        assert not same(constants(cache), learned)
        check_formulas_of_keys(cache, more[1][:, :, 4 - keep :])
    assert same(*(constants(cache) for cache in caches)) and equal(*(stored(cache) for cache in caches))
    # A window of 8 beyond the sink is exact; of the rest the error is that of two bits.
    keys = store(caches[0]).dense("k")[:, :, keep:]
    exact = more[1]
    assert (keys - exact).square().mean() < 0.1 * exact.var()


def check_formulas_of_keys(cache, keys):
    spread, _ = naive(store(cache).config, keys, torch.ones(1, HEADS * GROUP, 10, DIM), 0)
    transform = constants(cache)["key_transform"].double()
    white = transform.mT @ spread @ transform
    torch.testing.assert_close(white / white[:, :1, :1], torch.eye(DIM).double().expand_as(white), atol=1e-4, rtol=0)


@each_kind
def test_steps_after_a_crop_to_before_the_history(static):
    """Rows are read with the constants that they were packed with."""
    cache = new_cache(static)
    feed(cache, tokens(200))
    steps(cache, 5)
    cache.crop(-203)
    states = tokens(100, seed=3)
    one_by_one(cache, states)
    assert store(cache).history == 102 - 4 - 8
    error = store(cache).dense("k")[:, :, 2:] - states[1]
    # A growing cache has learned from a window of 8, which is little.
    assert error.square().mean() < 0.3 * states[1].var()


GATHERS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
}


@each_kind
@each_window
@pytest.mark.parametrize("name", GATHERS)
def test_gathers_keep_what_was_learned(name, windows, static):
    gather, rows = GATHERS[name]
    cache = new_cache(static, **windows)
    feed(cache, tokens(400, 3))
    steps(cache, 3, 3)
    learned, before, dense = constants(cache), stored(cache), store(cache).dense("k")
    gather(cache)
    assert same(constants(cache), learned)
    assert equal(stored(cache), [tensor[rows] for tensor in before])
    assert torch.equal(store(cache).dense("k"), dense[rows])
    steps(cache, 40, len(rows), seed=4)
    assert same(constants(cache), learned)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@each_kind
@pytest.mark.parametrize("how", [*COPIES, "saved"])
@pytest.mark.parametrize("windows, length", [(SMALL, 3), (SMALL, 100), (DEFAULT, 40), (DEFAULT, 300), (DEFAULT, 400)])
def test_copies_go_on_bit_for_bit(windows, length, how, static, tmp_path):
    """Before anything is packed, too: what a copy will learn is the same."""
    cache = new_cache(static, **windows)
    feed(cache, tokens(length, 2))
    steps(cache, 2, 2, seed=2)
    if how == "saved":
        cache.save_pretrained(tmp_path / "cache")
        twin = OscarCache.load(tmp_path / "cache", max_cache_len=LIMIT if static else None)
    else:
        twin = COPIES[how](cache)
    before = constants(cache)
    # What the copy does leaves the original alone.
    more = max(50, sum(windows.values()) + 40 - length)
    steps(twin, more, 2, seed=3)
    assert same(constants(cache), before)
    steps(cache, more, 2, seed=3)
    assert store(cache).history > 0 and same(constants(cache), constants(twin))
    assert equal(stored(cache), stored(twin))
    twin.reset()
    feed(twin, tokens(400, 2, seed=9))
    assert not same(constants(twin), constants(cache)), "memory of their own"


@pytest.mark.parametrize("length", [5, 100, 400])
def test_a_growing_cache_that_is_loaded_as_a_static_one_has_learned(length, tmp_path):
    """As a static cache would from the same prompt; and the other way round a growing one goes on learning."""
    growing, fixed = new_cache(**DEFAULT), new_cache(True, **DEFAULT)
    for cache in (growing, fixed):
        feed(cache, tokens(length))
        cache.commit()
    growing.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache", max_cache_len=LIMIT)
    for cache in (loaded, fixed):
        steps(cache, max(10, 340 - length))
    assert same(constants(loaded), constants(fixed)) and equal(stored(loaded), stored(fixed))
    fixed = new_cache(True, **DEFAULT)
    feed(fixed, tokens(length))
    fixed.save_pretrained(tmp_path / "cache")
    loaded = OscarCache.load(tmp_path / "cache")
    for cache in (loaded, growing):
        steps(cache, max(10, 340 - length))
    assert same(constants(loaded), constants(growing)) and equal(stored(loaded), stored(growing))


def test_a_copy_while_the_prompt_waits():
    cache = new_cache()
    feed(cache, tokens(100))
    twin = copy.deepcopy(cache)
    assert cache.layers[0].store.waiting is not None and twin.layers[0].store.waiting is not None
    assert same(constants(cache), constants(twin)) and equal(stored(cache), stored(twin))


def test_constants_learned_in_inference_mode_serve_outside():
    for static in (False, True):
        caches = [new_cache(static) for _ in range(2)]
        with torch.inference_mode():
            feed(caches[0], tokens(100))
            steps(caches[0], 1)
        feed(caches[1], tokens(100))
        steps(caches[1], 1)
        for cache in caches:
            steps(cache, 10, seed=2)
            cache.reset()
            feed(cache, tokens(90, seed=3))
        assert same(*(constants(cache) for cache in caches)) and equal(*(stored(cache) for cache in caches))


# ------------------------------------------------------------------------------------------------ padding
@each_kind
@each_window
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("pad", [3, 40, 200, 330])
def test_padding_does_not_enter(pad, stated, attn, windows, static):
    """What stands in padded slots is nothing that a cache may learn from or center by."""
    made = []
    mask = torch.arange(420) >= torch.tensor([[0], [pad]])
    for junk in (0.0, 50.0):
        cache = new_cache(static, **windows)
        states = tokens(420, 2)
        for x in states:
            x[1, :, :pad] = junk * torch.randn(x[1, :, :pad].shape, generator=torch.Generator().manual_seed(5))
        if stated:
            cache.set_padding(mask)
        feed(cache, states, mask, attn)
        steps(cache, 4, 2)
        made.append((constants(cache), store(cache)))
    (first, one), (second, other) = made
    assert same(first, second)
    sink, history = one.sink, one.history
    real = torch.arange(sink, sink + history) >= torch.tensor([[0], [pad]])
    for a, b in zip(one.sides, other.sides):
        for x, y in zip(a.rows.read(0, history)[:2], b.rows.read(0, history)[:2]):
            assert torch.equal(x[real[:, None].expand(x.shape[:3])], y[real[:, None].expand(y.shape[:3])])
    assert torch.equal(one.keys.rows.centers, other.keys.rows.centers)


@each_kind
@pytest.mark.parametrize("pad", [0, 4, 5, 36, 37, 50, 68, 90])
def test_centers_are_means_of_real_tokens(pad, static):
    cache = new_cache(static)
    states, mask = tokens(150, 2), torch.arange(150) >= torch.tensor([[0], [pad]])
    feed(cache, states, mask)
    s = store(cache)
    # The prompt's last 39 tokens are exact still; a block is centered by all of its tokens that are there.
    assert s.history == 150 - 4 - 39 and s.keys.center_block == 32
    for row, start in enumerate((0, pad)):
        for block in range(-(-s.history // 32)):
            begin, end = 4 + 32 * block, min(4 + 32 * (block + 1), 150)
            members = states[1][row, :, max(begin, start) : end]
            expected = members.mean(1) if members.shape[1] else torch.zeros(HEADS, DIM)
            torch.testing.assert_close(s.keys.rows.centers[row, :, block].float(), expected, atol=2e-3, rtol=1e-3)


def test_a_row_of_padding_alone_teaches_nothing():
    one, two = new_cache(), new_cache()
    states = tokens(100, 2)
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[1] = False
    feed(one, [x[:1] for x in states], mask[:1])
    feed(two, states, mask)
    moments = [cache.layers[0].store.statistics.query_moment for cache in (one, two)]
    torch.testing.assert_close(*moments)
    assert [cache.layers[0].store.statistics.queries for cache in (one, two)] == [GROUP * 96] * 2


# ------------------------------------------------------------------------------------------------ who shows queries
def model_constants(model, ids, mask, static=False, wrapped=False, **options):
    """Constants of all layers after a prompt and three steps, and the queries that each was made from."""
    cache = OscarCache(model.config, **SMALL, **(dict(max_cache_len=128) if static else {}), **options)
    undo = register_attention() if wrapped else lambda: None
    try:
        model.generate(
            ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=4, do_sample=False, disable_compile=True
        )
    finally:
        undo()
    cache.commit()
    return [(layer.constants.tensors(), layer.store.statistics.queries) for layer in cache.layers]


@pytest.mark.parametrize("pads", [(), (0, 13)], ids=["unpadded", "padded"])
@each_kind
def test_every_attention_shows_the_same_queries_once(flash, static, pads):  # noqa: F811
    ids, mask = prompt(2, 60, pads)
    models = {attn: tiny_model("llama", attn) for attn in ("sdpa", "eager")}
    models[FLASH] = tiny_model("llama")
    models[FLASH].config._attn_implementation = FLASH
    expected = model_constants(models["sdpa"], ids, mask, static)
    # Half of the first tokens at most are left out for the sink's sake.
    assert [queries for _, queries in expected] == [2 * GROUP * 56] * 3
    for attn, wrapped in (("eager", False), ("sdpa", True), ("eager", True), (FLASH, True)):
        got = model_constants(models[attn], ids, mask, static, wrapped)
        for (ours, queries), (theirs, number) in zip(got, expected):
            assert queries == number
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], atol=1e-3, rtol=1e-3)


def test_flash_attention_that_is_not_registered_shows_none(flash):  # noqa: F811
    """The keys' statistics are there all the same."""
    model = tiny_model("llama")
    ids, mask = prompt(2, 60)
    expected = model_constants(model, ids, mask)
    model.config._attn_implementation = FLASH
    with pytest.warns(UserWarning, match="has no packed path"):
        got = model_constants(model, ids, mask)
    for (ours, queries), (theirs, _) in zip(got, expected):
        assert queries == 0
        torch.testing.assert_close(ours["key_transform"], theirs["key_transform"], atol=1e-3, rtol=1e-3)
        assert all(tensor.isfinite().all() for tensor in ours.values())


def test_compiled_chunks_of_a_prompt_show_theirs():
    model = tiny_model("llama")
    ids, mask = prompt(2, 72)
    made = []
    for options in (dict(disable_compile=True), Counting("eager").options):
        cache = OscarCache(model.config, max_cache_len=128, **SMALL)
        model.generate(
            ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, prefill_chunk_size=24, max_new_tokens=3, do_sample=False,
            **options,
        )  # fmt: skip
        made.append(cache)
    assert made[0].layers[0].store.statistics.queries == made[1].layers[0].store.statistics.queries > 0
    for layer, other in zip(*(cache.layers for cache in made)):
        for name, tensor in layer.constants.tensors().items():
            torch.testing.assert_close(tensor, other.constants.tensors()[name], atol=1e-4, rtol=1e-4)


def test_offloading_changes_nothing():
    model = tiny_model("llama")
    ids, mask = prompt(2, 60, (0, 13))
    one, other = (model_constants(model, ids, mask, offloading=offloading) for offloading in (False, True))
    for (ours, queries), (theirs, number) in zip(one, other):
        assert queries == number > 0 and same(ours, theirs)


def test_autocast_enters_neither():
    states = tokens(100)
    caches = [new_cache(), new_cache()]
    feed(caches[0], states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Not through attention, to which autocast gives queries in bfloat16.
        key, _ = caches[1].update(*states[1:], 0)
        key.source.observe()
        key.source.see_queries(states[0])
        caches[1].commit()
    assert same(*(constants(cache) for cache in caches))


def test_queries_are_not_looked_at_where_nothing_is_to_be_learned(monkeypatch):
    seen = []
    original = PromptStatistics.see
    monkeypatch.setattr(PromptStatistics, "see", lambda *arguments: seen.append(1) or original(*arguments))
    cache = new_cache(recipe="hadamard", key_scale="search")
    feed(cache, tokens(100))
    assert cache.layers[0].store.statistics is None and not seen
    cache = new_cache()
    feed(cache, tokens(100))
    assert len(seen) == 1
    steps(cache, 5)
    assert len(seen) == 1, "what is packed is packed"


def test_a_calibrated_metric_is_taken_as_it_is():
    artifact = calibrated_artifact(layers=1)
    cache = new_cache(artifact=artifact)
    feed(cache, tokens(100))
    assert cache.layers[0].store.statistics is None
    # A missing one is learned, for the transform that the artifact gives.
    artifact = calibrated_artifact(layers=1, without=["key_metric"])
    cache = new_cache(artifact=artifact)
    states = tokens(100)
    feed(cache, states)
    made = constants(cache)
    torch.testing.assert_close(made["key_transform"], artifact.layers[0].key_transform)
    _, queries = naive(OscarConfig(**SMALL), states[1][:, :, 4:], states[0], 0)
    inverse, eye = made["key_inverse"].double(), torch.eye(DIM).double()
    left = torch.linalg.inv(eye + made["key_metric"].double())
    diagonal = left @ (inverse @ queries @ inverse.mT) @ left.mT
    off = diagonal - torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-3 * diagonal.abs().max()

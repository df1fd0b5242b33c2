"""Many new tokens on top of a history: flash attention block by block against packed_attention, its specification."""

import weakref

import pytest
import torch
from helpers import calibrated_artifact

from oscar_hf.attention import blockwise, dispatch
from oscar_hf.attention.blockwise import prefill_attention, prefill_problem
from oscar_hf.attention.dispatch import attend
from oscar_hf.attention.packed import packed_attention
from oscar_hf.cache.layer import OscarLayer
from oscar_hf.storage.waiting_prompt import DRAFT_MARGIN

SINK, RECENT = 8, 16
# What is exact after a prompt has been packed.
EXACT = SINK + RECENT - 1 + DRAFT_MARGIN
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def store_with(tokens, new, heads=2, dim=64, batch=1, dtype=torch.float32, starts=None, device="cpu", value_dim=None):
    """The store of a layer that has packed a prompt of `tokens` and holds `new` more of the latest call."""
    artifact = calibrated_artifact(1, heads, dim, value_dim=value_dim, sink_tokens=SINK, recent_tokens=RECENT)
    layer = OscarLayer(artifact.config, artifact, 0)
    layer.set_padding(list(starts or [0] * batch))
    generator = torch.Generator().manual_seed(tokens + new)
    for count in filter(None, (tokens, new)):
        states = torch.randn(2, batch, heads, count, dim, generator=generator).to(device, dtype)
        layer.update(states[0], states[1][..., :value_dim])
    return layer.store


def queries(store, new, group, seed=0):
    shape = (store.batch_size, store.kv_heads * group, new, store.keys.sink.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(store.device, store.dtype)


def causal_mask(store, new, total, starts=None):
    """The mask that transformers makes: bool [B, 1, M, T]."""
    slots = torch.arange(total, device=store.device)
    mask = slots <= torch.arange(total - new, total, device=store.device)[:, None]
    starts = torch.tensor(starts or [0] * store.batch_size, device=store.device)
    return (mask & (slots >= starts[:, None, None]))[:, None]


def additive(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def error(output, exact):
    return ((output.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def taken(monkeypatch):
    """A list that grows with every call of the fast path through `attend`."""
    calls = []
    monkeypatch.setattr(dispatch, "prefill_attention", lambda *args: calls.append(args) or prefill_attention(*args))
    return calls


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


GROUPS, DIMS, HISTORIES = (1, 2, 3, 5, 8), (64, 96, 128, 256), (0, 1, 300, 5000)
CASES = [
    (group, dim, history, dtype)
    for i, group in enumerate(GROUPS)
    for j, dim in enumerate(DIMS)
    for k, history in enumerate(HISTORIES)
    for dtype in [list(TOLERANCE)[(i + j + k) % 4]]
    # A third of them, in which every pair of small ones occurs; a long history with few heads of small dims is enough.
    if (i + j + k) % 3 == 0 and group * dim * history < 2_000_000
]


@pytest.mark.parametrize("group,dim,history,dtype", CASES)
def test_equals_the_specification(group, dim, history, dtype, device, monkeypatch):
    """Within the dtype's rounding of float64 over the same codes."""
    # Several blocks, the last one short.
    monkeypatch.setattr(blockwise, "block_size", lambda store: 2048 if history > 2048 else 128)
    new = 70
    store = store_with(EXACT + history if history else SINK // 2, new, dim=dim, dtype=dtype, device=device)
    assert store.history == history
    query = queries(store, new, group)
    with torch.no_grad():
        if device == "cuda" and dtype in (torch.float32, torch.float64):
            assert "no flash attention" in prefill_problem(store, query)
            return
        assert prefill_problem(store, query) == ""
        exact = packed_attention(store, query.double(), None, True, 0.3 * dim**-0.5)
        output = prefill_attention(store, query, 0.3 * dim**-0.5)
    assert output.dtype == dtype and output.shape == query.shape
    assert error(output, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "tokens,starts",
    [
        (EXACT + 300, [0, 100]),  # within the history
        (EXACT + 300, [300, 3, 0]),  # the row's sink just fits
        (EXACT + 300, [306, 0]),  # the row's sink is part in the ring
        (EXACT + 300, [308, 200]),  # its sink is empty
        (SINK + 3, [2, 0]),  # nothing packed
        (SINK // 2, [3, 4, 0]),  # a row of padding alone before this call
        (EXACT + 300, [17, 17]),
    ],
)
def test_padding(tokens, starts, taken, device):
    """Rows that begin late, in all regions, with the mask that says so and without one."""
    new = 65
    dtype = torch.float32 if device == "cpu" else torch.float16
    store = store_with(tokens, new, batch=len(starts), starts=starts, dtype=dtype, device=device)
    query = queries(store, new, 2)
    mask = causal_mask(store, new, tokens + new, starts)
    with torch.no_grad():
        exact = packed_attention(store, query.double(), mask, False, None)
        for form, is_causal in ((mask, False), (additive(mask), False), (None, True)):
            assert error(attend(store, query, form, is_causal, None, new), exact) < TOLERANCE[dtype]
    assert len(taken) == 3


@pytest.mark.parametrize("tokens,starts", [(EXACT + 50, [60, 0]), (20, [25, 0])])
def test_rows_that_begin_later_take_the_specification(tokens, starts, taken):
    """A row that begins within the recent window or the new tokens."""
    store = store_with(tokens, 65, batch=2, starts=starts)
    query, mask = queries(store, 65, 1), causal_mask(store, 65, tokens + 65, starts)
    with torch.no_grad():
        expected = packed_attention(store, query, mask, False, None)
        assert torch.equal(attend(store, query, mask, False, None, 65), expected)
    assert not taken


@pytest.mark.parametrize("tokens", [SINK + 4, EXACT + 100])
def test_new_tokens_that_are_placed(tokens, device):
    """Few tokens are in the ring already."""
    new = 20
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    store = store_with(tokens, new, dtype=dtype, device=device)
    assert store.waiting is None
    query = queries(store, new, 3)
    with torch.no_grad():
        assert prefill_problem(store, query) == ""
        exact = packed_attention(store, query.double(), None, True, None)
        assert error(prefill_attention(store, query, None), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("starts", [None, [0, 500]])
def test_one_block_is_alive_at_a_time(starts, monkeypatch):
    """When a block is dequantized, those before it are gone, and none is larger than the bound."""
    batch = len(starts or [0])
    store = store_with(EXACT + 2000, 65, batch=batch, starts=starts)
    per_token = batch * store.kv_heads * 64
    monkeypatch.setattr(blockwise, "_BLOCK_ELEMENTS", 601 * per_token)
    alive, sizes, original = [], [], blockwise.dequantize_rows

    def counted(*args, **options):
        live = [reference for reference in alive if reference() is not None]
        # Of this block the keys may be there already.
        assert len(live) <= len(alive) % 2
        block = original(*args, **options)
        alive.append(weakref.ref(block))
        sizes.append(block.numel())
        return block

    monkeypatch.setattr(blockwise, "dequantize_rows", counted)
    with torch.no_grad():
        prefill_attention(store, queries(store, 65, 2), None)
    assert len(sizes) == 2 * 4 and max(sizes) == 600 * per_token


def test_block_size_is_even_and_bounded():
    store = store_with(10, 65)
    assert blockwise.block_size(store) == blockwise._MAX_BLOCK
    store.batch_size = 100_000
    assert blockwise.block_size(store) == blockwise._MIN_BLOCK


def test_what_takes_the_specification(taken):
    """Masks that hide more, or less, than padding and later tokens; biases; no causality; gradients; other dtypes."""
    tokens, new = EXACT + 100, 65
    store = store_with(tokens, new)
    query = queries(store, new, 2)
    plain = causal_mask(store, new, tokens + new)
    hole, window, sees_later, padded = (plain.clone() for _ in range(4))
    hole[..., 30, 40] = False
    window = window & (torch.arange(tokens + new) > torch.arange(tokens, tokens + new)[:, None] - 100)
    sees_later[..., 0, tokens + 5] = True
    padded[..., :20] = False
    bias = additive(plain)
    bias[..., 3] = -0.5
    with torch.no_grad():
        for mask in (hole, window, sees_later, padded, bias, plain.expand(-1, 4, -1, -1), None):
            expected = packed_attention(store, query, mask, False, None)
            assert torch.equal(attend(store, query, mask, False, None, new), expected)
        assert not taken
        wide = torch.cat([plain, torch.ones(1, 1, new, 7, dtype=torch.bool)], -1)
        for mask in (plain, additive(plain), additive(plain, torch.bfloat16), wide):
            assert (
                error(
                    attend(store, query, mask, False, None, new),
                    packed_attention(store, query.double(), plain, False, None),
                )
                < 3e-6
            )
        assert len(taken) == 4
        assert "one dtype" in prefill_problem(store, query.double())
        assert "differ in number" in prefill_problem(store, query[:, :, :-1])
    assert "gradient" in prefill_problem(store, query.requires_grad_())
    other = store_with(tokens, new, value_dim=48)
    assert "no flash attention" in prefill_problem(other, queries(other, new, 1))
    few = store_with(3, 10)
    few.place_waiting()
    few.set_lengths(9, 0)
    assert "sink" in prefill_problem(few, queries(few, 3, 1))


def test_huge_queries_stay_finite():
    """Rotated queries saturate where they are held in fp16."""
    store = store_with(EXACT + 100, 65, dtype=torch.bfloat16)
    with torch.no_grad():
        assert prefill_attention(store, queries(store, 65, 2) * 1e5, None).isfinite().all()

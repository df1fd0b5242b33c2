"""Many new tokens on top of a history: flash attention block by block against packed_attention, its specification."""

import weakref

import pytest
import torch
from helpers import calibrated_artifact

from oscar_hf.attention import blockwise as prefill
from oscar_hf.attention import packed as attention
from oscar_hf.attention.blockwise import prefill_attention, prefill_problem
from oscar_hf.attention.packed import attend, packed_attention
from oscar_hf.cache.layer import DRAFT_MARGIN, OscarLayer

SINK, RECENT = 8, 16
# What is exact after a prompt has been packed.
EXACT = SINK + RECENT - 1 + DRAFT_MARGIN
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer_with(tokens, new, heads=2, dim=64, batch=1, dtype=torch.float32, starts=None, device="cpu", value_dim=None):
    """A layer that has packed a prompt of `tokens` and holds `new` more of the latest call."""
    artifact = calibrated_artifact(1, heads, dim, value_dim=value_dim, sink_tokens=SINK, recent_tokens=RECENT)
    layer = OscarLayer(artifact.config, artifact, 0)
    layer.set_starts(list(starts or [0] * batch))
    generator = torch.Generator().manual_seed(tokens + new)
    for count in filter(None, (tokens, new)):
        states = torch.randn(2, batch, heads, count, dim, generator=generator).to(device, dtype)
        layer.commit()
        layer.update(states[0], states[1][..., :value_dim])
    return layer


def queries(layer, new, group, seed=0):
    shape = (layer.batch_size, layer.kv_heads * group, new, layer.sink_keys.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(layer.device, layer.dtype)


def causal_mask(layer, new, total, starts=None):
    """The mask that transformers makes: bool [B, 1, M, T]."""
    slots = torch.arange(total, device=layer.device)
    mask = slots <= torch.arange(total - new, total, device=layer.device)[:, None]
    starts = torch.tensor(starts or [0] * layer.batch_size, device=layer.device)
    return (mask & (slots >= starts[:, None, None]))[:, None]


def additive(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def error(output, exact):
    return ((output.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def taken(monkeypatch):
    """A list that grows with every call of the fast path through `attend`."""
    calls = []
    monkeypatch.setattr(attention, "prefill_attention", lambda *args: calls.append(args) or prefill_attention(*args))
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
    monkeypatch.setattr(prefill, "block_size", lambda layer: 2048 if history > 2048 else 128)
    new = 70
    layer = layer_with(EXACT + history if history else SINK // 2, new, dim=dim, dtype=dtype, device=device)
    assert layer.history == history
    query = queries(layer, new, group)
    with torch.no_grad():
        if device == "cuda" and dtype in (torch.float32, torch.float64):
            assert "no flash attention" in prefill_problem(layer, query)
            return
        assert prefill_problem(layer, query) == ""
        exact = packed_attention(layer, query.double(), None, True, 0.3 * dim**-0.5)
        output = prefill_attention(layer, query, 0.3 * dim**-0.5)
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
    layer = layer_with(tokens, new, batch=len(starts), starts=starts, dtype=dtype, device=device)
    query = queries(layer, new, 2)
    mask = causal_mask(layer, new, tokens + new, starts)
    with torch.no_grad():
        exact = packed_attention(layer, query.double(), mask, False, None)
        for form, is_causal in ((mask, False), (additive(mask), False), (None, True)):
            assert error(attend(layer, query, form, is_causal, None, new), exact) < TOLERANCE[dtype]
    assert len(taken) == 3


@pytest.mark.parametrize("tokens,starts", [(EXACT + 50, [60, 0]), (20, [25, 0])])
def test_rows_that_begin_later_take_the_specification(tokens, starts, taken):
    """A row that begins within the recent window or the new tokens."""
    layer = layer_with(tokens, 65, batch=2, starts=starts)
    query, mask = queries(layer, 65, 1), causal_mask(layer, 65, tokens + 65, starts)
    with torch.no_grad():
        expected = packed_attention(layer, query, mask, False, None)
        assert torch.equal(attend(layer, query, mask, False, None, 65), expected)
    assert not taken


@pytest.mark.parametrize("tokens", [SINK + 4, EXACT + 100])
def test_new_tokens_that_are_placed(tokens, device):
    """Few tokens are in the ring already."""
    new = 20
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = layer_with(tokens, new, dtype=dtype, device=device)
    assert layer.pending is None
    query = queries(layer, new, 3)
    with torch.no_grad():
        assert prefill_problem(layer, query) == ""
        exact = packed_attention(layer, query.double(), None, True, None)
        assert error(prefill_attention(layer, query, None), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("starts", [None, [0, 500]])
def test_one_block_is_alive_at_a_time(starts, monkeypatch):
    """When a block is dequantized, those before it are gone, and none is larger than the bound."""
    batch = len(starts or [0])
    layer = layer_with(EXACT + 2000, 65, batch=batch, starts=starts)
    per_token = batch * layer.kv_heads * 64
    monkeypatch.setattr(prefill, "_BLOCK_ELEMENTS", 601 * per_token)
    alive, sizes, original = [], [], prefill.dequantize_rows

    def counted(*args):
        live = [reference for reference in alive if reference() is not None]
        # Of this block the keys may be there already.
        assert len(live) <= len(alive) % 2
        block = original(*args)
        alive.append(weakref.ref(block))
        sizes.append(block.numel())
        return block

    monkeypatch.setattr(prefill, "dequantize_rows", counted)
    with torch.no_grad():
        prefill_attention(layer, queries(layer, 65, 2), None)
    assert len(sizes) == 2 * 4 and max(sizes) == 600 * per_token


def test_block_size_is_even_and_bounded():
    layer = layer_with(10, 65)
    assert prefill.block_size(layer) == prefill._MAX_BLOCK
    layer.batch_size = 100_000
    assert prefill.block_size(layer) == prefill._MIN_BLOCK


def test_what_takes_the_specification(taken):
    """Masks that hide more, or less, than padding and later tokens; biases; no causality; gradients; other dtypes."""
    tokens, new = EXACT + 100, 65
    layer = layer_with(tokens, new)
    query = queries(layer, new, 2)
    plain = causal_mask(layer, new, tokens + new)
    hole, window, sees_later, padded = (plain.clone() for _ in range(4))
    hole[..., 30, 40] = False
    window = window & (torch.arange(tokens + new) > torch.arange(tokens, tokens + new)[:, None] - 100)
    sees_later[..., 0, tokens + 5] = True
    padded[..., :20] = False
    bias = additive(plain)
    bias[..., 3] = -0.5
    with torch.no_grad():
        for mask in (hole, window, sees_later, padded, bias, plain.expand(-1, 4, -1, -1), None):
            expected = packed_attention(layer, query, mask, False, None)
            assert torch.equal(attend(layer, query, mask, False, None, new), expected)
        assert not taken
        wide = torch.cat([plain, torch.ones(1, 1, new, 7, dtype=torch.bool)], -1)
        for mask in (plain, additive(plain), additive(plain, torch.bfloat16), wide):
            assert (
                error(
                    attend(layer, query, mask, False, None, new),
                    packed_attention(layer, query.double(), plain, False, None),
                )
                < 3e-6
            )
        assert len(taken) == 4
        assert "one dtype" in prefill_problem(layer, query.double())
        assert "differ in number" in prefill_problem(layer, query[:, :, :-1])
    assert "gradient" in prefill_problem(layer, query.requires_grad_())
    other = layer_with(tokens, new, value_dim=48)
    assert "no flash attention" in prefill_problem(other, queries(other, new, 1))
    few = layer_with(3, 10)
    few.commit()
    few.tokens, few.history = 9, 0
    assert "sink" in prefill_problem(few, queries(few, 3, 1))


def test_a_mask_is_looked_at_once(monkeypatch):
    """All layers of a model share a mask; it is not kept alive."""
    looks, original = [], attention._find_leading
    monkeypatch.setattr(attention, "_find_leading", lambda *args: looks.append(1) or original(*args))
    layer = layer_with(100, 65)
    mask = causal_mask(layer, 65, 165)
    with torch.no_grad():
        for _ in range(3):
            attend(layer, queries(layer, 65, 1), mask, False, None, 65)
    assert len(looks) == 1
    reference = weakref.ref(mask)
    del mask
    assert reference() is None


def test_huge_queries_stay_finite():
    """Rotated queries saturate where they are held in fp16."""
    layer = layer_with(EXACT + 100, 65, dtype=torch.bfloat16)
    with torch.no_grad():
        assert prefill_attention(layer, queries(layer, 65, 2) * 1e5, None).isfinite().all()

"""The step kernel against its PyTorch reference: in Triton's interpreter, and on a GPU if there is one."""

import copy
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before the kernels are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import calibrated_artifact, pairwise_mix, random_covariance, random_orthogonal, side_of

from oscar_hf.kernels import decode_step, launch
from oscar_hf.kernels.decode_step import (
    AHEAD,
    COUNTERS,
    HISTORY,
    LENGTH,
    OVERFLOW,
    encode_ahead_reference,
    encode_ahead_triton,
    packed_after,
    place_problem,
    place_tokens_reference,
    place_tokens_triton,
)
from oscar_hf.kernels.dequantize import dequantize_rows_reference
from oscar_hf.quantization.packed_rows import PackedRows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not launch.interpreting(), reason="needs Triton, with a GPU or interpreted"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SINK, RECENT, EXTRA = 4, 5, 8
# Fills sink and window, overflows the window by drafts, then goes on token by token.
STEPS = [1, 3, 8, 1, 1, 1, 5, 1, 1, 2, 8, 8, 1, 1, 1]


def side(heads, dim, group, symmetric, rule, dtype, seed, batch=2, centered=True, capacity=64, ring=RECENT - 1 + EXTRA):
    """Empty windows and store, random constants."""
    made = side_of(
        PackedRows(batch, heads, dim, group, symmetric, DEVICE, capacity),
        rule,
        random_orthogonal(heads, dim, dim, seed=seed).float(),
        torch.randn(heads, dim) if centered else None,
        random_covariance(heads, dim, dim, seed=seed + 1).float(),
        sink=torch.zeros(batch, heads, SINK, dim, dtype=dtype),
        ring=torch.zeros(batch, heads, ring, dim, dtype=dtype),
    )
    for name in ("sink", "ring", "transform", "mean", "metric"):
        tensor = getattr(made, name)
        setattr(made, name, None if tensor is None else tensor.to(DEVICE).contiguous())
    return made


def stored(keys, values):
    """Every tensor that a step writes."""
    return [t for s in (keys, values) for t in (*s.rows.named.values(), s.sink, s.ring)]


def run(steps, pairs, dtype, on_device, start=None, limit=None, key_dim=64, value_dim=64, heads=2):
    """Both implementations over the same random tokens; returns both lengths."""
    start = None if start is None else torch.tensor(start, dtype=torch.int32, device=DEVICE)
    lengths = [torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE) if on_device else (0, 0) for _ in range(2)]
    places = (place_tokens_reference, place_tokens_triton)
    for new in steps:
        tokens = [torch.randn(2, heads, new, dim, device=DEVICE).to(dtype) for dim in (key_dim, value_dim)]
        for i, place in enumerate(places):
            lengths[i] = place(*pairs[i], *tokens, lengths[i], RECENT, start, limit)
    return lengths


@pytest.mark.parametrize(
    "dim, group, rule, on_device, start, dtype",
    [
        (64, 64, "weighted_search_both_ends", True, [0, 5], torch.bfloat16),
        (128, 64, "percentile(0.9)", False, None, torch.float32),
        (96, 32, "search", True, [3, 0], torch.float16),
        (16, 16, "weighted_search", True, None, torch.float32),
        (256, 128, "weighted_search_both_ends", False, [11, 0], torch.float16),
    ],
)
def test_equals_the_reference(dim, group, rule, on_device, start, dtype):
    torch.manual_seed(0)
    keys = side(2, dim, group, False, rule, dtype, 1)
    values = side(2, dim, group, True, "percentile(0.92)", dtype, 2, centered=False)
    pairs = [(keys, values), copy.deepcopy((keys, values))]
    lengths = run(STEPS, pairs, dtype, on_device, start, key_dim=dim, value_dim=dim)
    total = sum(STEPS)
    expected = (total, packed_after(total - STEPS[-1], 0, SINK, RECENT))
    for got in lengths:
        assert tuple(got.tolist()[:2] if on_device else got) == expected
    if on_device:
        assert lengths[1].tolist()[2:] == [0, 0, 0]
    for reference, kernel in zip(stored(*pairs[0]), stored(*pairs[1])):
        assert reference.count_nonzero() and torch.equal(reference, kernel)


def test_keys_and_values_of_different_head_dims_without_transforms():
    torch.manual_seed(0)
    keys, values = (
        side(2, dim, 16, symmetric, "percentile(none)", torch.float32, 3, centered=False)
        for dim, symmetric in ((32, False), (48, True))
    )
    keys.transform = values.transform = None
    pairs = [(keys, values), copy.deepcopy((keys, values))]
    run(STEPS, pairs, torch.float32, True, key_dim=32, value_dim=48)
    for reference, kernel in zip(stored(*pairs[0]), stored(*pairs[1])):
        assert torch.equal(reference, kernel)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_step_that_does_not_fit_writes_nothing(on_device):
    torch.manual_seed(0)
    keys, values = (side(2, 64, 64, False, "percentile(0.9)", torch.float32, s, centered=False) for s in (1, 2))
    pairs = [(keys, values), copy.deepcopy((keys, values))]
    lengths = run([8, 4], pairs, torch.float32, on_device, limit=12)
    before = [t.clone() for t in stored(*pairs[1])]
    tokens = torch.randn(2, 2, 1, 64, device=DEVICE)
    for i, place in enumerate((place_tokens_reference, place_tokens_triton)):
        lengths[i] = place(*pairs[i], tokens, tokens, lengths[i], RECENT, None, 12)
        if on_device:
            assert lengths[i][LENGTH] == 12 and lengths[i][OVERFLOW] == 1 and lengths[i][HISTORY] == 0
        else:
            assert lengths[i] == (12, 0)
    for old, new in zip(before, stored(*pairs[1])):
        assert torch.equal(old, new)


def test_the_new_token_may_take_the_slot_of_one_that_leaves():
    """The ring is as full as it can be: what leaves is read before the new token is written over it."""
    torch.manual_seed(0)
    ring = RECENT - 1 + 1
    keys, values = (side(2, 64, 64, False, "search", torch.float32, s, centered=False, ring=ring) for s in (1, 2))
    pairs = [(keys, values), copy.deepcopy((keys, values))]
    run([1] * 20, pairs, torch.float32, True)
    for reference, kernel in zip(stored(*pairs[0]), stored(*pairs[1])):
        assert torch.equal(reference, kernel)


def test_refusals():
    keys, values = (side(2, 64, 64, False, "weighted_search", torch.float32, s) for s in (1, 2))
    tokens = torch.randn(2, 2, 1, 64, device=DEVICE)
    keys.metric = None
    with pytest.raises(ValueError, match="error metric"):
        place_tokens_triton(keys, values, tokens, tokens, (0, 0), RECENT)
    assert "for keys only" in place_problem(keys, values) or DEVICE == "cpu"
    full = side(2, 64, 64, False, "search", torch.float32, 1, capacity=2)
    with pytest.raises(ValueError, match="reserve first"):
        place_tokens_triton(full, full, tokens, tokens, (40, 2), RECENT)


@pytest.mark.parametrize("start", [None, [0, 5]])
def test_encoding_ahead_changes_nothing_but_when(start):
    """Steps of one and of several tokens with and without it, and each implementation against the other."""
    torch.manual_seed(0)
    keys = side(2, 128, 64, False, "weighted_search_both_ends", torch.bfloat16, 1)
    values = side(2, 128, 64, False, "percentile(0.92)", torch.bfloat16, 2, centered=False)
    plain, triton_ahead, reference_ahead = pairs = [
        (keys, values),
        copy.deepcopy((keys, values)),
        copy.deepcopy((keys, values)),
    ]
    counters = [torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE) for _ in pairs]
    start = None if start is None else torch.tensor(start, dtype=torch.int32, device=DEVICE)
    for new in STEPS:
        tokens = [torch.randn(2, 2, new, 128, device=DEVICE).bfloat16() for _ in "kv"]
        for pair, counter in zip(pairs, counters):
            place = place_tokens_reference if pair is reference_ahead else place_tokens_triton
            place(*pair, *tokens, counter, RECENT, start, None)
        length, history = counters[0].tolist()[:2]
        assert all(c[LENGTH] == length and c[HISTORY] == history for c in counters)
        encode_ahead_triton(*triton_ahead, counters[1], RECENT)
        encode_ahead_reference(*reference_ahead, counters[2], RECENT)
        is_full = length - SINK - history >= RECENT
        assert counters[1].tolist() == counters[2].tolist()
        assert counters[1][AHEAD] == (history + 1 if is_full else 0)
        for ours, reference in zip(stored(*triton_ahead), stored(*reference_ahead)):
            assert torch.equal(ours, reference)
    # What was encoded ahead of the last step lies behind the history.
    for expected, got in zip(stored(*plain), stored(*triton_ahead)):
        rows = slice(None) if expected.shape[2] in (SINK, keys.ring.shape[2]) else slice(int(counters[0][HISTORY]))
        assert torch.equal(expected[:, :, rows], got[:, :, rows])
    # Garbage in the ring's oldest slot shows that the step takes the codes as they are.
    triton_ahead[0].ring.fill_(7.0)
    kept = [t.clone() for t in triton_ahead[0].rows.named.values()]
    place_tokens_triton(
        *triton_ahead, *(torch.zeros(2, 2, 1, 128, device=DEVICE).bfloat16() for _ in "kv"), counters[1], RECENT
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, triton_ahead[0].rows.named.values()))


def centered_side(dim, block, dtype, history, held, seed, symmetric=False):
    """Windows that hold `held` history tokens from `history` on, far from 0, and a store with centers of blocks, or a mean.

    All sums are exact, so that codes may not depend on their order.
    """
    torch.manual_seed(seed)
    ring = held + EXTRA
    rows = PackedRows(2, 2, dim, dim // 2, symmetric, DEVICE, history + ring + 1, block)
    if block:
        # What a step does not open must stay.
        rows.centers.copy_(100 * torch.randn(rows.centers.shape))
    made = side_of(rows, "percentile(none)", pairwise_mix(dim, seed).to(DEVICE), torch.randn(2, dim, device=DEVICE))
    made.inverse = 2 * made.transform.mT
    made.sink = torch.zeros(2, 2, SINK, dim, dtype=dtype, device=DEVICE)
    offset = torch.randint(-100, 101, (2, 1, dim))
    made.ring = (offset + torch.randint(-4, 5, (2, 2, ring, dim)) / 2).to(DEVICE, dtype)
    return made


def ulps_apart(a, b):
    """How many fp16 numbers lie between, elementwise."""
    a, b = ((bits & 0x7FFF) * (1 - 2 * (bits < 0).int()) for bits in (t.view(torch.int16).int() for t in (a, b)))
    return (a - b).abs()


def adopt_centers(monkeypatch, ours, kernels):
    """Make the reference go on with the centers of the kernel, once it has seen that they differ from its own by rounding."""
    opened = decode_step._open_blocks

    def open_and_adopt(side, *arguments):
        opened(side, *arguments)
        if side.center_block:
            theirs = kernels[[side is mine for mine in ours].index(True)].rows.centers
            apart = ulps_apart(side.rows.centers, theirs)
            assert apart.max() <= 1 and apart.float().mean() < 0.01
            side.rows.centers.copy_(theirs)

    monkeypatch.setattr(decode_step, "_open_blocks", open_and_adopt)


@pytest.mark.parametrize(
    "dim, block, value_block, dtype, history, held, recent, start, on_device",
    [
        # Two blocks at once, of the last of which only some tokens are there.
        (64, 32, 0, torch.bfloat16, 31, 38, 5, None, True),
        # From within a block to the next, of which one row has padding alone, the other some. Values have blocks, too.
        (64, 32, 64, torch.float16, 61, 45, 38, [SINK + 96, SINK + 70], True),
        (96, 64, 0, torch.float32, 127, 20, 17, [SINK + 136, 3], False),
        (128, 128, 0, torch.bfloat16, 250, 140, 133, [0, SINK + 300], True),
        # No block opens.
        (128, 64, 0, torch.float16, 65, 12, 10, [0, 80], True),
        # A block opens with the last step's token.
        (80, 32, 0, torch.bfloat16, 92, 9, 7, None, False),
    ],
)
def test_centers_of_blocks(dim, block, value_block, dtype, history, held, recent, start, on_device, monkeypatch):
    """Steps that open blocks: centers, codes and windows, with garbage in the centers before."""
    keys = centered_side(dim, block, dtype, history, held, 1)
    values = centered_side(dim, value_block, dtype, history, held, 2, symmetric=True)
    pairs = [(keys, values), copy.deepcopy((keys, values))]
    before = keys.rows.centers.clone()
    adopt_centers(monkeypatch, *pairs)
    start = None if start is None else torch.tensor(start, dtype=torch.int32, device=DEVICE)
    length = SINK + history + held
    lengths = [torch.tensor([length, history, 0, 0, 0], dtype=torch.int32, device=DEVICE) for _ in pairs]
    if not on_device:
        lengths = [(length, history)] * 2
    exact, exact_values = keys.ring.clone(), values.ring.clone()
    for new in (2, 1):
        # As far from 0 as those that are there.
        tokens = [held_rows[:, :, 3 : 3 + new] for held_rows in (exact, exact_values)]
        # The kernel first, for the reference takes its centers.
        for i, place in ((1, place_tokens_triton), (0, place_tokens_reference)):
            lengths[i] = place(*pairs[i], *tokens, lengths[i], recent, start, None)
    packed = packed_after(length + 2, history, SINK, recent)
    assert all(int(n[1]) == packed for n in lengths)
    for reference, kernel in zip(stored(*pairs[0]), stored(*pairs[1])):
        assert torch.equal(reference, kernel)
    opened = range(-(-history // block), -(-packed // block))
    for i in range(before.shape[2]):
        assert torch.equal(before[:, :, i], pairs[1][0].rows.centers[:, :, i]) == (i not in opened)
    # Rows whose mean is up to 100 are off by a fraction of what they vary by.
    for j in range(opened[0] * block if opened else packed, min(packed, history + held)):
        row = dequantize_rows_reference(pairs[1][0], j, j + 1, torch.float64)[:, :, 0]
        error = (row - exact[:, :, j % exact.shape[2]].double()).abs().mean((1, 2))
        assert (error < 1)[slice(None) if start is None else j + SINK >= start].all()


@pytest.mark.parametrize(
    "dim, block, history, start", [(64, 32, 64, None), (128, 64, 64, [SINK + 66, 0]), (96, 32, 33, [40, 0])]
)
def test_encoding_ahead_opens_the_block_that_the_step_would(dim, block, history, start, monkeypatch):
    """The step after it finds center and codes, as a step without it makes them; the windows stay until then."""
    keys = centered_side(dim, block, torch.bfloat16, history, RECENT, 1)
    values = centered_side(dim, 0, torch.bfloat16, history, RECENT, 2)
    plain, ahead, reference = pairs = [copy.deepcopy((keys, values)) for _ in range(3)]
    counters = [
        torch.tensor([SINK + history + RECENT, history, 0, 0, 0], dtype=torch.int32, device=DEVICE) for _ in pairs
    ]
    start = None if start is None else torch.tensor(start, dtype=torch.int32, device=DEVICE)
    adopt_centers(monkeypatch, reference, ahead)
    encode_ahead_triton(*ahead, counters[1], RECENT, start)
    encode_ahead_reference(*reference, counters[2], RECENT, start)
    assert counters[1].tolist() == counters[2].tolist() and counters[1][AHEAD] == history + 1
    for ours, theirs in zip(stored(*reference), stored(*ahead)):
        assert torch.equal(ours, theirs)
    assert torch.equal(ahead[0].ring, keys.ring) and not ahead[0].sink.any()
    tokens = [torch.randint(-9, 9, (2, 2, 2, dim), device=DEVICE).bfloat16() for _ in "kv"]
    for pair, counter in zip(pairs[:2], counters):
        place_tokens_triton(*pair, *tokens, counter, RECENT, start, None)
    assert counters[0][HISTORY] == history + 1
    for expected, got in zip(stored(*plain), stored(*ahead)):
        assert torch.equal(expected, got)
    assert torch.equal(keys.rows.centers, ahead[0].rows.centers) == (history % block > 0)


@pytest.mark.gpu
def test_a_crop_forgets_what_was_encoded_ahead():
    """The operators of a compiled step encode ahead; what a crop and other tokens make of that equals eager steps."""
    from oscar_hf.attention.static_ops import attend_step
    from oscar_hf.cache.static_layer import StaticOscarLayer

    artifact = calibrated_artifact(1, 2, 64, sink_tokens=SINK, recent_tokens=RECENT)
    layers = [StaticOscarLayer(artifact.config, artifact, 0, 64) for _ in range(2)]
    torch.manual_seed(0)

    def states(count):
        return [torch.randn(1, 2, count, 64, device="cuda").bfloat16() for _ in "kv"]

    def step():
        query, new = torch.randn(1, 4, 1, 64, device="cuda").bfloat16(), states(1)
        compiled, eager = layers
        torch.ops.oscar_hf.place(compiled.store.storage, compiled.store.flat_constants, *new, compiled.store.spec)
        got = torch.ops.oscar_hf.attend(
            query, compiled.store.storage, compiled.store.flat_constants, None, None, 0.125, compiled.store.spec
        )
        eager.update(*new)
        assert torch.equal(got, attend_step(eager.store, query, None, None, 0.125))

    prompt = states(20)
    for layer in layers:
        layer.update(*prompt)
        layer.store.place_waiting()
        layer.store.restore(20, layer.store.history, None, True)
        layer.open_forward()
    for tokens_to_remove in (0, 1, RECENT, RECENT + 3):
        for layer in layers:
            layer.crop(-tokens_to_remove) if tokens_to_remove else None
        for _ in range(RECENT + 2):
            step()
        assert layers[0].store.counters[AHEAD] == layers[0].store.history + 1 and layers[1].store.counters[AHEAD] == 0

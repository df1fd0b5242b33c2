"""The decode kernel against its PyTorch reference: in Triton's interpreter, and on a GPU if there is one."""

import dataclasses
import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before the kernels are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import side_of

from oscar_hf.kernels import launch
from oscar_hf.kernels.decode import DecodeStore, decode_attention, decode_problem, mask_facts, splits_in_use
from oscar_hf.kernels.decode import store as store_module
from oscar_hf.kernels.decode.reference import decode_attention_reference, mask_facts_reference
from oscar_hf.kernels.decode.tuning import choose_tuning
from oscar_hf.quantization.packed_rows import PackedRows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not launch.interpreting(), reason="needs Triton, with a GPU or interpreted"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where hardware rounds to bfloat16.
TOLERANCE = {torch.bfloat16: 2e-3 if DEVICE == "cuda" else 4e-3, torch.float16: 5e-4, torch.float32: 5e-4}


def orthogonal(dim, heads=None):
    """A random rotation [dim, dim] or one per head."""
    shape = (dim, dim) if heads is None else (heads, dim, dim)
    return torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0].float().contiguous()


def make(
    batch=1, heads=4, kv_heads=1, dim=128, group=None, history=150, sink=8, ring=16, recent=None, new=1, capacity=None,
    dtype=torch.float32, symmetric=False, mean=False, per_head=False, start=None, rotate=True, seed=0, query_size=1.0,
    center=0, offset=1.0,
):  # fmt: skip
    """A store of fresh random content and a query; `recent` slots of the ring are in use (default: all of it).

    center: tokens of history that share a center, 0 for none; offset: the size of what all keys, those in the windows too,
    have in common, where they are centered by blocks.
    """
    torch.manual_seed(seed)
    group = group or dim
    capacity = capacity or max(64, -(-history // 64) * 64)
    recent = ring if recent is None else recent
    words = (capacity // 2, 16) if dim == 64 else (capacity, dim // 8)

    def codes():
        return torch.randint(-32768, 32768, (batch, kv_heads, *words), dtype=torch.int16)

    def scale():
        return (torch.rand(batch, kv_heads, capacity, dim // group) * 0.6 + 0.5).half()

    def low(of):
        return None if symmetric else (-1.5 * of.float() + 0.2 * torch.randn(of.shape)).half()

    def rows(count):
        return torch.randn(batch, kv_heads, count, dim).to(dtype)

    per = kv_heads if per_head else None

    def side(mean, center=0):
        steps = scale()
        tensors = {"codes": codes(), "scale": steps, "min": low(steps)}
        windows = dict(sink=rows(sink), ring=rows(ring))
        if center:
            common = torch.randn(kv_heads, 1, dim) * offset
            drift = torch.randn(batch, kv_heads, -(-capacity // center), dim) * 0.3
            # A center that no token in use has must not be read.
            drift[:, :, -(-history // center) :] = float("nan")
            tensors["centers"] = (common + drift).half()
            windows = {name: x + common.to(dtype) for name, x in windows.items()}
        packed = PackedRows.of({name: x.to(DEVICE) for name, x in tensors.items() if x is not None}, dim, center)
        inverse = orthogonal(dim, per).to(DEVICE).mT if rotate else None
        constant = (torch.randn(kv_heads, dim) * 0.3).to(DEVICE) if mean else None
        return side_of(packed, inverse=inverse, mean=constant, **{name: x.to(DEVICE) for name, x in windows.items()})

    start = None if start is None else torch.tensor(start, dtype=torch.int32, device=DEVICE)
    store = DecodeStore(side(mean, center), side(False), sink + history + recent, history, start)
    query = (torch.randn(batch, heads, new, dim) * query_size).to(dtype)
    return query.to(DEVICE), store


def by_both(query, store, tuning=None):
    """Tunings by which the split programs multiply centers themselves, and by which prepare does."""
    tuning = tuning or choose_tuning(query, store)
    return [dataclasses.replace(tuning, own_shifts=own) for own in (True, False)]


def poisoned(query, store, **call):
    """`decode_attention` with every buffer it allocates full of NaN beforehand."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return decode_attention(query, store, **call)
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def check(query, store, factor=1.0, **call):
    """The kernel's output after comparing it with the float64 reference."""
    out = poisoned(query, store, **call)
    assert out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous()
    call.pop("tuning", None)
    call.pop("mask_facts", None)
    expected = decode_attention_reference(query, store, **call)
    assert torch.isfinite(out).all()
    assert relative_error(out, expected) < TOLERANCE[query.dtype] * factor
    return out


@pytest.mark.parametrize("rep", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_query_heads_per_kv_head(rep):
    check(*make(heads=rep, history=131))


@pytest.mark.parametrize("dim,rep", [(64, 1), (64, 3), (64, 6), (64, 9), (256, 4)])
def test_head_dims(dim, rep):
    check(*make(dim=dim, heads=rep, history=133, mean=True))


@pytest.mark.parametrize(
    "dim,group,symmetric",
    [(64, 16, False), (64, 32, True), (128, 32, True), (128, 64, False), (256, 64, True), (256, 128, False)],
)
def test_groups_smaller_than_the_head_dim(dim, group, symmetric):
    check(*make(dim=dim, group=group, heads=2, history=70, symmetric=symmetric, mean=symmetric))


def test_symmetric_per_head_and_centered():
    check(*make(dim=64, batch=2, heads=6, kv_heads=2, history=140, symmetric=True, per_head=True, mean=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_the_query(dtype):
    check(*make(dtype=dtype, history=140))


def test_without_rotation():
    check(*make(rotate=False, history=140))


@pytest.mark.parametrize("history", [1, 127, 128, 257])
def test_odd_lengths_and_ring_wrap(history):
    # 16 ring entries begin at history % 16, so most of these wrap; 11 in use also leaves a gap.
    check(*make(history=history, recent=11 if history % 2 else 16))


@pytest.mark.parametrize("length", [1, 8, 24])
def test_no_history_yet(length):
    query, store = make(history=0)
    store.length = length
    check(query, store)


@pytest.mark.parametrize("new,rep,dim", [(2, 3, 128), (5, 4, 64), (16, 1, 256)])
def test_several_new_tokens_are_causal(new, rep, dim):
    query, store = make(new=new, heads=rep, dim=dim, history=131)
    out = check(query, store)
    # The last row alone sees what it sees among the others.
    last = decode_attention(query[:, :, -1:], store)
    assert torch.allclose(out[:, :, -1:], last, atol=2e-3)


def test_new_tokens_still_in_the_sink():
    query, store = make(history=0, new=3)
    store.length = 6
    check(query, store)


@pytest.mark.parametrize("dim", [64, 128])
def test_left_padding_by_start(dim):
    # Row 2 starts inside the history's second block, row 3 in the ring: its sink entries are past the sink's end.
    check(*make(dim=dim, batch=4, history=200, start=[0, 3, 150, 205]))


@pytest.mark.parametrize(
    "shape,kind", [((1, 1, 1), "bool"), ((2, 4, 2), "bool"), ((2, 1, 2), "float32"), ((2, 4, 1), "float16")]
)
def test_masks(shape, kind):
    query, store = make(batch=2, new=2, history=131, dtype=torch.float16 if kind == "float16" else torch.float32)
    full = (*shape, store.length)
    hidden = torch.rand(full, device=DEVICE) < 0.4
    if kind == "bool":
        mask = ~hidden
    else:
        dtype = getattr(torch, kind)
        mask = torch.randn(full, device=DEVICE).to(dtype).masked_fill(hidden, torch.finfo(dtype).min)
    check(query, store, mask=mask)


def mask_of(first, length, capacity, new=1, heads=1, dtype=torch.bool):
    """The mask that says "slot >= first and causal", [B, heads, new, capacity]; slots not in use hold anything."""
    slot, token = torch.arange(capacity), torch.arange(new)[:, None]
    see = (slot >= torch.tensor(first)[:, None, None, None]) & (slot <= length - new + token)
    see = (see ^ ((slot >= length) & (slot % 2 == 0))).expand(-1, heads, -1, -1).contiguous().to(DEVICE)
    return (
        see
        if dtype == torch.bool
        else torch.zeros(see.shape, device=DEVICE, dtype=dtype).masked_fill(~see, torch.finfo(dtype).min)
    )


@pytest.mark.parametrize("new,heads,dtype", [(1, 1, torch.bool), (3, 2, torch.bool), (2, 1, torch.float32)])
@pytest.mark.parametrize("on_device", [False, True])
def test_mask_facts(new, heads, dtype, on_device):
    length = 70
    mask = mask_of([0, 5, 69, 70, 7, 7, 7], length, 90, new, heads, dtype)
    low = False if dtype == torch.bool else torch.finfo(dtype).min
    mask[4, -1, -1, 30] = low
    mask[5, -1, 0, 2] = True if dtype == torch.bool else 0
    if new > 1:
        mask[6, 0, 0, length - 1] = True if dtype == torch.bool else 0
    else:
        mask[6] = low
    given = torch.tensor([length], dtype=torch.int32, device=DEVICE) if on_device else length
    facts = mask_facts(mask, given, new)
    assert facts.dtype == torch.int32 and facts.shape == (7, 2)
    assert torch.equal(facts, mask_facts_reference(mask, given, new))
    expected = [[0, 0], [5, 0], [69, 0], [70, 0], [7, 1], [2, 1], [7, 1] if new > 1 else [70, 0]]
    assert facts.tolist() == expected
    if dtype != torch.bool:
        mask[0, 0, 0, 3] = -0.5
        assert mask_facts(mask, given, new)[0].tolist() == [0, 1]


@pytest.mark.parametrize("new,start", [(1, None), (2, None), (1, [0, 3, 40, 5])])
def test_a_mask_known_by_its_facts_is_not_read(new, start):
    # Starts in the sink, in the history's first, second and third block, and in the ring.
    first = [0, 5, 70, 140] if start is None else [0, 2, 60, 205]
    query, store = make(batch=4, history=200, new=new, start=start)
    mask = mask_of(first, store.length, store.length + 9, new)
    facts = mask_facts(mask, store.length, new)
    assert not facts[:, 1].any()
    tuning = dataclasses.replace(choose_tuning(query, store), block=16)
    expected = decode_attention_reference(query, store, mask=mask[..., : store.length])
    out = poisoned(query, store, mask=torch.zeros_like(mask), mask_facts=facts, tuning=tuning)
    assert relative_error(out, expected) < TOLERANCE[query.dtype]
    # A row that must be read leaves the others alone.
    mask[1, :, :, 100:130] = False
    facts = mask_facts(mask, store.length, new)
    assert facts[:, 1].tolist() == [0, 1, 0, 0]
    check(query, store, mask=mask[..., : store.length], mask_facts=facts, tuning=tuning)


@pytest.mark.parametrize("kind", ["bool", "infinite"])
def test_rows_that_may_attend_to_nothing_are_zero(kind):
    query, store = make(batch=2, heads=4, history=131)
    mask = torch.ones(2, 4, 1, store.length, dtype=torch.bool, device=DEVICE)
    mask[1, 2] = False
    if kind != "bool":
        low = float("-inf") if kind == "infinite" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, low)
    out = check(query, store, mask=mask)
    assert (out[1, 2] == 0).all() and (out[0] != 0).all()


def test_softcap_and_sink_logits():
    query, store = make(heads=6, kv_heads=2, history=131, query_size=3.0)
    check(query, store, softcap=5.0)
    # Scores this wide show more of the query's rounding to fp16.
    check(query, store, s_aux=torch.randn(6, device=DEVICE) * 3, scale=0.2, factor=2)


def test_scores_that_rise_all_along_the_history():
    # Later keys are larger, so that the running maximum has to follow again and again.
    query, store = make(history=400, heads=2, query_size=2.0)
    rows = store.keys.rows
    growth = torch.linspace(0.1, 6, rows.capacity, device=DEVICE).half()[None, None, :, None]
    rows.scale, rows.min = rows.scale * growth, rows.min * growth
    check(query, store, factor=3, tuning=dataclasses.replace(choose_tuning(query, store), splits=1))


@pytest.mark.parametrize("size,shift", [(1e-4, 0.0), (1000.0, -400.0), (30.0, 400.0)])
def test_extreme_queries_and_means(size, shift):
    query, store = make(history=131, heads=2, mean=True, query_size=size)
    shrink = 1 / size
    keys = store.keys
    keys.rows.scale, keys.rows.min = (keys.rows.scale * shrink).clamp(max=6e4), keys.rows.min * shrink
    keys.sink, keys.ring = keys.sink * shrink, keys.ring * shrink
    # q.mu = shift for both heads: a constant far from the windows' scores, which decides who wins.
    rows = query[0, :, 0].double()
    keys.mean = torch.linalg.lstsq(rows, torch.full((2, 1), shift, device=DEVICE).double()).solution.T.float()
    check(query, store, factor=4)


def test_lengths_on_the_device():
    query, store = make(history=200, capacity=320)
    expected = decode_attention(query, store)
    counters = torch.tensor([store.length, store.history], dtype=torch.int32, device=DEVICE)
    store.length, store.history = counters[:1], counters[1:]
    out = poisoned(query, store)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
    counters[0], counters[1] = 5, 0
    check(query, store)


def test_room_for_more_changes_nothing():
    # The splits in use follow from the history, not from what the cache could hold.
    query, store = make(history=200, capacity=320)
    tuning = dataclasses.replace(choose_tuning(query, store), block=16, splits=4)
    length, history = (torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (store.length, store.history))
    sides = (
        dataclasses.replace(side, rows=side.rows.mapped(lambda x: torch.cat([x] * 5, 2)))
        for side in (store.keys, store.values)
    )
    large = DecodeStore(*sides, length, history)
    out = poisoned(query, large, tuning=tuning)
    assert torch.equal(out, decode_attention(query, store, tuning=tuning))


def test_splits():
    query, store = make(history=500)
    tuning = dataclasses.replace(choose_tuning(query, store), block=16, warps=1, tiles=2, splits=5, alone=False)
    used = [splits_in_use(history, tuning) for history in (0, 1, 32, 33, 160, 161, 500)]
    assert used == [0, 1, 1, 2, 5, 3, 4]
    check(query, store, tuning=tuning)
    # A last, partial block of its own; its split comes on top of the others.
    apart = dataclasses.replace(tuning, alone=True)
    assert [splits_in_use(history, apart) for history in (0, 1, 32, 33, 160, 161, 500)] == [0, 1, 1, 2, 5, 6, 6]
    check(query, store, tuning=apart)
    # A split does not grow beyond what matrix units can sum exactly enough.
    assert splits_in_use(100_000, dataclasses.replace(tuning, splits=1)) == -(-3125 // 256)


@pytest.mark.parametrize("together", [False, True])
def test_several_batch_rows_per_program(together):
    query, store = make(batch=5, heads=8, kv_heads=2, history=200, start=[0, 3, 150, 205, 50], new=2, per_head=True)
    rows = dict(prepare_rows=2, merge_rows=4, merge_parts=4, block=16, together=together)
    check(query, store, tuning=dataclasses.replace(choose_tuning(query, store), **rows))


def test_inverse_as_a_view_of_the_transform():
    query, store = make(history=140, kv_heads=2, heads=4, per_head=True)
    values = store.values
    store.values = dataclasses.replace(values, inverse=values.inverse.contiguous())
    turned = dataclasses.replace(store, values=dataclasses.replace(values, inverse=values.inverse.mT.contiguous().mT))
    assert torch.equal(decode_attention(query, turned), decode_attention(query, store))


def test_strided_arguments():
    query, store = make(batch=2, heads=4, kv_heads=2, history=140, new=2)
    sides = (side.mapped(lambda x: x.repeat_interleave(2, 0)[::2]) for side in (store.keys, store.values))
    strided = DecodeStore(*sides, store.length, store.history)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert torch.equal(decode_attention(turned, strided), decode_attention(query, store))


def test_an_older_triton_is_named(monkeypatch):
    monkeypatch.setattr(launch.triton, "__version__", "3.4.0")
    monkeypatch.setattr(store_module, "interpreting", lambda: False)
    assert "needs a newer Triton: Triton 3.4.0 is older than 3.5" in decode_problem(*make())


def test_what_the_kernel_does_not_take_is_named():
    assert decode_problem(*make()) == ""
    assert "head dims" in decode_problem(*make(dim=32))
    assert "new tokens" in decode_problem(*make(new=17))
    assert "groups" in decode_problem(*make(group=16))
    query, store = make()
    store.values.rows.min = None
    assert "min" in decode_problem(query, store)
    assert "at least 32, got 16" in decode_problem(*make(center=16))
    assert "power of two" in decode_problem(*make(center=96))
    assert decode_problem(*make(center=32)) == ""


# ---------------------------------------------------------------------------------------------- centers of blocks


@pytest.mark.parametrize("history", [0, 1, 63, 127, 128, 129, 310])
@pytest.mark.parametrize("own", [True, False])
def test_centers_at_odd_lengths(history, own):
    query, store = make(history=history, center=128, heads=2, symmetric=True, recent=11 if history % 2 else 16)
    check(query, store, tuning=dataclasses.replace(choose_tuning(query, store), own_shifts=own))


@pytest.mark.parametrize("center", [32, 64, 128, 256])
@pytest.mark.parametrize("dim,heads", [(64, 3), (64, 9), (128, 2), (128, 7), (256, 2)])
def test_blocks_of_a_center(center, dim, heads):
    query, store = make(dim=dim, heads=heads, history=291, center=center, symmetric=center > 64)
    check(query, store, tuning=by_both(query, store)[(dim + center) % 3 % 2])


def test_a_block_of_tokens_has_one_center():
    for center in (32, 64, 128):
        for few in (True, False):
            query, store = make(batch=1 if few else 3, kv_heads=1, heads=2, center=center, history=100)
            assert center % choose_tuning(query, store).tokens == 0
    tuning = dataclasses.replace(choose_tuning(query, store), block=128)
    with pytest.raises(ValueError, match="share a center"):
        decode_attention(query, store, tuning=tuning)


@pytest.mark.parametrize("dim,group", [(64, 32), (128, 32), (128, 64), (256, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_centers_and_groups(dim, group, symmetric):
    check(*make(dim=dim, group=group, heads=2, history=150, symmetric=symmetric, center=64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_centers_of_other_dtypes(dtype):
    query, store = make(dtype=dtype, history=270, center=128, symmetric=True, batch=2, kv_heads=2, heads=6)
    for tuning in by_both(query, store):
        check(query, store, tuning=tuning)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("own", [True, False])
def test_keys_far_from_zero(dtype, own):
    # What all keys have in common is 100 times what is left of them without it.
    query, store = make(dtype=dtype, history=400, center=64, symmetric=True, heads=3, offset=100.0)
    rows = store.keys.rows
    rows.scale = rows.scale * 0.5
    check(query, store, tuning=dataclasses.replace(choose_tuning(query, store), own_shifts=own))


def test_centers_that_rise_all_along_the_history():
    # The running maximum has to follow from block to block, far more than a score's own spread.
    query, store = make(history=500, heads=2, center=32, symmetric=True)
    along = torch.linspace(-30, 300, 20, device=DEVICE)[:, None]
    direction = torch.linalg.pinv(query[0, :, 0].double()).sum(1).float()
    store.keys.rows.centers[:] = (direction * along)[: store.keys.rows.centers.shape[2]].half()
    for splits in (1, 3):
        check(query, store, factor=2, tuning=dataclasses.replace(choose_tuning(query, store), splits=splits))


def test_centers_take_the_means_place():
    query, store = make(history=140, center=64, symmetric=True, mean=True)
    assert store.keys.mean is not None
    out = check(query, store)
    assert torch.equal(out, decode_attention(query, dataclasses.replace(store, keys=without_mean(store.keys))))


def without_mean(side):
    return dataclasses.replace(side, mean=None)


@pytest.mark.parametrize("own", [True, False])
def test_centers_with_lengths_on_the_device(own):
    query, store = make(history=200, capacity=320, center=64, symmetric=True)
    tuning = dataclasses.replace(choose_tuning(query, store), own_shifts=own)
    expected = decode_attention(query, store, tuning=tuning)
    counters = torch.tensor([store.length, store.history], dtype=torch.int32, device=DEVICE)
    store.length, store.history = counters[:1], counters[1:]
    out = poisoned(query, store, tuning=tuning)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
    for length, history in ((5, 0), (8 + 65 + 16, 65)):
        counters[0], counters[1] = length, history
        check(query, store, tuning=tuning)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("own", [True, False])
def test_centers_and_padding(dim, own):
    query, store = make(dim=dim, batch=4, history=200, start=[0, 3, 150, 205], center=64, symmetric=True)
    check(query, store, tuning=dataclasses.replace(choose_tuning(query, store), own_shifts=own))


def test_centers_and_masks():
    query, store = make(batch=2, new=2, history=150, center=64, symmetric=True)
    mask = torch.rand(2, 4, 2, store.length, device=DEVICE) > 0.4
    check(query, store, mask=mask)
    low = torch.finfo(torch.float32).min
    check(query, store, mask=torch.randn(mask.shape, device=DEVICE).masked_fill(~mask, low))
    mask = mask_of([0, 75], store.length, store.length, 2)
    check(query, store, mask=mask, mask_facts=mask_facts(mask, store.length, 2))


def test_centers_under_softcap_and_sink_logits():
    query, store = make(heads=6, kv_heads=2, history=150, query_size=3.0, center=64, symmetric=True)
    check(query, store, softcap=5.0)
    check(query, store, s_aux=torch.randn(6, device=DEVICE) * 3, scale=0.2, factor=2)


@pytest.mark.parametrize("heads,new,dim", [(40, 1, 128), (12, 3, 64), (5, 4, 256)])
@pytest.mark.parametrize("own", [True, False])
def test_centers_and_chunks_of_columns(heads, new, dim, own):
    query, store = make(heads=heads, new=new, dim=dim, history=131, center=64, symmetric=True)
    tuning = dataclasses.replace(choose_tuning(query, store), own_shifts=own)
    assert heads * new > tuning.columns
    check(query, store, tuning=tuning)


@pytest.mark.parametrize("own", [True, False])
def test_centers_and_several_batch_rows_per_program(own):
    query, store = make(
        batch=5, heads=8, kv_heads=2, history=200, start=[0, 3, 150, 205, 50], per_head=True, center=32, symmetric=True
    )
    rows = dict(prepare_rows=2, merge_rows=4, merge_parts=4, block=16, together=True, own_shifts=own)
    check(query, store, tuning=dataclasses.replace(choose_tuning(query, store), **rows))


def test_many_blocks_of_a_split():
    # More centers than a program multiplies at a time, in either kernel.
    query, store = make(history=1300, heads=2, center=32, symmetric=True)
    tuning = dataclasses.replace(choose_tuning(query, store), splits=2)
    for each in by_both(query, store, tuning):
        check(query, store, tuning=each)


def test_strided_centers():
    query, store = make(batch=2, heads=4, kv_heads=2, history=140, center=64, symmetric=True)
    sides = [side.mapped(lambda x: x.repeat_interleave(2, 0)[::2]) for side in (store.keys, store.values)]
    assert torch.equal(
        decode_attention(query, DecodeStore(*sides, store.length, store.history)), decode_attention(query, store)
    )
    rows = sides[0].rows
    rows.centers = rows.centers.mT.contiguous().mT
    with pytest.raises(ValueError, match="dense rows"):
        decode_attention(query, DecodeStore(*sides, store.length, store.history))


def test_room_for_more_centers():
    query, store = make(history=200, center=64, symmetric=True, batch=2, heads=4, kv_heads=2)
    before = decode_attention(query, store)
    for side in (store.keys, store.values):
        side.rows.reserve(600)
    assert store.keys.rows.centers.shape[2] > 4
    assert torch.equal(decode_attention(query, store), before)


# ------------------------------------------------------------------------------------------------ on a GPU only


def _random_case(seed):
    draw = random.Random(seed)
    dim = draw.choice([64, 128, 128, 256])
    kv_heads, rep = draw.choice([1, 2, 3, 8]), draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
    batch = draw.choice([1, 2, 3])
    return make(
        batch=batch, heads=kv_heads * rep, kv_heads=kv_heads, dim=dim, group=dim // draw.choice([1, 1, 2, 4]),
        history=draw.choice([draw.randint(0, 600), draw.randint(1000, 40_000)]), sink=64, ring=256,
        recent=draw.randint(16, 256), new=draw.choice([1, 1, 1, 2, 7, 16]),
        dtype=draw.choice([torch.bfloat16, torch.float16]), symmetric=draw.random() < 0.3, mean=draw.random() < 0.5,
        per_head=draw.random() < 0.5, start=[draw.randint(0, 300) for _ in range(batch)] if draw.random() < 0.3 else None,
        seed=seed, center=draw.choice([0, 32, 64, 128, 128, 256]), offset=draw.choice([0.3, 10.0]),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_within_the_target(seed):
    check(*_random_case(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("dim,heads,group", [(64, 3, 64), (64, 8, 32), (128, 4, 128), (128, 12, 64), (256, 4, 256)])
def test_assembly_and_its_twin_agree(dim, heads, group):
    query, store = make(dim=dim, heads=heads, group=group, history=5000, sink=64, ring=256, mean=True)
    tuning = choose_tuning(query, store)
    assert tuning.asm
    twin = decode_attention(query, store, tuning=dataclasses.replace(tuning, asm=False))
    torch.testing.assert_close(decode_attention(query, store, tuning=tuning), twin, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,history", [(1, 30_000), (8, 12_345)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whoever_multiplies_centers(batch, history, dtype):
    query, store = make(
        batch=batch, heads=32, kv_heads=8, history=history, sink=64, ring=256, center=128, symmetric=True, dtype=dtype,
        offset=100.0,
    )  # fmt: skip
    for tuning in by_both(query, store):
        # Again and again: what one program stores and reads itself must not depend on luck.
        outs = [check(query, store, tuning=tuning)] + [decode_attention(query, store, tuning=tuning) for _ in range(20)]
        assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("center,own", [(0, True), (128, True), (128, False)])
def test_one_graph_follows_the_device_counters(center, own):
    query, store = make(
        history=4096, sink=64, ring=256, heads=8, kv_heads=2, dtype=torch.bfloat16, center=center, symmetric=center > 0
    )
    tuning = dataclasses.replace(choose_tuning(query, store), own_shifts=own)
    counters = torch.tensor([store.length, store.history], dtype=torch.int32, device=DEVICE)
    captured = dataclasses.replace(store, length=counters[:1], history=counters[1:])
    decode_attention(query, captured, tuning=tuning)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(query, captured, tuning=tuning)
    for length, history in [(64 + 3000 + 256, 3000), (64 + 17 + 256, 17), (64 + 4096 + 40, 4096), (30, 0)]:
        counters.copy_(torch.tensor([length, history], dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expected = decode_attention_reference(query, dataclasses.replace(store, length=length, history=history))
        # Stale counters would be off by orders of magnitude; the output's own rounding is just about the target.
        assert relative_error(out, expected) < 1.5 * TOLERANCE[torch.bfloat16]

"""What a decode step does to a static store, place, attend and read: as functions, and as operators of torch.

Lengths are read on the device, so that nothing in a captured graph depends on them. The operators are for compiled models:
they take a store as two flat buffers and a text (`static_layout.Layout`), and are registered with torch.library.Library,
whose calls cost a tenth of a custom_op's.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes import without_autocast
from ..errors import CacheStateError
from ..kernels.decode import DecodeStore, decode_attention, decode_problem, mask_facts
from ..kernels.decode_step import (
    HISTORY,
    LENGTH,
    OVERFLOW,
    encode_ahead_triton,
    place_problem,
    place_tokens_reference,
    place_tokens_triton,
)
from ..kernels.dequantize import dequantize_rows
from ..kernels.launch import fall_back, launch_problem
from ..masks import visible
from ..storage.static_layout import Layout, StaticRegions
from ..storage.static_store import StaticStore, overflow_message

_LIBRARY = torch.library.Library("oscar_hf", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
for _schema in (
    "place(Tensor(a!) storage, Tensor constants, Tensor keys, Tensor values, str spec) -> ()",
    "attend(Tensor query, Tensor storage, Tensor constants, Tensor? mask, Tensor? facts, float scale, str spec) -> Tensor",
    "dense(Tensor storage, Tensor constants, bool keys, str spec) -> Tensor",
    "mask_facts(Tensor mask, Tensor storage, int new_tokens, str spec) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)


# ------------------------------------------------------------------------------------- what views and layers call
def place_step(store: StaticStore, keys: Tensor, values: Tensor) -> None:
    """Place a step's tokens [B, H, M, D]."""
    if torch.compiler.is_compiling():
        torch.ops.oscar_hf.place(store.storage, store.flat_constants, keys, values, store.spec)
        return
    with torch.no_grad(), without_autocast(store.device):
        _place(store.regions, store.layout, keys, values)


def attend_step(store: StaticStore, query: Tensor, mask: Tensor | None, facts: Tensor | None, scale: float) -> Tensor:
    """Attention of a step's tokens, [B, Hq, M, D] to [B, Hq, M, Dv] in the query's dtype, causal among them."""
    if torch.compiler.is_compiling():
        return torch.ops.oscar_hf.attend(query, store.storage, store.flat_constants, mask, facts, scale, store.spec)
    with without_autocast(store.device):
        return _attend(store.regions, store.layout, query, mask, facts, scale)


def dense_slots(store: StaticStore, is_key: bool) -> Tensor:
    """All slots of keys or of values, [B, H, max_cache_len, D] in the model's dtype; those without a token are 0."""
    if torch.compiler.is_compiling():
        return torch.ops.oscar_hf.dense(store.storage, store.flat_constants, is_key, store.spec)
    with torch.no_grad(), without_autocast(store.device):
        return _dense(store.regions, store.layout, is_key)


def mask_facts_of(store: StaticStore, mask: Tensor, new_tokens: int) -> Tensor:
    """What a step's mask says, int32 [B, 2]: see `kernels.decode.mask_facts`."""
    if torch.compiler.is_compiling():
        return torch.ops.oscar_hf.mask_facts(mask, store.storage, new_tokens, store.spec)
    return mask_facts(mask, store.regions.length, new_tokens)


# ------------------------------------------------------------------------------------------------- the functions
def _place(regions: StaticRegions, layout: Layout, keys: Tensor, values: Tensor) -> None:
    """`kernels.decode_step.place_tokens_reference` on a static store's regions."""
    sides, counters = (regions.keys, regions.values), regions.counters
    arguments = (*sides, keys, values, counters, layout.recent, regions.start, layout.limit)
    problem = place_problem(*sides)
    if not problem:
        place_tokens_triton(*arguments)
        return
    if keys.is_cuda:
        fall_back(keys.device, problem)
        if torch.cuda.is_current_stream_capturing():
            # The reference asks the device for the lengths.
            raise CacheStateError(
                "this static cache cannot be captured in a CUDA graph: its head dims are not supported by the kernels; pass "
                "disable_compile=True to generate(), or leave max_cache_len out"
            )
        place_tokens_reference(*arguments)
        return
    place_tokens_reference(*arguments)
    if counters[OVERFLOW]:
        counters[OVERFLOW] = 0
        raise CacheStateError(overflow_message(int(counters[LENGTH]), keys.shape[2], layout.limit))


def _attend(
    regions: StaticRegions, layout: Layout, query: Tensor, mask: Tensor | None, facts: Tensor | None, scale: float
) -> Tensor:
    problem, dtype = launch_problem(query.device), regions.keys.sink.dtype
    if query.dtype != dtype:
        problem = f"the decode kernel takes queries of the cache's dtype {dtype}, got {query.dtype}"
    if not problem:
        store = DecodeStore(regions.keys, regions.values, regions.length, regions.history, regions.start)
        problem = decode_problem(query, store)
        if not problem:
            return decode_attention(query, store, mask=mask, mask_facts=facts, scale=scale)
    fall_back(query.device, problem)
    limit, start = layout.limit, regions.start
    keys, values = (_dense(regions, layout, is_key).to(query.dtype) for is_key in (True, False))
    slots, new = torch.arange(limit, device=query.device), query.shape[2]
    newest = regions.length - new + torch.arange(new, device=query.device)
    keep = (slots <= newest[:, None])[None, None] & (slots >= start[:, None])[:, None, None]
    if mask is not None:
        keep = keep & visible(mask)
    bias = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~keep, torch.finfo(query.dtype).min)
    if mask is not None and mask.dtype != torch.bool:
        bias = torch.where(keep, mask.to(query.dtype), bias)
    gqa = query.shape[1] != keys.shape[1]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=gqa)
    # A row that may attend to nothing gives zeros.
    return torch.where(keep.any(-1, keepdim=True), output, 0).contiguous()


def _dense(regions: StaticRegions, layout: Layout, is_key: bool) -> Tensor:
    counters, start, limit = regions.counters, regions.start, layout.limit
    side = regions.keys if is_key else regions.values
    sink, ring, (_, heads, size, dim) = side.sink, side.ring, side.sink.shape
    length, packed_end = counters[LENGTH], size + counters[HISTORY]
    slots = torch.arange(limit, device=sink.device)
    # Everything is computed for every slot and picked afterwards: no shape may depend on what the device counts.
    found = ring.index_select(2, (slots - size).clamp(min=0) % ring.shape[2])
    count = min(side.rows.capacity, limit - size)
    if count > 0:
        history = dequantize_rows(side, 0, count, sink.dtype)
        is_history = (slots[size : size + count] < packed_end)[:, None]
        found[:, :, size : size + count] = torch.where(is_history, history, found[:, :, size : size + count])
    if size:
        entry = slots - start[:, None]
        exact = (entry >= 0) & (entry < size) & (slots < packed_end)
        index = entry.clamp(0, size - 1)[:, None, :, None].expand(-1, heads, -1, dim)
        found = torch.where(exact[:, None, :, None], sink.gather(2, index), found)
    seen = (slots < length) & (slots >= start[:, None])
    return torch.where(seen[:, None, :, None], found, 0)


# ------------------------------------------------------------------------------------------------- the operators
def _opened(storage: Tensor, constants: Tensor, spec: str) -> tuple[StaticRegions, Layout]:
    layout = Layout.parse(spec)
    return layout.open(storage, layout.constant_views(constants)), layout


def _place_op(storage, constants, keys, values, spec):
    _place(*_opened(storage, constants, spec), keys, values)


def _attend_op(query, storage, constants, mask, facts, scale, spec):
    """`_attend`, and beside it, on a stream of its own, the encoding of the token that the next step packs.

    That writes only where nothing reads before the next `place`, so the operator does not count as one that changes storage.
    """
    regions, layout = _opened(storage, constants, spec)
    sides = (regions.keys, regions.values)
    if place_problem(*sides):
        return _attend(regions, layout, query, mask, facts, scale)
    beside, stream = _beside(query.device), torch.cuda.current_stream(query.device)
    beside.wait_stream(stream)
    try:
        with torch.cuda.stream(beside):
            encode_ahead_triton(*sides, regions.counters, layout.recent, regions.start)
        return _attend(regions, layout, query, mask, facts, scale)
    finally:
        # Whatever happens, a capture must find its streams joined.
        stream.wait_stream(beside)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _dense_op(storage, constants, keys, spec):
    return _dense(*_opened(storage, constants, spec), keys)


def _mask_facts_op(mask, storage, new_tokens, spec):
    return mask_facts(mask, Layout.parse(spec).counters(storage)[LENGTH : LENGTH + 1], new_tokens)


def _fake_attend(query, storage, constants, mask, facts, scale, spec):
    # Contiguous whatever the strides of the query, as the kernel returns it.
    return query.new_empty((*query.shape[:3], Layout.parse(spec).values.dim))


def _fake_dense(storage, constants, keys, spec):
    layout = Layout.parse(spec)
    form = layout.keys if keys else layout.values
    return storage.new_empty((layout.batch, layout.heads, layout.limit, form.dim), dtype=layout.dtype)


def _fake_mask_facts(mask, storage, new_tokens, spec):
    return mask.new_empty((mask.shape[0], 2), dtype=torch.int32)


for _name, _function, _fake in (
    ("place", _place_op, lambda *arguments: None),
    ("attend", _attend_op, _fake_attend),
    ("dense", _dense_op, _fake_dense),
    ("mask_facts", _mask_facts_op, _fake_mask_facts),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"oscar_hf::{_name}", _fake, lib=_LIBRARY)

"""The two things that a decode step does to a static layer, and its dense view: as functions, and as operators of torch.

Lengths are read on the device, so that nothing in a captured graph depends on them. The operators are for compiled models:
they take a layer as two flat buffers and a text (`static_storage.Layout`), and are registered with torch.library.Library,
whose calls cost a tenth of a custom_op's.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..artifact.layer_constants import LayerConstants
from ..errors import CacheStateError
from ..kernels.decode import DecodeStore, decode_attention, decode_problem, mask_facts
from ..kernels.dequantize import dequantize_rows
from ..kernels.launch import fall_back, launch_problem
from ..kernels.step import (
    HISTORY,
    LENGTH,
    OVERFLOW,
    Side,
    encode_ahead_triton,
    place_problem,
    place_tokens_reference,
    place_tokens_triton,
)
from ..quantization.packed_rows import PackedRows
from ..storage.static_layout import Layout, StoredTensors
from .packed import visible

_LIBRARY = torch.library.Library("oscar_hf", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
for _schema in (
    "place(Tensor(a!) storage, Tensor constants, Tensor keys, Tensor values, str spec) -> ()",
    "attend(Tensor query, Tensor storage, Tensor constants, Tensor? mask, Tensor? facts, float scale, str spec) -> Tensor",
    "dense(Tensor storage, Tensor constants, bool keys, str spec) -> Tensor",
    "mask_facts(Tensor mask, Tensor storage, int new_tokens, str spec) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)


def _sides(stored: StoredTensors, constants: LayerConstants, layout: Layout) -> tuple[Side, Side]:
    """Keys and values of a static layer as the step kernel takes them."""
    key_side = Side(
        PackedRows.of(stored.k_codes, stored.k_scale, stored.k_min, layout.key_dim), stored.sink_k, stored.ring_k,
        layout.key_rule, None if layout.key_is_identity else constants.key_transform, constants.key_mean,
        constants.key_metric,
    )  # fmt: skip
    value_side = Side(
        PackedRows.of(stored.v_codes, stored.v_scale, stored.v_min, layout.value_dim), stored.sink_v, stored.ring_v,
        layout.value_rule, None if layout.value_is_identity else constants.value_transform,
    )  # fmt: skip
    return key_side, value_side


def place(stored: StoredTensors, constants: LayerConstants, layout: Layout, keys: Tensor, values: Tensor) -> None:
    """Place new tokens [B, H, M, D]: `kernels.step.place_tokens_reference` on what a static layer stores."""
    key_side, value_side = _sides(stored, constants, layout)
    arguments = (key_side, value_side, keys, values, stored.counters, layout.recent, stored.start, layout.limit)
    problem = place_problem(key_side, value_side)
    if not problem:
        place_tokens_triton(*arguments)
        return
    if keys.is_cuda:
        fall_back(keys.device, problem)
        _place_on_device(*arguments)
        return
    place_tokens_reference(*arguments)
    if stored.counters[OVERFLOW]:
        stored.counters[OVERFLOW] = 0
        raise CacheStateError(overflow_message(int(stored.counters[LENGTH]), keys.shape[2], layout.limit))


def _place_on_device(*arguments):
    """A GPU that cannot run the kernel: the reference, which asks the device for the lengths."""
    if torch.cuda.is_current_stream_capturing():
        raise CacheStateError(
            "this static cache cannot be captured in a CUDA graph: its head dims are not supported by the kernels; pass "
            "disable_compile=True to generate(), or leave max_cache_len out"
        )
    place_tokens_reference(*arguments)


def overflow_message(held: int, new: int, limit: int) -> str:
    """What is wrong when tokens do not fit a static cache."""
    return (
        f"the cache was made for max_cache_len={limit} tokens, holds {held} and was given {new} more, which were not stored: "
        "use a larger max_cache_len or a growing cache (leave it out), or call reset() for another prompt"
    )


def attend(
    stored: StoredTensors, constants: LayerConstants, layout: Layout, query: Tensor, mask: Tensor | None,
    facts: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of the last M tokens, [B, Hq, M, D] to [B, Hq, M, Dv] in the query's dtype, causal among them."""
    problem = launch_problem(query.device)
    if query.dtype != stored.sink_k.dtype:
        problem = f"the decode kernel takes queries of the cache's dtype {stored.sink_k.dtype}, got {query.dtype}"
    if not problem:
        store = DecodeStore(
            *stored[:10],
            length=stored.counters[LENGTH : LENGTH + 1], history=stored.counters[HISTORY : HISTORY + 1],
            key_query=None if layout.key_is_identity else constants.key_query,
            value_inverse=None if layout.value_is_identity else constants.value_inverse,
            key_mean=constants.key_mean, start=stored.start,
        )  # fmt: skip
        problem = decode_problem(query, store)
        if not problem:
            return decode_attention(query, store, mask=mask, mask_facts=facts, scale=scale)
    fall_back(query.device, problem)
    limit, counters, start = layout.limit, stored.counters, stored.start
    keys, values = (dense(stored, constants, layout, is_key).to(query.dtype) for is_key in (True, False))
    slots, new = torch.arange(limit, device=query.device), query.shape[2]
    newest = counters[LENGTH] - new + torch.arange(new, device=query.device)
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


def dense(stored: StoredTensors, constants: LayerConstants, layout: Layout, keys: bool) -> Tensor:
    """All keys or all values, [B, H, limit, D] in the model's dtype; slots that hold no token are 0."""
    counters, start, limit = stored.counters, stored.start, layout.limit
    if keys:
        sink, ring, packed = stored.sink_k, stored.ring_k, (stored.k_codes, stored.k_scale, stored.k_min)
        inverse, mean = None if layout.key_is_identity else constants.key_inverse, constants.key_mean
    else:
        sink, ring, packed = stored.sink_v, stored.ring_v, (stored.v_codes, stored.v_scale, stored.v_min)
        inverse, mean = None if layout.value_is_identity else constants.value_inverse, None
    heads, size, dim = sink.shape[1:]
    rows = PackedRows.of(*packed, dim)
    length, packed_end = counters[LENGTH], size + counters[HISTORY]
    slots = torch.arange(limit, device=sink.device)
    # Everything is computed for every slot and picked afterwards: no shape may depend on what the device counts.
    found = ring.index_select(2, (slots - size).clamp(min=0) % ring.shape[2])
    count = min(rows.capacity, limit - size)
    if count > 0:
        history = dequantize_rows(rows, 0, count, inverse, mean, sink.dtype)
        is_history = (slots[size : size + count] < packed_end)[:, None]
        found[:, :, size : size + count] = torch.where(is_history, history, found[:, :, size : size + count])
    if size:
        entry = slots - start[:, None]
        exact = (entry >= 0) & (entry < size) & (slots < packed_end)
        index = entry.clamp(0, size - 1)[:, None, :, None].expand(-1, heads, -1, dim)
        found = torch.where(exact[:, None, :, None], sink.gather(2, index), found)
    seen = (slots < length) & (slots >= start[:, None])
    return torch.where(seen[:, None, :, None], found, 0)


def facts_of(stored: StoredTensors, mask: Tensor, new_tokens: int) -> Tensor:
    """int32 [B, 2]: see `kernels.decode.mask_facts`."""
    return mask_facts(mask, stored.counters[LENGTH : LENGTH + 1], new_tokens)


def _opened(storage: Tensor, constants: Tensor, spec: str) -> tuple[StoredTensors, LayerConstants, Layout]:
    layout = Layout.parse(spec)
    return layout.views(storage), layout.constant_views(constants), layout


def _place(storage, constants, keys, values, spec):
    place(*_opened(storage, constants, spec), keys, values)


def _attend(query, storage, constants, mask, facts, scale, spec):
    """`attend`, and beside it, on a stream of its own, the encoding of the token that the next step packs.

    That writes only where nothing reads before the next `place`, so the operator does not count as one that changes storage.
    """
    opened = stored, constants, layout = _opened(storage, constants, spec)
    sides = _sides(*opened)
    if place_problem(*sides):
        return attend(*opened, query, mask, facts, scale)
    beside, stream = _beside(query.device), torch.cuda.current_stream(query.device)
    beside.wait_stream(stream)
    try:
        with torch.cuda.stream(beside):
            encode_ahead_triton(*sides, stored.counters, layout.recent)
        return attend(*opened, query, mask, facts, scale)
    finally:
        # Whatever happens, a capture must find its streams joined.
        stream.wait_stream(beside)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _dense(storage, constants, keys, spec):
    return dense(*_opened(storage, constants, spec), keys)


def _mask_facts(mask, storage, new_tokens, spec):
    return facts_of(Layout.parse(spec).views(storage), mask, new_tokens)


def _fake_attend(query, storage, constants, mask, facts, scale, spec):
    # Contiguous whatever the strides of the query, as the kernel returns it.
    return query.new_empty((*query.shape[:3], Layout.parse(spec).value_dim))


def _fake_dense(storage, constants, keys, spec):
    layout = Layout.parse(spec)
    shape = (layout.batch, layout.heads, layout.limit, layout.key_dim if keys else layout.value_dim)
    return storage.new_empty(shape, dtype=getattr(torch, layout.dtype_name))


def _fake_mask_facts(mask, storage, new_tokens, spec):
    return mask.new_empty((mask.shape[0], 2), dtype=torch.int32)


for _name, _function, _fake in (
    ("place", _place, lambda *arguments: None),
    ("attend", _attend, _fake_attend),
    ("dense", _dense, _fake_dense),
    ("mask_facts", _mask_facts, _fake_mask_facts),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"oscar_hf::{_name}", _fake, lib=_LIBRARY)

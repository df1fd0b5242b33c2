"""The two things that a compiled decode step does to a static layer, and its dense view, as operators of torch.

Registered with torch.library.Library, whose calls cost a few microseconds: the tenth of a custom_op's. Lengths are read on
the device, so that nothing in a captured graph depends on them. Arguments are a layer's tensors one by one, because torch
must know which of them an operator changes.
"""

import functools

import torch
import torch.nn.functional as F

from .errors import CacheStateError
from .kernels.decode import DecodeStore, decode_attention, decode_problem, mask_facts
from .kernels.dequantize import dequantize_rows
from .kernels.launch import can_launch
from .kernels.step import HISTORY, LENGTH, OVERFLOW, Side, place_problem, place_tokens_reference, place_tokens_triton
from .packed import PackedRows
from .quantizer import ScaleRule

_LIBRARY = torch.library.Library("oscar_hf", "DEF")
_PACKED = (
    "Tensor{0} k_codes, Tensor{1} k_scale, Tensor{2}? k_min, Tensor{3} v_codes, Tensor{4} v_scale, Tensor{5}? v_min, "
    "Tensor{6} sink_k, Tensor{7} sink_v, Tensor{8} ring_k, Tensor{9} ring_v, Tensor{10} counters, Tensor start"
)
_READ = _PACKED.format(*[""] * 11)
_WRITTEN = _PACKED.format(*[f"({letter}!)" for letter in "abcdefghijk"])
_TAGS = (torch.Tag.pt2_compliant_tag,)

_LIBRARY.define(
    f"place({_WRITTEN}, Tensor? key_transform, Tensor? key_mean, Tensor? key_metric, Tensor? value_transform, "
    "Tensor keys, Tensor values, int recent, int limit, str key_rule, str value_rule) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    f"attend(Tensor query, {_READ}, Tensor? key_query, Tensor? key_mean, Tensor? value_inverse, Tensor? key_inverse, "
    "Tensor? mask, Tensor? facts, float scale, int limit) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    f"dense({_READ}, Tensor? inverse, Tensor? mean, bool keys, int limit) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define("mask_facts(Tensor mask, Tensor counters, int new_tokens) -> Tensor", tags=_TAGS)
_rule = functools.lru_cache(ScaleRule.parse)


def _place(
    k_codes, k_scale, k_min, v_codes, v_scale, v_min, sink_k, sink_v, ring_k, ring_v, counters, start,
    key_transform, key_mean, key_metric, value_transform, keys, values, recent, limit, key_rule, value_rule,
):  # fmt: skip
    """Place new tokens [B, H, M, D]: `kernels.step.place_tokens_reference` on a static layer's tensors."""
    key_rows = PackedRows.of(k_codes, k_scale, k_min, sink_k.shape[3])
    value_rows = PackedRows.of(v_codes, v_scale, v_min, sink_v.shape[3])
    key_side = Side(key_rows, sink_k, ring_k, _rule(key_rule), key_transform, key_mean, key_metric)
    value_side = Side(value_rows, sink_v, ring_v, _rule(value_rule), value_transform)
    if not place_problem(key_side, value_side):
        place_tokens_triton(key_side, value_side, keys, values, counters, recent, start, limit)
        return
    if keys.is_cuda:
        _place_on_device(key_side, value_side, keys, values, counters, recent, start, limit)
        return
    place_tokens_reference(key_side, value_side, keys, values, counters, recent, start, limit)
    if counters[OVERFLOW]:
        counters[OVERFLOW] = 0
        raise CacheStateError(overflow_message(int(counters[LENGTH]), keys.shape[2], limit))


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
        "use a larger max_cache_len, or a growing cache (leave it out)"
    )


def _store(packed, start, key_query=None, value_inverse=None, key_mean=None) -> DecodeStore:
    k_codes, k_scale, k_min, v_codes, v_scale, v_min, sink_k, sink_v, ring_k, ring_v, counters = packed
    return DecodeStore(
        k_codes=k_codes, k_scale=k_scale, k_min=k_min, v_codes=v_codes, v_scale=v_scale, v_min=v_min,
        sink_k=sink_k, sink_v=sink_v, ring_k=ring_k, ring_v=ring_v,
        length=counters[LENGTH : LENGTH + 1], history=counters[HISTORY : HISTORY + 1],
        key_query=key_query, value_inverse=value_inverse, key_mean=key_mean, start=start,
    )  # fmt: skip


def _attend(
    query, k_codes, k_scale, k_min, v_codes, v_scale, v_min, sink_k, sink_v, ring_k, ring_v, counters, start,
    key_query, key_mean, value_inverse, key_inverse, mask, facts, scale, limit,
):  # fmt: skip
    """Attention of the last M tokens, [B, Hq, M, D] to [B, Hq, M, Dv] in the query's dtype, causal among them."""
    packed = (k_codes, k_scale, k_min, v_codes, v_scale, v_min, sink_k, sink_v, ring_k, ring_v, counters)
    if can_launch(query.device)[0] and query.dtype == sink_k.dtype:
        store = _store(packed, start, key_query, value_inverse, key_mean)
        if not decode_problem(query, store):
            return decode_attention(query, store, mask=mask, mask_facts=facts, scale=scale)
    keys = _dense(*packed, start, key_inverse, key_mean, True, limit).to(query.dtype)
    values = _dense(*packed, start, value_inverse, None, False, limit).to(query.dtype)
    slots, new = torch.arange(limit, device=query.device), query.shape[2]
    newest = counters[LENGTH] - new + torch.arange(new, device=query.device)
    keep = (slots <= newest[:, None])[None, None] & (slots >= start[:, None])[:, None, None]
    if mask is not None:
        keep = keep & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    bias = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~keep, torch.finfo(query.dtype).min)
    if mask is not None and mask.dtype != torch.bool:
        bias = torch.where(keep, mask.to(query.dtype), bias)
    gqa = query.shape[1] != keys.shape[1]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=gqa)
    # A row that may attend to nothing gives zeros.
    return torch.where(keep.any(-1, keepdim=True), output, 0).contiguous()


def _mask_facts(mask, counters, new_tokens):
    """int32 [B, 2]: see `kernels.decode.mask_facts`."""
    return mask_facts(mask, counters[LENGTH : LENGTH + 1], new_tokens)


def _dense(
    k_codes, k_scale, k_min, v_codes, v_scale, v_min, sink_k, sink_v, ring_k, ring_v, counters, start,
    inverse, mean, keys, limit,
):  # fmt: skip
    """All keys or all values, [B, H, limit, D] in the model's dtype; slots that hold no token are 0."""
    sink, ring = (sink_k, ring_k) if keys else (sink_v, ring_v)
    codes, scale, minimum = (k_codes, k_scale, k_min) if keys else (v_codes, v_scale, v_min)
    heads, size, dim = sink.shape[1:]
    rows = PackedRows.of(codes, scale, minimum, dim)
    length, packed_end = counters[LENGTH], size + counters[HISTORY]
    slots = torch.arange(limit, device=sink.device)
    # Everything is computed for every slot and picked afterwards: no shape may depend on what the device counts.
    dense = ring.index_select(2, (slots - size).clamp(min=0) % ring.shape[2])
    count = min(rows.capacity, limit - size)
    if count > 0:
        history = dequantize_rows(rows, 0, count, inverse, mean, sink.dtype)
        is_history = (slots[size : size + count] < packed_end)[:, None]
        dense[:, :, size : size + count] = torch.where(is_history, history, dense[:, :, size : size + count])
    if size:
        entry = slots - start[:, None]
        exact = (entry >= 0) & (entry < size) & (slots < packed_end)
        index = entry.clamp(0, size - 1)[:, None, :, None].expand(-1, heads, -1, dim)
        dense = torch.where(exact[:, None, :, None], sink.gather(2, index), dense)
    seen = (slots < length) & (slots >= start[:, None])
    return torch.where(seen[:, None, :, None], dense, 0)


def _fake_attend(query, *arguments):
    # Contiguous whatever the strides of the query, as the kernel returns it.
    return query.new_empty((*query.shape[:3], arguments[7].shape[3]))


def _fake_dense(*arguments):
    keys, limit = arguments[-2:]
    sink = arguments[6 if keys else 7]
    return sink.new_empty((*sink.shape[:2], limit, sink.shape[3]))


def _fake_mask_facts(mask, counters, new_tokens):
    return mask.new_empty((mask.shape[0], 2), dtype=torch.int32)


for _name, _function in (("place", _place), ("attend", _attend), ("dense", _dense), ("mask_facts", _mask_facts)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
torch.library.register_fake("oscar_hf::place", lambda *arguments: None, lib=_LIBRARY)
torch.library.register_fake("oscar_hf::attend", _fake_attend, lib=_LIBRARY)
torch.library.register_fake("oscar_hf::dense", _fake_dense, lib=_LIBRARY)
torch.library.register_fake("oscar_hf::mask_facts", _fake_mask_facts, lib=_LIBRARY)

"""Attention of many new tokens over a layer with history: block by block through flash attention kernels of PyTorch.

Each block of history is dequantized in the rotated basis (to fp16 for 16-bit models), attended by queries that were rotated
once, and let go before the next one: at most one block is alive. A flash kernel returns the log-sum-exp of its scores beside
its output, so the partial results merge exactly, in float32. The exact tokens (sink, ring and the new tokens themselves) are
attended in the original basis. Specification: `attention.packed_attention`.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.dequantize import dequantize_rows
from ..quantization.quantizer import FP16_MAX

if TYPE_CHECKING:
    from ..cache.layer import OscarLayer

# Elements of one block of dequantized keys (and of its values), all rows and heads: 32 MiB each in 16 bits.
_BLOCK_ELEMENTS = 1 << 24
_MIN_BLOCK, _MAX_BLOCK = 256, 16384


def block_size(layer: "OscarLayer") -> int:
    """Tokens of history that are dequantized at a time."""
    per_token = layer.batch_size * layer.kv_heads * layer.sink_keys.shape[3]
    # Even, so that a block never splits a row of words that holds two tokens.
    return max(_MIN_BLOCK, min(_MAX_BLOCK, _BLOCK_ELEMENTS // per_token)) // 2 * 2


def _flash_cuda(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, is_causal, False, scale=scale
    )
    return output, lse


def _flash_cpu(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, is_causal, scale=scale)


def _kernel(query: Tensor, layer: "OscarLayer"):
    """The flash kernel for these queries, or None where PyTorch has none."""
    if query.shape[3] != layer.sink_values.shape[3]:
        return None
    if query.device.type == "cpu":
        return _flash_cpu
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    # Asked in the form of a block of history: queries of a KV head's group side by side. It also heeds `sdpa_kernel`.
    asked = query[:, : layer.kv_heads]
    params = torch.backends.cuda.SDPAParams(asked, asked, asked, None, 0.0, False, False)
    return _flash_cuda if torch.backends.cuda.can_use_flash_attention(params) else None


class _Sums:
    """Attention outputs [B, H, N, D] and log-sum-exps [B, H, N] merged from parts, in float32 (float64 of float64)."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        self.output = torch.zeros(shape, dtype=dtype, device=device)
        self.lse = torch.full(shape[:3], float("-inf"), dtype=dtype, device=device)

    def add(self, output: Tensor, lse: Tensor, row: slice = slice(None)) -> None:
        """Merge a part, of all rows of the batch or of some. A part must have seen at least one token."""
        lse = lse.to(self.lse.dtype)
        merged = torch.logaddexp(self.lse[row], lse)
        self.lse[row] = merged
        share = (lse - merged).exp_()
        self.output[row].lerp_(output.to(self.output.dtype), share[..., None])


def _history(layer: "OscarLayer", history: int, rotated: Tensor, flash, scale: float, sums: _Sums) -> None:
    """Add attention over the packed tokens, in the rotated basis. rotated: [B, Hkv, g * M, D]."""
    size = block_size(layer)
    for begin in range(0, history, size):
        end = min(begin + size, history)
        keys, values = (
            dequantize_rows(rows, begin, end, None, None, rotated.dtype) for rows in (layer.key_rows, layer.value_rows)
        )
        # History token j is slot sink + j, and a row that begins at slot s keeps its first `sink` tokens in the sink.
        hidden = [min(max(start - begin, 0), end - begin) for start in layer.starts or [0]]
        if not any(hidden):
            sums.add(*flash(rotated, keys, values, False, scale))
        else:
            for row, first in enumerate(hidden):
                if first < end - begin:
                    part = slice(row, row + 1)
                    seen = (x[part, :, first:] for x in (keys, values))
                    sums.add(*flash(rotated[part], *seen, False, scale), part)
        # Before the next block is made.
        del keys, values


def _window(layer: "OscarLayer", history: int, placed: int, folded: Tensor, flash, scale: float, sums: _Sums) -> None:
    """Add attention over the exact tokens before slot `placed`, those of the sink and of the ring."""
    begin = layer.sink + history
    ring = layer.ring_index(begin, placed) if begin < placed else slice(0, 0)
    counts = [max(0, min(layer.sink, min(placed, begin) - start)) for start in layer.starts or [0]]
    # Rows whose sinks are as full as each other go together.
    parts = [slice(None)] if len(set(counts)) == 1 else [slice(row, row + 1) for row in range(len(counts))]
    for part, count in zip(parts, counts):
        keys, values = (
            torch.cat([sink[part, :, :count], recent[part][:, :, ring]], 2)
            for sink, recent in ((layer.sink_keys, layer.ring_keys), (layer.sink_values, layer.ring_values))
        )
        if keys.shape[2]:
            sums.add(*flash(folded[part], keys, values, False, scale), part)


def _new_tokens(layer: "OscarLayer", placed: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the call's own tokens, which wait or are the last ones in the ring."""
    if layer.pending is not None:
        return layer.pending
    index = layer.ring_index(placed, placed + count)
    return layer.ring_keys[:, :, index], layer.ring_values[:, :, index]


def _placed(layer: "OscarLayer", new: int) -> int:
    """Slots before the call's own tokens."""
    return layer.tokens - (0 if layer.pending is not None else new)


def prefill_problem(layer: "OscarLayer", query: Tensor) -> str:
    """Why `prefill_attention` cannot take these queries, or an empty string."""
    new, pending = query.shape[2], layer.pending or ()
    if any(x.shape[2] != new for x in pending):
        return "queries and new tokens differ in number"
    if {x.dtype for x in pending} | {layer.dtype} != {query.dtype}:
        return "queries, stored and new tokens are not of one dtype"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, *pending)):
        return "merging parts has no gradient"
    placed, packed_end = _placed(layer, new), layer.sink + layer.history
    if not pending and placed < packed_end:
        return "new tokens are in the sink or packed"
    if layer.starts is not None and max(layer.starts) > min(placed, packed_end):
        return "a row begins within the recent window or the new tokens"
    return "" if _kernel(query, layer) else "PyTorch has no flash attention for these queries"


def prefill_attention(layer: "OscarLayer", query: Tensor, scale: float | None) -> Tensor:
    """`packed_attention` of the call's own tokens, which see each other causally and every slot before them.

    query [B, Hq, M, D] in the cache's dtype, one per new token. A left-padded row sees slots from its start on. Only where
    `prefill_problem` finds none. Returns [B, Hq, M, D] in the query's dtype.
    """
    flash, constants = _kernel(query, layer), layer.constants
    batch, heads, new, dim = query.shape
    placed, history = _placed(layer, new), layer.history
    scale = dim**-0.5 if scale is None else scale
    working = torch.promote_types(query.dtype, torch.float32)
    # Queries of a group become rows of one head: then no kernel needs keys and values of the past repeated.
    folded = query.reshape(batch, layer.kv_heads, -1, dim)
    sums = _Sums(folded.shape, working, query.device)
    if history:
        rotated = folded.to(working) @ constants.key_query.to(working)
        if query.dtype.itemsize == 2:
            # Stored rows are fp16 numbers by their scale and min: of them fp16 keeps 3 bits more than bf16 does.
            rotated = rotated.clamp_(-FP16_MAX, FP16_MAX).half()
        _history(layer, history, rotated, flash, scale, sums)
        del rotated
        sums.output = sums.output @ constants.value_inverse.to(working)
        if constants.key_mean is not None:
            sums.lse += (folded.to(working) @ constants.key_mean.to(working)[..., None])[..., 0] * scale
    _window(layer, history, placed, folded, flash, scale, sums)
    keys, values = _new_tokens(layer, placed, new)
    if query.device.type == "cpu":
        group = heads // layer.kv_heads
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (keys, values))
    own = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    output, lse = flash(*own, True, scale)
    sums.add(output.reshape(folded.shape), lse.reshape(folded.shape[:3]))
    return sums.output.to(query.dtype).view(query.shape)

"""Attention of many new tokens over a store with history: block by block through flash attention kernels of PyTorch.

Each block of history is dequantized in the rotated basis (to fp16 for 16-bit models), attended by queries that were rotated
once, and let go before the next one: at most one block is alive. A flash kernel returns the log-sum-exp of its scores beside
its output, so the partial results merge exactly, in float32. The exact tokens (sink, ring and the new tokens themselves) are
attended in the original basis. Specification: `attention.packed_attention`.
"""

import torch
from torch import Tensor

from ..kernels.dequantize import dequantize_rows
from ..quantization.quantizer import FP16_MAX
from ..storage.layer_store import LayerStore

# Elements of one block of dequantized keys (and of its values), all rows and heads: 32 MiB each in 16 bits.
_BLOCK_ELEMENTS = 1 << 24
_MIN_BLOCK, _MAX_BLOCK = 256, 16384


def block_size(store: LayerStore) -> int:
    """Tokens of history that are dequantized at a time."""
    per_token = store.batch_size * store.kv_heads * store.keys.dim
    # Even, so that a block never splits a row of words that holds two tokens.
    return max(_MIN_BLOCK, min(_MAX_BLOCK, _BLOCK_ELEMENTS // per_token)) // 2 * 2


def _flash_cuda(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, is_causal, False, scale=scale
    )
    return output, lse


def _flash_cpu(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, is_causal, scale=scale)


def _kernel(query: Tensor, store: LayerStore):
    """The flash kernel for these queries, or None where PyTorch has none."""
    if query.shape[3] != store.values.dim:
        return None
    if query.device.type == "cpu":
        return _flash_cpu
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    # Asked in the form of a block of history: queries of a KV head's group side by side. It also heeds `sdpa_kernel`.
    asked = query[:, : store.kv_heads]
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


def _history(store: LayerStore, history: int, rotated: Tensor, flash, scale: float, sums: _Sums) -> None:
    """Add attention over the packed tokens, in the rotated basis. rotated: [B, Hkv, g * M, D]."""
    size = block_size(store)
    for begin in range(0, history, size):
        end = min(begin + size, history)
        keys, values = (dequantize_rows(side, begin, end, rotated.dtype, rotated=True) for side in store.sides)
        # History token j is slot sink + j, and a row that begins at slot s keeps its first `sink` tokens in the sink.
        hidden = [min(max(start - begin, 0), end - begin) for start in store.padding.rows or [0]]
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


def _window(store: LayerStore, history: int, placed: int, folded: Tensor, flash, scale: float, sums: _Sums) -> None:
    """Add attention over the exact tokens before slot `placed`, those of the sink and of the ring."""
    begin = store.sink + history
    ring = store.ring_index(begin, placed) if begin < placed else slice(0, 0)
    counts = [max(0, min(store.sink, min(placed, begin) - start)) for start in store.padding.rows or [0]]
    # Rows whose sinks are as full as each other go together.
    parts = [slice(None)] if len(set(counts)) == 1 else [slice(row, row + 1) for row in range(len(counts))]
    for part, count in zip(parts, counts):
        keys, values = (torch.cat([side.sink[part, :, :count], side.ring[part][:, :, ring]], 2) for side in store.sides)
        if keys.shape[2]:
            sums.add(*flash(folded[part], keys, values, False, scale), part)


def _new_tokens(store: LayerStore, placed: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the call's own tokens, which wait or are the last ones in the ring."""
    if store.waiting is not None:
        return store.waiting.keys, store.waiting.values
    index = store.ring_index(placed, placed + count)
    return store.keys.ring[:, :, index], store.values.ring[:, :, index]


def _placed(store: LayerStore, new: int) -> int:
    """Slots before the call's own tokens."""
    return store.tokens - (0 if store.waiting is not None else new)


def prefill_problem(store: LayerStore, query: Tensor) -> str:
    """Why `prefill_attention` cannot take these queries, or an empty string."""
    new = query.shape[2]
    waiting = () if store.waiting is None else (store.waiting.keys, store.waiting.values)
    if any(x.shape[2] != new for x in waiting):
        return "queries and new tokens differ in number"
    if {x.dtype for x in waiting} | {store.dtype} != {query.dtype}:
        return "queries, stored and new tokens are not of one dtype"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, *waiting)):
        return "merging parts has no gradient"
    placed, packed_end = _placed(store, new), store.sink + store.history
    if not waiting and placed < packed_end:
        return "new tokens are in the sink or packed"
    if store.padding.is_padded and max(store.padding.rows) > min(placed, packed_end):
        return "a row begins within the recent window or the new tokens"
    return "" if _kernel(query, store) else "PyTorch has no flash attention for these queries"


def prefill_attention(store: LayerStore, query: Tensor, scale: float | None) -> Tensor:
    """`packed_attention` of the call's own tokens, which see each other causally and every slot before them.

    query [B, Hq, M, D] in the cache's dtype, one per new token. A left-padded row sees slots from its start on. Only where
    `prefill_problem` finds none. Returns [B, Hq, M, D] in the query's dtype.
    """
    flash, keys = _kernel(query, store), store.keys
    batch, heads, new, dim = query.shape
    placed, history = _placed(store, new), store.history
    scale = dim**-0.5 if scale is None else scale
    working = torch.promote_types(query.dtype, torch.float32)
    # Queries of a group become rows of one head: then no kernel needs keys and values of the past repeated.
    folded = query.reshape(batch, store.kv_heads, -1, dim)
    sums = _Sums(folded.shape, working, query.device)
    if history:
        rotated = folded.to(working)
        if keys.query_transform is not None:
            rotated = rotated @ keys.query_transform.to(working)
        if query.dtype.itemsize == 2:
            # Stored rows are fp16 numbers by their scale and min: of them fp16 keeps 3 bits more than bf16 does.
            rotated = rotated.clamp_(-FP16_MAX, FP16_MAX).half()
        _history(store, history, rotated, flash, scale, sums)
        del rotated
        if store.values.inverse is not None:
            sums.output = sums.output @ store.values.inverse.to(working)
        if keys.mean is not None:
            sums.lse += (folded.to(working) @ keys.mean.to(working)[..., None])[..., 0] * scale
    _window(store, history, placed, folded, flash, scale, sums)
    own = _new_tokens(store, placed, new)
    if query.device.type == "cpu":
        group = heads // store.kv_heads
        own = (x.repeat_interleave(group, 1) if group > 1 else x for x in own)
    own = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, *own))
    output, lse = flash(*own, True, scale)
    sums.add(output.reshape(folded.shape), lse.reshape(folded.shape[:3]))
    return sums.output.to(query.dtype).view(query.shape)

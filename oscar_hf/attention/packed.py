"""Attention over a store's regions in plain PyTorch, on packed data: the specification of the fused kernels.

Scores of the history are taken in the rotated basis, (q A^-T) . code-row, plus the constant q . mean of centered keys; its
outputs are summed in the rotated basis and rotated back once. Windows and new tokens are in the original basis. At most one
block of dequantized history is alive at a time, and the softmax is accumulated block by block in float32 (float64 for
float64 queries).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes import keeps_dtypes
from ..kernels.dequantize import dequantize_rows
from ..storage.layer_store import LayerStore

# Elements of the score block, and of the dequantized block, that may be alive at a time.
_BLOCK_ELEMENTS = 1 << 24


@dataclass
class Segment:
    """Neighboring tokens of one region. slots: their positions, a slice for all rows or int64 [B, T]; valid: bool [B, T] where
    some entries hold no token of their row, else None; rotated: whether keys and values are in the rotated basis."""

    keys: Tensor
    values: Tensor
    slots: slice | Tensor
    valid: Tensor | None = None
    rotated: bool = False


def segments(store: LayerStore, dtype: torch.dtype, block: int, kinds: str = "kv") -> Iterator[Segment]:
    """The regions of a store, oldest first; history in blocks. Keys or values that `kinds` leaves out are empty."""
    sink, (tokens, history) = store.sink, store.lengths()
    packed_end = min(tokens, sink + history)
    starts = store.padding.on(store.device)[:, None] if store.padding.is_padded else None
    if starts is None:
        exact = slice(0, min(sink, tokens))
        yield Segment(*(side.sink[:, :, exact] for side in store.sides), exact)
    elif sink:
        slots = starts + torch.arange(sink, device=store.device)
        # Of a row that begins late, part of the sink is still in the ring.
        valid = slots < packed_end
        yield Segment(store.keys.sink, store.values.sink, slots.clamp(max=max(store.held - 1, 0)), valid)
    for begin in range(0, history, block):
        end = min(begin + block, history)
        keys, values = (
            dequantize_rows(store.side(kind), begin, end, dtype, rotated=True) if kind in kinds else store.keys.sink[:0]
            for kind in "kv"
        )
        valid = None
        if starts is not None:
            valid = torch.arange(sink + begin, sink + end, device=store.device) >= starts + sink
        yield Segment(keys, values, slice(sink + begin, sink + end), valid, rotated=True)
    if sink + history < tokens:
        index = store.ring_index(sink + history, tokens)
        yield Segment(*(side.ring[:, :, index] for side in store.sides), slice(sink + history, tokens))
    if store.waiting is not None:
        yield Segment(store.waiting.keys, store.waiting.values, slice(tokens, store.held))


def exact_attention(query, keys, values, mask, is_causal, scale, repeat) -> Tensor:
    """scaled_dot_product_attention on dense tensors, with the KV heads repeated the way the caller asked for."""
    if repeat > 1:
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    gqa = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
    )


class _Query:
    """A query folded to [B, Hkv, g, M, D] and its rotated twin."""

    def __init__(self, store: LayerStore, query: Tensor):
        self.shape = query.shape
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.group = query.shape[1] // store.kv_heads
        self.folded = query.to(self.dtype).unflatten(1, (store.kv_heads, self.group)).flatten(2, 3)
        transform, mean = store.keys.query_transform, store.keys.mean
        self.rotated = self.folded if transform is None else self.folded @ transform.to(self.dtype)
        self.shift = None if mean is None else self.folded @ mean.to(self.dtype)[..., None]

    def scores(self, segment: Segment) -> Tensor:
        """q k^T of a segment, [B, Hkv, g * M, T], unscaled."""
        keys = segment.keys.to(self.dtype).mT
        if not segment.rotated:
            return self.folded @ keys
        scores = self.rotated @ keys
        return scores if self.shift is None else scores + self.shift

    def split(self, x: Tensor) -> Tensor:
        """[B, Hkv, g * M, ...] to [B, Hkv, g, M, ...]."""
        return x.unflatten(2, (self.group, self.shape[2]))

    def unfold(self, x: Tensor) -> Tensor:
        """[B, Hkv, g * M, n] to [B, Hq, M, n]."""
        return self.split(x).flatten(1, 2)


def _rotated_back(store: LayerStore, rotated_sum: Tensor) -> Tensor:
    """A sum of values from the rotated basis to the model's."""
    inverse = store.values.inverse
    return rotated_sum if inverse is None else rotated_sum @ inverse.to(rotated_sum.dtype)


def _block_size(query: Tensor, store: LayerStore) -> int:
    per_token = query.shape[0] * max(query.shape[1] * query.shape[2], store.kv_heads * query.shape[3])
    # Even, so that a block never splits a row of words that holds two tokens.
    return max(256, min(8192, _BLOCK_ELEMENTS // per_token)) // 2 * 2


def _mask_block(mask: Tensor, segment: Segment, heads: int) -> Tensor:
    """The columns of an SDPA mask [B|1, 1|Hq, 1|M, T] for a segment, as [B|1, 1|Hkv, 1|g, 1|M, t]."""
    if isinstance(segment.slots, slice):
        block = mask[..., segment.slots]
    else:
        slots = segment.slots[:, None, None, :]
        mask = mask.expand(slots.shape[0], -1, -1, -1)
        block = mask.gather(-1, slots.expand(-1, mask.shape[1], mask.shape[2], -1))
    return block[:, :, None] if block.shape[1] == 1 else block.unflatten(1, (heads, -1))


@keeps_dtypes
def packed_attention(
    store: LayerStore, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention output [B, Hq, M, Dv] in the query's dtype over all tokens of the store.

    query [B, Hq, M, D], Hq a multiple of the KV heads. mask: bool (True = attend) or additive, [B|1, 1|Hq, 1|M, >= T].
    is_causal: the last M tokens are the query's own and query i sees none after its own. scale None: 1 / sqrt(D). A row that
    is masked entirely gives 0.
    """
    folded = _Query(store, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    total, new = store.held, query.shape[2]
    best = denominator = exact_sum = rotated_sum = None
    for segment in segments(store, folded.dtype, _block_size(query, store)):
        scores = folded.split(folded.scores(segment) * scale)
        if mask is not None:
            block = _mask_block(mask, segment, store.kv_heads)
            if block.dtype == torch.bool:
                scores = scores.masked_fill(~block, float("-inf"))
            else:
                scores = scores + block.to(scores.dtype)
        if segment.valid is not None:
            scores = scores.masked_fill(~segment.valid[:, None, None, None], float("-inf"))
        if is_causal and new > 1:
            slots = segment.slots
            slots = torch.arange(slots.start, slots.stop, device=query.device) if isinstance(slots, slice) else slots
            limit = torch.arange(total - new, total, device=query.device)
            hidden = slots[..., None, :] > limit[:, None]
            scores = scores.masked_fill(hidden if hidden.dim() == 2 else hidden[:, None, None], float("-inf"))
        scores = scores.flatten(2, 3)
        highest = (
            scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:3], 1), -torch.inf)
        )
        if best is None:
            best = highest
            denominator = torch.zeros_like(best)
            exact_sum = scores.new_zeros(*scores.shape[:3], store.values.dim)
            rotated_sum = torch.zeros_like(exact_sum)
        highest = torch.maximum(best, highest)
        # Nothing visible so far: any finite reference keeps exp(-inf - reference) at 0.
        reference = highest.masked_fill(highest == float("-inf"), 0)
        weights, decay = (scores - reference).exp(), (best - reference).exp()
        best, denominator = highest, denominator * decay + weights.sum(-1, keepdim=True)
        exact_sum, rotated_sum = exact_sum * decay, rotated_sum * decay
        target = rotated_sum if segment.rotated else exact_sum
        target += weights @ segment.values.to(folded.dtype)
    total_sum = exact_sum + _rotated_back(store, rotated_sum)
    output = torch.where(denominator > 0, total_sum / denominator, 0)
    return folded.unfold(output).to(query.dtype)


@keeps_dtypes
def packed_scores(store: LayerStore, query: Tensor) -> Tensor:
    """q k^T over all slots, [B, Hq, M, T] in the query's dtype, unscaled: the first product of eager attention."""
    folded = _Query(store, query)
    parts, late_sink = [], None
    for segment in segments(store, folded.dtype, _block_size(query, store), "k"):
        scores = folded.scores(segment)
        if isinstance(segment.slots, slice):
            parts.append(scores)
        else:
            late_sink = (segment, scores)
            parts.append(scores.new_zeros(*scores.shape[:3], min(store.sink, store.tokens)))
    scores = torch.cat(parts, -1)
    if late_sink is not None:
        scores = _write_at(scores, *late_sink)
    return folded.unfold(scores).to(query.dtype)


def _write_at(scores: Tensor, segment: Segment, own: Tensor) -> Tensor:
    """Scores [B, Hkv, n, T] with a segment's own [B, Hkv, n, t] at its slots, which differ by row."""
    # Entries that hold no token go to a column of their own, which is then dropped.
    slots = torch.where(segment.valid, segment.slots, scores.shape[-1])
    slots = slots[:, None, None, :].expand(own.shape)
    return F.pad(scores, (0, 1)).scatter(-1, slots, own)[..., :-1]


@keeps_dtypes
def packed_weighted_sum(store: LayerStore, weights: Tensor) -> Tensor:
    """weights [B, Hq, M, T] times v, [B, Hq, M, Dv] in their dtype: the second product of eager attention."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    heads = store.kv_heads
    shape = weights.shape
    folded = weights.to(dtype).unflatten(1, (heads, shape[1] // heads)).flatten(2, 3)
    exact_sum = rotated_sum = folded.new_zeros(*folded.shape[:3], store.values.dim)
    for segment in segments(store, dtype, _block_size(weights[..., :1], store), "v"):
        if isinstance(segment.slots, slice):
            block = folded[..., segment.slots]
        else:
            block = folded.gather(-1, segment.slots[:, None, None, :].expand(*folded.shape[:3], -1))
        if segment.valid is not None:
            block = block * segment.valid[:, None, None]
        product = block @ segment.values.to(dtype)
        if segment.rotated:
            rotated_sum = rotated_sum + product
        else:
            exact_sum = exact_sum + product
    output = exact_sum + _rotated_back(store, rotated_sum)
    return output.unflatten(2, (shape[1] // heads, shape[2])).flatten(1, 2).to(weights.dtype)

"""Attention over a layer's regions in plain PyTorch, on packed data: the specification of the fused kernels.

Scores of the history are taken in the rotated basis, (q A^-T) . code-row, plus the constant q . mean of centred keys; its
outputs are summed in the rotated basis and rotated back once. Windows and new tokens are in the original basis. At most one
block of dequantized history is alive at a time, and the softmax is accumulated block by block in float32 (float64 for
float64 queries).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.decode import MAX_NEW_TOKENS, DecodeStore, decode_attention, decode_problem, mask_facts
from ..kernels.dequantize import dequantize_rows
from ..kernels.launch import launch_problem, warn_once
from .blockwise import prefill_attention, prefill_problem

if TYPE_CHECKING:
    from ..cache.layer import OscarLayer

# Elements of the score block, and of the dequantized block, that may be alive at a time.
_BLOCK_ELEMENTS = 1 << 24

# New tokens from which flash attention on dequantized blocks beats the plain path, by device: on CPUs a block must pay
# for itself, and on GPUs the decode kernel takes few tokens.
_MIN_PREFILL = {"cpu": 64, "cuda": 2}

# What is known of masks that are still alive; it keeps none of them alive.
_known_of_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _once_per_mask(mask: Tensor, question: tuple, answer: Callable):
    """What `answer` says of a mask, asked once for all layers of a model: they share the mask."""
    known = _known_of_masks.setdefault(mask, {})
    if question not in known:
        known[question] = answer()
    return known[question]


def visible(mask: Tensor) -> Tensor:
    """Which places an SDPA mask, bool (True = attend) or additive, lets queries see: bool of the same shape."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def without_autocast(device: torch.device):
    """A context in which torch keeps the dtypes that this package chose, also inside somebody's autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def keeps_dtypes(function):
    """Decorator for functions and methods whose first argument is a layer: they run `without_autocast`."""

    @functools.wraps(function)
    def wrapped(layer, *args, **kwargs):
        with without_autocast(layer.device):
            return function(layer, *args, **kwargs)

    return wrapped


@dataclass
class Segment:
    """Neighbouring tokens of one region. slots: their positions, a slice for all rows or int64 [B, T]; valid: bool [B, T]
    or None; rotated: whether keys and values are in the rotated basis."""

    keys: Tensor
    values: Tensor
    slots: slice | Tensor
    valid: Tensor | None = None
    rotated: bool = False


def segments(layer: "OscarLayer", dtype: torch.dtype, block: int, kinds: str = "kv") -> Iterator[Segment]:
    """The regions of a layer, oldest first; history in blocks. Keys or values that `kinds` leaves out are empty."""
    sink, tokens, history = layer.sink, layer.tokens, layer.history
    packed_end = min(tokens, sink + history)
    starts = None if layer.starts is None else layer.row_starts()[:, None]
    if starts is None:
        exact = min(sink, tokens)
        yield Segment(layer.sink_keys[:, :, :exact], layer.sink_values[:, :, :exact], slice(0, exact))
    elif sink:
        slots = starts + torch.arange(sink, device=layer.device)
        # Of a row that begins late, part of the sink is still in the ring.
        valid = slots < packed_end
        yield Segment(layer.sink_keys, layer.sink_values, slots.clamp(max=max(layer.held - 1, 0)), valid)
    for begin in range(0, history, block):
        end = min(begin + block, history)
        keys, values = (
            dequantize_rows(rows, begin, end, None, None, dtype) if kind in kinds else rows.scale.new_empty(0)
            for kind, rows in (("k", layer.key_rows), ("v", layer.value_rows))
        )
        valid = None
        if starts is not None:
            valid = torch.arange(sink + begin, sink + end, device=layer.device) >= starts + sink
        yield Segment(keys, values, slice(sink + begin, sink + end), valid, rotated=True)
    if sink + history < tokens:
        index = layer.ring_index(sink + history, tokens)
        yield Segment(layer.ring_keys[:, :, index], layer.ring_values[:, :, index], slice(sink + history, tokens))
    if layer.pending is not None:
        yield Segment(*layer.pending, slice(tokens, layer.held))


def attend(
    layer: "OscarLayer", query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, new_tokens: int
) -> Tensor:
    """`packed_attention` through the fused decode kernel or block by block through flash attention where these can run,
    else in plain PyTorch.

    new_tokens: tokens that the call added; a query of one token per head may come packed as [B, Hkv, g, D].
    """
    # A prompt on top of a history goes block by block: the kernel reads few, placed tokens only.
    if layer.pending is None and new_tokens <= MAX_NEW_TOKENS and query.device.type == "cuda":
        packed_query, query = query, one_row_per_token(query, new_tokens)
        store = layer.decode_store()
        problem = _fused_problem(query, store, mask, is_causal, new_tokens)
        if not problem:
            facts = None
            if mask is not None:
                length = store.length
                facts = _once_per_mask(
                    mask, ("facts", new_tokens, length), lambda: mask_facts(mask, length, new_tokens)
                )
            output = decode_attention(query, store, mask=mask, mask_facts=facts, scale=scale)
            return output.reshape(*packed_query.shape[:3], -1)
        warn_once(problem)
        query = packed_query
    if _takes_prefill(layer, query, mask, is_causal, new_tokens):
        return _prefill(layer, query, scale)
    return packed_attention(layer, query, mask, is_causal, scale)


def one_row_per_token(query: Tensor, new_tokens: int) -> Tensor:
    """A query [B, Hq, M, D] of `new_tokens` tokens; one token's may come packed as [B, Hkv, g, D]."""
    if new_tokens == 1 and query.shape[2] > 1:
        return query.reshape(query.shape[0], query.shape[1] * query.shape[2], 1, query.shape[3])
    return query


def _takes_prefill(layer: "OscarLayer", query: Tensor, mask: Tensor | None, is_causal: bool, new_tokens: int) -> bool:
    """Whether a call is many new tokens that see every slot but padding and what comes after them, so `_prefill` can do it."""
    least = _MIN_PREFILL.get(query.device.type)
    if least is None or new_tokens < least or query.shape[2] != new_tokens or prefill_problem(layer, query):
        return False
    if mask is None:
        return is_causal
    hidden = _leading_slots_hidden(mask, new_tokens, layer.held)
    starts = layer.starts or [0] * layer.batch_size
    return hidden is not None and (hidden * layer.batch_size if len(hidden) == 1 else hidden) == starts


@keeps_dtypes
def _prefill(layer: "OscarLayer", query: Tensor, scale: float | None) -> Tensor:
    return prefill_attention(layer, query, scale)


def _leading_slots_hidden(mask: Tensor, new_tokens: int, total: int) -> list[int] | None:
    """How many leading slots each row of an SDPA mask hides, if that and what follows a token are all it does; else None.

    Asks the device once per mask, which all layers of a model share.
    """
    if mask.shape[1] != 1 or mask.shape[2] != new_tokens or mask.shape[3] < total:
        return None
    return _once_per_mask(
        mask, ("leading", new_tokens, total), lambda: _find_leading(mask[:, 0, :, :total], new_tokens)
    )


def _find_leading(mask: Tensor, new_tokens: int) -> list[int] | None:
    """The same for a mask [B, M, T]."""
    seen = visible(mask)
    # A finite bias is neither hidden nor plain.
    biased = torch.zeros((), dtype=torch.bool, device=mask.device) if mask is seen else (seen & (mask != 0)).any()
    first = seen.any(1).int().argmax(-1)
    past = mask.shape[2] - new_tokens
    # No query sees a slot before `first` or after its own; if they see as many as that leaves, they see all of them.
    expected = new_tokens * (past - first) + new_tokens * (new_tokens + 1) // 2
    wrong = biased | seen[..., past:].triu(1).any() | (first > past).any() | (seen.sum((1, 2)) != expected).any()
    *first, wrong = torch.cat([first, wrong[None].long()]).tolist()
    return None if wrong else first


def _fused_problem(query: Tensor, store: DecodeStore, mask: Tensor | None, is_causal: bool, new_tokens: int) -> str:
    """Why the fused kernel cannot take this call, or an empty string."""
    problem = launch_problem(query.device)
    if problem:
        return problem
    if query.dtype != store.sink_k.dtype:
        return f"the decode kernel takes queries of the cache's dtype {store.sink_k.dtype}, got {query.dtype}"
    if query.shape[2] != new_tokens:
        return f"the decode kernel takes one query per new token ({new_tokens}), got {query.shape[2]}"
    if mask is not None and mask.shape[3] < store.length:
        return f"the decode kernel takes masks over all {store.length} slots, got {list(mask.shape)}"
    if mask is not None and query.shape[2] == 1 and (mask.shape[1] not in (1, query.shape[1]) or mask.shape[2] != 1):
        return f"the decode kernel takes no mask of shape {list(mask.shape)} for one new token"
    if new_tokens > 1 and not (_is_causal_mask(mask, new_tokens) if mask is not None else is_causal):
        return "the decode kernel takes causal attention among the new tokens only"
    return decode_problem(query, store)


def _is_causal_mask(mask: Tensor, new_tokens: int) -> bool:
    """Whether no new token sees a later one. Asks the device once per mask, which all layers of a model share."""
    if mask.shape[2] != new_tokens:
        return False
    return _once_per_mask(
        mask, ("causal", new_tokens), lambda: not bool(visible(mask[..., -new_tokens:]).triu(1).any())
    )


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

    def __init__(self, layer: "OscarLayer", query: Tensor):
        self.shape = query.shape
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        heads = layer.kv_heads
        self.group = query.shape[1] // heads
        self.folded = query.to(self.dtype).unflatten(1, (heads, self.group)).flatten(2, 3)
        constants = layer.constants
        self.rotated = self.folded @ constants.key_query.to(self.dtype)
        self.shift = None
        if constants.key_mean is not None:
            self.shift = self.folded @ constants.key_mean.to(self.dtype)[..., None]

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


def _block_size(query: Tensor, layer: "OscarLayer") -> int:
    per_token = query.shape[0] * max(query.shape[1] * query.shape[2], layer.kv_heads * query.shape[3])
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
    layer: "OscarLayer", query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention output [B, Hq, M, Dv] in the query's dtype over all tokens of the layer.

    query [B, Hq, M, D], Hq a multiple of the KV heads. mask: bool (True = attend) or additive, [B|1, 1|Hq, 1|M, >= T].
    is_causal: the last M tokens are the query's own and query i sees none after its own. scale None: 1 / sqrt(D). A row that
    is masked entirely gives 0.
    """
    folded = _Query(layer, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    total, new = layer.held, query.shape[2]
    best = denominator = exact_sum = rotated_sum = None
    for segment in segments(layer, folded.dtype, _block_size(query, layer)):
        scores = folded.split(folded.scores(segment) * scale)
        if mask is not None:
            block = _mask_block(mask, segment, layer.kv_heads)
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
            exact_sum = scores.new_zeros(*scores.shape[:3], layer.sink_values.shape[3])
            rotated_sum = torch.zeros_like(exact_sum)
        highest = torch.maximum(best, highest)
        # Nothing visible so far: any finite reference keeps exp(-inf - reference) at 0.
        reference = highest.masked_fill(highest == float("-inf"), 0)
        weights, decay = (scores - reference).exp(), (best - reference).exp()
        best, denominator = highest, denominator * decay + weights.sum(-1, keepdim=True)
        exact_sum, rotated_sum = exact_sum * decay, rotated_sum * decay
        target = rotated_sum if segment.rotated else exact_sum
        target += weights @ segment.values.to(folded.dtype)
    total_sum = exact_sum + rotated_sum @ layer.constants.value_inverse.to(folded.dtype)
    output = torch.where(denominator > 0, total_sum / denominator, 0)
    return folded.unfold(output).to(query.dtype)


@keeps_dtypes
def packed_scores(layer: "OscarLayer", query: Tensor) -> Tensor:
    """q k^T over all slots, [B, Hq, M, T] in the query's dtype, unscaled: the first product of eager attention."""
    folded = _Query(layer, query)
    parts, overlay = [], None
    for segment in segments(layer, folded.dtype, _block_size(query, layer), "k"):
        scores = folded.scores(segment)
        if isinstance(segment.slots, slice):
            parts.append(scores)
        else:
            overlay = (segment, scores)
            parts.append(scores.new_zeros(*scores.shape[:3], min(layer.sink, layer.tokens)))
    scores = torch.cat(parts, -1)
    if overlay is not None:
        segment, overlaid = overlay
        slots = segment.slots[:, None, None, :].expand(overlaid.shape)
        # An invalid entry shares its clamped slot with a valid one, so it must write what is there already; it goes to a
        # column of its own that is then dropped.
        slots = torch.where(segment.valid[:, None, None], slots, scores.shape[-1])
        scores = F.pad(scores, (0, 1)).scatter(-1, slots, overlaid)[..., :-1]
    return folded.unfold(scores).to(query.dtype)


@keeps_dtypes
def packed_weighted_sum(layer: "OscarLayer", weights: Tensor) -> Tensor:
    """weights [B, Hq, M, T] times v, [B, Hq, M, Dv] in their dtype: the second product of eager attention."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    heads = layer.kv_heads
    shape = weights.shape
    folded = weights.to(dtype).unflatten(1, (heads, shape[1] // heads)).flatten(2, 3)
    exact_sum = rotated_sum = 0
    for segment in segments(layer, dtype, _block_size(weights[..., :1], layer), "v"):
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
    output = exact_sum
    if layer.history:
        output = output + rotated_sum @ layer.constants.value_inverse.to(dtype)
    return output.unflatten(2, (shape[1] // heads, shape[2])).flatten(1, 2).to(weights.dtype)

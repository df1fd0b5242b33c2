"""What decode attention reads of a layer, and which calls it takes."""

import dataclasses

from torch import Tensor

MAX_NEW_TOKENS = 16


@dataclasses.dataclass
class DecodeStore:
    """One layer's cache as `decode_attention` reads it. Shapes: B rows, Hkv KV heads, C capacity, S sink, R ring, D, G.

    k_codes, v_codes: int16 [B, Hkv, C, D/8], for D = 64 [B, Hkv, C/2, 16] (layout: packed_rows.py)
    k_scale, k_min, v_scale, v_min: fp16 [B, Hkv, C, D/G]; both mins None when symmetric (xhat = scale (code - 1.5))
    sink_k, sink_v [B, Hkv, S, D], ring_k, ring_v [B, Hkv, R, D]: the model's dtype, raw basis
    length: slots in use, new tokens of the call included; history: how many are quantized (slots S..S+history-1).
    Both are ints, or both int32 tensors of one element on the device.
    key_query, value_inverse: fp32 [D, D] or [Hkv, D, D], None for the identity; key_mean fp32 [Hkv, D] or None
    start: int32 [B] first real slot of each row (left padding), or None for zeros
    """

    k_codes: Tensor
    k_scale: Tensor
    k_min: Tensor | None
    v_codes: Tensor
    v_scale: Tensor
    v_min: Tensor | None
    sink_k: Tensor
    sink_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    length: int | Tensor
    history: int | Tensor
    key_query: Tensor | None = None
    value_inverse: Tensor | None = None
    key_mean: Tensor | None = None
    start: Tensor | None = None


def decode_problem(query: Tensor, store: DecodeStore) -> str:
    """Why the fused kernel cannot take this call, or an empty string."""
    head_dim, groups = query.shape[-1], store.k_scale.shape[-1]
    if head_dim not in (64, 128, 256):
        return f"the decode kernel takes head dims 64, 128 and 256, got {head_dim}"
    if store.sink_v.shape[-1] != head_dim:
        return f"the decode kernel takes keys and values of one head dim, got {head_dim} and {store.sink_v.shape[-1]}"
    if query.shape[2] > MAX_NEW_TOKENS:
        return f"the decode kernel takes at most {MAX_NEW_TOKENS} new tokens, got {query.shape[2]}"
    if groups not in (1, 2, 4) or store.v_scale.shape[-1] != groups:
        return f"the decode kernel takes 1, 2 or 4 groups per row, keys and values alike, got {groups}"
    if (store.k_min is None) != (store.v_min is None):
        return "the decode kernel takes keys and values both with or both without min"
    return ""

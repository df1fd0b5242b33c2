"""Plain-PyTorch references of the kernels that read the cache: the specification the tests compare them with."""

import torch
from torch import Tensor


def _unpack(codes: Tensor, head_dim: int) -> Tensor:
    """int16 words to codes [B, H, C, D] (layout: packed.py)."""
    words = codes.to(torch.int32)
    crumbs = torch.stack([words >> 2 * i & 3 for i in range(8)], -2)
    if head_dim == 64:
        return crumbs.unflatten(-2, (2, 4)).flatten(-2).flatten(2, 3)
    return crumbs.flatten(-2)


def _dequantize(codes, scale, minimum, head_dim, tokens, dtype):
    """First `tokens` rows in the rotated basis."""
    levels = _unpack(codes, head_dim)[:, :, :tokens].to(dtype)
    step = scale[:, :, :tokens].to(dtype).repeat_interleave(head_dim // scale.shape[-1], -1)
    if minimum is None:
        return step * (levels - 1.5)
    return minimum[:, :, :tokens].to(dtype).repeat_interleave(head_dim // scale.shape[-1], -1) + step * levels


def decode_attention_reference(query, store, mask=None, scale=None, softcap=None, s_aux=None, dtype=torch.float64):
    """What `decode_attention` computes, in `dtype`: same arguments, output [B, Hq, M, D] in `dtype`."""
    batch, heads, new, head_dim = query.shape
    kv_heads, sink, ring = store.k_codes.shape[1], store.sink_k.shape[2], store.ring_k.shape[2]
    rep = heads // kv_heads
    n, h, device = int(store.length), int(store.history), query.device
    scale = head_dim**-0.5 if scale is None else scale
    start = torch.zeros(batch, dtype=torch.int64) if store.start is None else store.start.to(torch.int64)
    start = start.to(device)[:, None]
    q = query.to(dtype).unflatten(1, (kv_heads, rep))

    def per_head(matrix):
        if matrix is None:
            return torch.eye(head_dim, dtype=dtype, device=device).expand(kv_heads, -1, -1)
        return matrix.to(dtype).expand(kv_heads, -1, -1)

    # Three regions, each with the absolute slot of every entry per row and whether the row may see it at all.
    i = torch.arange(sink, device=device)
    sink_slot = start + i
    regions = [(sink_slot, sink_slot < min(n, sink + h))]
    j = torch.arange(h, device=device)
    regions.append(((sink + j).expand(batch, -1), j >= start))
    r = torch.arange(sink + h, max(n, sink + h), device=device)
    regions.append((r.expand(batch, -1), r >= start))
    slot = torch.cat([s for s, _ in regions], 1)
    visible = torch.cat([v.expand(batch, -1) for _, v in regions], 1)

    k_hat = _dequantize(store.k_codes, store.k_scale, store.k_min, head_dim, h, dtype)
    v_hat = _dequantize(store.v_codes, store.v_scale, store.v_min, head_dim, h, dtype)
    ring_at = (r - sink) % ring
    q_rot = torch.einsum("bhgmd,hde->bhgme", q, per_head(store.key_query))
    history = q_rot @ k_hat[:, :, None].mT
    if store.key_mean is not None:
        history = history + torch.einsum("bhgmd,hd->bhgm", q, store.key_mean.to(dtype))[..., None]
    scores = torch.cat(
        [
            q @ store.sink_k.to(dtype)[:, :, None].mT,
            history,
            q @ store.ring_k.to(dtype)[:, :, ring_at][:, :, None].mT,
        ],
        -1,
    )
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    oldest_new = n - new + torch.arange(new, device=device)
    keep = visible[:, None, :] & (slot[:, None, :] <= oldest_new[None, :, None])
    keep = keep[:, None, None].expand(batch, kv_heads, rep, new, -1)
    if mask is not None:
        full = mask.expand(batch, heads, new, -1).unflatten(1, (kv_heads, rep))
        at = slot.clamp(0, n - 1)[:, None, None, None].expand(batch, kv_heads, rep, new, -1)
        full = full.gather(-1, at)
        if mask.dtype == torch.bool:
            keep = keep & full
        else:
            keep = keep & (full > torch.finfo(mask.dtype).min / 2)
            scores = scores + full.to(dtype)
    scores = scores.masked_fill(~keep, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if s_aux is not None:
        aux = s_aux.to(dtype).view(1, kv_heads, rep, 1, 1)
        top = torch.maximum(top, aux)
    top = top.masked_fill(top == float("-inf"), 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(aux - top)
    weights = weights / total.masked_fill(total == 0, 1)
    values = torch.einsum("bhtd,hde->bhte", v_hat, per_head(store.value_inverse))
    values = torch.cat([store.sink_v.to(dtype), values, store.ring_v.to(dtype)[:, :, ring_at]], 2)
    return (weights @ values[:, :, None]).flatten(1, 2)


def mask_facts_reference(mask, length, new_tokens):
    """What `mask_facts` computes: same arguments, same result."""
    slot = torch.arange(mask.shape[-1], device=mask.device)
    used = slot < length
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = (seen & used).expand(-1, -1, new_tokens, -1)
    first = torch.where(seen.any((1, 2)), slot, length).amin(-1)
    newest = length - new_tokens + torch.arange(new_tokens, device=mask.device)
    expected = (slot >= first[:, None, None]) & (slot <= newest[:, None]) & used
    same = (seen == expected[:, None]).all(-1).all(-1).all(-1)
    if mask.dtype != torch.bool:
        same &= ((mask == 0) | ~seen).all(-1).all(-1).all(-1)
    return torch.stack([first, (~same).long()], -1).to(torch.int32)

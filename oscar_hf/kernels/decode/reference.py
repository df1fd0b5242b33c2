"""Plain-PyTorch references of the kernels that read the cache: the specification the tests compare them with."""

import torch

from ...masks import hidden_below, visible
from ...quantization.quantizer import dequantize


def decode_attention_reference(query, store, mask=None, scale=None, softcap=None, s_aux=None, dtype=torch.float64):
    """What `decode_attention` computes, in `dtype`: same arguments, output [B, Hq, M, D] in `dtype`."""
    batch, heads, new, head_dim = query.shape
    kv_heads, sink, ring = store.keys.rows.codes.shape[1], store.keys.sink.shape[2], store.keys.ring.shape[2]
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
    in_row = torch.cat([v.expand(batch, -1) for _, v in regions], 1)

    # In the rotated basis.
    k_hat, v_hat = (dequantize(*side.rows.read(0, h), dtype=dtype) for side in (store.keys, store.values))
    ring_at = (r - sink) % ring
    q_rot = torch.einsum("bhgmd,hde->bhgme", q, per_head(store.keys.query_transform))
    history = q_rot @ k_hat[:, :, None].mT
    if store.keys.rows.centers is not None:
        block = store.keys.rows.center_block
        at_centers = torch.einsum("bhgmd,bhcd->bhgmc", q, store.keys.rows.centers[:, :, : -(-h // block)].to(dtype))
        history = history + at_centers.repeat_interleave(block, -1)[..., :h]
    elif store.keys.mean is not None:
        history = history + torch.einsum("bhgmd,hd->bhgm", q, store.keys.mean.to(dtype))[..., None]
    scores = torch.cat(
        [
            q @ store.keys.sink.to(dtype)[:, :, None].mT,
            history,
            q @ store.keys.ring.to(dtype)[:, :, ring_at][:, :, None].mT,
        ],
        -1,
    )
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    oldest_new = n - new + torch.arange(new, device=device)
    keep = in_row[:, None, :] & (slot[:, None, :] <= oldest_new[None, :, None])
    keep = keep[:, None, None].expand(batch, kv_heads, rep, new, -1)
    if mask is not None:
        full = mask.expand(batch, heads, new, -1).unflatten(1, (kv_heads, rep))
        at = slot.clamp(0, n - 1)[:, None, None, None].expand(batch, kv_heads, rep, new, -1)
        full = full.gather(-1, at)
        if mask.dtype == torch.bool:
            keep = keep & full
        else:
            keep = keep & (full > hidden_below(mask.dtype))
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
    values = torch.einsum("bhtd,hde->bhte", v_hat, per_head(store.values.inverse))
    values = torch.cat([store.values.sink.to(dtype), values, store.values.ring.to(dtype)[:, :, ring_at]], 2)
    return (weights @ values[:, :, None]).flatten(1, 2)


def mask_facts_reference(mask, length, new_tokens):
    """What `mask_facts` computes: same arguments, same result."""
    slot = torch.arange(mask.shape[-1], device=mask.device)
    used = slot < length
    seen = visible(mask)
    seen = (seen & used).expand(-1, -1, new_tokens, -1)
    first = torch.where(seen.any((1, 2)), slot, length).amin(-1)
    newest = length - new_tokens + torch.arange(new_tokens, device=mask.device)
    expected = (slot >= first[:, None, None]) & (slot <= newest[:, None]) & used
    same = (seen == expected[:, None]).all(-1).all(-1).all(-1)
    if mask.dtype != torch.bool:
        same &= ((mask == 0) | ~seen).all(-1).all(-1).all(-1)
    return torch.stack([first, (~same).long()], -1).to(torch.int32)

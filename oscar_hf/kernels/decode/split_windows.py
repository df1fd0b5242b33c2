"""A split's piece of the sink or of the ring, which hold exact keys and values."""

from ..launch import tl, triton
from .elements import NEVER, softcapped


@triton.jit
def attend_window(
    q_ptr, k_ptr, v_ptr, mask_ptr, o_ptr, ml_ptr,
    stride_qh, stride_qm, n, h, start, low, reads, sink, ring, first, last,
    column, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
    RING: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, WB: tl.constexpr, LOW: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Entries first..last-1 of the sink or of the ring, exact; pointers are at that KV head (q: at the batch row).

    start: the slot of the sink's first entry; low: the first slot that may be seen, if LOW
    """
    N: tl.constexpr = NC if NC > 8 else 8
    col = tl.arange(0, N)
    d = tl.arange(0, D)
    c = column + col
    live = (col < NC) & (c < cols)
    token = c % new_tokens
    at = (rep_head + c // new_tokens) * stride_qh + token * stride_qm
    q = tl.load(q_ptr + at[None, :] + d[:, None], mask=live[None, :], other=0.0)
    if WIDEN:
        # The interpreter multiplies bfloat16 as if it were integers.
        q = q.to(tl.float32)
    m_run = tl.full([N], NEVER, tl.float32)
    l_run = tl.zeros([N], tl.float32)
    acc = tl.zeros([D, N], tl.float32)
    for e in tl.range(first, last, WB, num_stages=2):
        entry = e + tl.arange(0, WB)
        if RING:
            slot = sink + h + entry
            index = (h + entry) % ring
            valid = (entry < last) & (slot < n)
        else:
            slot = start + entry
            index = entry
            valid = (entry < last) & (slot < tl.minimum(n, sink + h))
        if LOW:
            valid = valid & (slot >= low)
        k = tl.load(k_ptr + index[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        x = tl.dot(k, q, input_precision=PRECISION) * scale
        if CAP:
            x = softcapped(x, cap)
        keep = valid[:, None] & (slot[:, None] <= (n - new_tokens + token)[None, :])
        if MASK > 0:
            where = (rep_head + c // new_tokens).to(tl.int64) * stride_mh + token * stride_mm
            where = where[None, :] + slot[:, None].to(tl.int64) * stride_mn
            wanted = keep & (live & (tl.zeros([N], tl.int32) + reads > 0))[None, :]
            if MASK == 1:
                keep = keep & (tl.load(mask_ptr + where, mask=wanted, other=1) != 0)
            else:
                bias = tl.load(mask_ptr + where, mask=wanted, other=0.0).to(tl.float32)
                keep = keep & (bias > mask_floor)
                x += bias * 1.4426950408889634
        x = tl.where(keep, x, NEVER)
        m_new = tl.maximum(m_run, tl.max(x, axis=0))
        shrink = tl.exp2(m_run - m_new)
        m_run = m_new
        p = tl.where(keep, tl.exp2(x - m_new[None, :]), 0.0)
        l_run = l_run * shrink + tl.sum(p, axis=0)
        v = tl.load(v_ptr + index[None, :] * D + d[:, None], mask=valid[None, :], other=0.0)
        if WIDEN:
            v = v.to(tl.float32)
        # Two terms: one alone, of bfloat16's 8 bits, would be most of the kernel's error. The windows are small.
        rounded = p.to(v.dtype)
        acc = tl.dot(v, rounded, acc * shrink[None, :], input_precision=PRECISION)
        if v.dtype != tl.float32:
            acc = tl.dot(v, (p - rounded.to(tl.float32)).to(v.dtype), acc, input_precision=PRECISION)
    tl.store(ml_ptr + col, m_run, mask=col < NC)
    tl.store(ml_ptr + NC + col, l_run, mask=col < NC)
    tl.store(o_ptr + col[None, :] * D + d[:, None], acc, mask=(col < NC)[None, :])

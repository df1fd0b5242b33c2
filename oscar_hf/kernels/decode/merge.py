"""Merge: weigh the partial results, rotate the history's share back and add the windows' share."""

from ..launch import tl, tlx, triton
from .elements import NEVER
from .tuning import history_splits


@triton.jit(
    do_not_specialize=[
        "history", "all_parts", "n_window", "limit", "longest", "alone", "block", "batch", "cols", "chunks"
    ]
)  # fmt: skip
def merge_kernel(
    o_ptr, ml_ptr, vi_ptr, aux_ptr, out_ptr, start_ptr, facts_ptr, history, all_parts, n_window, sink,
    limit, longest, alone, block, stride_fb, stride_vi, batch, cols, new_tokens, chunks,
    ON_DEVICE: tl.constexpr, STARTS: tl.constexpr, FACTS: tl.constexpr, HKV: tl.constexpr, REP: tl.constexpr,
    D: tl.constexpr, NC: tl.constexpr, DS: tl.constexpr, PT: tl.constexpr, PB: tl.constexpr, PW: tl.constexpr,
    PER: tl.constexpr, RB: tl.constexpr, ROTATE: tl.constexpr, TURNED: tl.constexpr, AUX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Weigh the parts, history (part >= n_window) times VI, plus windows: DS channels of PER columns of RB batch rows.

    Grid (batch groups * Hkv, column groups, slices). TURNED: vi is given as its transpose's memory.
    """
    R: tl.constexpr = RB * PER
    h = tl.program_id(0) % HKV
    b = tl.program_id(0) // HKV * RB + tl.arange(0, R) // PER
    column = tl.program_id(1) * PER + tl.arange(0, R) % PER
    d = tl.arange(0, D)
    ds = tl.program_id(2) * DS + tl.arange(0, DS)
    there = b < batch
    if ROTATE:
        if TURNED:
            vi = tl.load(vi_ptr + h * stride_vi + d[:, None] + ds[None, :] * D)
        else:
            vi = tl.load(vi_ptr + h * stride_vi + d[:, None] * D + ds[None, :])
    if PDL:
        tlx.gdc_wait()
    tokens = tl.load(history) if ON_DEVICE else history
    low = tl.zeros([R], tl.int32)
    if STARTS:
        low = tl.load(start_ptr + b, mask=there, other=0)
    if FACTS:
        low = tl.maximum(low, tl.load(facts_ptr + b * stride_fb, mask=there, other=0) - sink)
    parts = tl.where(there, n_window + history_splits(tokens, low, limit, longest, alone, block)[3], 0)
    # PER divides NC, so one chunk holds all columns of a program.
    row = ((b * HKV + h) * chunks + tl.program_id(1) * PER // NC).to(tl.int64) * all_parts
    c = column % NC
    o_row = o_ptr + (row * (NC * D) + c * D)[None, :, None]
    ml_row = ml_ptr + (row * (2 * NC) + c)[None, :]
    # Every load that needs no other is issued before the first sum: their latencies are most of this kernel's time.
    window = tl.arange(0, PW)
    first = n_window + tl.arange(0, PB)
    every = tl.arange(0, PT)
    in_window = (window < n_window)[:, None] & there[None, :]
    in_first = first[:, None] < parts[None, :]
    in_every = every[:, None] < parts[None, :]
    raw_at = window[:, None, None] * (NC * D) + ds[None, None, :]
    raw = tl.load(o_row + raw_at, mask=in_window[:, :, None], other=0.0)
    old_channel = d if ROTATE else ds
    old_at = first[:, None, None] * (NC * D) + old_channel[None, None, :]
    old = tl.load(o_row + old_at, mask=in_first[:, :, None], other=0.0)
    m = tl.load(ml_row + every[:, None] * (2 * NC), mask=in_every, other=NEVER)
    total = tl.load(ml_row + every[:, None] * (2 * NC) + NC, mask=in_every, other=0.0)
    m_window = tl.load(ml_row + window[:, None] * (2 * NC), mask=in_window, other=NEVER)
    m_old = tl.load(ml_row + first[:, None] * (2 * NC), mask=in_first, other=NEVER)
    top = tl.max(m, axis=0)
    if AUX:
        # A learned sink logit: one more score, with no value.
        head = tl.minimum(column // new_tokens, REP - 1)
        aux = tl.load(aux_ptr + h * REP + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, aux)
    total = tl.sum(total * tl.exp2(m - top[None, :]), axis=0)
    if AUX:
        total += tl.exp2(aux - top)
    out = tl.sum(raw * tl.exp2(m_window - top[None, :])[:, :, None], axis=0)
    rotated = tl.sum(old * tl.exp2(m_old - top[None, :])[:, :, None], axis=0)
    for p0 in range(n_window + PB, tl.max(parts), PB):
        part = p0 + tl.arange(0, PB)
        in_part = part[:, None] < parts[None, :]
        part_at = part[:, None, None] * (NC * D) + old_channel[None, None, :]
        x = tl.load(o_row + part_at, mask=in_part[:, :, None], other=0.0)
        m_part = tl.load(ml_row + part[:, None] * (2 * NC), mask=in_part, other=NEVER)
        rotated += tl.sum(x * tl.exp2(m_part - top[None, :])[:, :, None], axis=0)
    if not ROTATE:
        out += rotated
    elif R < 16:
        out += tl.sum(rotated[:, :, None] * vi[None, :, :], axis=1)
    else:
        out = tl.dot(rotated, vi, out, input_precision="tf32x3")
    # A row that may attend to nothing gives zeros, not NaN.
    out = tl.where((total > 0)[:, None], out / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    out_row = out_ptr + (b * HKV + h).to(tl.int64) * (REP * D) * new_tokens + column * D
    tl.store(out_row[:, None] + ds[None, :], out.to(out_ptr.dtype.element_ty), mask=((column < cols) & there)[:, None])

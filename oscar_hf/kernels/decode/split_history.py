"""A split's share of the history: scores and weighted sums straight from 2-bit codes, block by block."""

from ..launch import tl, triton
from .elements import (
    LIFT,
    LIMIT,
    NEVER,
    PAIRED_DIM,
    add4,
    column_max,
    column_sum,
    crumb_plane,
    fast_exp2,
    high_bits,
    operand_offset,
    per_column,
    plane_unit,
    rows16,
    scaled,
    softcapped,
    split_groups,
    unfragment,
)


@triton.jit
def _plane_sum(
    words, high, queries, query: tl.constexpr, crumb: tl.constexpr, COUNT: tl.constexpr,
    NW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sum of COUNT crumb planes from `crumb` on, each times its query plane from `query` on: fp32 [NW, M, N]."""
    even = tl.zeros([NW, M, N], tl.float32)
    odd = tl.zeros([NW, M, N], tl.float32)
    # Short tiles have few independent sums of their own; tall ones would only run out of registers.
    BOTH: tl.constexpr = M <= 32 and COUNT > 1
    for j in tl.static_range(COUNT):
        if j % 2 == 0 or not BOTH:
            even = tl.dot(crumb_plane(words, high, crumb + j, ASM), queries[query + j], even)
        else:
            odd = tl.dot(crumb_plane(words, high, crumb + j, ASM), queries[query + j], odd)
    if BOTH:
        return even + odd
    return even


@triton.jit
def _places(
    n0, h,
    D: tl.constexpr, NG: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of the block at token n0: rows of words of each warp's left tile [NW, BT], rows in use, places of the scales."""
    PAIR: tl.constexpr = D == PAIRED_DIM
    rows = n0 // 2 if PAIR else n0
    rows += tl.arange(0, NW)[:, None] * (BT if PAIR else TILES * BT) + tl.arange(0, BT)[None, :]
    used = (h + 1) // 2 if PAIR else h
    return rows, used, n0 * NG + tl.arange(0, NW * TILES * BT * NG)


@triton.jit
def _words(ptr, rows, used, W: tl.constexpr, TOKENS_FIRST: tl.constexpr, BOUND: tl.constexpr):
    """Words of the given rows, [NW, BT, W] or [NW, W, BT]; rows past the used ones read as zeros if BOUND."""
    words = tl.arange(0, W)
    if TOKENS_FIRST:
        at, there = rows[:, :, None] * W + words[None, None, :], (rows < used)[:, :, None]
    else:
        at, there = rows[:, None, :] * W + words[None, :, None], (rows < used)[:, None, :]
    if BOUND:
        return tl.load(ptr + at, mask=there, other=0)
    return tl.load(ptr + at)


@triton.jit
def _per_group(ptr, tok, h, BLOCK: tl.constexpr, NG: tl.constexpr, BOUND: tl.constexpr):
    """Scales or mins of a block, a vector [BLOCK] per group."""
    if BOUND:
        return split_groups(tl.load(ptr + tok, mask=tok < h * NG, other=0.0), BLOCK, NG)
    return split_groups(tl.load(ptr + tok), BLOCK, NG)


@triton.jit
def _scores(
    kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, shift,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    SYM: tl.constexpr, BOUND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores in log2 units [NW, BT, TILES * NC] of tokens n0.. against the centered key, plus `shift`."""
    PAIR: tl.constexpr = D == PAIRED_DIM
    W: tl.constexpr = 16 if PAIR else D // 8
    PLANES: tl.constexpr = D // W
    PG: tl.constexpr = PLANES // NG
    BLOCK: tl.constexpr = NW * TILES * BT
    rows, used, tok = _places(n0, h, D, NG, TILES, NW, BT)
    ws = _words(kc_ptr, rows, used, W, True, BOUND)
    scale = _per_group(ks_ptr, tok, h, BLOCK, NG, BOUND)
    high = high_bits(ws, ASM)
    # Separate sums for the left and the right tile: two short chains of dependent products instead of a long one.
    left = ()
    right = ()
    for group in tl.static_range(NG):
        left = left + (_plane_sum(ws, high, qa, group * PG, group * PG, PG, NW, BT, TILES * NC, ASM),)
        if PAIR:
            right = right + (_plane_sum(ws, high, qb, group * PG, 4 + group * PG, PG, NW, BT, TILES * NC, ASM),)
    if TILES == 2 and not PAIR:
        ws = _words(kc_ptr, rows + BT, used, W, True, BOUND)
        high = high_bits(ws, ASM)
        for group in tl.static_range(NG):
            right = right + (_plane_sum(ws, high, qb, group * PG, group * PG, PG, NW, BT, TILES * NC, ASM),)
    s = ()
    for group in tl.static_range(NG):
        if TILES == 2:
            s = s + (left[group] + right[group],)
        else:
            s = s + (left[group],)
    low = scale
    if not SYM:
        low = _per_group(km_ptr, tok, h, BLOCK, NG, BOUND)
    x = tl.zeros([NW, BT, TILES * NC], tl.float32) + shift[None, None, :]
    for group in tl.static_range(NG):
        sc = per_column(scale[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
        if SYM:
            x = sc * (s[group] * factor - 1.5 * qsum[group][None, None, :]) + x
        else:
            lo = per_column(low[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
            x = s[group] * (sc * factor) + (lo * qsum[group][None, None, :] + x)
    return x


@triton.jit
def _accumulate(
    vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    SYM: tl.constexpr, BOUND: tl.constexpr, ASM: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Add sum_t p_t scale_t code_t to the planes (left tile oa, right tile ob) and sum_t p_t min_t to corr.

    FINE: what rounding p_t scale_t to fp16 takes away is given back for the middle of the codes, through corr. The
    rounding then weighs (code - 1.5)'s size instead of the code's own, 1.7 times as much.
    """
    PAIR: tl.constexpr = D == PAIRED_DIM
    W: tl.constexpr = 16 if PAIR else D // 8
    PLANES: tl.constexpr = D // W
    PG: tl.constexpr = PLANES // NG
    BLOCK: tl.constexpr = NW * TILES * BT
    rows, used, tok = _places(n0, h, D, NG, TILES, NW, BT)
    scale = _per_group(vs_ptr, tok, h, BLOCK, NG, BOUND)
    low = scale
    if not SYM:
        low = _per_group(vm_ptr, tok, h, BLOCK, NG, BOUND)
    weights = ()
    sums = ()
    for group in tl.static_range(NG):
        pv = p * per_column(scale[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
        weight = pv.to(tl.float16)
        if SYM:
            share = weight.to(tl.float32) if FINE else pv
        else:
            share = p * per_column(low[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
            if FINE:
                share += 1.5 * (pv - weight.to(tl.float32))
        sums = sums + (corr[group] + rows16(share, NW, BT, TILES * NC),)
        weights = weights + (weight,)
    ws = _words(vc_ptr, rows, used, W, False, BOUND)
    high = high_bits(ws, ASM)
    na = ()
    nb = ()
    for i in tl.static_range(PLANES):
        na = na + (tl.dot(crumb_plane(ws, high, i, ASM), weights[i // PG], oa[i]),)
        if PAIR:
            nb = nb + (tl.dot(crumb_plane(ws, high, 4 + i, ASM), weights[i // PG], ob[i]),)
    if TILES == 2 and not PAIR:
        ws = _words(vc_ptr, rows + BT, used, W, False, BOUND)
        high = high_bits(ws, ASM)
        for i in tl.static_range(PLANES):
            nb = nb + (tl.dot(crumb_plane(ws, high, i, ASM), weights[i // PG], ob[i]),)
    return na, nb, sums


@triton.jit
def attend_history(
    frag_ptr, info_ptr, shift_ptr, kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr, mask_ptr, o_ptr, ml_ptr,
    h, low, reads, sink, begin, end, column, cols, new_tokens, rep_head,
    stride_mh, stride_mm, stride_mn, mask_floor, cap,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr, SLICE: tl.constexpr, SYM: tl.constexpr, MASK: tl.constexpr, LOW: tl.constexpr,
    CAP: tl.constexpr, ASM: tl.constexpr, FINE: tl.constexpr, CENTER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks begin..end of one KV head's history; pointers are at that head. Writes o [NC, D] (rotated basis), m, l.

    shift [.., NC] has a row for every CENTER_BLOCK tokens; without them (0) one shift, a row of info, serves all.

    low: first entry that may be seen, if LOW; reads: whether a mask must be read element by element.
    """
    PAIR: tl.constexpr = D == PAIRED_DIM
    W: tl.constexpr = 16 if PAIR else D // 8
    PLANES: tl.constexpr = D // W
    N: tl.constexpr = TILES * NC
    BLOCK: tl.constexpr = NW * TILES * BT
    PG: tl.constexpr = PLANES // NG
    # Whole blocks that may be seen run without bounds; the first and the last block, and every block under a mask that
    # must be read, run in the second loop, which counts as if the clean blocks did not exist.
    clean = begin
    if LOW:
        clean = tl.minimum(tl.maximum(begin, (low + BLOCK - 1) // BLOCK * BLOCK), end)
    if MASK > 0:
        clean = tl.where(reads > 0, end, clean)
    clean_end = tl.maximum(tl.minimum(end, h // BLOCK * BLOCK), clean)
    words = tl.arange(0, W)
    col = tl.arange(0, N)
    qa = ()
    qb = ()
    offset = operand_offset(tl.arange(0, NW * W * N), NW, W, N)
    for i in tl.static_range(PLANES):
        qa = qa + (unfragment(tl.load(frag_ptr + i * (W * N) + offset), NW, W, N),)
        if TILES == 2:
            qb = qb + (unfragment(tl.load(frag_ptr + (i + PLANES) * (W * N) + offset), NW, W, N),)
    qsum = ()
    SLICES: tl.constexpr = D // SLICE
    for group in tl.static_range(NG):
        total = tl.load(info_ptr + group * (SLICES // NG) * NC + col % NC)
        for i in tl.static_range(1, SLICES // NG):
            total += tl.load(info_ptr + (group * (SLICES // NG) + i) * NC + col % NC)
        qsum = qsum + (total,)
    if CENTER_BLOCK:
        # A block of tokens lies in one block that has a center. Its shift is loaded a round ahead.
        shift_ptr += col % NC
        shift = tl.load(shift_ptr + tl.minimum(clean, h - 1) // CENTER_BLOCK * NC)
    else:
        shift = tl.load(info_ptr + SLICES * NC + col % NC)
    factor = tl.load(info_ptr + (SLICES + 1) * NC)
    oa = ()
    ob = ()
    for _ in tl.static_range(PLANES):
        oa = oa + (tl.zeros([NW, W, N], tl.float32),)
        if TILES == 2:
            ob = ob + (tl.zeros([NW, W, N], tl.float32),)
    l_sum = tl.zeros([NW, 16, N], tl.float32)
    corr = ()
    for _ in tl.static_range(NG):
        corr = corr + (tl.zeros([NW, 16, N], tl.float32),)
    # Zero before a first clean block (whose own maximum replaces it), never-seen otherwise.
    m_ref = tl.zeros([N], tl.float32) + tl.where(clean_end > clean, 0.0, NEVER)

    for n0 in tl.range(clean, clean_end, BLOCK, num_stages=STAGES):
        base = shift if CAP else shift - m_ref
        if CENTER_BLOCK:
            shift = tl.load(shift_ptr + tl.minimum(n0 + BLOCK, h - 1) // CENTER_BLOCK * NC)
        x = _scores(
            kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, base, D, NG, NC, TILES, NW, BT, SYM, False, ASM
        )
        if CAP:
            x = softcapped(x, cap) - m_ref[None, None, :]
        p = fast_exp2(x, ASM)
        part = rows16(p, NW, BT, N)
        # Sums are not negative, so their bits order like integers, and an integer maximum is one instruction.
        if (n0 == clean) | (tl.max(part.to(tl.int32, bitcast=True)) > LIMIT):
            rise = column_max(x, NC, TILES) - LIFT
            if n0 > clean:
                rise = tl.maximum(rise, 0.0)
            m_ref += rise
            p = fast_exp2(x - rise[None, None, :], ASM)
            part = rows16(p, NW, BT, N)
            shrink = tl.exp2(-tl.maximum(rise, 0.0))
            oa = scaled(oa, shrink)
            ob = scaled(ob, shrink)
            corr = scaled(corr, shrink)
            l_sum = l_sum * shrink[None, None, :]
        l_sum += part
        oa, ob, corr = _accumulate(
            vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr, D, NG, NC, TILES, NW, BT, SYM, False, ASM, FINE
        )

    # Two stages even for a lone block: its value loads then start together with its key loads.
    TAIL_STAGES: tl.constexpr = STAGES if MASK > 0 else 2
    if begin + (clean_end - clean) < end:
        for at_block in tl.range(begin + (clean_end - clean), end, BLOCK, num_stages=TAIL_STAGES):
            n0 = at_block
            if LOW:
                n0 -= tl.where(at_block < clean_end, clean_end - clean, 0)
            if CENTER_BLOCK:
                shift = tl.load(shift_ptr + n0 // CENTER_BLOCK * NC)
            x = _scores(
                kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, shift, D, NG, NC, TILES, NW, BT, SYM, True, ASM
            )
            if CAP:
                x = softcapped(x, cap)
            tok = per_column(n0 + tl.arange(0, BLOCK), NW, BT, NC, TILES, PAIR)
            keep = tok < h
            if LOW:
                keep = keep & (tok >= low)
            if MASK > 0:
                c = column + col % NC
                at = (rep_head + c // new_tokens).to(tl.int64) * stride_mh + c % new_tokens * stride_mm
                at = at[None, None, :] + (tok + sink).to(tl.int64) * stride_mn
                wanted = keep & ((c < cols) & (tl.zeros([N], tl.int32) + reads > 0))[None, None, :]
                if MASK == 1:
                    keep = keep & (tl.load(mask_ptr + at, mask=wanted, other=1) != 0)
                else:
                    bias = tl.load(mask_ptr + at, mask=wanted, other=0.0).to(tl.float32)
                    keep = keep & (bias > mask_floor)
                    x += bias * 1.4426950408889634
            x = tl.where(keep, x, NEVER)
            m_new = tl.maximum(m_ref, column_max(x, NC, TILES) - LIFT)
            shrink = tl.exp2(m_ref - m_new)
            m_ref = m_new
            p = tl.where(keep, tl.exp2(x - m_new[None, None, :]), 0.0)
            oa = scaled(oa, shrink)
            ob = scaled(ob, shrink)
            corr = scaled(corr, shrink)
            l_sum = l_sum * shrink[None, None, :] + rows16(p, NW, BT, N)
            oa, ob, corr = _accumulate(
                vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr, D, NG, NC, TILES, NW, BT, SYM, True, ASM, FINE
            )

    out_col = tl.arange(0, NC)
    tl.store(ml_ptr + out_col, tl.max(tl.reshape(m_ref, [TILES, NC]), axis=0))
    tl.store(ml_ptr + NC + out_col, column_sum(l_sum, NC, TILES))
    low = ()
    for group in tl.static_range(NG):
        total = column_sum(corr[group], NC, TILES)
        if SYM:
            total = total * -1.5
        low = low + (total,)
    if TILES == 2:
        # Each tile's own columns: the others hold one tile's codes against the other's probabilities.
        mine = ()
        for i in tl.static_range(PLANES):
            left = oa[i] * plane_unit(i)
            right = ob[i] * plane_unit(i + 4 if PAIR else i)
            mine = mine + (tl.where(col[None, None, :] < NC, left, right),)
        oa = mine
    for i in tl.static_range(0, PLANES, 4):
        # Four at a time: one exchange between the warps instead of four.
        sums = tl.reduce((oa[i], oa[i + 1], oa[i + 2], oa[i + 3]), 0, add4)
        for j in tl.static_range(4):
            if TILES == 2:
                a = tl.sum(tl.reshape(sums[j], [W, TILES, NC]), axis=1)
            else:
                a = sums[j] * plane_unit(i + j)
            tl.store(o_ptr + out_col[None, :] * D + (i + j) * W + words[:, None], a + low[(i + j) // PG][None, :])

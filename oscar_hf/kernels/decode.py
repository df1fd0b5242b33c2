"""Decode attention straight from 2-bit codes: split-KV over history, merged with the exact windows, in three launches.

    prepare   one program per KV head and slice of channels: q @ KQ in fp32, rounded once to fp16, stored as
              matrix-unit operands
    split     one program per KV head and split: history splits read codes, window splits read the sink and the ring
    merge     weighs the partial results, rotates the history's share back with VI, adds the windows' share

What keeps the split kernel short (a lone warp's instruction latency binds it at batch 1, that and memory at batch 8):

* A crumb is an fp16 subnormal where it lies: `word & 0x0300` *is* the number 4^4 code 2^-24, and matrix units take
  subnormals at full speed. So a code costs one `and` per pair; crumbs 5-7 share one shift by 10. The powers of four are
  folded into the query's planes (keys) and into the final store (values), all exact.
* q.khat = scale (q.code) + min sum(q): scale and min are applied to scores and to probabilities, never to elements.
* Tokens lie on the matrix unit's M axis, query heads on N = 8. With at most 4 query rows per KV head two tiles of
  tokens share the 8 columns: the left tile meets [q | 0], the right one [0 | q], so no lane computes softmax for padding.
* The running maximum is lazy: a block is exponentiated against the old reference, and only when its row sums pass
  `_LIMIT` is the reference raised and everything rescaled. Results do not depend on when that happens, up to rounding.

`reference.decode_attention_reference` specifies it all in plain PyTorch.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from ..packed import PAIRED_HEAD_DIM
from .launch import HAS_TRITON, interpreting, next_power_of_two, tl, triton
from .launch import on_device as on_device_of

if HAS_TRITON:
    from triton.language.extra import cuda as tlx

MAX_NEW_TOKENS = 16
_LOG2E = math.log2(math.e)
_Q_UNIT = tl.constexpr(2048.0) if HAS_TRITON else 2048.0
# Probabilities are kept 2^4 times too large against the recorded maximum, which cancels in the merge: fp16(p * scale) is
# then a normal number down to small value scales, and finite for scales up to 511 whatever the scores.
_LIFT = tl.constexpr(4.0) if HAS_TRITON else 4.0
# Bit pattern of 128.0f, the largest sum of a thread's rows that needs no rescale.
_LIMIT = tl.constexpr(0x43000000) if HAS_TRITON else 0x43000000
_NEVER = tl.constexpr(-1.0e30) if HAS_TRITON else -1.0e30


@dataclasses.dataclass
class DecodeStore:
    """One layer's cache as `decode_attention` reads it. Shapes: B rows, Hkv KV heads, C capacity, S sink, R ring, D, G.

    k_codes, v_codes: int16 [B, Hkv, C, D/8], for D = 64 [B, Hkv, C/2, 16] (layout: packed.py)
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


# ---------------------------------------------------------------------------------------------- element helpers


@triton.jit
def _crumb(words, high, index: tl.constexpr, ASM: tl.constexpr):
    """Crumb `index` of int16 words as fp16 code 4^e 2^-24, e = index or index - 5; `high` is words >> 10."""
    # Assembly because LLVM would unpack every 16-bit half to a register of its own: 2.2x the instructions.
    if ASM:
        if index == 0:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [words], tl.float16, True, 2)
        elif index == 1:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000C000C;", "=r,r", [words], tl.float16, True, 2)
        elif index == 2:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [words], tl.float16, True, 2)
        elif index == 3:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00C000C0;", "=r,r", [words], tl.float16, True, 2)
        elif index == 4:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x03000300;", "=r,r", [words], tl.float16, True, 2)
        elif index == 5:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [high], tl.float16, True, 2)
        elif index == 6:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000C000C;", "=r,r", [high], tl.float16, True, 2)
        else:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [high], tl.float16, True, 2)
    else:
        if index < 5:
            bits = words & (3 << (2 * index))
        else:
            bits = high & (3 << (2 * index - 10))
        return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _high(words, ASM: tl.constexpr):
    """Words shifted right by 10; the upper bits are not meant to be read (assembly and twin differ there)."""
    if ASM:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 10;", "=r,r", [words], tl.int16, True, 2)
    else:
        return words >> 10


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def _softcap(x, cap):
    """cap tanh(x / cap), both in log2 units; tanh through exp2, which cannot overflow to NaN this way round."""
    y = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x) / cap)
    t = (1.0 - y) / (1.0 + y) * cap
    return tl.where(x < 0, -t, t)


@triton.jit
def _operand_offset(index, NW: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Where element `index` of an operand vector (see `_unfragment`) is stored: every warp reads the same copy."""
    INNER: tl.constexpr = (W // 16) * (N // 8) * 4 if (W // 16) * (N // 8) * 4 < 8 else 8
    return index // (INNER * 32 * NW) * (INNER * 32) + index % (INNER * 32)


@triton.jit
def _unfragment(x, NW: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """1-D operand vector, one copy per warp, to [NW, W, N].

    The order is [rest][warp][lane n, 8][lane k, 4][inner], inner and rest running over (n / 8, k / 16, k / 8, k % 2): a
    plain vector load then already is an mma.m16n8k16 B operand and needs no shuffles (which would run in every round).
    """
    INNER: tl.constexpr = (W // 16) * (N // 8) * 4 if (W // 16) * (N // 8) * 4 < 8 else 8
    REST: tl.constexpr = W * N // (32 * INNER)
    x = tl.reshape(x, [REST, NW, 8, 4, INNER])
    x = tl.permute(x, [1, 2, 3, 0, 4])
    x = tl.reshape(x, [NW, 8, 4, N // 8, W // 16, 2, 2])
    x = tl.permute(x, [0, 4, 5, 2, 6, 3, 1])
    return tl.reshape(x, [NW, W, N])


@triton.jit
def _fragment_offset(k, n, W: tl.constexpr, N: tl.constexpr):
    """Where element (k, n) of a [W, N] operand is stored: matrix-unit order, a single copy."""
    INNER: tl.constexpr = (W // 16) * (N // 8) * 4 if (W // 16) * (N // 8) * 4 < 8 else 8
    lane = n % 8 * 4 + k % 8 // 2
    inner = (n // 8 * (W // 16) + k // 16) * 4 + k % 16 // 8 * 2 + k % 2
    return inner // INNER * (32 * INNER) + lane * INNER + inner % INNER


@triton.jit
def _per_column(x, NW: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, PAIR: tl.constexpr):
    """Per-token values [NW * TILES * BT] to [NW, BT, TILES * NC]: the token each place of a score tile is about."""
    if TILES == 1:
        return tl.broadcast_to(tl.reshape(x, [NW, BT])[:, :, None], [NW, BT, NC])
    if PAIR:
        x = tl.reshape(x, [NW, BT, TILES])
    else:
        x = tl.permute(tl.reshape(x, [NW, TILES, BT]), [0, 2, 1])
    return tl.reshape(tl.broadcast_to(x[:, :, :, None], [NW, BT, TILES, NC]), [NW, BT, TILES * NC])


@triton.jit
def _groups(x, BLOCK: tl.constexpr, NG: tl.constexpr):
    """[BLOCK * NG] to NG vectors [BLOCK]."""
    if NG == 1:
        return (x,)
    elif NG == 2:
        a, b = tl.split(tl.reshape(x, [BLOCK, 2]))
        return (a, b)
    else:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return (a, b, c, d)


@triton.jit
def _rows16(x, NW: tl.constexpr, BT: tl.constexpr, N: tl.constexpr):
    """Sum [NW, BT, N] to [NW, 16, N]: rows 16 apart sit in one thread, so this needs no shuffle."""
    return tl.sum(tl.reshape(x, [NW, BT // 16, 16, N]), axis=1)


@triton.jit
def _column_max(x, NC: tl.constexpr, TILES: tl.constexpr):
    """Maximum of [NW, BT, TILES * NC] for every column, over the tiles that share it too: [TILES * NC]."""
    top = tl.max(tl.max(x, axis=1), axis=0)
    if TILES == 1:
        return top
    top = tl.max(tl.reshape(top, [TILES, NC]), axis=0)
    return tl.reshape(tl.broadcast_to(top[None, :], [TILES, NC]), [TILES * NC])


@triton.jit
def _column_sum(x, NC: tl.constexpr, TILES: tl.constexpr):
    """Sum of [NW, 16, TILES * NC] over everything but the NC query columns."""
    return tl.sum(tl.reshape(tl.sum(tl.sum(x, axis=1), axis=0), [TILES, NC]), axis=0)


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _scaled(planes, factor):
    """Every plane of a tuple times the column factors."""
    out = ()
    for i in tl.static_range(len(planes)):
        out = out + (planes[i] * factor[None, None, :],)
    return out


@triton.jit
def _fetch(ptr):
    """Ask for the cache lines of an early pointer block; a hint that needs no register until the data is used."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64)], tl.int32, False, 1)


# ---------------------------------------------------------------------------------------------- prepare


@triton.jit(do_not_specialize=["cols"])
def _prepare_kernel(
    q_ptr, kq_ptr, mean_ptr, frag_ptr, info_ptr,
    stride_qb, stride_qh, stride_qm, stride_kq, cols, new_tokens, q_scale,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr,
    SLICE: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotated channels slice * SLICE.. of the queries of one KV head and chunk; column c = head * new_tokens + token.

    frag: fp16 [B * Hkv, chunks, operands, W * N], in matrix-unit order, N = TILES * NC columns. Operand i < 8 is
    crumb i's, times 4^-e; with two tiles, 8 + i is the same for the right tile. The other tile's columns are zero.
    (D = 64: crumbs 0-3 are the left tile's and 4-7 the right tile's, so there are 8 operands.)
    info: fp32 [B * Hkv, chunks, D / SLICE + 2, NC]: sum(q) per slice, shift q.mu, factor of raw scores; in log2 units
    """
    if PDL:
        tlx.gdc_launch_dependents()
    W: tl.constexpr = 16 if D == 64 else D // 8
    bh = tl.program_id(0)
    chunk = tl.program_id(1)
    b = bh // HKV
    h = bh % HKV
    k = tl.arange(0, D)
    d = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    row = tl.arange(0, NC)
    c = chunk * NC + row
    live = c < cols
    q_row = q_ptr + b.to(tl.int64) * stride_qb + (h * REP + c // new_tokens) * stride_qh + c % new_tokens * stride_qm
    q = tl.load(q_row[:, None] + k[None, :], mask=live[:, None], other=0.0).to(tl.float32) * q_scale
    if ROTATE:
        # Plain fp32 sums: so few rows are cheaper that way than splitting the matrix for three tf32 products.
        matrix = tl.load(kq_ptr + h * stride_kq + k[:, None] * D + d[None, :])
        rotated = tl.sum(q[:, :, None] * matrix[None, :, :], axis=1)
    else:
        rotated = tl.load(q_row[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32) * q_scale
    # A power of two near the longest row's norm brings all rows into fp16's middle: a rotation keeps the norm, so no
    # element passes 2^11, and the clamp below matters only for transforms that lengthen a query over 30 times.
    norm = tl.sqrt(tl.max(tl.sum(q * q, axis=1), axis=0))
    bits = tl.minimum(tl.maximum(norm, 1e-30), 1e30).to(tl.int32, bitcast=True) & 0x7F800000
    unit = bits.to(tl.float32, bitcast=True) * (1.0 / _Q_UNIT)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True) * _Q_UNIT
    half = tl.minimum(tl.maximum(rotated * inverse, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    query = bh * tl.num_programs(1) + chunk
    PAIR: tl.constexpr = D == 64
    N: tl.constexpr = TILES * NC
    frag_ptr += query.to(tl.int64) * ((8 if PAIR else 8 * TILES) * W * N)
    for side in tl.static_range(TILES):
        crumb = d // W + (4 * side if PAIR else 0)
        quarter = tl.exp2(-2.0 * (crumb % 5))
        stored = (half * quarter[None, :]).to(tl.float16)
        operand = (crumb if PAIR else crumb + 8 * side)[None, :] * (W * N)
        for place in tl.static_range(TILES):
            at = operand + _fragment_offset((d % W)[None, :], (place * NC + row)[:, None], W, N)
            tl.store(frag_ptr + at, stored if place == side else tl.zeros_like(stored))
    info_ptr += query * ((D // SLICE + 2) * NC)
    tl.store(info_ptr + tl.program_id(2) * NC + row, tl.sum(half, axis=1) * unit)
    if tl.program_id(2) == 0:
        shift = tl.zeros([NC], tl.float32)
        if CENTRED:
            shift = tl.sum(q * tl.load(mean_ptr + h * D + k)[None, :], axis=1)
        tl.store(info_ptr + D // SLICE * NC + row, shift)
        factor = tl.zeros([NC], tl.float32) + unit * 16777216.0
        tl.store(info_ptr + (D // SLICE + 1) * NC + row, factor)


# ---------------------------------------------------------------------------------------------- split: history


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
            even = tl.dot(_crumb(words, high, crumb + j, ASM), queries[query + j], even)
        else:
            odd = tl.dot(_crumb(words, high, crumb + j, ASM), queries[query + j], odd)
    if BOTH:
        return even + odd
    return even


@triton.jit
def _scores(
    kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, shift,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    SYM: tl.constexpr, BOUND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores in log2 units [NW, BT, TILES * NC] of tokens n0.. against the centred key, plus `shift`."""
    PAIR: tl.constexpr = D == 64
    W: tl.constexpr = 16 if PAIR else D // 8
    PLANES: tl.constexpr = D // W
    PG: tl.constexpr = PLANES // NG
    BLOCK: tl.constexpr = NW * TILES * BT
    words = tl.arange(0, W)
    tok = n0 * NG + tl.arange(0, BLOCK * NG)
    rows = n0 // 2 if PAIR else n0
    rows += tl.arange(0, NW)[:, None] * (BT if PAIR else TILES * BT) + tl.arange(0, BT)[None, :]
    used = (h + 1) // 2 if PAIR else h
    at = rows[:, :, None] * W + words[None, None, :]
    if BOUND:
        ws = tl.load(kc_ptr + at, mask=(rows < used)[:, :, None], other=0)
        scale = tl.load(ks_ptr + tok, mask=tok < h * NG, other=0.0)
    else:
        ws = tl.load(kc_ptr + at)
        scale = tl.load(ks_ptr + tok)
    high = _high(ws, ASM)
    # Separate sums for the left and the right tile: two short chains of dependent products instead of a long one.
    left = ()
    right = ()
    for group in tl.static_range(NG):
        left = left + (_plane_sum(ws, high, qa, group * PG, group * PG, PG, NW, BT, TILES * NC, ASM),)
        if PAIR:
            right = right + (_plane_sum(ws, high, qb, group * PG, 4 + group * PG, PG, NW, BT, TILES * NC, ASM),)
    if TILES == 2 and not PAIR:
        if BOUND:
            ws = tl.load(kc_ptr + BT * W + at, mask=(rows + BT < used)[:, :, None], other=0)
        else:
            ws = tl.load(kc_ptr + BT * W + at)
        high = _high(ws, ASM)
        for group in tl.static_range(NG):
            right = right + (_plane_sum(ws, high, qb, group * PG, group * PG, PG, NW, BT, TILES * NC, ASM),)
    s = ()
    for group in tl.static_range(NG):
        if TILES == 2:
            s = s + (left[group] + right[group],)
        else:
            s = s + (left[group],)
    scale = _groups(scale, BLOCK, NG)
    if SYM:
        low = scale
    else:
        if BOUND:
            low = _groups(tl.load(km_ptr + tok, mask=tok < h * NG, other=0.0), BLOCK, NG)
        else:
            low = _groups(tl.load(km_ptr + tok), BLOCK, NG)
    x = tl.zeros([NW, BT, TILES * NC], tl.float32) + shift[None, None, :]
    for group in tl.static_range(NG):
        sc = _per_column(scale[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
        if SYM:
            x = sc * (s[group] * factor - 1.5 * qsum[group][None, None, :]) + x
        else:
            lo = _per_column(low[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
            x = s[group] * (sc * factor) + (lo * qsum[group][None, None, :] + x)
    return x


@triton.jit
def _accumulate(
    vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    SYM: tl.constexpr, BOUND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add sum_t p_t scale_t code_t to the planes (left tile oa, right tile ob) and sum_t p_t min_t to corr."""
    PAIR: tl.constexpr = D == 64
    W: tl.constexpr = 16 if PAIR else D // 8
    PLANES: tl.constexpr = D // W
    PG: tl.constexpr = PLANES // NG
    BLOCK: tl.constexpr = NW * TILES * BT
    words = tl.arange(0, W)
    tok = n0 * NG + tl.arange(0, BLOCK * NG)
    rows = n0 // 2 if PAIR else n0
    rows += tl.arange(0, NW)[:, None] * (BT if PAIR else TILES * BT) + tl.arange(0, BT)[None, :]
    used = (h + 1) // 2 if PAIR else h
    at = rows[:, None, :] * W + words[None, :, None]
    if BOUND:
        scale = _groups(tl.load(vs_ptr + tok, mask=tok < h * NG, other=0.0), BLOCK, NG)
    else:
        scale = _groups(tl.load(vs_ptr + tok), BLOCK, NG)
    if SYM:
        low = scale
    else:
        if BOUND:
            low = _groups(tl.load(vm_ptr + tok, mask=tok < h * NG, other=0.0), BLOCK, NG)
        else:
            low = _groups(tl.load(vm_ptr + tok), BLOCK, NG)
    weights = ()
    sums = ()
    for group in tl.static_range(NG):
        pv = p * _per_column(scale[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
        if SYM:
            sums = sums + (corr[group] + _rows16(pv, NW, BT, TILES * NC),)
        else:
            pm = p * _per_column(low[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
            sums = sums + (corr[group] + _rows16(pm, NW, BT, TILES * NC),)
        weights = weights + (pv.to(tl.float16),)
    if BOUND:
        ws = tl.load(vc_ptr + at, mask=(rows < used)[:, None, :], other=0)
    else:
        ws = tl.load(vc_ptr + at)
    high = _high(ws, ASM)
    na = ()
    nb = ()
    for i in tl.static_range(PLANES):
        na = na + (tl.dot(_crumb(ws, high, i, ASM), weights[i // PG], oa[i]),)
        if PAIR:
            nb = nb + (tl.dot(_crumb(ws, high, 4 + i, ASM), weights[i // PG], ob[i]),)
    if TILES == 2 and not PAIR:
        if BOUND:
            ws = tl.load(vc_ptr + BT * W + at, mask=(rows + BT < used)[:, None, :], other=0)
        else:
            ws = tl.load(vc_ptr + BT * W + at)
        high = _high(ws, ASM)
        for i in tl.static_range(PLANES):
            nb = nb + (tl.dot(_crumb(ws, high, i, ASM), weights[i // PG], ob[i]),)
    return na, nb, sums


@triton.jit
def _history(
    frag_ptr, info_ptr, kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr, mask_ptr, o_ptr, ml_ptr,
    h, start, sink, split, n_splits, column, cols, new_tokens, rep_head,
    stride_mh, stride_mm, stride_mn, mask_floor, cap,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr, SLICE: tl.constexpr, SYM: tl.constexpr, MASK: tl.constexpr, STARTS: tl.constexpr,
    CAP: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One split of one KV head's history; pointers are at that head. Writes o [NC, D] (rotated basis), m and l [NC]."""
    PAIR: tl.constexpr = D == 64
    W: tl.constexpr = 16 if PAIR else D // 8
    PLANES: tl.constexpr = D // W
    N: tl.constexpr = TILES * NC
    BLOCK: tl.constexpr = NW * TILES * BT
    blocks = (h + BLOCK - 1) // BLOCK
    skipped = start // BLOCK if STARTS else 0
    todo = tl.maximum(blocks - skipped, 0)
    share = (todo + n_splits - 1) // n_splits
    begin = (skipped + tl.minimum(split * share, todo)) * BLOCK
    end = (skipped + tl.minimum((split + 1) * share, todo)) * BLOCK
    PG: tl.constexpr = PLANES // NG
    exact: tl.constexpr = (MASK > 0) or STARTS
    # Whole blocks run without bounds; the last block, and every block under a mask, runs in the second loop.
    clean = begin if exact else tl.maximum(tl.minimum(end, h // BLOCK * BLOCK), begin)
    words = tl.arange(0, W)
    col = tl.arange(0, N)
    if PDL:
        # The history is older than the launch before this one: fetch while the queries are still being rotated.
        LINE: tl.constexpr = 512 // D
        lines = tl.arange(0, NW * 32)
        for n0 in range(begin, tl.minimum(clean, begin + AHEAD), NW * 32 * LINE):
            ahead = tl.minimum(n0 // LINE + lines, (clean - 1) // LINE) * 64
            _fetch(kc_ptr + ahead)
            _fetch(vc_ptr + ahead)
        tlx.gdc_wait()
    qa = ()
    qb = ()
    offset = _operand_offset(tl.arange(0, NW * W * N), NW, W, N)
    for i in tl.static_range(PLANES):
        qa = qa + (_unfragment(tl.load(frag_ptr + i * (W * N) + offset), NW, W, N),)
        if TILES == 2:
            qb = qb + (_unfragment(tl.load(frag_ptr + (i + PLANES) * (W * N) + offset), NW, W, N),)
    qsum = ()
    SLICES: tl.constexpr = D // SLICE
    for group in tl.static_range(NG):
        total = tl.load(info_ptr + group * (SLICES // NG) * NC + col % NC)
        for i in tl.static_range(1, SLICES // NG):
            total += tl.load(info_ptr + (group * (SLICES // NG) + i) * NC + col % NC)
        qsum = qsum + (total,)
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
    m_ref = tl.zeros([N], tl.float32) + tl.where(clean > begin, 0.0, _NEVER)

    for n0 in tl.range(begin, clean, BLOCK, num_stages=STAGES):
        base = shift if CAP else shift - m_ref
        x = _scores(
            kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, base, D, NG, NC, TILES, NW, BT, SYM, False, ASM
        )
        if CAP:
            x = _softcap(x, cap) - m_ref[None, None, :]
        p = _exp2(x, ASM)
        part = _rows16(p, NW, BT, N)
        # Sums are not negative, so their bits order like integers, and an integer maximum is one instruction.
        if (n0 == begin) | (tl.max(part.to(tl.int32, bitcast=True)) > _LIMIT):
            rise = _column_max(x, NC, TILES) - _LIFT
            if n0 > begin:
                rise = tl.maximum(rise, 0.0)
            m_ref += rise
            p = _exp2(x - rise[None, None, :], ASM)
            part = _rows16(p, NW, BT, N)
            shrink = tl.exp2(-tl.maximum(rise, 0.0))
            oa = _scaled(oa, shrink)
            ob = _scaled(ob, shrink)
            corr = _scaled(corr, shrink)
            l_sum = l_sum * shrink[None, None, :]
        l_sum += part
        oa, ob, corr = _accumulate(
            vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr, D, NG, NC, TILES, NW, BT, SYM, False, ASM
        )

    # Two stages even for a lone block: its value loads then start together with its key loads.
    TAIL_STAGES: tl.constexpr = STAGES if exact else 2
    if clean < end:
        for n0 in tl.range(clean, end, BLOCK, num_stages=TAIL_STAGES):
            x = _scores(
                kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, shift, D, NG, NC, TILES, NW, BT, SYM, True, ASM
            )
            if CAP:
                x = _softcap(x, cap)
            tok = _per_column(n0 + tl.arange(0, BLOCK), NW, BT, NC, TILES, PAIR)
            keep = tok < h
            if STARTS:
                keep = keep & (tok >= start)
            if MASK > 0:
                c = column + col % NC
                at = (rep_head + c // new_tokens).to(tl.int64) * stride_mh + c % new_tokens * stride_mm
                at = at[None, None, :] + (tok + sink).to(tl.int64) * stride_mn
                if MASK == 1:
                    keep = keep & (tl.load(mask_ptr + at, mask=keep & (c < cols)[None, None, :], other=0) != 0)
                else:
                    bias = tl.load(mask_ptr + at, mask=keep & (c < cols)[None, None, :], other=0.0).to(tl.float32)
                    keep = keep & (bias > mask_floor)
                    x += bias * 1.4426950408889634
            x = tl.where(keep, x, _NEVER)
            m_new = tl.maximum(m_ref, _column_max(x, NC, TILES) - _LIFT)
            shrink = tl.exp2(m_ref - m_new)
            m_ref = m_new
            p = tl.where(keep, tl.exp2(x - m_new[None, None, :]), 0.0)
            oa = _scaled(oa, shrink)
            ob = _scaled(ob, shrink)
            corr = _scaled(corr, shrink)
            l_sum = l_sum * shrink[None, None, :] + _rows16(p, NW, BT, N)
            oa, ob, corr = _accumulate(
                vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr, D, NG, NC, TILES, NW, BT, SYM, True, ASM
            )

    out_col = tl.arange(0, NC)
    tl.store(ml_ptr + out_col, tl.max(tl.reshape(m_ref, [TILES, NC]), axis=0))
    tl.store(ml_ptr + NC + out_col, _column_sum(l_sum, NC, TILES))
    low = ()
    for group in tl.static_range(NG):
        total = _column_sum(corr[group], NC, TILES)
        if SYM:
            total = total * -1.5
        low = low + (total,)
    if TILES == 2:
        # Each tile's own columns: the others hold one tile's codes against the other's probabilities.
        mine = ()
        for i in tl.static_range(PLANES):
            left = oa[i] * _plane_unit(i)
            right = ob[i] * _plane_unit(i + 4 if PAIR else i)
            mine = mine + (tl.where(col[None, None, :] < NC, left, right),)
        oa = mine
    for i in tl.static_range(0, PLANES, 4):
        # Four at a time: one exchange between the warps instead of four.
        sums = tl.reduce((oa[i], oa[i + 1], oa[i + 2], oa[i + 3]), 0, _add4)
        for j in tl.static_range(4):
            if TILES == 2:
                a = tl.sum(tl.reshape(sums[j], [W, TILES, NC]), axis=1)
            else:
                a = sums[j] * _plane_unit(i + j)
            tl.store(o_ptr + out_col[None, :] * D + (i + j) * W + words[:, None], a + low[(i + j) // PG][None, :])


@triton.jit
def _plane_unit(index: tl.constexpr):
    """What turns crumb plane `index` back into codes: 2^24 4^-e."""
    return 2.0 ** (24 - 2 * (index % 5))


# ---------------------------------------------------------------------------------------------- split: windows


@triton.jit
def _window(
    q_ptr, k_ptr, v_ptr, mask_ptr, o_ptr, ml_ptr,
    stride_qh, stride_qm, n, h, start, sink, ring, first, last,
    column, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
    RING: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, WB: tl.constexpr, STARTS: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Entries first..last-1 of the sink or of the ring, exact; pointers are at that KV head (q: at the batch row)."""
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
    m_run = tl.full([N], _NEVER, tl.float32)
    l_run = tl.zeros([N], tl.float32)
    acc = tl.zeros([D, N], tl.float32)
    for e in tl.range(first, last, WB, num_stages=2):
        entry = e + tl.arange(0, WB)
        if RING:
            slot = sink + h + entry
            index = (h + entry) % ring
            valid = (entry < last) & (slot < n)
            if STARTS:
                valid = valid & (slot >= start)
        else:
            slot = start + entry
            index = entry
            valid = (entry < last) & (slot < tl.minimum(n, sink + h))
        k = tl.load(k_ptr + index[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        x = tl.dot(k, q, input_precision=PRECISION) * scale
        if CAP:
            x = _softcap(x, cap)
        keep = valid[:, None] & (slot[:, None] <= (n - new_tokens + token)[None, :])
        if MASK > 0:
            where = (rep_head + c // new_tokens).to(tl.int64) * stride_mh + token * stride_mm
            where = where[None, :] + slot[:, None].to(tl.int64) * stride_mn
            if MASK == 1:
                keep = keep & (tl.load(mask_ptr + where, mask=keep & live[None, :], other=0) != 0)
            else:
                bias = tl.load(mask_ptr + where, mask=keep & live[None, :], other=0.0).to(tl.float32)
                keep = keep & (bias > mask_floor)
                x += bias * 1.4426950408889634
        x = tl.where(keep, x, _NEVER)
        m_new = tl.maximum(m_run, tl.max(x, axis=0))
        shrink = tl.exp2(m_run - m_new)
        m_run = m_new
        p = tl.where(keep, tl.exp2(x - m_new[None, :]), 0.0)
        l_run = l_run * shrink + tl.sum(p, axis=0)
        v = tl.load(v_ptr + index[None, :] * D + d[:, None], mask=valid[None, :], other=0.0)
        if WIDEN:
            v = v.to(tl.float32)
        acc = tl.dot(v, p.to(v.dtype), acc * shrink[None, :], input_precision=PRECISION)
    tl.store(ml_ptr + col, m_run, mask=col < NC)
    tl.store(ml_ptr + NC + col, l_run, mask=col < NC)
    tl.store(o_ptr + col[None, :] * D + d[:, None], acc, mask=(col < NC)[None, :])


# Numbers that change while a sequence grows must not each ask for a compilation of their own.
@triton.jit(
    do_not_specialize=[
        "length", "history", "n_sink", "n_window", "window", "cols", "stride_mb", "stride_mh", "stride_mm"
    ]
)  # fmt: skip
def _split_kernel(
    q_ptr, frag_ptr, info_ptr, kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr,
    sink_k_ptr, sink_v_ptr, ring_k_ptr, ring_v_ptr, start_ptr, mask_ptr, o_ptr, ml_ptr,
    length, history, stride_qb, stride_qh, stride_qm,
    stride_cb, stride_ch, stride_sb, stride_sh, stride_kb, stride_kh, stride_rb, stride_rh,
    stride_mb, stride_mh, stride_mm, stride_mn, sink, ring, n_sink, n_window, window, cols, new_tokens,
    scale, mask_floor, cap,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, WB: tl.constexpr, SLICE: tl.constexpr, SYM: tl.constexpr,
    MASK: tl.constexpr, STARTS: tl.constexpr, CAP: tl.constexpr, ON_DEVICE: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, NW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv, window splits + history splits, chunks); split s writes o[.., s] fp32 [NC, D] and ml[.., s]."""
    if PDL:
        tlx.gdc_launch_dependents()
    bh = tl.program_id(0)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    b = (bh // HKV).to(tl.int64)
    hk = (bh % HKV).to(tl.int64)
    if ON_DEVICE:
        n = tl.load(length)
        h = tl.load(history)
    else:
        n = length
        h = history
    start = 0
    if STARTS:
        start = tl.load(start_ptr + b)
    row = (bh * tl.num_programs(2) + chunk).to(tl.int64) * tl.num_programs(1) + part
    o_ptr += row * (NC * D)
    ml_ptr += row * (2 * NC)
    rep_head = (bh % HKV) * REP
    if MASK > 0:
        mask_ptr += b * stride_mb
    if part < n_sink:
        at = b * stride_kb + hk * stride_kh
        first = part * window
        _window(
            q_ptr + b * stride_qb, sink_k_ptr + at, sink_v_ptr + at, mask_ptr, o_ptr, ml_ptr,
            stride_qh, stride_qm, n, h, start, sink, ring, first, tl.minimum(first + window, tl.minimum(sink, n)),
            chunk * NC, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
            False, D, NC, WB, STARTS, MASK, CAP, PRECISION, WIDEN,
        )  # fmt: skip
    elif part < n_window:
        at = b * stride_rb + hk * stride_rh
        first = (part - n_sink) * window
        _window(
            q_ptr + b * stride_qb, ring_k_ptr + at, ring_v_ptr + at, mask_ptr, o_ptr, ml_ptr,
            stride_qh, stride_qm, n, h, start, sink, ring, first, tl.minimum(first + window, n - sink - h),
            chunk * NC, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
            True, D, NC, WB, STARTS, MASK, CAP, PRECISION, WIDEN,
        )  # fmt: skip
    else:
        query = (bh * tl.num_programs(2) + chunk).to(tl.int64)
        codes = b * stride_cb + hk * stride_ch
        scales = b * stride_sb + hk * stride_sh
        _history(
            frag_ptr + query * ((128 if D == 64 else D * TILES) * NC * TILES),
            info_ptr + query * ((D // SLICE + 2) * NC),
            kc_ptr + codes, ks_ptr + scales, km_ptr + scales, vc_ptr + codes, vs_ptr + scales, vm_ptr + scales,
            mask_ptr, o_ptr, ml_ptr, h, start, sink, part - n_window, tl.num_programs(1) - n_window, chunk * NC,
            cols, new_tokens, rep_head, stride_mh, stride_mm, stride_mn, mask_floor, cap,
            D, NG, NC, TILES, NW, BT, STAGES, SLICE, SYM, MASK, STARTS, CAP, ASM, PDL, AHEAD,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- merge


@triton.jit(do_not_specialize=["parts", "n_window", "cols", "chunks"])
def _merge_kernel(
    o_ptr, ml_ptr, vi_ptr, aux_ptr, out_ptr, parts, n_window, stride_vi, cols, new_tokens, chunks,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, DS: tl.constexpr, PT: tl.constexpr,
    PB: tl.constexpr, PW: tl.constexpr, PER: tl.constexpr, ROTATE: tl.constexpr, AUX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PER columns and DS channels of the output: weigh the parts, history (part >= n_window) times VI, plus windows."""
    bh = tl.program_id(0)
    column = tl.program_id(1) * PER + tl.arange(0, PER)
    d = tl.arange(0, D)
    ds = tl.program_id(2) * DS + tl.arange(0, DS)
    h = bh % HKV
    if ROTATE:
        vi = tl.load(vi_ptr + h * stride_vi + d[:, None] * D + ds[None, :])
    if PDL:
        tlx.gdc_wait()
    # PER divides NC, so one chunk holds all columns of a program.
    row = (bh * chunks + tl.program_id(1) * PER // NC).to(tl.int64) * parts
    c = column % NC
    o_ptr += row * (NC * D) + (c * D)[None, :, None]
    ml_ptr += row * (2 * NC) + c[None, :]
    # Every load that needs no other is issued before the first sum: their latencies are most of this kernel's time.
    window = tl.arange(0, PW)
    first = n_window + tl.arange(0, PB)
    every = tl.arange(0, PT)
    raw_at = window[:, None, None] * (NC * D) + ds[None, None, :]
    raw = tl.load(o_ptr + raw_at, mask=(window < n_window)[:, None, None], other=0.0)
    old_channel = d if ROTATE else ds
    old_at = first[:, None, None] * (NC * D) + old_channel[None, None, :]
    old = tl.load(o_ptr + old_at, mask=(first < parts)[:, None, None], other=0.0)
    m = tl.load(ml_ptr + every[:, None] * (2 * NC), mask=(every < parts)[:, None], other=_NEVER)
    total = tl.load(ml_ptr + every[:, None] * (2 * NC) + NC, mask=(every < parts)[:, None], other=0.0)
    m_window = tl.load(ml_ptr + window[:, None] * (2 * NC), mask=(window < n_window)[:, None], other=_NEVER)
    m_old = tl.load(ml_ptr + first[:, None] * (2 * NC), mask=(first < parts)[:, None], other=_NEVER)
    top = tl.max(m, axis=0)
    if AUX:
        # A learnt sink logit: one more score, with no value.
        head = tl.minimum(column // new_tokens, REP - 1)
        aux = tl.load(aux_ptr + h * REP + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, aux)
    total = tl.sum(total * tl.exp2(m - top[None, :]), axis=0)
    if AUX:
        total += tl.exp2(aux - top)
    out = tl.sum(raw * tl.exp2(m_window - top[None, :])[:, :, None], axis=0)
    rotated = tl.sum(old * tl.exp2(m_old - top[None, :])[:, :, None], axis=0)
    for p0 in range(n_window + PB, parts, PB):
        part = p0 + tl.arange(0, PB)
        part_at = part[:, None, None] * (NC * D) + old_channel[None, None, :]
        x = tl.load(o_ptr + part_at, mask=(part < parts)[:, None, None], other=0.0)
        m_part = tl.load(ml_ptr + part[:, None] * (2 * NC), mask=(part < parts)[:, None], other=_NEVER)
        rotated += tl.sum(x * tl.exp2(m_part - top[None, :])[:, :, None], axis=0)
    if ROTATE:
        out += tl.sum(rotated[:, :, None] * vi[None, :, :], axis=1)
    else:
        out += rotated
    # A row that may attend to nothing gives zeros, not NaN.
    out = tl.where((total > 0)[:, None], out / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    out_ptr += bh.to(tl.int64) * (REP * D) * new_tokens
    at = column[:, None] * D + ds[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(column < cols)[:, None])


# ---------------------------------------------------------------------------------------------- launcher


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes and splits of one call; `_choose` picks them from shape and device."""

    columns: int  # query rows (heads x new tokens) per program
    tiles: int  # tiles of tokens that share the score columns: 1 or 2
    block: int  # tokens per tile
    warps: int
    stages: int
    splits: int  # history splits per KV head
    merge_columns: int  # columns per merge program
    merge_parts: int  # parts it weighs at a time
    pdl: bool  # programmatic dependent launch (Hopper and later): a launch starts while the one before it drains
    asm: bool
    registers: int | None = None
    window: int = 64  # sink or ring entries per window split
    window_block: int = 16
    ahead: int = 256  # tokens fetched to L2 before the queries are ready
    merge_slice: int = 32  # output channels per merge program
    merge_warps: int = 4
    prepare_slice: int = 32
    prepare_warps: int = 4


@functools.cache
def _device_facts(index: int) -> tuple[int, bool]:
    """Multiprocessors, and whether launches may overlap."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major >= 9 and torch.version.hip is None


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


def _choose(query: Tensor, store: DecodeStore) -> Tuning:
    """Tuned on an H200; the reasons are in the comments, so that another device can be reasoned about."""
    batch, heads, new, head_dim = query.shape
    kv_heads = store.k_codes.shape[1]
    cols = heads // kv_heads * new
    # Two tiles share 8 columns where at most 4 are needed. At D = 64 a row of words is two tokens, so always two tiles.
    tiles = 2 if head_dim == 64 or (cols <= 4 and head_dim == 128) else 1
    columns = min(16 if head_dim == 128 else 8, max(next_power_of_two(cols), 4 if tiles == 2 else 8))
    # Accumulators take head_dim * columns * tiles / 32 registers of each thread: shorter tiles where those are many.
    small = head_dim * columns * (tiles if head_dim == 128 else 1) <= 1024
    block = 64 if small else 32
    resident = 12 if head_dim * columns <= 1024 and not (tiles == 2 and head_dim == 128) else 8
    on_cpu = query.device.type != "cuda"
    # The interpreter: enough splits to test their merging, otherwise few programs, each of which is slow.
    sms, pdl = (4, False) if on_cpu else _device_facts(query.device.index)
    programs = batch * kv_heads * -(-cols // columns)
    capacity = store.k_scale.shape[2] if isinstance(store.history, Tensor) else store.history
    blocks = max(1, -(-capacity // (block * tiles)))
    # One wave of splits at most; six blocks each where that still gives every multiprocessor two: a split costs about
    # two blocks' time to start and to merge.
    splits = min(sms * resident // programs, max(-(-blocks // 6), 2 * sms // programs), blocks, 256)
    wide = on_cpu or batch * heads * new > 2 * sms
    return Tuning(
        columns=columns, tiles=tiles, block=block, warps=1, stages=3, splits=max(1, splits),
        merge_columns=min(4, columns) if wide else 1, merge_parts=16 if wide else 64,
        pdl=pdl, asm=not interpreting() and torch.version.hip is None,
        merge_slice=head_dim // 2 if on_cpu else 32, prepare_slice=head_dim // 2 if on_cpu else 32,
    )  # fmt: skip


def _strides(keys: Tensor, values: Tensor | None, what: str) -> tuple[int, int]:
    """Batch and head strides of a pair of buffers, which must agree and have dense rows."""
    for x in (keys, values):
        if x is not None and (x.stride(3) != 1 or x.stride(2) != x.shape[3] or x.stride()[:2] != keys.stride()[:2]):
            raise ValueError(f"{what}: the decode kernel needs dense rows and the same strides for keys and values")
    return keys.stride(0), keys.stride(1)


def _head_stride(matrix: Tensor | None) -> int:
    return 0 if matrix is None or matrix.dim() == 2 else matrix.stride(0)


def _mask_arguments(mask: Tensor | None) -> tuple[Tensor | None, int, float, tuple[int, ...]]:
    """The mask as the kernel takes it, its kind (0 none, 1 bool, 2 additive), the floor of what may attend, strides."""
    if mask is None:
        return None, 0, 0.0, (0, 0, 0, 0)
    strides = tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.stride()))
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), 1, 0.0, strides
    # transformers fills masked places with the most negative number of the mask's own type; -inf is below it too.
    return mask, 2, torch.finfo(mask.dtype).min / 2, strides


def decode_attention(
    query: Tensor,
    store: DecodeStore,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attention of the last M tokens over the whole cache, M of them new: [B, Hq, M, D] in, the same out (contiguous).

    mask: bool (True: attend) or additive, broadcastable to [B, Hq, M, length]; scale: default D^-1/2;
    softcap: scores become cap tanh(score / cap); s_aux: [Hq] learnt logit per head that takes part in the softmax only;
    tuning: for benchmarks. Slots are causal among the new tokens; a row that may attend to nothing gives zeros.
    """
    batch, heads, new, head_dim = query.shape
    kv_heads, groups = store.k_codes.shape[1], store.k_scale.shape[-1]
    rep = heads // kv_heads
    cols = rep * new
    sink, ring = store.sink_k.shape[2], store.ring_k.shape[2]
    t = tuning or _choose(query, store)
    chunks = -(-cols // t.columns)
    on_device = isinstance(store.history, Tensor)
    # The grid covers what the buffers can hold; what they do hold is on the device or, as a number, trims the grid.
    sink_used = sink if on_device else min(store.length, sink)
    ring_used = ring if on_device else max(0, store.length - sink - store.history)
    n_sink = -(-sink_used // t.window)
    n_window = n_sink + -(-ring_used // t.window)
    has_history = on_device or store.history > 0
    parts = n_window + (t.splits if has_history else 0)
    symmetric = store.k_min is None
    pair = head_dim == PAIRED_HEAD_DIM
    slice_ = min(t.prepare_slice, head_dim // groups)

    device, programs = query.device, batch * kv_heads * chunks
    operand = t.columns * t.tiles * (16 if pair else head_dim // 8)
    frag = torch.empty(programs * operand * (8 if pair else 8 * t.tiles), dtype=torch.float16, device=device)
    info = torch.empty(programs * (head_dim // slice_ + 2) * t.columns, dtype=torch.float32, device=device)
    partial = torch.empty(programs * parts * t.columns * head_dim, dtype=torch.float32, device=device)
    max_sum = torch.empty(programs * parts * t.columns * 2, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, new, head_dim, dtype=query.dtype, device=device)

    if query.stride(3) != 1:
        query = query.contiguous()
    query_strides = query.stride()[:3]
    key_query, value_inverse = (None if x is None else x.contiguous() for x in (store.key_query, store.value_inverse))
    mask, mask_kind, mask_floor, mask_strides = _mask_arguments(mask)
    scale = (head_dim**-0.5 if scale is None else scale) * _LOG2E
    cap = 0.0 if softcap is None else softcap * _LOG2E
    if not symmetric:
        _strides(store.k_scale, store.k_min, "mins")
        _strides(store.k_scale, store.v_min, "mins")
    after_prepare = t.pdl and has_history
    with on_device_of(device):
        if has_history:
            _prepare_kernel[(batch * kv_heads, chunks, head_dim // slice_)](
                query, key_query, store.key_mean, frag, info, *query_strides, _head_stride(key_query), cols, new, scale,
                HKV=kv_heads, REP=rep, D=head_dim, NC=t.columns, TILES=t.tiles, SLICE=slice_,
                ROTATE=key_query is not None, CENTRED=store.key_mean is not None, PDL=t.pdl, num_warps=t.prepare_warps,
            )  # fmt: skip
        _split_kernel[(batch * kv_heads, parts, chunks)](
            query, frag, info, store.k_codes, store.k_scale, store.k_scale if symmetric else store.k_min,
            store.v_codes, store.v_scale, store.v_scale if symmetric else store.v_min,
            store.sink_k, store.sink_v, store.ring_k, store.ring_v, store.start, mask, partial, max_sum,
            store.length, store.history, *query_strides, *_strides(store.k_codes, store.v_codes, "codes"),
            *_strides(store.k_scale, store.v_scale, "scales"), *_strides(store.sink_k, store.sink_v, "sink"),
            *_strides(store.ring_k, store.ring_v, "ring"), *mask_strides,
            sink, ring, n_sink, n_window, t.window, cols, new, scale, mask_floor, cap,
            HKV=kv_heads, REP=rep, D=head_dim, NG=groups, NC=t.columns, TILES=t.tiles, BT=t.block, STAGES=t.stages,
            WB=t.window_block, SLICE=slice_, SYM=symmetric, MASK=mask_kind, STARTS=store.start is not None,
            CAP=softcap is not None, ON_DEVICE=on_device,
            PRECISION="tf32x3" if query.dtype == torch.float32 else "ieee",
            WIDEN=interpreting(), ASM=t.asm, PDL=after_prepare, NW=t.warps, AHEAD=t.ahead,
            num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers, launch_pdl=after_prepare,
        )  # fmt: skip
        per_program = min(t.merge_columns, t.columns)
        _merge_kernel[(batch * kv_heads, -(-cols // per_program), head_dim // t.merge_slice)](
            partial, max_sum, value_inverse, s_aux, out, parts, n_window, _head_stride(value_inverse), cols, new, chunks,
            HKV=kv_heads, REP=rep, D=head_dim, NC=t.columns, DS=t.merge_slice,
            # Few distinct sizes, so that a growing sequence does not compile anew again and again.
            PT=max(64, next_power_of_two(parts)), PB=t.merge_parts, PW=max(8, next_power_of_two(n_window)),
            PER=per_program, ROTATE=value_inverse is not None, AUX=s_aux is not None, PDL=t.pdl,
            num_warps=t.merge_warps, launch_pdl=t.pdl,
        )  # fmt: skip
    return out

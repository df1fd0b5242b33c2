"""Decode attention straight from 2-bit codes: split-KV over history, merged with the exact windows, in three launches.

    prepare   per KV head and slice of channels: q @ KQ in fp32, rounded once to fp16, stored as matrix-unit operands
    split     one warp per KV head and split: reads codes; also, or alone, a piece of the sink or of the ring
    merge     weighs the partial results, rotates the history's share back with VI, adds the windows' share

How many splits there are follows on the device from the history (`_splits`), so that room for more costs nothing.
What keeps the split kernel short (at batch 1 code that nothing has fetched yet and a lone warp's latencies bind it, at
batch 8 and 32 memory does):

* A crumb is an fp16 subnormal where it lies: `word & 0x0300` *is* the number 4^4 code 2^-24, and matrix units take
  subnormals at full speed. So a code costs one `and` per pair; crumbs 5-7 share one shift by 10. The powers of four are
  folded into the query's planes (keys) and into the final store (values), all exact.
* q.khat = scale (q.code) + min sum(q): scale and min are applied to scores and to probabilities, never to elements.
* Tokens lie on the matrix unit's M axis, query heads on N = 8. With at most 4 query rows per KV head two tiles of
  tokens share the 8 columns: the left tile meets [q | 0], the right one [0 | q], so no lane computes softmax for padding.
* The running maximum is lazy: a block is exponentiated against the old reference, and only when its row sums pass
  `_LIMIT` is the reference raised and everything rescaled. Results do not depend on when that happens, up to rounding.
* Bounds, padding and masks cost only the blocks where they bite: whole, visible blocks run in a loop that knows of none.

`reference.decode_attention_reference` specifies it all in plain PyTorch.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from ...quantization.packed_rows import PAIRED_HEAD_DIM
from ..launch import HAS_TRITON, interpreting, launch_problem, next_power_of_two, tl, triton
from ..launch import on_device as on_device_of
from .reference import mask_facts_reference

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


@triton.jit(do_not_specialize=["batch", "cols", "chunks"])
def _prepare_kernel(
    q_ptr, kq_ptr, mean_ptr, frag_ptr, info_ptr,
    stride_qb, stride_qh, stride_qm, stride_kq, batch, cols, chunks, new_tokens, q_scale,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, RB: tl.constexpr,
    SLICE: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotated channels slice * SLICE.. of the queries of RB batch rows, one KV head and chunk.

    Column c = head * new_tokens + token. Grid (batch groups * Hkv, chunks, slices).
    frag: fp16 [B * Hkv, chunks, operands, W * N], in matrix-unit order, N = TILES * NC columns. Operand i < 8 is
    crumb i's, times 4^-e; with two tiles, 8 + i is the same for the right tile. The other tile's columns are zero.
    (D = 64: crumbs 0-3 are the left tile's and 4-7 the right tile's, so there are 8 operands.)
    info: fp32 [B * Hkv, chunks, D / SLICE + 2, NC]: sum(q) per slice, shift q.mu, factor of raw scores; in log2 units
    """
    if PDL:
        tlx.gdc_launch_dependents()
    W: tl.constexpr = 16 if D == 64 else D // 8
    R: tl.constexpr = RB * NC
    h = tl.program_id(0) % HKV
    chunk = tl.program_id(1)
    k = tl.arange(0, D)
    d = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    row = tl.arange(0, R) % NC
    b = tl.program_id(0) // HKV * RB + tl.arange(0, R) // NC
    c = chunk * NC + row
    live = (c < cols) & (b < batch)
    if ROTATE:
        matrix = tl.load(kq_ptr + h * stride_kq + k[:, None] * D + d[None, :])
    q_row = q_ptr + b.to(tl.int64) * stride_qb + (h * REP + c // new_tokens) * stride_qh + c % new_tokens * stride_qm
    q = tl.load(q_row[:, None] + k[None, :], mask=live[:, None], other=0.0).to(tl.float32) * q_scale
    if not ROTATE:
        rotated = tl.load(q_row[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32) * q_scale
    elif R < 16:
        # Plain fp32 sums: so few rows are cheaper that way than splitting the matrix for three tf32 products.
        rotated = tl.sum(q[:, :, None] * matrix[None, :, :], axis=1)
    else:
        # Written as above, Triton would make it one product in tf32, whose 11 bits would be most of the kernel's error.
        rotated = tl.dot(q, matrix, input_precision="tf32x3")
    # A power of two near the longest row's norm brings all of a program's rows into fp16's middle: a rotation keeps the
    # norm, so no element passes 2^11, and the clamp below matters only for transforms that lengthen a query 30 times.
    norm = tl.max(tl.reshape(tl.sum(q * q, axis=1), [RB, NC]), axis=1)
    norm = tl.sqrt(tl.reshape(tl.broadcast_to(norm[:, None], [RB, NC]), [R]))
    bits = tl.minimum(tl.maximum(norm, 1e-30), 1e30).to(tl.int32, bitcast=True) & 0x7F800000
    unit = bits.to(tl.float32, bitcast=True) * (1.0 / _Q_UNIT)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True) * _Q_UNIT
    half = tl.minimum(tl.maximum(rotated * inverse[:, None], -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    query = (b * HKV + h) * chunks + chunk
    PAIR: tl.constexpr = D == 64
    N: tl.constexpr = TILES * NC
    frag_row = frag_ptr + query.to(tl.int64) * ((8 if PAIR else 8 * TILES) * W * N)
    for side in tl.static_range(TILES):
        crumb = d // W + (4 * side if PAIR else 0)
        quarter = tl.exp2(-2.0 * (crumb % 5))
        stored = (half * quarter[None, :]).to(tl.float16)
        operand = (crumb if PAIR else crumb + 8 * side)[None, :] * (W * N)
        for place in tl.static_range(TILES):
            at = operand + _fragment_offset((d % W)[None, :], (place * NC + row)[:, None], W, N)
            value = stored if place == side else tl.zeros_like(stored)
            tl.store(frag_row[:, None] + at, value, mask=(b < batch)[:, None])
    info_row = info_ptr + query * ((D // SLICE + 2) * NC) + row
    tl.store(info_row + tl.program_id(2) * NC, tl.sum(half, axis=1) * unit, mask=b < batch)
    if tl.program_id(2) == 0:
        shift = tl.zeros([R], tl.float32)
        if CENTRED:
            shift = tl.sum(q * tl.load(mean_ptr + h * D + k)[None, :], axis=1)
        tl.store(info_row + D // SLICE * NC, shift, mask=b < batch)
        tl.store(info_row + (D // SLICE + 1) * NC, unit * 16777216.0, mask=b < batch)


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
def _places(
    n0, h,
    D: tl.constexpr, NG: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of the block at token n0: rows of words of each warp's left tile [NW, BT], rows in use, places of the scales."""
    PAIR: tl.constexpr = D == 64
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
        return _groups(tl.load(ptr + tok, mask=tok < h * NG, other=0.0), BLOCK, NG)
    return _groups(tl.load(ptr + tok), BLOCK, NG)


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
    rows, used, tok = _places(n0, h, D, NG, TILES, NW, BT)
    ws = _words(kc_ptr, rows, used, W, True, BOUND)
    scale = _per_group(ks_ptr, tok, h, BLOCK, NG, BOUND)
    high = _high(ws, ASM)
    # Separate sums for the left and the right tile: two short chains of dependent products instead of a long one.
    left = ()
    right = ()
    for group in tl.static_range(NG):
        left = left + (_plane_sum(ws, high, qa, group * PG, group * PG, PG, NW, BT, TILES * NC, ASM),)
        if PAIR:
            right = right + (_plane_sum(ws, high, qb, group * PG, 4 + group * PG, PG, NW, BT, TILES * NC, ASM),)
    if TILES == 2 and not PAIR:
        ws = _words(kc_ptr, rows + BT, used, W, True, BOUND)
        high = _high(ws, ASM)
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
    SYM: tl.constexpr, BOUND: tl.constexpr, ASM: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Add sum_t p_t scale_t code_t to the planes (left tile oa, right tile ob) and sum_t p_t min_t to corr.

    FINE: what rounding p_t scale_t to fp16 takes away is given back for the middle of the codes, through corr. The
    rounding then weighs (code - 1.5)'s size instead of the code's own, 1.7 times as much.
    """
    PAIR: tl.constexpr = D == 64
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
        pv = p * _per_column(scale[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
        weight = pv.to(tl.float16)
        if SYM:
            share = weight.to(tl.float32) if FINE else pv
        else:
            share = p * _per_column(low[group], NW, BT, NC, TILES, PAIR).to(tl.float32)
            if FINE:
                share += 1.5 * (pv - weight.to(tl.float32))
        sums = sums + (corr[group] + _rows16(share, NW, BT, TILES * NC),)
        weights = weights + (weight,)
    ws = _words(vc_ptr, rows, used, W, False, BOUND)
    high = _high(ws, ASM)
    na = ()
    nb = ()
    for i in tl.static_range(PLANES):
        na = na + (tl.dot(_crumb(ws, high, i, ASM), weights[i // PG], oa[i]),)
        if PAIR:
            nb = nb + (tl.dot(_crumb(ws, high, 4 + i, ASM), weights[i // PG], ob[i]),)
    if TILES == 2 and not PAIR:
        ws = _words(vc_ptr, rows + BT, used, W, False, BOUND)
        high = _high(ws, ASM)
        for i in tl.static_range(PLANES):
            nb = nb + (tl.dot(_crumb(ws, high, i, ASM), weights[i // PG], ob[i]),)
    return na, nb, sums


@triton.jit
def _ahead(
    kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr, begin, end,
    D: tl.constexpr, NG: tl.constexpr, NW: tl.constexpr, SYM: tl.constexpr,
):  # fmt: skip
    """Fetch tokens begin..end-1 to L2: the history is older than the queries, which are still being rotated."""
    LINE: tl.constexpr = 512 // D
    lanes = tl.arange(0, NW * 32)
    for n0 in range(begin, end, NW * 32 * LINE):
        ahead = tl.minimum(n0 // LINE + lanes, (end - 1) // LINE) * 64
        _fetch(kc_ptr + ahead)
        _fetch(vc_ptr + ahead)
    for n0 in range(begin, end, NW * 32 * 64 // NG):
        ahead = tl.minimum(n0 * NG + lanes * 64, (end - 1) * NG)
        _fetch(ks_ptr + ahead)
        _fetch(vs_ptr + ahead)
        if not SYM:
            _fetch(km_ptr + ahead)
            _fetch(vm_ptr + ahead)


@triton.jit
def _splits(h, low, limit, longest, alone, block):
    """First block, whole splits' blocks in all and each, splits. `splits_in_use` is the same rule on the host.

    limit: splits at most, unless they would pass `longest` blocks
    alone: 1 if a last, partial block is a split of its own. It runs through code of its own, which nothing has fetched
    yet, so that at the end of a short split it would take as long as three blocks.
    """
    skipped = low // block
    todo = tl.maximum((h + block - 1) // block - skipped, 0)
    rest = tl.where(h % block > 0, tl.minimum(alone, todo), 0)
    body = todo - rest
    share = tl.maximum(tl.minimum((body + limit - 1) // limit, longest), 1)
    return skipped, body, share, (body + share - 1) // share + rest


@triton.jit
def _history(
    frag_ptr, info_ptr, kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr, mask_ptr, o_ptr, ml_ptr,
    h, low, reads, sink, begin, end, column, cols, new_tokens, rep_head,
    stride_mh, stride_mm, stride_mn, mask_floor, cap,
    D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr, SLICE: tl.constexpr, SYM: tl.constexpr, MASK: tl.constexpr, LOW: tl.constexpr,
    CAP: tl.constexpr, ASM: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Blocks begin..end of one KV head's history; pointers are at that head. Writes o [NC, D] (rotated basis), m, l.

    low: first entry that may be seen, if LOW; reads: whether a mask must be read element by element.
    """
    PAIR: tl.constexpr = D == 64
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
    m_ref = tl.zeros([N], tl.float32) + tl.where(clean_end > clean, 0.0, _NEVER)

    for n0 in tl.range(clean, clean_end, BLOCK, num_stages=STAGES):
        base = shift if CAP else shift - m_ref
        x = _scores(
            kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, base, D, NG, NC, TILES, NW, BT, SYM, False, ASM
        )
        if CAP:
            x = _softcap(x, cap) - m_ref[None, None, :]
        p = _exp2(x, ASM)
        part = _rows16(p, NW, BT, N)
        # Sums are not negative, so their bits order like integers, and an integer maximum is one instruction.
        if (n0 == clean) | (tl.max(part.to(tl.int32, bitcast=True)) > _LIMIT):
            rise = _column_max(x, NC, TILES) - _LIFT
            if n0 > clean:
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
            vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr, D, NG, NC, TILES, NW, BT, SYM, False, ASM, FINE
        )

    # Two stages even for a lone block: its value loads then start together with its key loads.
    TAIL_STAGES: tl.constexpr = STAGES if MASK > 0 else 2
    if begin + (clean_end - clean) < end:
        for at_block in tl.range(begin + (clean_end - clean), end, BLOCK, num_stages=TAIL_STAGES):
            n0 = at_block
            if LOW:
                n0 -= tl.where(at_block < clean_end, clean_end - clean, 0)
            x = _scores(
                kc_ptr, ks_ptr, km_ptr, n0, h, qa, qb, qsum, factor, shift, D, NG, NC, TILES, NW, BT, SYM, True, ASM
            )
            if CAP:
                x = _softcap(x, cap)
            tok = _per_column(n0 + tl.arange(0, BLOCK), NW, BT, NC, TILES, PAIR)
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
                vc_ptr, vs_ptr, vm_ptr, n0, h, p, oa, ob, corr, D, NG, NC, TILES, NW, BT, SYM, True, ASM, FINE
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
    m_run = tl.full([N], _NEVER, tl.float32)
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
            x = _softcap(x, cap)
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
        x = tl.where(keep, x, _NEVER)
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


# Numbers that change while a sequence grows must not each ask for a compilation of their own.
@triton.jit(
    do_not_specialize=[
        "length", "history", "n_sink", "n_window", "window", "ahead", "offset", "limit", "longest", "alone",
        "parts", "cols", "stride_mb", "stride_mh", "stride_mm",
    ]
)  # fmt: skip
def _split_kernel(
    q_ptr, frag_ptr, info_ptr, kc_ptr, ks_ptr, km_ptr, vc_ptr, vs_ptr, vm_ptr,
    sink_k_ptr, sink_v_ptr, ring_k_ptr, ring_v_ptr, start_ptr, mask_ptr, facts_ptr, o_ptr, ml_ptr,
    length, history, stride_qb, stride_qh, stride_qm,
    stride_cb, stride_ch, stride_sb, stride_sh, stride_kb, stride_kh, stride_rb, stride_rh,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_fb,
    sink, ring, n_sink, n_window, window, ahead, offset, limit, longest, alone, parts,
    cols, new_tokens, scale, mask_floor, cap,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NG: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, WB: tl.constexpr, SLICE: tl.constexpr, SYM: tl.constexpr,
    MASK: tl.constexpr, FACTS: tl.constexpr, STARTS: tl.constexpr, CAP: tl.constexpr, ON_DEVICE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, ASM: tl.constexpr, FINE: tl.constexpr, PDL: tl.constexpr,
    NW: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv, programs, chunks). Program i takes window piece i and history split i - offset, where they exist.

    Piece i writes part i, split i part n_window + i: o[.., part] fp32 [NC, D], ml[.., part] [2, NC].
    """
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
    low = start
    low_slot = start
    reads = 1
    if FACTS:
        first_slot = tl.load(facts_ptr + b * stride_fb)
        reads = tl.load(facts_ptr + b * stride_fb + 1)
        low = tl.maximum(low, first_slot - sink)
        low_slot = tl.maximum(low_slot, first_slot)
    BLOCK: tl.constexpr = NW * TILES * BT
    skipped, body, share, n_splits = _splits(h, low, limit, longest, alone, BLOCK)
    split = part - offset
    # The grid may cover more than is in use: what a cache can hold, or what other rows hold.
    programs = tl.maximum(n_window, tl.where(n_splits > 0, offset + n_splits, 0))
    if part < programs:
        query = (bh * tl.num_programs(2) + chunk).to(tl.int64)
        o_ptr += query * parts * (NC * D)
        ml_ptr += query * parts * (2 * NC)
        rep_head = (bh % HKV) * REP
        if MASK > 0:
            mask_ptr += b * stride_mb
        codes = b * stride_cb + hk * stride_ch
        scales = b * stride_sb + hk * stride_sh
        begin = (skipped + tl.minimum(split * share, body)) * BLOCK
        end = (skipped + tl.minimum(split * share + share, body)) * BLOCK
        end = tl.where(begin == end, begin + BLOCK, end)
        in_history = (split >= 0) & (split < n_splits)
        if PDL:
            fetched = tl.minimum(tl.minimum(end, begin + ahead), h)
            _ahead(
                kc_ptr + codes, ks_ptr + scales, km_ptr + scales, vc_ptr + codes, vs_ptr + scales, vm_ptr + scales,
                begin, tl.where(in_history, fetched, begin), D, NG, NW, SYM,
            )  # fmt: skip
        if part < n_sink:
            at = b * stride_kb + hk * stride_kh
            first = part * window
            _window(
                q_ptr + b * stride_qb, sink_k_ptr + at, sink_v_ptr + at, mask_ptr,
                o_ptr + part * (NC * D), ml_ptr + part * (2 * NC),
                stride_qh, stride_qm, n, h, start, low_slot, reads, sink, ring,
                first, tl.minimum(first + window, tl.minimum(sink, n)),
                chunk * NC, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
                False, D, NC, WB, STARTS or FACTS, MASK, CAP, PRECISION, WIDEN,
            )  # fmt: skip
        elif part < n_window:
            at = b * stride_rb + hk * stride_rh
            first = (part - n_sink) * window
            _window(
                q_ptr + b * stride_qb, ring_k_ptr + at, ring_v_ptr + at, mask_ptr,
                o_ptr + part * (NC * D), ml_ptr + part * (2 * NC),
                stride_qh, stride_qm, n, h, start, low_slot, reads, sink, ring,
                first, tl.minimum(first + window, n - sink - h),
                chunk * NC, cols, new_tokens, rep_head, scale, stride_mh, stride_mm, stride_mn, mask_floor, cap,
                True, D, NC, WB, STARTS or FACTS, MASK, CAP, PRECISION, WIDEN,
            )  # fmt: skip
        if PDL:
            # The history's split needs the rotated queries; a program without one waits too, so that whatever waits for
            # this kernel has also waited for the one before.
            tlx.gdc_wait()
        if in_history:
            _history(
                frag_ptr + query * ((128 if D == 64 else D * TILES) * NC * TILES),
                info_ptr + query * ((D // SLICE + 2) * NC),
                kc_ptr + codes, ks_ptr + scales, km_ptr + scales, vc_ptr + codes, vs_ptr + scales, vm_ptr + scales,
                mask_ptr, o_ptr + (n_window + split) * (NC * D), ml_ptr + (n_window + split) * (2 * NC),
                h, low, reads, sink, begin, end, chunk * NC,
                cols, new_tokens, rep_head, stride_mh, stride_mm, stride_mn, mask_floor, cap,
                D, NG, NC, TILES, NW, BT, STAGES, SLICE, SYM, MASK, STARTS or FACTS, CAP, ASM, FINE,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------- merge


@triton.jit(
    do_not_specialize=[
        "history", "all_parts", "n_window", "limit", "longest", "alone", "block", "batch", "cols", "chunks"
    ]
)  # fmt: skip
def _merge_kernel(
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
    parts = tl.where(there, n_window + _splits(tokens, low, limit, longest, alone, block)[3], 0)
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
    m = tl.load(ml_row + every[:, None] * (2 * NC), mask=in_every, other=_NEVER)
    total = tl.load(ml_row + every[:, None] * (2 * NC) + NC, mask=in_every, other=0.0)
    m_window = tl.load(ml_row + window[:, None] * (2 * NC), mask=in_window, other=_NEVER)
    m_old = tl.load(ml_row + first[:, None] * (2 * NC), mask=in_first, other=_NEVER)
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
    for p0 in range(n_window + PB, tl.max(parts), PB):
        part = p0 + tl.arange(0, PB)
        in_part = part[:, None] < parts[None, :]
        part_at = part[:, None, None] * (NC * D) + old_channel[None, None, :]
        x = tl.load(o_row + part_at, mask=in_part[:, :, None], other=0.0)
        m_part = tl.load(ml_row + part[:, None] * (2 * NC), mask=in_part, other=_NEVER)
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


# ---------------------------------------------------------------------------------------------- masks


@triton.jit(do_not_specialize=["length", "new_tokens", "heads", "stride_b", "stride_h", "stride_m"])
def _facts_kernel(
    mask_ptr, facts_ptr, length, new_tokens, heads, stride_b, stride_h, stride_m, stride_n, mask_floor,
    BOOL: tl.constexpr, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One batch row's mask, every element once. The kernel runs once per forward, not per layer, so it is kept plain."""
    b = tl.program_id(0)
    n = tl.load(length) if ON_DEVICE else length
    first = tl.zeros([BLOCK], tl.int32) + n
    inside = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for line in range(0, heads * new_tokens):
        token = line % new_tokens
        row = mask_ptr + b.to(tl.int64) * stride_b + (line // new_tokens).to(tl.int64) * stride_h + token * stride_m
        newest = n - new_tokens + token
        for n0 in range(0, n, BLOCK):
            slot = n0 + tl.arange(0, BLOCK)
            value = tl.load(row + slot.to(tl.int64) * stride_n, mask=slot < n, other=0)
            if BOOL:
                seen = (value != 0) & (slot < n)
            else:
                bias = value.to(tl.float32)
                seen = (bias > mask_floor) & (slot < n)
                wrong |= (seen & (bias != 0.0)).to(tl.int32)
            wrong |= (seen & (slot > newest)).to(tl.int32)
            inside += seen.to(tl.int32)
            first = tl.minimum(first, tl.where(seen, slot, n))
    start = tl.min(first)
    # No row of the mask sees more than first..newest, so their numbers add up only if each row sees all of that.
    expected = 0
    for token in range(0, new_tokens):
        expected += tl.maximum(n - new_tokens + token - start + 1, 0) * heads
    tl.store(facts_ptr + 2 * b, start)
    tl.store(facts_ptr + 2 * b + 1, ((tl.max(wrong) > 0) | (tl.sum(inside) != expected)).to(tl.int32))


def mask_facts(mask: Tensor, length: int | Tensor, new_tokens: int) -> Tensor:
    """What a mask [B or 1, Hq or 1, M, >= length] says: int32 [B or 1, 2] on its device, for `decode_attention`.

    First the first slot that any head and query sees (length if none). Then 0 if the mask is just "slot >= first and
    causal" on the slots in use, else 1: it must be read. length: an int, or an int32 tensor of one element on the device
    """
    problem = launch_problem(mask.device)
    if problem and not interpreting():
        return mask_facts_reference(mask, length, new_tokens)
    facts = torch.empty(mask.shape[0], 2, dtype=torch.int32, device=mask.device)
    data, kind, floor, strides = _mask_arguments(mask)
    with on_device_of(mask.device):
        _facts_kernel[(mask.shape[0],)](
            data, facts, length, new_tokens, mask.shape[1], *strides, floor,
            BOOL=kind == 1, ON_DEVICE=isinstance(length, Tensor), BLOCK=8192, num_warps=16,
        )  # fmt: skip
    return facts


# ---------------------------------------------------------------------------------------------- launcher


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Block sizes and splits of one call; `_choose` picks them from shape and device."""

    columns: int  # query rows (heads x new tokens) per program
    tiles: int  # tiles of tokens that share the score columns: 1 or 2
    block: int  # tokens per tile
    warps: int
    stages: int
    splits: int  # history splits per KV head at most
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
    together: bool = True  # programs take a window piece and a history split; else one or the other
    alone: bool = False  # a last, partial block is a split of its own
    prepare_rows: int = 1  # batch rows per prepare program
    merge_rows: int = 1  # batch rows per merge program

    @property
    def tokens(self) -> int:
        """Tokens per block of a program."""
        return self.warps * self.tiles * self.block

    @property
    def longest(self) -> int:
        """Blocks per split at most: matrix units truncate what they accumulate, and 256 steps cost 1e-5 of the sum.

        The output is hundreds of times smaller than that sum where a long history averages many values.
        """
        return max(1, 4096 // self.block)


def splits_in_use(history: int, tuning: Tuning) -> int:
    """History splits that a row without padding uses; `_splits` is the same rule on the device."""
    block = tuning.tokens
    rest = int(tuning.alone and history % block > 0)
    body = -(-history // block) - rest
    share = max(min(-(-body // tuning.splits), tuning.longest), 1)
    return rest + -(-body // share)


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
    on_cpu = query.device.type != "cuda"
    # The interpreter: enough splits to test their merging, otherwise few programs, each of which is slow.
    sms, pdl = (4, False) if on_cpu else _device_facts(query.device.index)
    programs = batch * kv_heads * -(-cols // columns)
    # With few heads a program runs few blocks, and the time goes into the first of them: code that nothing has fetched
    # yet and loads that nothing hides. Short blocks are half the code; with many blocks they cost 5% more a token.
    few = programs <= sms // 8
    # Accumulators take head_dim * columns * tiles / 32 registers of each thread: shorter tiles where those are many.
    small = head_dim * columns * (tiles if head_dim == 128 else 1) <= 1024
    resident = 12 if head_dim * columns <= 1024 and not (tiles == 2 and head_dim == 128) else 8
    # One wave of programs: what does not fit starts when the others are done. At batch 1 a split is as short as two
    # blocks; hundreds of parts still merge in one pass.
    splits = sms * resident // programs
    if few:
        # Windows take longer than the wait for the queries there, so they get programs of their own.
        window = 64
        splits -= sum(-(-x.shape[2] // window) for x in (store.sink_k, store.ring_k))
    else:
        # A program takes a piece while it waits for the queries, the smaller the more programs share them.
        window = 16 if splits >= 8 else 64
    splits = max(1, min(splits, 256))
    # Rotating and merging go by 16 rows through the matrix units where programs would come in several waves otherwise,
    # rotating also where plain sums would run out of registers. (With more parts than one pass takes, merging that way is
    # slower than any other: 50 us at batch 8.)
    rows = max(1, 16 // columns)
    tokens = store.k_scale.shape[2] if isinstance(store.history, Tensor) else store.history
    by16 = programs >= sms and max(splits, -(-tokens // (4096 * tiles))) <= 512 // head_dim
    if on_cpu:
        merge = dict(merge_columns=min(4, columns), merge_parts=16, merge_slice=head_dim // 2)
    elif by16:
        merge = dict(merge_columns=columns, merge_parts=max(2, 256 // head_dim), merge_slice=32, merge_rows=rows)
    elif splits > 32 and batch * heads * new <= sms:
        merge = dict(merge_columns=1, merge_parts=min(128, 16384 // head_dim), merge_slice=32)
    else:
        parts = 32 if splits > 32 and head_dim < 256 else 16
        merge = dict(merge_columns=2, merge_parts=parts, merge_slice=min(8192 // head_dim, head_dim))
    return Tuning(
        columns=columns, tiles=tiles, block=64 if small and not few else 32, warps=1, stages=3, splits=splits,
        # Fetching further ahead than the wait for the queries delays the first loads.
        window=window, together=not few, alone=few, ahead=128 if few else 256,
        prepare_rows=rows if programs >= sms or head_dim * columns >= 1024 else 1,
        prepare_slice=head_dim // 2 if on_cpu else 32,
        pdl=pdl, asm=not interpreting() and torch.version.hip is None, **merge,
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
    mask_facts: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attention of the last M tokens over the whole cache, M of them new: [B, Hq, M, D] in, the same out (contiguous).

    mask: bool (True: attend) or additive, broadcastable to [B, Hq, M, length]; scale: default D^-1/2;
    softcap: scores become cap tanh(score / cap); s_aux: [Hq] learnt logit per head that takes part in the softmax only;
    mask_facts: int32 [B or 1, 2], what the function of that name says of this mask, which then is read only if it must
    be (B in all, so that a padded row does not make the others slow);
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
    most = store.k_scale.shape[2] if on_device else store.history
    splits = splits_in_use(most, t)
    if on_device or store.start is not None or mask_facts is not None:
        # Fewer blocks than the most may take more splits than those, whose shares are rounded up.
        blocks = -(-most // t.tokens)
        splits = min(max(t.splits, -(-blocks // t.longest)) + t.alone, blocks)
    offset = 0 if t.together else n_window
    parts = n_window + splits
    grid = max(1, n_window, offset + splits if splits else 0)
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
    key_query = None if store.key_query is None else store.key_query.contiguous()
    value_inverse = store.value_inverse
    turned = value_inverse is not None and not value_inverse.is_contiguous()
    if turned:
        # An inverse is usually kept as a view of its orthogonal transform: no copy then.
        value_inverse = value_inverse.mT.contiguous()
    mask, mask_kind, mask_floor, mask_strides = _mask_arguments(mask)
    facts_stride = 0 if mask_facts is None or mask_facts.shape[0] == 1 else 2
    scale = (head_dim**-0.5 if scale is None else scale) * _LOG2E
    cap = 0.0 if softcap is None else softcap * _LOG2E
    if not symmetric:
        _strides(store.k_scale, store.k_min, "mins")
        _strides(store.k_scale, store.v_min, "mins")
    rotate = value_inverse is not None
    after_prepare = t.pdl and splits > 0
    with on_device_of(device):
        if splits:
            _prepare_kernel[(-(-batch // t.prepare_rows) * kv_heads, chunks, head_dim // slice_)](
                query, key_query, store.key_mean, frag, info, *query_strides, _head_stride(key_query),
                batch, cols, chunks, new, scale,
                HKV=kv_heads, REP=rep, D=head_dim, NC=t.columns, TILES=t.tiles, RB=t.prepare_rows, SLICE=slice_,
                ROTATE=key_query is not None, CENTRED=store.key_mean is not None, PDL=t.pdl,
                num_warps=t.prepare_warps,
            )  # fmt: skip
        _split_kernel[(batch * kv_heads, grid, chunks)](
            query, frag, info, store.k_codes, store.k_scale, store.k_scale if symmetric else store.k_min,
            store.v_codes, store.v_scale, store.v_scale if symmetric else store.v_min,
            store.sink_k, store.sink_v, store.ring_k, store.ring_v, store.start, mask, mask_facts,
            partial, max_sum, store.length, store.history,
            *query_strides, *_strides(store.k_codes, store.v_codes, "codes"),
            *_strides(store.k_scale, store.v_scale, "scales"), *_strides(store.sink_k, store.sink_v, "sink"),
            *_strides(store.ring_k, store.ring_v, "ring"), *mask_strides, facts_stride,
            sink, ring, n_sink, n_window, t.window, t.ahead, offset, t.splits, t.longest, int(t.alone), parts,
            cols, new, scale, mask_floor, cap,
            HKV=kv_heads, REP=rep, D=head_dim, NG=groups, NC=t.columns, TILES=t.tiles, BT=t.block, STAGES=t.stages,
            WB=t.window_block, SLICE=slice_, SYM=symmetric, MASK=mask_kind, FACTS=mask_facts is not None,
            STARTS=store.start is not None, CAP=softcap is not None, ON_DEVICE=on_device,
            PRECISION="tf32x3" if query.dtype == torch.float32 else "ieee",
            WIDEN=interpreting(), ASM=t.asm, FINE=query.dtype != torch.bfloat16, PDL=after_prepare, NW=t.warps,
            num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers, launch_pdl=after_prepare,
        )  # fmt: skip
        per_program = min(t.merge_columns, t.columns)
        _merge_kernel[(-(-batch // t.merge_rows) * kv_heads, -(-cols // per_program), head_dim // t.merge_slice)](
            partial, max_sum, value_inverse, s_aux, out, store.start, mask_facts, store.history, parts, n_window, sink,
            t.splits, t.longest, int(t.alone), t.tokens, facts_stride, _head_stride(value_inverse),
            batch, cols, new, chunks,
            ON_DEVICE=on_device, STARTS=store.start is not None, FACTS=mask_facts is not None,
            HKV=kv_heads, REP=rep, D=head_dim, NC=t.columns, DS=t.merge_slice,
            # Few distinct sizes, so that a growing sequence does not compile anew again and again.
            PT=max(32, next_power_of_two(parts)), PB=t.merge_parts, PW=max(8, next_power_of_two(n_window)),
            PER=per_program, RB=t.merge_rows, ROTATE=rotate, TURNED=turned, AUX=s_aux is not None, PDL=t.pdl,
            num_warps=t.merge_warps, launch_pdl=t.pdl,
        )  # fmt: skip
    return out

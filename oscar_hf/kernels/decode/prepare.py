"""Prepare: rotate the queries, round them once to fp16 and store them as matrix-unit operands; multiply centers of blocks."""

from ..launch import tl, tlx, triton
from .block_shifts import block_shifts
from .elements import PAIRED_DIM, Q_UNIT, fragment_offset

# Blocks of history whose shifts a program computes.
SHIFT_ROWS = 32


# Numbers that change while a sequence grows must not each ask for a compilation of their own.
@triton.jit(do_not_specialize=["history", "blocks", "batch", "cols", "chunks"])
def prepare_kernel(
    q_ptr, kq_ptr, mean_ptr, centers_ptr, frag_ptr, info_ptr, shift_ptr, history,
    stride_qb, stride_qh, stride_qm, stride_kq, stride_nb, stride_nh, blocks, batch, cols, chunks, new_tokens, q_scale,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, RB: tl.constexpr,
    SLICE: tl.constexpr, ROTATE: tl.constexpr, CENTERED: tl.constexpr, CENTER_BLOCK: tl.constexpr, SB: tl.constexpr,
    ON_DEVICE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (batch groups * Hkv, chunks, slices + RB * shift tiles): what `_rotated` does, and where the history's blocks have
    centers the shifts of SB blocks of one batch row, shift: fp32 [B * Hkv, chunks, blocks, NC].
    """
    if PDL:
        tlx.gdc_launch_dependents()
    if CENTER_BLOCK == 0:
        _rotated(
            q_ptr, kq_ptr, mean_ptr, frag_ptr, info_ptr, stride_qb, stride_qh, stride_qm, stride_kq, batch, cols, chunks,
            new_tokens, q_scale, HKV, REP, D, NC, TILES, RB, SLICE, ROTATE, CENTERED,
        )  # fmt: skip
    else:
        tile = tl.program_id(2) - D // SLICE
        if tile < 0:
            _rotated(
                q_ptr, kq_ptr, mean_ptr, frag_ptr, info_ptr, stride_qb, stride_qh, stride_qm, stride_kq, batch, cols,
                chunks, new_tokens, q_scale, HKV, REP, D, NC, TILES, RB, SLICE, ROTATE, CENTERED,
            )  # fmt: skip
        else:
            # Room for more than the history costs a program that leaves at once.
            h = tl.load(history) if ON_DEVICE else history
            hk = tl.program_id(0) % HKV
            b = tl.program_id(0) // HKV * RB + tile % RB
            first = tile // RB * SB
            last = tl.minimum(first + SB, (h + CENTER_BLOCK - 1) // CENTER_BLOCK)
            if (first < last) & (b < batch):
                query = ((b * HKV + hk) * chunks + tl.program_id(1)).to(tl.int64)
                block_shifts(
                    q_ptr + b.to(tl.int64) * stride_qb,
                    centers_ptr + b.to(tl.int64) * stride_nb + hk.to(tl.int64) * stride_nh,
                    shift_ptr + query * blocks * NC, stride_qh, stride_qm, first, last,
                    tl.program_id(1) * NC, cols, new_tokens, hk * REP, q_scale, D, NC, SB, 1, PRECISION,
                )  # fmt: skip


@triton.jit
def _rotated(
    q_ptr, kq_ptr, mean_ptr, frag_ptr, info_ptr,
    stride_qb, stride_qh, stride_qm, stride_kq, batch, cols, chunks, new_tokens, q_scale,
    HKV: tl.constexpr, REP: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, TILES: tl.constexpr, RB: tl.constexpr,
    SLICE: tl.constexpr, ROTATE: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Rotated channels slice * SLICE.. of the queries of RB batch rows, one KV head and chunk.

    Column c = head * new_tokens + token.
    frag: fp16 [B * Hkv, chunks, operands, W * N], in matrix-unit order, N = TILES * NC columns. Operand i < 8 is
    crumb i's, times 4^-e; with two tiles, 8 + i is the same for the right tile. The other tile's columns are zero.
    (D = 64: crumbs 0-3 are the left tile's and 4-7 the right tile's, so there are 8 operands.)
    info: fp32 [B * Hkv, chunks, D / SLICE + 2, NC]: sum(q) per slice, shift q.mu, factor of raw scores; in log2 units
    """
    W: tl.constexpr = 16 if D == PAIRED_DIM else D // 8
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
    unit = bits.to(tl.float32, bitcast=True) * (1.0 / Q_UNIT)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True) * Q_UNIT
    half = tl.minimum(tl.maximum(rotated * inverse[:, None], -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    query = (b * HKV + h) * chunks + chunk
    PAIR: tl.constexpr = D == PAIRED_DIM
    N: tl.constexpr = TILES * NC
    frag_row = frag_ptr + query.to(tl.int64) * ((8 if PAIR else 8 * TILES) * W * N)
    for side in tl.static_range(TILES):
        crumb = d // W + (4 * side if PAIR else 0)
        quarter = tl.exp2(-2.0 * (crumb % 5))
        stored = (half * quarter[None, :]).to(tl.float16)
        operand = (crumb if PAIR else crumb + 8 * side)[None, :] * (W * N)
        for place in tl.static_range(TILES):
            at = operand + fragment_offset((d % W)[None, :], (place * NC + row)[:, None], W, N)
            value = stored if place == side else tl.zeros_like(stored)
            tl.store(frag_row[:, None] + at, value, mask=(b < batch)[:, None])
    info_row = info_ptr + query * ((D // SLICE + 2) * NC) + row
    tl.store(info_row + tl.program_id(2) * NC, tl.sum(half, axis=1) * unit, mask=b < batch)
    if tl.program_id(2) == 0:
        shift = tl.zeros([R], tl.float32)
        if CENTERED:
            shift = tl.sum(q * tl.load(mean_ptr + h * D + k)[None, :], axis=1)
        tl.store(info_row + D // SLICE * NC, shift, mask=b < batch)
        tl.store(info_row + (D // SLICE + 1) * NC, unit * 16777216.0, mask=b < batch)

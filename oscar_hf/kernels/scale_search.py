"""Device functions that choose the scale and min of rotated rows: of a range, and by trying shrunken ranges.

A search keeps the candidate range with the least loss, as `quantizer._search` does. `search_at_once` makes the candidates an
axis of the tile, which suits a lone token; `search_in_turn` goes through them with a tile of many tokens, which suits a
prompt. Rows are [tokens, groups, channels of a group], padded to powers of two as `encode` says.
"""

from ..quantization import quantizer
from .launch import tl, triton

_MAX_CODE = tl.constexpr(quantizer.MAX_CODE)
_SCALE_FLOOR = tl.constexpr(quantizer.SCALE_FLOOR)
_FP16_MAX = tl.constexpr(quantizer.FP16_MAX)


@triton.jit
def round_to_fp16(x):
    """What fp16 will hold of x, float32; saturates."""
    return tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def quantize(x, scale, low):
    """Codes as float32. IEEE division: an approximate one moves codes across a rounding boundary."""
    codes = tl.floor(tl.div_rn(x - low, scale) + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), _MAX_CODE)


@triton.jit
def scale_of_range(low, high, SYMMETRIC: tl.constexpr):
    """Scale and min of ranges low..high as fp16 will hold them, for codes must fit the stored numbers."""
    scale = round_to_fp16(tl.maximum(tl.div_rn(high - low, _MAX_CODE), _SCALE_FLOOR))
    if SYMMETRIC:
        low = scale * -1.5
    else:
        low = round_to_fp16(low)
    return scale, low


@triton.jit
def _shrink(middle, end, factor):
    """middle + (end - middle) * factor with both roundings of the reference.

    The product goes through float64, where it is exact: the compiler would fuse a float32 one with the sum.
    """
    return middle + ((end - middle).to(tl.float64) * factor.to(tl.float64)).to(tl.float32)


@triton.jit
def _weighted_loss(
    error, metric_ptr, channels, is_channel, stride_mk, stride_mn,
    GROUP_SIZE: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    DIM_TILE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """e M e^T of each row of `error` float32 [ROWS, DIM_TILE], as [ROWS]."""
    CHUNKS: tl.constexpr = DIM_TILE // BLOCK_K
    # Registers cannot be sliced, so chunk i of the k axis is picked by a masked sum: columns i, i + CHUNKS, ...
    chunked = tl.reshape(error, [ROWS, BLOCK_K, CHUNKS])
    chunk_ids = tl.arange(0, CHUNKS)[None, None, :]
    product = tl.zeros([ROWS, DIM_TILE], dtype=tl.float32)
    for i in range(CHUNKS):
        k = tl.arange(0, BLOCK_K) * CHUNKS + i
        group, within = k // GROUP_TILE, k % GROUP_TILE
        is_k = (group < GROUPS) & (within < GROUP_SIZE)
        k_channels = group * GROUP_SIZE + within
        matrix = tl.load(
            metric_ptr + k_channels[:, None] * stride_mk + channels[None, :] * stride_mn,
            mask=is_k[:, None] & is_channel[None, :],
            other=0.0,
        )
        chunk = tl.sum(tl.where(chunk_ids == i, chunked, 0.0), axis=2)
        product = tl.dot(chunk, matrix, product, input_precision="ieee")
    return tl.sum(product * error, axis=1)


@triton.jit
def search_at_once(
    groups, low, high, metric_ptr, channels, is_channel, stride_mk, stride_mn,
    SYMMETRIC: tl.constexpr, WEIGHTED: tl.constexpr, LOW_FACTORS: tl.constexpr, HIGH_FACTORS: tl.constexpr,
    NUM_FACTORS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, BLOCK_T: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Best scale and min [BLOCK_T, GROUPS_TILE] of rows `groups` with ranges low..high; all CANDIDATES side by side."""
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    low, high = low[:, None, :], high[:, None, :]
    candidate = tl.arange(0, CANDIDATES)[None, :, None]
    # Candidates beyond NUM_FACTORS repeat the first one, and the first of equal losses wins.
    low_factor = tl.full([1, CANDIDATES, 1], LOW_FACTORS[0], dtype=tl.float32)
    high_factor = tl.full([1, CANDIDATES, 1], HIGH_FACTORS[0], dtype=tl.float32)
    for i in tl.static_range(1, NUM_FACTORS):
        low_factor = tl.where(candidate == i, LOW_FACTORS[i], low_factor)
        high_factor = tl.where(candidate == i, HIGH_FACTORS[i], high_factor)
    middle = (low + high) * 0.5
    # [BLOCK_T, CANDIDATES, GROUPS_TILE]
    scale, low = scale_of_range(_shrink(middle, low, low_factor), _shrink(middle, high, high_factor), SYMMETRIC)
    entries = groups[:, None, :, :]
    codes = quantize(entries, scale[:, :, :, None], low[:, :, :, None])
    error = low[:, :, :, None] + scale[:, :, :, None] * codes - entries
    if DIM_TILE != HEAD_DIM:
        error = tl.where(tl.reshape(is_channel, [1, 1, GROUPS_TILE, GROUP_TILE]), error, 0.0)
    if WEIGHTED:
        # The metric couples all channels of a row, so one candidate is chosen for the whole row.
        loss = _weighted_loss(
            tl.reshape(error, [BLOCK_T * CANDIDATES, DIM_TILE]), metric_ptr, channels, is_channel, stride_mk, stride_mn,
            GROUP_SIZE, GROUP_TILE, GROUPS, BLOCK_T * CANDIDATES, DIM_TILE, BLOCK_K,
        )  # fmt: skip
        loss = tl.reshape(loss, [BLOCK_T, CANDIDATES, 1])
    else:
        loss = tl.sum(error * error, axis=3)
    best = tl.min(loss, axis=1)[:, None, :]
    # A row of NaN has no least loss; it takes the first candidate.
    chosen = tl.min(tl.where(loss == best, candidate, CANDIDATES), axis=1) % CANDIDATES
    is_chosen = candidate == chosen[:, None, :]
    return tl.sum(tl.where(is_chosen, scale, 0.0), axis=1), tl.sum(tl.where(is_chosen, low, 0.0), axis=1)


# ------------------------------------------------------------------------------------------------ candidates in turn
@triton.jit
def code_limit(scale, MIDDLE: tl.constexpr, SLACK: tl.constexpr):
    """Smallest float32 d with d / scale at least MIDDLE - SLACK; both products are exact, for scale has 11 bits."""
    slack = scale * SLACK
    limit = scale * MIDDLE - slack
    is_below = scale * MIDDLE - limit > slack
    bits = limit.to(tl.int32, bitcast=True)
    return tl.where(is_below, bits + 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def _error(groups, scale, low):
    """Dequantized minus true rows, the codes being those of `quantize` bit for bit.

    fl(fl(d / scale) + 0.5) reaches 1, 2 or 3 where fl(d / scale) reaches 0.5 - 2^-25, 1.5 or 2.5, so where d / scale reaches
    the middle between that number and the one below, which no d / scale meets exactly. Three comparisons cost a third of a
    division.
    """
    d = groups - low[:, :, None]
    codes = (d >= code_limit(scale, 0.5, 3 * 2.0**-26)[:, :, None]).to(tl.float32)
    codes += (d >= code_limit(scale, 1.5, 2.0**-24)[:, :, None]).to(tl.float32)
    codes += (d >= code_limit(scale, 2.5, 2.0**-23)[:, :, None]).to(tl.float32)
    return low[:, :, None] + scale[:, :, None] * codes - groups


@triton.jit
def _one_over_power_of_two(x):
    """1 / 2^floor(log2 x) of a normal float32."""
    return (0x7F000000 - (x.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)


@triton.jit
def _metric_block(
    metric_ptr, unit, row, column, stride_mk, stride_mn,
    GROUP_SIZE: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A square block of unit * M as a sum of two fp16 blocks, which hold 22 of its 24 bits; padding is 0."""
    rows, columns = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK)
    is_row = (rows // GROUP_TILE < GROUPS) & (rows % GROUP_TILE < GROUP_SIZE)
    is_column = (columns // GROUP_TILE < GROUPS) & (columns % GROUP_TILE < GROUP_SIZE)
    rows = rows // GROUP_TILE * GROUP_SIZE + rows % GROUP_TILE
    columns = columns // GROUP_TILE * GROUP_SIZE + columns % GROUP_TILE
    matrix = unit * tl.load(
        metric_ptr + rows[:, None] * stride_mk + columns[None, :] * stride_mn,
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )
    coarse = matrix.to(tl.float16)
    return coarse, (matrix - coarse.to(tl.float32)).to(tl.float16)


@triton.jit
def _loss_part(left, right, coarse, fine):
    """left_coarse M (2 right - right_coarse)^T of each row, with M = coarse + fine. See `search_in_turn`."""
    rounded = left.to(tl.float16)
    product = tl.dot(rounded, fine)
    product = tl.dot(rounded, coarse, product)
    return tl.sum(product * (2 * right - right.to(tl.float16).to(tl.float32)), axis=1)


@triton.jit
def search_in_turn(
    groups, low, high, metric_ptr, channels, is_channel, stride_mk, stride_mn,
    SYMMETRIC: tl.constexpr, WEIGHTED: tl.constexpr, LOW_FACTORS: tl.constexpr, HIGH_FACTORS: tl.constexpr,
    NUM_FACTORS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Best scale and min [BLOCK_T, GROUPS_TILE] of rows `groups` with ranges low..high; one candidate after the other.

    The loss e M e^T goes through matrix units at nearly float32's precision, but in two fp16 products: with e = h + r, h its
    fp16 rounding, it is h M (h + 2 r)^T + r M r^T for a symmetric M, and the last term, 2^-24 of the loss, is left out. Rows
    and metric are brought near 1 by powers of two, which change no code.
    """
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    # As two fp16 blocks a metric of 128 channels takes 64 KiB of the 99 KiB of shared memory that any GPU has; of a larger
    # one a quarter is there at a time.
    SIDE: tl.constexpr = DIM_TILE if DIM_TILE <= 128 else DIM_TILE // 2
    middle = (low + high) * 0.5
    best_scale, best_low = scale_of_range(low, high, SYMMETRIC)
    if WEIGHTED:
        best = tl.full([BLOCK_T], float("inf"), dtype=tl.float32)
        row_unit = _one_over_power_of_two(tl.max(best_scale, axis=1))[:, None]
        groups *= row_unit[:, :, None]
        # No entry of a positive semidefinite matrix exceeds its diagonal.
        diagonal = tl.load(metric_ptr + channels * (stride_mk + stride_mn), mask=is_channel, other=0.0)
        unit = 16384.0 * _one_over_power_of_two(tl.maximum(tl.max(diagonal, axis=0), 1e-30))
        if SIDE == DIM_TILE:
            coarse, fine = _metric_block(
                metric_ptr, unit, 0, 0, stride_mk, stride_mn, GROUP_SIZE, GROUP_TILE, GROUPS, SIDE
            )
    else:
        best = tl.full([BLOCK_T, GROUPS_TILE], float("inf"), dtype=tl.float32)
    for i in range(NUM_FACTORS):
        low_factor = tl.full([], LOW_FACTORS[0], dtype=tl.float32)
        high_factor = tl.full([], HIGH_FACTORS[0], dtype=tl.float32)
        for j in tl.static_range(1, NUM_FACTORS):
            low_factor = tl.where(i == j, LOW_FACTORS[j], low_factor)
            high_factor = tl.where(i == j, HIGH_FACTORS[j], high_factor)
        scale, minimum = scale_of_range(_shrink(middle, low, low_factor), _shrink(middle, high, high_factor), SYMMETRIC)
        if WEIGHTED:
            error = _error(groups, scale * row_unit, minimum * row_unit)
        else:
            error = _error(groups, scale, minimum)
        if DIM_TILE != HEAD_DIM:
            error = tl.where(tl.reshape(is_channel, [1, GROUPS_TILE, GROUP_TILE]), error, 0.0)
        if WEIGHTED:
            error = tl.reshape(error, [BLOCK_T, DIM_TILE])
            if SIDE == DIM_TILE:
                loss = _loss_part(error, error, coarse, fine)
            else:
                left, right = tl.split(tl.permute(tl.reshape(error, [BLOCK_T, 2, SIDE]), (0, 2, 1)))
                loss = tl.zeros([BLOCK_T], dtype=tl.float32)
                # A loop, not four calls: blocks loaded in it are not kept for the next candidate.
                for j in range(4):
                    coarse, fine = _metric_block(
                        metric_ptr, unit, j // 2 * SIDE, j % 2 * SIDE, stride_mk, stride_mn, GROUP_SIZE, GROUP_TILE,
                        GROUPS, SIDE,
                    )  # fmt: skip
                    loss += _loss_part(tl.where(j < 2, left, right), tl.where(j % 2 == 0, left, right), coarse, fine)
            # The metric couples all channels of a row, so one candidate is chosen for the whole row.
            better = loss < best
            best_scale = tl.where(better[:, None], scale, best_scale)
            best_low = tl.where(better[:, None], minimum, best_low)
        else:
            loss = tl.sum(error * error, axis=2)
            better = loss < best
            best_scale = tl.where(better, scale, best_scale)
            best_low = tl.where(better, minimum, best_low)
        # A row of NaN is never better and keeps the unshrunken range.
        best = tl.where(better, loss, best)
    return best_scale, best_low

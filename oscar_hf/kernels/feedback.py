"""Device functions of the scale rules `feedback` and `unbiased`: scales from the root mean square, codes made one channel after
the other, and the scale that is stored.

Columns are in group order (see encode.py) and padded columns hold 0. What is padded in L is read as 0, so that the codes of
padded columns, whatever they are, reach no other.
"""

from ..quantization import quantizer
from .launch import tl, triton
from .scale_search import code_limit, round_to_fp16

_SCALE_FLOOR = tl.constexpr(quantizer.SCALE_FLOOR)
FEEDBACK_SCALE = tl.constexpr(quantizer.FEEDBACK_SCALE)
UNBIASED_SCALE = tl.constexpr(quantizer.UNBIASED_SCALE)
_LEAST_FACTOR, _MOST_FACTOR = (tl.constexpr(factor) for factor in quantizer.UNBIASED_RANGE)
# Columns whose codes are made in turn before their errors go to all columns before them at once; tl.dot wants 16.
_BLOCK = tl.constexpr(16)
# Through matrix units, with 22 bits: half the time of float32 products, and rows stay within a warp (see `_tile_size`).
_PRECISION = tl.constexpr("tf32x3")
# Columns whose products are made at once where the stored scale is found.
_SLICE = tl.constexpr(32)


@triton.jit
def scale_of_rms(
    x, FACTOR: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Scales of rotated rows x [BLOCK_T, DIM_TILE] as fp16 will hold them, float32 [BLOCK_T, GROUPS_TILE]."""
    groups = tl.reshape(x, [BLOCK_T, GROUPS_TILE, GROUP_TILE])
    rms = tl.sqrt_rn(tl.div_rn(tl.sum(groups * groups, axis=2), GROUP_SIZE))
    return round_to_fp16(tl.maximum(FACTOR * rms, _SCALE_FLOOR))


@triton.jit
def _times_factor(scale, own, shared):
    """`scale` times own / shared, bounded, as fp16 will hold it; see `quantizer.unbiased_scale`."""
    factor = tl.where((shared > 0) & (own < float("inf")), own / shared, 1.0)
    factor = tl.minimum(tl.maximum(factor, _LEAST_FACTOR), _MOST_FACTOR)
    return round_to_fp16(tl.maximum(scale * factor, _SCALE_FLOOR))


@triton.jit
def unbiased_scale(
    x, codes, scale, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Scale to store, float32 [BLOCK_T, GROUPS_TILE], for rotated rows x and their codes int32, both [BLOCK_T, DIM_TILE]."""
    groups = tl.reshape(x, [BLOCK_T, GROUPS_TILE, GROUP_TILE])
    levels = tl.reshape(codes, [BLOCK_T, GROUPS_TILE, GROUP_TILE]).to(tl.float32) - 1.5
    shared = tl.sum(groups * (levels * scale[:, :, None]), axis=2)
    return _times_factor(scale, tl.sum(groups * groups, axis=2), shared)


@triton.jit
def unbiased_scale_of_metric(
    x, codes, scale, feedback_ptr, channels, is_channel, stride_fk, stride_fn,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The same with one factor for each row, of products of x (I + L). BLOCK_T is 1 or at least 16."""
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    WIDTH: tl.constexpr = min(_SLICE, DIM_TILE)
    levels = tl.reshape(codes, [BLOCK_T, GROUPS_TILE, GROUP_TILE]).to(tl.float32) - 1.5
    rows = tl.reshape(levels * scale[:, :, None], [BLOCK_T, DIM_TILE])
    columns = tl.arange(0, DIM_TILE)
    own = tl.zeros([BLOCK_T], tl.float32)
    shared = tl.zeros([BLOCK_T], tl.float32)
    for i in tl.range(DIM_TILE // WIDTH, num_stages=1):
        some = i * WIDTH + tl.arange(0, WIDTH)
        is_some = (some // GROUP_TILE < GROUPS) & (some % GROUP_TILE < GROUP_SIZE)
        some_channels = some // GROUP_TILE * GROUP_SIZE + some % GROUP_TILE
        matrix = tl.load(
            feedback_ptr + channels[:, None] * stride_fk + some_channels[None, :] * stride_fn,
            mask=is_channel[:, None] & is_some[None, :],
            other=0.0,
        )
        # The diagonal of L is zero; padded columns of x are, too.
        matrix = tl.where(columns[:, None] == some[None, :], 1.0, matrix)
        if BLOCK_T == 1:
            y = tl.sum(tl.reshape(x, [DIM_TILE, 1]) * matrix, axis=0)[None, :]
            z = tl.sum(tl.reshape(rows, [DIM_TILE, 1]) * matrix, axis=0)[None, :]
        else:
            y = tl.dot(x, matrix, input_precision=_PRECISION)
            z = tl.dot(rows, matrix, input_precision=_PRECISION)
        own += tl.sum(y * y, axis=1)
        shared += tl.sum(y * z, axis=1)
    return _times_factor(scale, own[:, None], shared[:, None])


@triton.jit
def _column(x, is_column):
    """The one column of x [BLOCK_T, columns] where is_column [1, columns]; a warp sums integers faster than floats."""
    bits = tl.sum(tl.where(is_column, x.to(tl.int32, bitcast=True), 0), axis=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _limits(step):
    """Where codes 1, 2 and 3 begin, above code 0: the codes of a division bit for bit, see `scale_search._error`."""
    return code_limit(step, 0.5, 3 * 2.0**-26), code_limit(step, 1.5, 2.0**-24), code_limit(step, 2.5, 2.0**-23)


@triton.jit
def feedback_codes(
    x, scale, feedback_ptr, channels, is_channel, stride_fk, stride_fn,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Codes int32 [BLOCK_T, DIM_TILE] of rotated rows x with `scale` [BLOCK_T, GROUPS_TILE], as `quantizer.feedback_codes`.

    BLOCK_T is 1 or at least 16. As soon as a block has its codes, what its errors ask of the columns before it is added to
    their targets; its own targets are used up then, and the codes take their place.
    """
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    BLOCKS: tl.constexpr = DIM_TILE // _BLOCK
    blocks = tl.arange(0, BLOCKS)[None, :, None]
    group_ids = tl.arange(0, GROUPS_TILE)[None, :]
    columns = tl.arange(0, DIM_TILE)
    within = tl.arange(0, _BLOCK)
    rows = tl.reshape(x, [BLOCK_T, BLOCKS, _BLOCK])
    targets = x
    # Loads ahead of a block would take the registers of its rows.
    for i in tl.range(BLOCKS, num_stages=1):
        block = BLOCKS - 1 - i
        begin = block * _BLOCK
        # Registers cannot be sliced, so blocks and columns are picked by masked sums.
        row = tl.sum(tl.where(blocks == block, rows, 0.0), axis=1)
        target = tl.sum(tl.where(blocks == block, tl.reshape(targets, [BLOCK_T, BLOCKS, _BLOCK]), 0.0), axis=1)
        # NaN stays NaN anyway; said here, it brings both tiles into one layout, without which each column below would go
        # through shared memory.
        row = tl.where(target == target, row, float("nan"))
        block_columns = begin + within
        is_block_channel = (block_columns // GROUP_TILE < GROUPS) & (block_columns % GROUP_TILE < GROUP_SIZE)
        block_channels = block_columns // GROUP_TILE * GROUP_SIZE + block_columns % GROUP_TILE
        step = tl.sum(tl.where(group_ids == begin // GROUP_TILE, scale, 0.0), axis=1)
        limit_1, limit_2, limit_3 = _limits(step)
        # Two bits for each column.
        crumbs = tl.zeros([BLOCK_T], dtype=tl.int32)
        for j in range(_BLOCK):
            within_block = _BLOCK - 1 - j
            column = begin + within_block
            is_column = (within == within_block)[None, :]
            if GROUP_TILE < _BLOCK:
                step = tl.sum(tl.where(group_ids == column // GROUP_TILE, scale, 0.0), axis=1)
                limit_1, limit_2, limit_3 = _limits(step)
            d = _column(target, is_column) + 1.5 * step
            reaches_1, reaches_2, reaches_3 = d >= limit_1, d >= limit_2, d >= limit_3
            crumb = reaches_1.to(tl.int32) + reaches_2.to(tl.int32) + reaches_3.to(tl.int32)
            crumbs |= crumb << (2 * within_block)
            level = tl.where(reaches_3, 1.5, tl.where(reaches_2, 0.5, tl.where(reaches_1, -0.5, -1.5)))
            missing = _column(row, is_column) - step * level
            # Row `column` of L, which is 0 from that column on.
            k = column + 0 * within
            is_l = is_block_channel & (k // GROUP_TILE < GROUPS) & (k % GROUP_TILE < GROUP_SIZE)
            k = k // GROUP_TILE * GROUP_SIZE + k % GROUP_TILE
            feedback = tl.load(feedback_ptr + k * stride_fk + block_channels * stride_fn, mask=is_l, other=0.0)
            # A target that is used up makes room for what its code leaves missing.
            target = tl.where(is_column, missing[:, None], target + missing[:, None] * feedback[None, :])
        # Rows of L that belong to the block, without the columns of the block itself.
        matrix = tl.load(
            feedback_ptr + block_channels[:, None] * stride_fk + channels[None, :] * stride_fn,
            mask=is_block_channel[:, None] & (is_channel & (columns < begin))[None, :],
            other=0.0,
        )
        if BLOCK_T == 1:
            targets += tl.sum(tl.reshape(target, [_BLOCK, 1]) * matrix, axis=0)[None, :]
        else:
            targets = tl.dot(target, matrix, targets, input_precision=_PRECISION)
        codes = (crumbs[:, None] >> (2 * within)[None, :]) & 3
        targets = tl.reshape(
            tl.where(blocks == block, codes.to(tl.float32)[:, None, :], tl.reshape(targets, [BLOCK_T, BLOCKS, _BLOCK])),
            [BLOCK_T, DIM_TILE],
        )
    return targets.to(tl.int32)

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
# Columns of a lone token whose products with L are made at once where its stored scale is found: fewer loads that wait.
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
def _channels_of(columns, GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr):
    """Channels that columns hold, and whether they hold one."""
    group, within = columns // GROUP_TILE, columns % GROUP_TILE
    return group * GROUP_SIZE + within, (group < GROUPS) & (within < GROUP_SIZE)


@triton.jit
def _high_part(x):
    """The part of float32 x that tf32 holds."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(left, right, sums):
    """sums + left @ right through matrix units, with 22 bits: half the time of float32 products, and rows stay within a warp
    (see `_tile_size`). Triton's own three products (tf32x3) first add up apart from `sums`, which takes registers that are short.
    """
    left_high, right_high = _high_part(left), _high_part(right)
    sums = tl.dot(left_high, right - right_high, sums, input_precision="tf32")
    sums = tl.dot(left - left_high, right_high, sums, input_precision="tf32")
    return tl.dot(left_high, right_high, sums, input_precision="tf32")


@triton.jit
def _times_feedback(
    x, feedback_ptr, channels, is_channel, stride_fk, stride_fn,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """x (I + L). A slice of x changes only columns before its end, so that x itself takes the sums, from the first slice on."""
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    WIDTH: tl.constexpr = _SLICE if BLOCK_T == 1 and DIM_TILE > _SLICE else _BLOCK
    SLICES: tl.constexpr = DIM_TILE // WIDTH
    slices = tl.arange(0, SLICES)[None, :, None]
    for i in tl.range(SLICES, num_stages=1):
        rows, is_row = _channels_of(tl.arange(0, WIDTH) + i * WIDTH, GROUP_SIZE, GROUPS, GROUP_TILE)
        matrix = tl.load(
            feedback_ptr + rows[:, None] * stride_fk + channels[None, :] * stride_fn,
            mask=is_row[:, None] & is_channel[None, :],
            other=0.0,
        )
        part = tl.sum(tl.where(slices == i, tl.reshape(x, [BLOCK_T, SLICES, WIDTH]), 0.0), axis=1)
        if BLOCK_T == 1:
            x += tl.sum(tl.reshape(part, [WIDTH, 1]) * matrix, axis=0)[None, :]
        else:
            x = _add_product(part, matrix, x)
    return x


@triton.jit
def unbiased_scale_of_metric(
    x, targets, scale, feedback_ptr, channels, is_channel, stride_fk, stride_fn,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The same with one factor for each row, of products of y = x (I + L), and levels: codes less 1.5 of the `feedback_targets`,
    float32 [BLOCK_T, GROUPS_TILE, GROUP_TILE].

    What the codes stand for, z = levels * scale, needs no product of its own: targets are x + (x - z) L, so that z (I + L) is
    y - (targets - z).
    """
    y = _times_feedback(
        x,
        feedback_ptr,
        channels,
        is_channel,
        stride_fk,
        stride_fn,
        GROUP_SIZE,
        GROUPS,
        GROUP_TILE,
        GROUPS_TILE,
        BLOCK_T,
    )
    y = tl.reshape(y, [BLOCK_T, GROUPS_TILE, GROUP_TILE])
    targets = tl.reshape(targets, [BLOCK_T, GROUPS_TILE, GROUP_TILE])
    step = scale[:, :, None]
    limit_1, limit_2, limit_3 = _limits(step)
    levels = _level(targets, step, limit_1, limit_2, limit_3)
    # Padded columns of y are 0.
    own, shared = tl.sum(y * y, axis=2), tl.sum(y * (y - (targets - levels * step)), axis=2)
    return _times_factor(scale, tl.sum(own, axis=1)[:, None], tl.sum(shared, axis=1)[:, None]), levels


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
def _level(target, step, limit_1, limit_2, limit_3):
    """Code less 1.5 of a target."""
    d = target + 1.5 * step
    return tl.where(d >= limit_3, 1.5, tl.where(d >= limit_2, 0.5, tl.where(d >= limit_1, -0.5, -1.5)))


@triton.jit
def feedback_targets(
    x, scale, feedback_ptr, channels, is_channel, stride_fk, stride_fn,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What the codes of rotated rows x are made of, float32 [BLOCK_T, DIM_TILE], with `scale` [BLOCK_T, GROUPS_TILE]: the targets
    of `quantizer.feedback_codes`.

    BLOCK_T is 1 or at least 16. As soon as a block has its targets, what its errors ask of the columns before it is added to
    theirs.
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
        block_channels, is_block_channel = _channels_of(within + begin, GROUP_SIZE, GROUPS, GROUP_TILE)
        step = tl.sum(tl.where(group_ids == begin // GROUP_TILE, scale, 0.0), axis=1)
        limit_1, limit_2, limit_3 = _limits(step)
        errors = row
        for j in range(_BLOCK):
            within_block = _BLOCK - 1 - j
            column = begin + within_block
            is_column = (within == within_block)[None, :]
            if GROUP_TILE < _BLOCK:
                step = tl.sum(tl.where(group_ids == column // GROUP_TILE, scale, 0.0), axis=1)
                limit_1, limit_2, limit_3 = _limits(step)
            level = _level(_column(target, is_column), step, limit_1, limit_2, limit_3)
            missing = _column(errors, is_column) - step * level
            # Row `column` of L, which is 0 from that column on.
            k, is_k = _channels_of(column + 0 * within, GROUP_SIZE, GROUPS, GROUP_TILE)
            feedback = tl.load(
                feedback_ptr + k * stride_fk + block_channels * stride_fn, mask=is_block_channel & is_k, other=0.0
            )
            errors = tl.where(is_column, missing[:, None], errors)
            before = (within < within_block)[None, :]
            target = tl.where(before, target + missing[:, None] * feedback[None, :], target)
        # Rows of L that belong to the block, without the columns of the block itself.
        matrix = tl.load(
            feedback_ptr + block_channels[:, None] * stride_fk + channels[None, :] * stride_fn,
            mask=is_block_channel[:, None] & (is_channel & (columns < begin))[None, :],
            other=0.0,
        )
        if BLOCK_T == 1:
            targets += tl.sum(tl.reshape(errors, [_BLOCK, 1]) * matrix, axis=0)[None, :]
        else:
            targets = _add_product(errors, matrix, targets)
        targets = tl.reshape(
            tl.where(blocks == block, target[:, None, :], tl.reshape(targets, [BLOCK_T, BLOCKS, _BLOCK])),
            [BLOCK_T, DIM_TILE],
        )
    return targets

"""What append and step share: rotate rows, choose their scales, quantize and pack them; and the tiles in which that is done."""

import functools

from torch import Tensor

from ..quantization.kv_side import Side
from ..quantization.packed_rows import tokens_per_row
from ..quantization.quantizer import ScaleRule, check_group_size
from .feedback import (
    FEEDBACK_SCALE,
    UNBIASED_SCALE,
    feedback_targets,
    scale_of_rms,
    unbiased_scale,
    unbiased_scale_of_metric,
)
from .launch import MAX_HEAD_DIM, head_dim_problem, next_power_of_two, tl, triton
from .scale_search import quantize, scale_of_range, search_at_once, search_in_turn

# Inside the kernel the columns of a rotated row stand in "group order": DIM_TILE = GROUPS_TILE x GROUP_TILE columns,
# group g from column g * GROUP_TILE on. For a power-of-two head dim that is the order of the channels. For any other,
# groups and channels are padded to powers of two and the columns that hold no channel are masked.


# In place of an order statistic that clips: the rule `unbiased`, which needs none. -1: nothing clips.
_BY_RMS = tl.constexpr(-2)


@triton.jit
def _load_centers(center_ptr, rows, is_row, channels, is_channel, stride_ct, CENTER_BLOCK: tl.constexpr):
    """Centers of rows `rows` of the history, float32 [rows, channels], or [1, channels] where all have the same one."""
    if CENTER_BLOCK:
        addresses = (rows // CENTER_BLOCK * stride_ct)[:, None] + channels[None, :]
        centers = tl.load(center_ptr + addresses, mask=is_row[:, None] & is_channel[None, :], other=0.0)
    else:
        centers = tl.load(center_ptr + channels, mask=is_channel, other=0.0)[None, :]
    return centers.to(tl.float32)


@triton.jit
def rotate(
    x_ptr, transform_ptr, center_ptr, channels, is_channel, start, first_token, num_tokens, stride_xt, stride_rk,
    stride_rn, stride_ct,
    HAS_TRANSFORM: tl.constexpr, HAS_CENTER: tl.constexpr, CENTER_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """(x - center) @ transform of the tokens of one head, float32 [BLOCK_T, DIM_TILE]; 0 in masked columns.

    Row t of x is row start + t of the history. CENTER_BLOCK: how many rows of the history share a row of centers; 0: all do.
    """
    if HAS_TRANSFORM:
        # tl.dot wants 16 rows: a smaller tile repeats its tokens.
        REPEAT: tl.constexpr = 16 // BLOCK_T if BLOCK_T < 16 else 1
        if BLOCK_T == 1:
            # One token is a matrix-vector product: the sums stay apart over k until the end, for one reduction in all.
            partial = tl.zeros([BLOCK_K, DIM_TILE], dtype=tl.float32)
        else:
            rotated = tl.zeros([BLOCK_T * REPEAT, DIM_TILE], dtype=tl.float32)
            row_tokens = first_token + tl.arange(0, BLOCK_T * REPEAT) // REPEAT
        for k_start in range(0, HEAD_DIM, BLOCK_K):
            k = k_start + tl.arange(0, BLOCK_K)
            is_k = k < HEAD_DIM
            matrix = tl.load(
                transform_ptr + k[:, None] * stride_rk + channels[None, :] * stride_rn,
                mask=is_k[:, None] & is_channel[None, :],
                other=0.0,
            )
            if BLOCK_T == 1:
                # The grid has one program per token, so this token exists.
                x = tl.load(x_ptr + first_token * stride_xt + k, mask=is_k, other=0.0).to(tl.float32)
                if HAS_CENTER:
                    at = center_ptr + k
                    if CENTER_BLOCK:
                        at += (start + first_token) // CENTER_BLOCK * stride_ct
                    x = x - tl.load(at, mask=is_k, other=0.0).to(tl.float32)
                partial += x[:, None] * matrix
            else:
                is_row = row_tokens < num_tokens
                mask = is_row[:, None] & is_k[None, :]
                x = tl.load(x_ptr + row_tokens[:, None] * stride_xt + k[None, :], mask=mask, other=0.0).to(tl.float32)
                if HAS_CENTER:
                    x = x - _load_centers(center_ptr, start + row_tokens, is_row, k, is_k, stride_ct, CENTER_BLOCK)
                rotated = tl.dot(x, matrix, rotated, input_precision="ieee")
        if BLOCK_T == 1:
            rotated = tl.sum(partial, axis=0)[None, :]
        elif REPEAT > 1:
            rotated = tl.max(tl.reshape(rotated, [BLOCK_T, REPEAT, DIM_TILE]), axis=1)
    else:
        tokens = first_token + tl.arange(0, BLOCK_T)
        is_row = tokens < num_tokens
        mask = is_row[:, None] & is_channel[None, :]
        rotated = tl.load(x_ptr + tokens[:, None] * stride_xt + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_CENTER:
            rotated = rotated - _load_centers(
                center_ptr, start + tokens, is_row, channels, is_channel, stride_ct, CENTER_BLOCK
            )
    return rotated


@triton.jit
def _clip_threshold(x, is_channel, CLIP_INDEX: tl.constexpr, BLOCK_T: tl.constexpr):
    """Ascending order statistic CLIP_INDEX of |x| per row, float32 [BLOCK_T]: exact, found bit by bit.

    Non-negative floats order as their bits do, and the statistic is the largest value with at most CLIP_INDEX entries
    below it.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.where(is_channel[None, :], magnitude, 0x7FFFFFFF)
    threshold = tl.zeros([BLOCK_T], dtype=tl.int32)
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        below = tl.sum((magnitude < candidate[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(below <= CLIP_INDEX, candidate, threshold)
    return threshold.to(tl.float32, bitcast=True)


@triton.jit
def _codes_of_range(
    x, metric_ptr, channels, is_channel, stride_mk, stride_mn,
    SYMMETRIC: tl.constexpr, CLIP_INDEX: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr,
    LOW_FACTORS: tl.constexpr, HIGH_FACTORS: tl.constexpr, NUM_FACTORS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scale and min [BLOCK_T, GROUPS_TILE], and codes int32 [BLOCK_T, DIM_TILE], of rules that choose a range."""
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    # The clipped row only sets the range; codes are made of the row itself, and clamp by themselves.
    clipped = x
    if CLIP_INDEX >= 0:
        threshold = _clip_threshold(x, is_channel, CLIP_INDEX, BLOCK_T)[:, None]
        clipped = tl.minimum(tl.maximum(x, -threshold), threshold)
    groups = tl.reshape(clipped, [BLOCK_T, GROUPS_TILE, GROUP_TILE])
    # A group that is padding altogether gets the range 0..0, not an infinite one.
    group_ids = tl.arange(0, GROUPS_TILE)
    is_entry = (tl.arange(0, GROUP_TILE) < GROUP_SIZE)[None, None, :] | (group_ids >= GROUPS)[None, :, None]
    if SYMMETRIC:
        high = tl.max(tl.abs(groups), axis=2)
        low = -high
    else:
        low = tl.min(tl.where(is_entry, groups, float("inf")), axis=2)
        high = tl.max(tl.where(is_entry, groups, float("-inf")), axis=2)
    if SEARCH and CANDIDATES > 1:
        scale, low = search_at_once(
            groups, low, high, metric_ptr, channels, is_channel, stride_mk, stride_mn, SYMMETRIC, WEIGHTED, LOW_FACTORS,
            HIGH_FACTORS, NUM_FACTORS, HEAD_DIM, GROUP_SIZE, GROUPS, GROUP_TILE, GROUPS_TILE, BLOCK_T, CANDIDATES,
            BLOCK_K,
        )  # fmt: skip
    elif SEARCH:
        scale, low = search_in_turn(
            groups, low, high, metric_ptr, channels, is_channel, stride_mk, stride_mn, SYMMETRIC, WEIGHTED, LOW_FACTORS,
            HIGH_FACTORS, NUM_FACTORS, HEAD_DIM, GROUP_SIZE, GROUPS, GROUP_TILE, GROUPS_TILE, BLOCK_T,
        )  # fmt: skip
    else:
        scale, low = scale_of_range(low, high, SYMMETRIC)

    codes = quantize(tl.reshape(x, [BLOCK_T, GROUPS_TILE, GROUP_TILE]), scale[:, :, None], low[:, :, None])
    codes = tl.reshape(codes.to(tl.int32), [BLOCK_T, DIM_TILE])
    return scale, low, codes


@triton.jit
def encode(
    x, metric_ptr, codes_ptr, scale_ptr, min_ptr, targets, is_token, channels, is_channel, stride_mk, stride_mn,
    stride_cr, stride_st,
    SYMMETRIC: tl.constexpr, CLIP_INDEX: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr,
    LOW_FACTORS: tl.constexpr, HIGH_FACTORS: tl.constexpr, NUM_FACTORS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
    WORDS_TILE: tl.constexpr, PAIRED: tl.constexpr, BLOCK_T: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose the scales of rotated rows x [BLOCK_T, DIM_TILE], quantize, and store them as tokens `targets` [BLOCK_T].

    Pointers are at the batch row and KV head. The ranges of a search are an axis of the tile if CANDIDATES is more than 1,
    so that all are tried at once, also for a single token; else they are tried in turn.
    """
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    PADDED: tl.constexpr = DIM_TILE != HEAD_DIM

    group_ids = tl.arange(0, GROUPS_TILE)
    # With feedback there is no search, and the metric is L.
    if WEIGHTED and not SEARCH:
        scale = scale_of_rms(x, FEEDBACK_SCALE, GROUP_SIZE, GROUP_TILE, GROUPS_TILE, BLOCK_T)
        wanted = feedback_targets(
            x, scale, metric_ptr, channels, is_channel, stride_mk, stride_mn, GROUP_SIZE, GROUPS, GROUP_TILE,
            GROUPS_TILE, BLOCK_T,
        )  # fmt: skip
        scale, levels = unbiased_scale_of_metric(
            x, wanted, scale, metric_ptr, channels, is_channel, stride_mk, stride_mn, GROUP_SIZE, GROUPS, GROUP_TILE,
            GROUPS_TILE, BLOCK_T,
        )  # fmt: skip
        codes = tl.reshape((levels + 1.5).to(tl.int32), [BLOCK_T, DIM_TILE])
    elif CLIP_INDEX == _BY_RMS:
        scale = scale_of_rms(x, UNBIASED_SCALE, GROUP_SIZE, GROUP_TILE, GROUPS_TILE, BLOCK_T)
        step = scale[:, :, None]
        codes = quantize(tl.reshape(x, [BLOCK_T, GROUPS_TILE, GROUP_TILE]), step, step * -1.5)
        codes = tl.reshape(codes.to(tl.int32), [BLOCK_T, DIM_TILE])
        scale = unbiased_scale(x, codes, scale, GROUP_TILE, GROUPS_TILE, BLOCK_T)
    else:
        scale, low, codes = _codes_of_range(
            x, metric_ptr, channels, is_channel, stride_mk, stride_mn, SYMMETRIC, CLIP_INDEX, SEARCH, WEIGHTED,
            LOW_FACTORS, HIGH_FACTORS, NUM_FACTORS, HEAD_DIM, GROUP_SIZE, GROUPS, GROUP_TILE, GROUPS_TILE, BLOCK_T,
            CANDIDATES, BLOCK_K,
        )  # fmt: skip

    scale_offsets = targets[:, None] * stride_st + group_ids[None, :]
    scale_mask = is_token[:, None] & (group_ids < GROUPS)[None, :]
    tl.store(scale_ptr + scale_offsets, scale.to(tl.float16), mask=scale_mask)
    if not SYMMETRIC:
        tl.store(min_ptr + scale_offsets, low.to(tl.float16), mask=scale_mask)

    if PAIRED:
        # Two tokens share a row of words, but never a byte: byte stores leave the neighbor alone.
        crumbs = tl.reshape(codes, [BLOCK_T, 4, 16]) << (2 * tl.arange(0, 4))[None, :, None]
        byte = tl.arange(0, 16)
        addresses = (targets // 2 * stride_cr + targets % 2)[:, None] + 2 * byte[None, :]
        tl.store(
            codes_ptr + addresses, tl.sum(crumbs, axis=1).to(tl.uint8), mask=is_token[:, None] & (byte < 16)[None, :]
        )
    else:
        WORDS: tl.constexpr = HEAD_DIM // 8
        if PADDED:
            crumb = tl.arange(0, 8 * WORDS_TILE)
            channel = tl.minimum(crumb // WORDS_TILE * WORDS + crumb % WORDS_TILE, HEAD_DIM - 1)
            source = channel // GROUP_SIZE * GROUP_TILE + channel % GROUP_SIZE
            codes = tl.gather(codes, tl.broadcast_to(source[None, :], [BLOCK_T, 8 * WORDS_TILE]), axis=1)
        crumbs = tl.reshape(codes, [BLOCK_T, 8, WORDS_TILE]) << (2 * tl.arange(0, 8))[None, :, None]
        word = tl.arange(0, WORDS_TILE)
        addresses = targets[:, None] * stride_cr + word[None, :]
        mask = is_token[:, None] & (word < WORDS)[None, :]
        tl.store(codes_ptr + addresses, tl.sum(crumbs, axis=1).to(tl.int16), mask=mask)


def _tile_dims(head_dim: int, group_size: int) -> tuple[int, int]:
    """Columns of a group and groups of a row, as the kernel pads them to powers of two."""
    group_tile, groups_tile = next_power_of_two(group_size), next_power_of_two(head_dim // group_size)
    # A matrix product wants 16 along k, which a head dim of 8 does not have.
    return max(group_tile, 16 // groups_tile), groups_tile


def _tile_size(single_token: bool, dim_tile: int, rule: ScaleRule) -> tuple[int, int, int]:
    """Tokens per program, candidate ranges side by side, warps per program: the fastest tried on an H200 at D = 128."""
    if single_token:
        # tl.dot wants 16 rows, here the candidates of a search.
        return 1, 16 if rule.search else 1, 4
    if rule.feedback:
        # 16 rows for each warp, or the matrix units of Hopper would spread a row over several.
        return 64, 1, 4 if dim_tile <= 128 else 8
    if not rule.search:
        return min(64, 4096 // dim_tile), 1, 4
    if not rule.weighted:
        return max(16, min(64, 4096 // dim_tile)), 1, 8
    # 64 tokens of 128 channels are 3% faster, but need 112 KiB of shared memory, which only large GPUs have.
    return (32, 1, 4) if dim_tile == 128 else (64, 1, 4 if dim_tile < 128 else 8)


# The launch of a single token takes about as long on the host as on the GPU, so what never changes is worked out once.
@functools.lru_cache(maxsize=256)
def encode_plan(head_dim: int, group_size: int, symmetric: bool, rule: ScaleRule, single_token: bool) -> dict:
    """The compile-time arguments of the kernel, except whether there is a transform and a mean."""
    check_group_size(head_dim, group_size)
    if rule.needs_symmetric and not symmetric:
        raise ValueError("the scale rules feedback and unbiased are for symmetric storage only")
    group_tile, groups_tile = _tile_dims(head_dim, group_size)
    dim_tile = group_tile * groups_tile
    factors = rule.factors() if rule.search else [(1.0, 1.0)]
    block_t, candidates, num_warps = _tile_size(single_token, dim_tile, rule)
    in_turn = rule.search and candidates == 1
    clip_index = _BY_RMS.value if rule.unbiased else -1
    # The largest entry as threshold clips nothing.
    if rule.clip is not None and int(rule.clip * head_dim) < head_dim - 1:
        clip_index = int(rule.clip * head_dim)
    return {
        "SYMMETRIC": symmetric,
        "CLIP_INDEX": clip_index,
        "SEARCH": rule.search,
        "WEIGHTED": rule.needs_metric,
        "LOW_FACTORS": tuple(low for low, _ in factors),
        "HIGH_FACTORS": tuple(high for _, high in factors),
        "NUM_FACTORS": len(factors),
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": group_size,
        "GROUPS": head_dim // group_size,
        "GROUP_TILE": group_tile,
        "GROUPS_TILE": groups_tile,
        "WORDS_TILE": next_power_of_two(head_dim // 8),
        "PAIRED": tokens_per_row(head_dim) == 2,
        "BLOCK_T": block_t,
        "CANDIDATES": candidates,
        "BLOCK_K": min(64 if in_turn else 32, dim_tile),
        "num_warps": num_warps,
        # Shared memory holds the metric, not copies of what a loop loads next.
        **({"num_stages": 1} if in_turn else {}),
    }


def matrix_strides(matrix: Tensor | None) -> tuple[int, int, int]:
    """Strides of a [H, D, D] matrix; a [D, D] one is shared, with head stride 0."""
    return (0, 0, 0) if matrix is None else ((0,) if matrix.dim() == 2 else ()) + matrix.stride()


def center_rows(side: Side) -> tuple[Tensor | None, tuple[int, int, int], int]:
    """What `rotate` subtracts, its strides over batch, heads and blocks, and rows of history to a block, 0 for one mean."""
    if side.rows.centers is not None:
        return side.rows.centers, side.rows.centers.stride()[:3], side.rows.center_block
    mean = side.mean
    if mean is not None and mean.stride(-1) != 1:
        mean = mean.contiguous()
    return mean, (0, 0 if mean is None else mean.stride(0), 0), 0


def encode_problem(head_dim: int, group_size: int) -> str:
    """Why the kernel cannot take this head dim and group size, or an empty string."""
    problem = head_dim_problem(head_dim)
    if not problem:
        group_tile, groups_tile = _tile_dims(head_dim, group_size)
        if group_tile * groups_tile > MAX_HEAD_DIM:
            problem = f"head dim {head_dim} in groups of {group_size} pads to more than {MAX_HEAD_DIM} columns"
    return problem

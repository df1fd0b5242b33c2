"""Append: center, rotate, choose the scale, quantize and pack rows as history of a `Side`."""

import torch
from torch import Tensor

from ..quantization.block_centers import centers_of
from ..quantization.kv_side import Side
from ..quantization.packed_rows import tokens_per_row
from ..quantization.quantizer import quantize_rows
from .encode import center_rows, encode, encode_plan, encode_problem, matrix_strides, rotate
from .launch import fall_back, launch_problem, on_device, tl, triton


def append_rows_reference(side: Side, start: int, x: Tensor) -> None:
    """Quantize x and store it as history tokens start..start+T-1 of `side`; room must be reserved.

    x: [B, H, T, D] in the model's dtype. x_rot = (x - center) @ transform is what is quantized, by the side's rule and metric.
    Centers of blocks must be there already (`open_blocks`).
    """
    x, rows = x.float(), side.rows
    if rows.centers is not None:
        x = x - centers_of(rows, start, start + x.shape[2]).float()
    elif side.mean is not None:
        x = x - side.mean[:, None, :]
    if side.transform is not None:
        x = x @ side.transform
    rows.write(start, *quantize_rows(x, rows.group_size, side.rule, rows.symmetric, side.metric))


@triton.jit(do_not_specialize=["start", "num_tokens"])
def _append_kernel(
    x_ptr, transform_ptr, center_ptr, metric_ptr, codes_ptr, scale_ptr, min_ptr, start, num_tokens, stride_xb,
    stride_xh, stride_xt, stride_rh, stride_rk, stride_rn, stride_center_b, stride_center_h, stride_center_t, stride_mh,
    stride_mk, stride_mn, stride_cb, stride_ch, stride_cr, stride_sb, stride_sh, stride_st,
    HAS_TRANSFORM: tl.constexpr, HAS_CENTER: tl.constexpr, CENTER_BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
    CLIP_INDEX: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr, LOW_FACTORS: tl.constexpr,
    HIGH_FACTORS: tl.constexpr, NUM_FACTORS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, WORDS_TILE: tl.constexpr,
    PAIRED: tl.constexpr, BLOCK_T: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of one (batch, KV head). Grid (token tiles, H, B).

    x [B, H, T, D] any float dtype; codes int16, or for D = 64 the same memory as bytes; scale, min and centers of blocks
    fp16; all others float32. Strides in elements of their own tensor; the last axis of x, centers, codes, scale and min has
    stride 1.
    """
    DIM_TILE: tl.constexpr = GROUPS_TILE * GROUP_TILE
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    first_token = tl.program_id(0).to(tl.int64) * BLOCK_T
    tokens = first_token + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    columns = tl.arange(0, DIM_TILE)
    is_channel = (columns // GROUP_TILE < GROUPS) & (columns % GROUP_TILE < GROUP_SIZE)
    channels = columns // GROUP_TILE * GROUP_SIZE + columns % GROUP_TILE

    x = rotate(
        x_ptr + batch * stride_xb + head * stride_xh, transform_ptr + head * stride_rh,
        center_ptr + batch * stride_center_b + head * stride_center_h, channels, is_channel, start, first_token,
        num_tokens, stride_xt, stride_rk, stride_rn, stride_center_t, HAS_TRANSFORM, HAS_CENTER, CENTER_BLOCK, HEAD_DIM,
        BLOCK_T, BLOCK_K, DIM_TILE,
    )  # fmt: skip
    encode(
        x, metric_ptr + head * stride_mh, codes_ptr + batch * stride_cb + head * stride_ch,
        scale_ptr + batch * stride_sb + head * stride_sh, min_ptr + batch * stride_sb + head * stride_sh,
        start + tokens, is_token, channels, is_channel, stride_mk, stride_mn, stride_cr, stride_st, SYMMETRIC,
        CLIP_INDEX, SEARCH, WEIGHTED, LOW_FACTORS, HIGH_FACTORS, NUM_FACTORS, HEAD_DIM, GROUP_SIZE, GROUPS, GROUP_TILE,
        GROUPS_TILE, WORDS_TILE, PAIRED, BLOCK_T, CANDIDATES, BLOCK_K,
    )  # fmt: skip


# Up to about two programs per SM of a large GPU, a program per token finishes before a program per tile does; so do the
# programs of a few tokens of however many rows and heads, which would leave most of a tile empty.
_MAX_SINGLE_TOKENS, _FEW_TOKENS = 256, 4


def append_rows_triton(side: Side, start: int, x: Tensor) -> None:
    """`append_rows_reference` as one Triton launch, on the GPU that holds x (or in the interpreter)."""
    rows, transform, rule, metric = side.rows, side.transform, side.rule, side.metric
    batch, heads, num_tokens, head_dim = x.shape
    codes, scale = rows.codes, rows.scale
    if codes.shape[:2] != x.shape[:2] or rows.head_dim != head_dim:
        wanted = (*codes.shape[:2], "T", rows.head_dim)
        raise ValueError(f"rows must be [B, H, T, D] = {wanted} to fit the store, got {tuple(x.shape)}")
    if rule.needs_metric and metric is None:
        raise ValueError("this scale rule needs the error metric of the keys: got none")
    paired = tokens_per_row(head_dim) == 2
    room, stop = min(scale.shape[2], codes.shape[2] * (2 if paired else 1)), start + num_tokens
    if start < 0 or stop > room:
        raise ValueError(f"tokens {start}..{stop - 1} do not fit the capacity {room}: reserve first")
    if num_tokens * batch * heads == 0:
        return
    if x.stride(3) != 1:
        x = x.contiguous()
    center, center_strides, center_block = center_rows(side)
    if paired:
        codes = codes.view(torch.uint8)
    single_token = num_tokens <= _FEW_TOKENS or num_tokens * batch * heads <= _MAX_SINGLE_TOKENS
    plan = encode_plan(head_dim, rows.group_size, rows.symmetric, rule, single_token)
    metric = metric if plan["WEIGHTED"] else None
    with on_device(x.device):
        _append_kernel[(-(-num_tokens // plan["BLOCK_T"]), heads, batch)](
            x, x if transform is None else transform, x if center is None else center, x if metric is None else metric,
            codes, scale, scale if rows.symmetric else rows.min, start, num_tokens, *x.stride()[:3],
            *matrix_strides(transform), *center_strides, *matrix_strides(metric), *codes.stride()[:3],
            *scale.stride()[:3], transform is not None, center is not None, center_block, **plan,
        )  # fmt: skip


def append_rows(side: Side, start: int, x: Tensor) -> None:
    """`append_rows_reference` through the fastest path that can run on the device of x."""
    problem = launch_problem(x.device) or encode_problem(side.rows.head_dim, side.rows.group_size)
    if problem:
        fall_back(x.device, problem)
        append_rows_reference(side, start, x)
    else:
        append_rows_triton(side, start, x)

"""Dequantize: packed rows back to keys or values, in the rotated or in the original basis."""

import torch
from torch import Tensor

from ..quantization.block_centers import centers_of
from ..quantization.kv_side import Side
from ..quantization.packed_rows import tokens_per_row
from ..quantization.quantizer import dequantize
from .launch import fall_back, head_dim_problem, launch_problem, next_power_of_two, on_device, tl, triton


def dequantize_rows_reference(side: Side, start: int, stop: int, dtype: torch.dtype, rotated: bool = False) -> Tensor:
    """History tokens start..stop-1 of `side` as [B, H, T, D] in `dtype`: x_rot @ inverse + center.

    rotated: in the rotated basis, x_rot + center @ transform for centers of blocks and x_rot alone where one mean serves all rows,
    for then a query meets it once, apart from the rows. The arithmetic is float32, or float64 if that is `dtype`.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    x = dequantize(*side.rows.read(start, stop), dtype=working)
    if not rotated and side.inverse is not None:
        x = x @ side.inverse.to(working)
    if side.rows.centers is not None:
        centers = centers_of(side.rows, start, stop).to(working)
        if rotated and side.transform is not None:
            centers = centers @ side.transform.to(working)
        x = x + centers
    elif side.mean is not None and not rotated:
        x = x + side.mean[:, None, :].to(working)
    return x.to(dtype)


@triton.jit
def _load_rows(
    codes_ptr, scale_ptr, min_ptr, tokens, is_token, channels, stride_cr, stride_st,
    SYMMETRIC: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """min + scale * code of some channels of the rows of one head, float32 [tokens, channels]; 0 where masked.

    Each word or byte is loaded once per crumb; all but the first hit the cache, and no shuffle is needed.
    """
    mask = is_token[:, None] & (channels < HEAD_DIM)[None, :]
    if PAIRED:
        addresses = (tokens // 2 * stride_cr + tokens % 2)[:, None] + (2 * (channels % 16))[None, :]
        shifts = 2 * (channels // 16)
    else:
        WORDS: tl.constexpr = HEAD_DIM // 8
        addresses = tokens[:, None] * stride_cr + (channels % WORDS)[None, :]
        shifts = 2 * (channels // WORDS)
    words = tl.load(codes_ptr + addresses, mask=mask, other=0).to(tl.int32)
    codes = ((words >> shifts[None, :]) & 3).to(tl.float32)
    groups = tokens[:, None] * stride_st + (channels // GROUP_SIZE)[None, :]
    scale = tl.load(scale_ptr + groups, mask=mask, other=0.0).to(tl.float32)
    if SYMMETRIC:
        low = scale * -1.5
    else:
        low = tl.load(min_ptr + groups, mask=mask, other=0.0).to(tl.float32)
    return low + scale * codes


@triton.jit(do_not_specialize=["start", "num_tokens"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, min_ptr, inverse_ptr, center_ptr, out_ptr, start, num_tokens, stride_cb, stride_ch, stride_cr,
    stride_sb, stride_sh, stride_st, stride_ih, stride_ik, stride_in, stride_center_b, stride_center_h, stride_center_t,
    stride_ob, stride_oh, stride_ot,
    HAS_INVERSE: tl.constexpr, HAS_CENTER: tl.constexpr, CENTER_BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, PAIRED: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of one (batch, KV head). Grid (token tiles, H, B).

    codes int16, or for D = 64 the same memory as bytes; scale and min fp16; inverse float32; out [B, H, T, D] fp32, fp16 or
    bf16. centers, fp32 or fp16: a row for each CENTER_BLOCK tokens from the block of token `start` on, or one for all if that
    is 0. Strides in elements of their own tensor; the last axis of all but inverse has stride 1.
    """
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    positions = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = positions < num_tokens
    tokens = start + positions
    codes_ptr += batch * stride_cb + head * stride_ch
    scale_ptr += batch * stride_sb + head * stride_sh
    min_ptr += batch * stride_sb + head * stride_sh
    channels = tl.arange(0, DIM_TILE)
    is_channel = channels < HEAD_DIM
    if HAS_INVERSE:
        x = tl.zeros([BLOCK_T, DIM_TILE], dtype=tl.float32)
        for k_start in range(0, HEAD_DIM, BLOCK_K):
            k = k_start + tl.arange(0, BLOCK_K)
            rotated = _load_rows(
                codes_ptr, scale_ptr, min_ptr, tokens, is_token, k, stride_cr, stride_st, SYMMETRIC, HEAD_DIM,
                GROUP_SIZE, PAIRED,
            )  # fmt: skip
            matrix = tl.load(
                inverse_ptr + head * stride_ih + k[:, None] * stride_ik + channels[None, :] * stride_in,
                mask=(k < HEAD_DIM)[:, None] & is_channel[None, :],
                other=0.0,
            )
            x = tl.dot(rotated, matrix, x, input_precision="ieee")
    else:
        x = _load_rows(
            codes_ptr, scale_ptr, min_ptr, tokens, is_token, channels, stride_cr, stride_st, SYMMETRIC, HEAD_DIM,
            GROUP_SIZE, PAIRED,
        )  # fmt: skip
    mask = is_token[:, None] & is_channel[None, :]
    if HAS_CENTER:
        center_ptr += batch * stride_center_b + head * stride_center_h
        if CENTER_BLOCK:
            rows = tokens // CENTER_BLOCK - start // CENTER_BLOCK
            addresses = rows[:, None] * stride_center_t + channels[None, :]
            x += tl.load(center_ptr + addresses, mask=mask, other=0.0).to(tl.float32)
        else:
            x += tl.load(center_ptr + channels, mask=is_channel, other=0.0)[None, :]
    out_ptr += batch * stride_ob + head * stride_oh
    tl.store(out_ptr + positions[:, None] * stride_ot + channels[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_rows_triton(side: Side, start: int, stop: int, dtype: torch.dtype, rotated: bool = False) -> Tensor:
    """`dequantize_rows_reference` as one Triton launch, on the GPU that holds the rows (or in the interpreter).

    dtype: float32, float16 or bfloat16.
    """
    rows = side.rows
    inverse = None if rotated else side.inverse
    batch, heads = rows.codes.shape[:2]
    head_dim = rows.head_dim
    if not 0 <= start <= stop <= rows.capacity:
        raise ValueError(f"tokens {start}..{stop - 1} are not within the capacity {rows.capacity}")
    out = torch.empty(batch, heads, stop - start, head_dim, dtype=dtype, device=rows.codes.device)
    if out.numel() == 0:
        return out
    center, center_strides = _centers_to_add(side, start, stop, rotated)
    paired = tokens_per_row(head_dim) == 2
    codes = rows.codes.view(torch.uint8) if paired else rows.codes
    inverse_strides = (0, 0, 0)
    if inverse is not None:
        # A shared [D, D] matrix has head stride 0.
        inverse_strides = ((0,) if inverse.dim() == 2 else ()) + inverse.stride()
    # A matrix product wants at least 16 columns.
    dim_tile = max(16, next_power_of_two(head_dim))
    block_t = min(16 if stop - start <= 16 else 64, max(16, 8192 // dim_tile))
    with on_device(codes.device):
        _dequantize_kernel[(-(-(stop - start) // block_t), heads, batch)](
            codes, rows.scale, rows.scale if rows.symmetric else rows.min, rows.scale if inverse is None else inverse,
            rows.scale if center is None else center, out, start, stop - start, *codes.stride()[:3],
            *rows.scale.stride()[:3], *inverse_strides, *center_strides, *out.stride()[:3],
            HAS_INVERSE=inverse is not None, HAS_CENTER=center is not None, CENTER_BLOCK=rows.center_block,
            SYMMETRIC=rows.symmetric, HEAD_DIM=head_dim, GROUP_SIZE=rows.group_size, PAIRED=paired, DIM_TILE=dim_tile,
            BLOCK_T=block_t, BLOCK_K=min(32, dim_tile), num_warps=4 if block_t * dim_tile <= 4096 else 8,
        )  # fmt: skip
    return out


def _centers_to_add(side: Side, start: int, stop: int, rotated: bool) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Centers of the blocks of tokens start..stop-1 in the wanted basis, or the mean of all; strides of batch, head, block."""
    if not (block := side.rows.center_block):
        mean = None if rotated else side.mean
        if mean is not None and mean.stride(-1) != 1:
            mean = mean.contiguous()
        return mean, (0, 0 if mean is None else mean.stride(0), 0)
    centers = side.rows.centers[:, :, start // block : -(-stop // block)]
    if rotated and side.transform is not None:
        # A center may be many times what is left of a row without it: neither tf32 nor autocast may round this product.
        centers = (centers.double() @ side.transform.double()).float()
    return centers, centers.stride()[:3]


def dequantize_rows(side: Side, start: int, stop: int, dtype: torch.dtype, rotated: bool = False) -> Tensor:
    """`dequantize_rows_reference` through the fastest path that can run on the device of the rows.

    float64 is the reference's own precision and always goes to it.
    """
    device = side.rows.codes.device
    problem = launch_problem(device) or head_dim_problem(side.rows.head_dim)
    if problem:
        fall_back(device, problem)
    take = dequantize_rows_reference if problem or dtype == torch.float64 else dequantize_rows_triton
    return take(side, start, stop, dtype, rotated)

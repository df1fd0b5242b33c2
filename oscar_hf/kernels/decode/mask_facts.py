"""Masks: how the kernels take them, and what one says, so that most need not be read in every layer."""

import torch
from torch import Tensor

from ...masks import hidden_below
from ..launch import interpreting, launch_problem, on_device, tl, triton
from .reference import mask_facts_reference


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
    if launch_problem(mask.device) and not interpreting():
        return mask_facts_reference(mask, length, new_tokens)
    facts = torch.empty(mask.shape[0], 2, dtype=torch.int32, device=mask.device)
    data, kind, floor, strides = mask_arguments(mask)
    with on_device(mask.device):
        _facts_kernel[(mask.shape[0],)](
            data, facts, length, new_tokens, mask.shape[1], *strides, floor,
            BOOL=kind == 1, ON_DEVICE=isinstance(length, Tensor), BLOCK=8192, num_warps=16,
        )  # fmt: skip
    return facts


def mask_arguments(mask: Tensor | None) -> tuple[Tensor | None, int, float, tuple[int, ...]]:
    """The mask as the kernel takes it, its kind (0 none, 1 bool, 2 additive), the floor of what may attend, strides."""
    if mask is None:
        return None, 0, 0.0, (0, 0, 0, 0)
    strides = tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.stride()))
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), 1, 0.0, strides
    return mask, 2, hidden_below(mask.dtype), strides

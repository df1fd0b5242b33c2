"""Centers of blocks: the mean of each block of neighboring keys, which is taken off before they are rotated.

Keys drift with their position, so that no mean that was measured elsewhere fits for long (docs/quality.md has the figures).
The mean of 128 neighbors does, and costs 16 bits per 128 elements. A block is opened by its first token to be packed: its
center is then computed once, from the tokens of the block that are exact at that moment (the recent window reaches further
than a block, so that mostly they all are), and stays what it is for tokens that are packed later.
"""

import torch
from torch import Tensor

from .packed_rows import PackedRows
from .quantizer import FP16_MAX


def open_blocks(rows: PackedRows, start: int, stop: int, x: Tensor, hidden: list[int] | None = None) -> None:
    """Set the centers of the blocks that history tokens start..stop-1 open: each the mean of its rows in x, as fp16.

    x: [B, H, T, D], the exact rows of history tokens start.. on, as many as there are (at least stop - start; more than end the
    last block do not matter). hidden: per row of the batch how many history tokens are padding, which does not count; a block of
    nothing but padding has center 0. Rows have no centers: nothing happens.
    """
    block = rows.center_block
    first = -(-start // block) if block else 0
    last = -(-stop // block) if block else 0
    if first >= last:
        return
    x = x[:, :, first * block - start : last * block - start]
    whole = x.shape[2] // block
    made = [x[:, :, : whole * block].unflatten(2, (whole, block)).mean(3, dtype=_working(x))] if whole else []
    if whole < last - first:
        made.append(x[:, :, whole * block :].mean(2, dtype=_working(x), keepdim=True))
    centers = torch.cat(made, 2) if len(made) > 1 else made[0]
    for row, count in enumerate(hidden or ()):
        if count <= first * block:
            continue
        padded = min(count // block, last) - first
        centers[row, :, :padded] = 0
        if padded < last - first and count % block:
            seen = x[row, :, count - first * block : (padded + 1) * block]
            centers[row, :, padded] = seen.mean(1, dtype=_working(x)) if seen.shape[1] else 0
    rows.centers[:, :, first:last] = centers.clamp_(-FP16_MAX, FP16_MAX)


def centers_of(rows: PackedRows, start: int, stop: int) -> Tensor:
    """The center of each of history tokens start..stop-1, fp16 [B, H, stop - start, D]."""
    block = rows.center_block
    first = start // block
    centers = rows.centers[:, :, first : -(-stop // block)].repeat_interleave(block, 2)
    return centers[:, :, start - first * block : stop - first * block]


def _working(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32

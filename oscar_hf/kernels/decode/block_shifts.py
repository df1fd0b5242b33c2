"""Block shifts: what the center of each block of history adds to the scores of its tokens."""

from ..launch import tl, triton


@triton.jit
def block_shifts(
    q_ptr, centers_ptr, shift_ptr, stride_qh, stride_qm, first, last, column, cols, new_tokens, rep_head, scale,
    D: tl.constexpr, NC: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . center in log2 units of blocks first..last-1, CB at a time, as fp32 [blocks, NC].

    Pointers are at that KV head (q: at the batch row). The query is the one that was given, neither rotated nor rounded, for
    a center may be many times what is left of a key without it.
    PRECISION: tf32 has the 11 bits of fp16 and the 8 of bfloat16, so that it is exact for such queries.
    """
    N: tl.constexpr = NC if NC > 8 else 8
    col = tl.arange(0, N)
    d = tl.arange(0, D)
    c = column + col
    at = (rep_head + c // new_tokens) * stride_qh + c % new_tokens * stride_qm
    live = (col < NC) & (c < cols)
    q = tl.load(q_ptr + at[None, :] + d[:, None], mask=live[None, :], other=0.0).to(tl.float32)
    for block0 in tl.range(first, last, CB, num_stages=STAGES):
        block = block0 + tl.arange(0, CB)
        there = (block < last)[:, None]
        centers = tl.load(centers_ptr + block[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        shift = tl.dot(centers, q, input_precision=PRECISION) * scale
        tl.store(shift_ptr + block[:, None] * NC + col[None, :], shift, mask=there & (col < NC)[None, :])

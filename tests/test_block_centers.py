"""Centers of blocks in plain PyTorch against a naive loop."""

import pytest
import torch

from oscar_hf.quantization.block_centers import centers_of, open_blocks
from oscar_hf.quantization.packed_rows import PackedRows

BATCH, HEADS, DIM, CAPACITY = 3, 2, 16, 200


def rows_with(block, capacity=CAPACITY):
    """A store whose centers are noise, so that those that are not set are told apart."""
    rows = PackedRows(BATCH, HEADS, DIM, DIM, False, "cpu", capacity, block)
    if block:
        rows.centers.copy_(torch.randn(rows.centers.shape))
    return rows


def naive_centers(rows, start, stop, x, hidden):
    """Float64 centers, token by token."""
    block, expected = rows.center_block, rows.centers.double()
    for token in range(start, stop):
        if token % block:
            continue
        for b in range(BATCH):
            members = [
                x[b, :, t - start].double()
                for t in range(token, min(token + block, start + x.shape[2]))
                if t >= (hidden[b] if hidden else 0)
            ]
            expected[b, :, token // block] = torch.stack(members).mean(0) if members else 0
    return expected.clamp(-65504, 65504)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hidden", [None, [0, 0, 0], [0, 33, 200], [64, 31, 70], [63, 65, 96], [128, 127, 129]])
@pytest.mark.parametrize(
    "block,start,stop,more",
    [
        (32, 0, 1, 0),
        (32, 0, 96, 0),
        (32, 31, 70, 9),
        (32, 33, 63, 5),
        (32, 64, 65, 31),
        (64, 1, 65, 40),
        (64, 0, 130, 100),
        (128, 100, 129, 3),
        (128, 127, 129, 0),
        (128, 128, 128, 7),
    ],
)
def test_open_blocks_against_a_loop(block, start, stop, more, hidden, dtype):
    """Starts inside of blocks, a last block that is partly there, rows beyond it, padding, nothing opened."""
    torch.manual_seed(0)
    rows = rows_with(block)
    x = (10 + torch.randn(BATCH, HEADS, stop - start + more, DIM)).to(dtype)
    expected = naive_centers(rows, start, stop, x, hidden)
    open_blocks(rows, start, stop, x, hidden)
    torch.testing.assert_close(rows.centers.double(), expected, rtol=2.0**-10, atol=1e-6)


def test_a_center_saturates():
    rows = rows_with(32)
    open_blocks(rows, 0, 1, torch.full((BATCH, HEADS, 1, DIM), -1e6))
    assert (rows.centers[:, :, 0] == -65504).all()


def test_rows_without_centers_are_left_alone():
    open_blocks(rows_with(0), 0, 40, torch.randn(BATCH, HEADS, 40, DIM), [0, 1, 2])


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("start,stop", [(0, 1), (0, 200), (31, 33), (65, 65), (63, 129), (128, 200), (199, 200)])
def test_centers_of_against_a_loop(block, start, stop):
    rows = rows_with(block)
    got = centers_of(rows, start, stop)
    assert got.shape == (BATCH, HEADS, stop - start, DIM)
    for token in range(start, stop):
        assert torch.equal(got[:, :, token - start], rows.centers[:, :, token // block])

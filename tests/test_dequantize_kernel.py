"""The dequantize kernel against its float64 reference: in Triton's interpreter, and on a GPU if there is one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before the kernels are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import side_of

from oscar_hf.kernels import dequantize, launch
from oscar_hf.kernels.dequantize import dequantize_rows, dequantize_rows_reference, dequantize_rows_triton
from oscar_hf.quantization.packed_rows import PackedRows

DEVICES = [pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]
SHAPES = [
    (16, 16),
    (16, 8),
    (64, 64),
    (64, 16),
    (128, 128),
    (128, 32),
    (256, 256),
    (256, 64),
    (80, 16),
    (96, 96),
    (8, 8),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DEVICES)
def device(request):
    if not launch.HAS_TRITON:
        pytest.skip("Triton is not installed")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    interpreted = type(dequantize._dequantize_kernel).__name__ == "InterpretedFunction"
    if request.param == "cpu" and not interpreted:
        pytest.skip("the kernels were imported without TRITON_INTERPRET=1")
    return request.param


def random_store(batch, heads, head_dim, group_size, symmetric, capacity, generator, center_block=0):
    """A store of random words, scales and mins: any bit pattern is a valid row of codes."""
    rows = PackedRows(batch, heads, head_dim, group_size, symmetric, "cpu", capacity, center_block)
    rows.codes.copy_(torch.randint(-(2**15), 2**15, rows.codes.shape, generator=generator))
    rows.scale.copy_(torch.rand(rows.scale.shape, generator=generator) + 0.1)
    if not symmetric:
        rows.min.copy_(torch.randn(rows.min.shape, generator=generator))
    if center_block:
        rows.centers.copy_(100 * torch.randn(rows.centers.shape, generator=generator))
    return rows


def dequantize_both(rows, start, stop, inverse, mean, dtype, device):
    """The float64 reference, and the kernel's result on the CPU."""
    expected = dequantize_rows_reference(side_of(rows, mean=mean, inverse=inverse), start, stop, torch.float64)
    rows = rows.mapped(lambda tensor: tensor.to(device))
    inverse, mean = (None if t is None else t.to(device) for t in (inverse, mean))
    return expected, dequantize_rows_triton(side_of(rows, mean=mean, inverse=inverse), start, stop, dtype).cpu()


def matrix(heads, dim, per_head, generator):
    inverse = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator))[0].contiguous()
    return inverse if per_head else inverse[0]


def rounded(x, dtype, device):
    """Float32 x as the kernel stores it in `dtype`: Triton's interpreter truncates to bfloat16, a GPU rounds."""
    if dtype == torch.bfloat16 and device == "cpu":
        x = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return x.to(dtype)


def assert_close(got, expected, dtype):
    """Within 1e-6 of the size of the row in float32; in a narrower dtype, an ulp of it comes on top."""
    assert got.dtype == dtype
    size = expected.abs().amax(-1, keepdim=True)
    bound = 1e-6 * size
    if dtype != torch.float32:
        bound = bound + torch.finfo(dtype).eps * expected.abs()
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("with_inverse", [False, True])
@pytest.mark.parametrize("head_dim,group_size", SHAPES)
def test_against_float64(head_dim, group_size, with_inverse, device):
    """Every shape, in both bases; dtype, symmetry, mean, one matrix or one per head take turns."""
    case = SHAPES.index((head_dim, group_size))
    generator = torch.Generator().manual_seed(case)
    symmetric, start, tokens = case % 2 == 0, case % 3, 17 + case % 2
    rows = random_store(2, 2, head_dim, group_size, symmetric, 64, generator)
    inverse = matrix(2, head_dim, case % 3 > 0, generator) if with_inverse else None
    mean = torch.randn(2, head_dim, generator=generator) if with_inverse and case % 4 < 2 else None
    dtype = DTYPES[(case + with_inverse) % 3]
    expected, got = dequantize_both(rows, start, start + tokens, inverse, mean, dtype, device)
    assert_close(got, expected, dtype)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    "head_dim,block,start,stop,per_head",
    [
        (64, 32, 0, 97, True),
        (64, 64, 31, 34, False),
        (96, 32, 33, 40, True),
        (128, 128, 127, 200, True),
        (128, 64, 65, 65, False),
        (80, 32, 95, 97, None),
        (256, 32, 160, 200, False),
    ],
)
def test_centers_of_blocks(head_dim, block, start, stop, per_head, rotated, device):
    """Ranges that begin and end inside of blocks, in both bases, with and without transforms; the mean does not count."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = random_store(2, 2, head_dim, head_dim // 2, block == 64, 200, generator, block)
    transform = None if per_head is None else matrix(2, head_dim, per_head, generator)
    inverse, mean = None if transform is None else transform.mT, torch.randn(2, head_dim, generator=generator)
    dtype = DTYPES[(head_dim // 16 + start) % 3]
    side = side_of(rows, transform=transform, mean=mean, inverse=inverse)
    expected = dequantize_rows_reference(side, start, stop, torch.float64, rotated)
    # A store narrowed to part of the batch has centers with the strides of the whole.
    wide = rows.mapped(lambda tensor: torch.cat([tensor[:1], tensor]).to(device)[1:])
    transform, inverse, mean = (None if t is None else t.to(device) for t in (transform, inverse, mean))
    side = side_of(wide, transform=transform, mean=mean, inverse=inverse)
    got = dequantize_rows_triton(side, start, stop, dtype, rotated).cpu()
    assert got.shape == (2, 2, stop - start, head_dim)
    if got.numel():
        assert_close(got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start,stop", [(0, 1), (1, 2), (3, 8), (2, 2), (0, 64), (63, 64)])
def test_ranges_of_paired_tokens(start, stop, dtype, device):
    """Head dim 64: ranges that begin or end within a pair, a single token, none, all; the same without the matrix."""
    generator = torch.Generator().manual_seed(start)
    rows = random_store(1, 2, 64, 32, False, 64, generator)
    expected, got = dequantize_both(rows, start, stop, None, None, dtype, device)
    # Scale times code is exact and one rounding follows: without a matrix the float32 result has no other error.
    assert got.shape == (1, 2, stop - start, 64)
    assert torch.equal(got, rounded(expected.float(), dtype, device))


def test_strided_store_and_matrix(device):
    """A store narrowed to part of the batch, and a matrix that is a transposed view."""
    generator = torch.Generator().manual_seed(0)
    rows = random_store(3, 2, 64, 32, False, 64, generator)
    rows = rows.mapped(lambda tensor: tensor[1:])
    inverse = matrix(2, 64, True, generator).mT
    expected = dequantize_rows_reference(side_of(rows, inverse=inverse), 1, 6, torch.float64)
    rows = rows.mapped(lambda t: torch.cat([t[:1], t]).to(device)[1:])
    got = dequantize_rows_triton(side_of(rows, inverse=inverse.mT.to(device).mT), 1, 6, torch.float32)
    assert_close(got.cpu(), expected, torch.float32)


def test_a_range_beyond_the_store_is_an_error(device):
    """The kernel would read past the buffers."""
    rows = PackedRows(1, 1, 16, 16, False, device, 8)
    with pytest.raises(ValueError, match="capacity"):
        dequantize_rows_triton(side_of(rows), 4, 9, torch.float32)


def test_cpu_tensors_and_float64_take_the_reference(monkeypatch):
    """The dispatching function runs no interpreter on the CPU, and float64 is the reference's alone."""
    monkeypatch.setattr(dequantize, "dequantize_rows_triton", None)
    rows = random_store(1, 1, 16, 16, False, 8, torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(
            dequantize_rows(side_of(rows), 1, 5, dtype), dequantize_rows_reference(side_of(rows), 1, 5, dtype)
        )
    if torch.cuda.is_available():
        rows = rows.mapped(torch.Tensor.cuda)
        assert dequantize_rows(side_of(rows), 1, 5, torch.float64).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_range_on_a_gpu(head_dim, monkeypatch):
    """Many tiles, through the dispatching function."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    generator = torch.Generator().manual_seed(0)
    rows = random_store(2, 4, head_dim, 32, False, 2048, generator)
    inverse, mean = matrix(4, head_dim, True, generator), torch.randn(4, head_dim, generator=generator)
    expected = dequantize_rows_reference(side_of(rows, mean=mean, inverse=inverse), 3, 2000, torch.float64)
    monkeypatch.setattr(dequantize, "dequantize_rows_reference", None)
    rows = rows.mapped(torch.Tensor.cuda)
    got = dequantize_rows(side_of(rows, mean=mean.cuda(), inverse=inverse.cuda()), 3, 2000, torch.bfloat16)
    assert_close(got.cpu(), expected, torch.bfloat16)

"""The search that goes through candidate ranges in turn: its codes at rounding boundaries, and its choices."""

import pytest
import torch
from helpers import random_covariance
from test_append_kernel import append_both, force_tile, random_store

from oscar_hf.kernels import launch
from oscar_hf.kernels.launch import tl, triton
from oscar_hf.kernels.scale_search import _error
from oscar_hf.quantization.quantizer import ScaleRule, dequantize, quantize, round_to_fp16


@triton.jit
def _error_kernel(x_ptr, scale_ptr, low_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    x = tl.reshape(tl.load(x_ptr + offsets), [ROWS, 1, COLUMNS])
    scale, low = tl.load(scale_ptr + rows)[:, None], tl.load(low_ptr + rows)[:, None]
    tl.store(out_ptr + offsets, tl.reshape(_error(x, scale, low), [ROWS, COLUMNS]))


def steps(x, count):
    """The float32 number `count` steps above x."""
    for _ in range(abs(count)):
        x = torch.nextafter(x, torch.full_like(x, float("inf") if count > 0 else -float("inf")))
    return x


@pytest.fixture
def device():
    if not launch.HAS_TRITON:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if type(_error_kernel).__name__ != "InterpretedFunction":
        pytest.skip("the kernels were imported without TRITON_INTERPRET=1")
    return "cpu"


@pytest.mark.parametrize("with_minimum", [False, True])
def test_codes_at_rounding_boundaries(with_minimum, device):
    """Three comparisons give the codes of the division, also a few float32 steps around the limits."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.cat([torch.rand(500, generator=generator) * 10.0 ** torch.linspace(-5, 4, 500), torch.ones(1)])
    powers = 2.0 ** torch.arange(-19, -8)
    scale = round_to_fp16(torch.cat([scale.clamp(min=1e-6), powers]))
    low = (
        round_to_fp16(torch.randn(len(scale), generator=generator) * scale) if with_minimum else torch.zeros(len(scale))
    )
    limits = [steps(scale * (code + 0.5), count) for code in range(3) for count in range(-4, 5)]
    others = [scale * factor for factor in (-1e6, -0.5, 0, 1, 3, 3.5, 1e6)]
    x = torch.stack(limits + others, 1) + low[:, None]
    # Rows and columns to powers of two.
    x = torch.nn.functional.pad(x, (0, 64 - x.shape[1], 0, 512 - len(x)))
    scale, low = (torch.nn.functional.pad(t, (0, 512 - len(t)), value=1.0) for t in (scale, low))
    out = torch.empty_like(x, device=device)
    _error_kernel[(1,)](x.to(device), scale.to(device), low.to(device), out, 512, 64)
    codes = quantize(x, scale[:, None], low[:, None])
    assert torch.equal(out.cpu(), dequantize(codes, scale[:, None], low[:, None]) - x)
    assert set(codes.unique().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", ["search", "weighted_search", "weighted_search_both_ends"])
@pytest.mark.parametrize("dim,group_size", [(128, 64), (64, 64), (256, 128), (96, 48)])
def test_choices_are_the_reference_ones(rule, dim, group_size, device, monkeypatch):
    """On random rows with outliers the same codes, whatever the scale of rows and metric."""
    force_tile(monkeypatch, "tile")
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(1, 2, 60, dim, generator=generator) * torch.randn(1, 2, 1, dim, generator=generator).exp()
    x = x * 10.0 ** torch.linspace(-4, 3, 60)[:, None]
    metric = random_covariance(2, dim, dim, seed=dim, decay=0.95).float()
    for size in (1e-6, 1.0, 1e6):
        rows = random_store(1, 2, dim, group_size, False)
        expected, got = append_both(rows, 1, x, None, None, ScaleRule.parse(rule), size * metric, device)
        # The GPU's own reference divides by 3 as a product, which may move a scale by one fp16 step: it is run on the CPU.
        assert torch.equal(expected.codes, got.codes) and torch.equal(expected.scale, got.scale)
        assert torch.equal(expected.min, got.min)

"""The append kernel against its PyTorch reference: in Triton's interpreter, and on a GPU if there is one."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before the kernels are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import pairwise_mix, side_of

from oscar_hf.kernels import append, launch
from oscar_hf.kernels.append import append_rows, append_rows_reference, append_rows_triton
from oscar_hf.quantization.packed_rows import PackedRows
from oscar_hf.quantization.quantizer import ScaleRule, dequantize, quantize

DEVICES = [pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]
SHAPES = [
    (16, 16),
    (16, 4),
    (64, 64),
    (64, 16),
    (128, 128),
    (128, 32),
    (256, 256),
    (256, 64),
    (80, 80),
    (80, 20),
    (96, 32),
]
CLIP_RULES = ["percentile(none)", "percentile(0.9)", "percentile(0.5)"]
SEARCH_RULES = ["search", "weighted_search", "weighted_search_both_ends"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TILES = ["one_token", "tile"]
SPREAD = "head_dim,group_size,rule,tile,dtype,start,symmetric,centered,per_head"
CAPACITY = 64


@pytest.fixture(params=DEVICES)
def device(request):
    if not launch.HAS_TRITON:
        pytest.skip("Triton is not installed")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    interpreted = type(append._append_kernel).__name__ == "InterpretedFunction"
    if request.param == "cpu" and not interpreted:
        pytest.skip("the kernels were imported without TRITON_INTERPRET=1")
    return request.param


def force_tile(monkeypatch, tile):
    """Force the program of a single token, or the tile of a long prompt, whatever the number of tokens."""
    for limit in ("_MAX_SINGLE_TOKENS", "_FEW_TOKENS"):
        monkeypatch.setattr(append, limit, {"one_token": 1_000_000, "tile": 0}[tile])


def spread(rules):
    """Every shape with every rule; the other choices take turns, so that each meets many shapes and rules."""
    cases = []
    for i, (head_dim, group_size) in enumerate(SHAPES):
        for j, rule in enumerate(rules):
            tile, dtype, start = TILES[(i + j) % 2], DTYPES[(i + 2 * j) % 3], 3 + (i + j // 2) % 2
            symmetric, centered, per_head = (i // 2 + j) % 2 == 0, (i + 2 * j) % 5 < 2, (i + j) % 4 > 0
            cases.append((head_dim, group_size, rule, tile, dtype, start, symmetric, centered, per_head))
    return cases


def random_store(batch, heads, head_dim, group_size, symmetric, capacity=CAPACITY, center_block=0):
    """A store full of noise, so that comparing whole tensors also shows a write outside of the appended tokens."""
    rows = PackedRows(batch, heads, head_dim, group_size, symmetric, "cpu", capacity, center_block)
    rows.codes.copy_(torch.randint(-(2**15), 2**15, rows.codes.shape))
    for tensor in list(rows.named.values())[1:]:
        tensor.copy_(torch.randn(tensor.shape))
    return rows


def store_copy(rows, device):
    return rows.mapped(lambda tensor: tensor.to(device, copy=True))


def append_both(rows, start, x, transform, mean, rule, metric, device):
    """Append with the reference on the CPU and with the kernel on `device`; both stores come back on the CPU."""
    expected, got = store_copy(rows, "cpu"), store_copy(rows, device)
    append_rows_reference(side_of(expected, rule, transform, mean, metric), start, x)
    on_device = [None if t is None else t.to(device) for t in (x, transform, mean, metric)]
    append_rows_triton(side_of(got, rule, on_device[1], on_device[2], on_device[3]), start, on_device[0])
    return expected, got.mapped(torch.Tensor.cpu)


def assert_same_store(expected, got):
    for a, b in zip(expected.named.values(), got.named.values()):
        assert torch.equal(a, b)


def assert_untouched_outside(rows, got, start, stop):
    for begin, end in ((0, start), (stop, rows.capacity)):
        for a, b in zip(rows.read(begin, end), got.read(begin, end)):
            assert (a is None and b is None) or torch.equal(a, b)


def metric_of(heads, dim, per_head, generator):
    factor = torch.randn(heads, dim, dim, generator=generator) * torch.logspace(-1, 1, dim)
    metric = factor @ factor.mT / dim
    return metric if per_head else metric[0]


def losses(x_rot, stored, rule, metric):
    """Float64 loss of stored rows, one per choice that the search makes: per row if weighted, else per group."""
    error = dequantize(*stored, dtype=torch.float64) - x_rot
    if rule.weighted:
        return ((error @ metric.double()) * error).sum(-1)
    return error.unflatten(-1, (stored[1].shape[-1], -1)).square().sum(-1)


def assert_as_good(x_rot, expected, got, start, stop, rule, metric):
    """Losses that differ by rounding alone may tip a search to another range: then it must be as good."""
    wanted = losses(x_rot, expected.read(start, stop), rule, metric)
    assert (losses(x_rot, got.read(start, stop), rule, metric) <= wanted * (1 + 1e-5) + 1e-12).all()


def orthogonal(heads, dim, per_head, generator):
    matrix = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator))[0].contiguous()
    return matrix if per_head else matrix[0]


def hadamard(dim):
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / dim**0.5


@pytest.mark.parametrize(SPREAD, spread(CLIP_RULES))
def test_rotated_rows_bit_for_bit(
    head_dim, group_size, rule, tile, dtype, start, symmetric, centered, per_head, device, monkeypatch
):
    """Without a rotation, codes, scale and min equal the reference's, and nothing else in the store changes."""
    force_tile(monkeypatch, tile)
    generator = torch.Generator().manual_seed(head_dim)
    x = (2 * torch.randn(1, 2, 3, head_dim, generator=generator)).to(dtype)
    mean = torch.randn(2, head_dim, generator=generator) if centered else None
    rows = random_store(1, 2, head_dim, group_size, symmetric)
    assert_same_store(*append_both(rows, start, x, None, mean, ScaleRule.parse(rule), None, device))


@pytest.mark.parametrize(SPREAD, spread(SEARCH_RULES))
def test_search(head_dim, group_size, rule, tile, dtype, start, symmetric, centered, per_head, device, monkeypatch):
    """A search finds the least loss, its codes fit the scale and min it stores, and nothing else changes."""
    force_tile(monkeypatch, tile)
    generator, tokens = torch.Generator().manual_seed(head_dim), 3
    x = (2 * torch.randn(1, 2, tokens, head_dim, generator=generator)).to(dtype)
    mean = torch.randn(2, head_dim, generator=generator) if centered else None
    metric = metric_of(2, head_dim, per_head, generator)
    rows, rule = random_store(1, 2, head_dim, group_size, symmetric), ScaleRule.parse(rule)
    expected, got = append_both(rows, start, x, None, mean, rule, metric, device)
    x_rot = x.float() if mean is None else x.float() - mean[:, None]
    codes, scale, minimum = got.read(start, start + tokens)
    assert torch.equal(codes, quantize(x_rot, scale, minimum))
    assert_as_good(x_rot.double(), expected, got, start, start + tokens, rule, metric)
    assert_untouched_outside(rows, got, start, start + tokens)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("head_dim,per_head", [(16, True), (64, False), (64, True), (256, True)])
def test_exact_rotation_bit_for_bit(head_dim, per_head, tile, device, monkeypatch):
    """Where every sum is exact in float32, the order of summation cannot matter: bit for bit again."""
    force_tile(monkeypatch, tile)
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randint(-32, 33, (1, 3, 3, head_dim), generator=generator) / 8.0
    mean = torch.randint(-16, 17, (3, head_dim), generator=generator) / 16.0
    transform = hadamard(head_dim)
    if per_head:
        transform = torch.stack([transform, transform.flip(1), -transform.roll(3, 0)])
    rows = random_store(1, 3, head_dim, 16, False)
    rule = ScaleRule.parse("percentile(0.9)")
    assert_same_store(*append_both(rows, 7, x.bfloat16(), transform, mean, rule, None, device))


@pytest.mark.parametrize(
    "rule,tile", [("percentile(0.92)", "one_token"), ("percentile(0.92)", "tile"), ("weighted_search", "tile")]
)
@pytest.mark.parametrize("head_dim,group_size", [(16, 16), (64, 32), (128, 64), (256, 256), (80, 16), (96, 48)])
def test_random_rotation(head_dim, group_size, rule, tile, device, monkeypatch):
    """Codes differ from the reference's at rounding ties alone; a search is as good as the reference's."""
    force_tile(monkeypatch, tile)
    generator = torch.Generator().manual_seed(head_dim)
    per_head, tokens, start = group_size != head_dim, 3, 2
    x = (3 * torch.randn(1, 2, tokens, head_dim, generator=generator)).half()
    mean = torch.randn(2, head_dim, generator=generator)
    transform = orthogonal(2, head_dim, per_head, generator)
    metric = metric_of(2, head_dim, per_head, generator)
    rows, rule = random_store(1, 2, head_dim, group_size, False), ScaleRule.parse(rule)
    expected, got = append_both(rows, start, x, transform, mean, rule, metric, device)
    assert_untouched_outside(rows, got, start, start + tokens)
    x_rot = (x.double() - mean.double()[:, None]) @ transform.double()
    codes, scale, minimum = got.read(start, start + tokens)
    if rule.search:
        assert_as_good(x_rot, expected, got, start, start + tokens, rule, metric)
    else:
        # A range whose ends differ in the last bit can round to the neighboring fp16 number, not further.
        torch.testing.assert_close(scale, expected.scale[:, :, start : start + tokens], rtol=2e-3, atol=0)
        torch.testing.assert_close(minimum, expected.min[:, :, start : start + tokens], rtol=2e-3, atol=0)
    wanted = quantize(x_rot, scale, minimum)
    position = (x_rot.unflatten(-1, (-1, group_size)) - minimum[..., None]) / scale[..., None].double() + 0.5
    distance = (position - position.round()).abs().flatten(-2)
    assert (distance[codes != wanted] < 1e-4).all()
    assert (codes != wanted).float().mean() < 0.01


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(
    "head_dim,group_size,block,start,tokens,tile,dtype",
    [
        (64, 32, 32, 31, 34, "one_token", torch.bfloat16),
        (64, 64, 32, 31, 70, "tile", torch.float16),
        (96, 32, 64, 63, 9, "tile", torch.bfloat16),
        (96, 96, 128, 127, 2, "one_token", torch.float32),
        (128, 64, 128, 101, 35, "tile", torch.float32),
        (128, 128, 64, 5, 3, "one_token", torch.float16),
        (256, 64, 32, 32, 33, "tile", torch.bfloat16),
    ],
)
def test_centers_of_blocks_bit_for_bit(
    head_dim, group_size, block, start, tokens, tile, dtype, mixed, device, monkeypatch
):
    """Each row is centered by its own block, 100 times larger than what is left; the mean does not count then."""
    force_tile(monkeypatch, tile)
    generator = torch.Generator().manual_seed(head_dim + block)
    rows = random_store(2, 2, head_dim, group_size, block == 64, 160, block)
    rows.centers.mul_(100)
    around = rows.centers.float().repeat_interleave(block, 2)[:, :, start : start + tokens]
    x = (around + torch.randn(around.shape, generator=generator)).to(dtype)
    transform = pairwise_mix(head_dim, block) if mixed else None
    mean = torch.randn(2, head_dim, generator=generator)
    expected, got = append_both(rows, start, x, transform, mean, ScaleRule.parse("percentile(none)"), None, device)
    assert_same_store(expected, got)


@pytest.mark.parametrize("tile,rule", [("tile", "weighted_search"), ("one_token", "search"), ("tile", "search")])
def test_rows_far_from_zero_lose_no_more_than_the_reference(tile, rule, device, monkeypatch):
    """Keys whose mean is 100 times their deviation, through a random rotation and a search, over two blocks."""
    force_tile(monkeypatch, tile)
    generator, rule = torch.Generator().manual_seed(0), ScaleRule.parse(rule)
    block, start, tokens, dim = 32, 27, 9, 64
    rows = random_store(1, 2, dim, 64, False, 64, block)
    rows.centers.mul_(100)
    around = rows.centers.float().repeat_interleave(block, 2)[:, :, start : start + tokens]
    x = (around + torch.randn(around.shape, generator=generator)).half()
    transform, metric = orthogonal(2, dim, True, generator), metric_of(2, dim, True, generator)
    expected, got = append_both(rows, start, x, transform, None, rule, metric, device)
    x_rot = (x.double() - around.double()) @ transform.double()
    wanted = losses(x_rot, expected.read(start, start + tokens), rule, metric)
    assert (losses(x_rot, got.read(start, start + tokens), rule, metric) <= wanted * (1 + 1e-4) + 1e-12).all()
    assert_untouched_outside(rows, got, start, start + tokens)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rule", ["percentile(none)", "percentile(0.9)", "search", "weighted_search_both_ends"])
def test_extreme_rows_stay_finite(rule, symmetric, device, monkeypatch):
    """Constant, zero, huge, denormal and one-hot rows: finite, and the same as the reference."""
    force_tile(monkeypatch, "tile")
    rule, head_dim = ScaleRule.parse(rule), 64
    x = torch.stack([torch.full((head_dim,), value) for value in (0.0, -0.0, 1.5, 6e4, -6e4, 1e-41, -1e-7)] * 2)
    x[7:, 5] = -x[7:, 5]
    x = torch.cat([x, torch.zeros(2, head_dim)])
    x[-1, 3], x[-2, 60] = 6e4, -65504.0
    for dtype in DTYPES:
        rows = random_store(1, 1, head_dim, 32, symmetric)
        metric = torch.eye(head_dim)
        expected, got = append_both(rows, 1, x[None, None].to(dtype), None, None, rule, metric, device)
        assert_same_store(expected, got)
        stored = got.read(1, 1 + len(x))
        assert all(t.isfinite().all() for t in stored if t is not None) and dequantize(*stored).isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_appends_in_pieces(head_dim, device, monkeypatch):
    """Appends of odd sizes, one token among them, leave the same store as a single one: no neighbor is damaged."""
    force_tile(monkeypatch, "tile")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 12, head_dim, generator=generator)
    rule = ScaleRule.parse("percentile(0.9)")
    rows = random_store(1, 2, head_dim, 64, False)
    expected, got = store_copy(rows, "cpu"), store_copy(rows, device)
    append_rows_reference(side_of(expected, rule), 1, x)
    for begin, end in ((6, 7), (0, 3), (7, 12), (3, 6)):
        append_rows_triton(side_of(got, rule), 1 + begin, x[:, :, begin:end].to(device))
    got = got.mapped(torch.Tensor.cpu)
    assert_same_store(expected, got)


def test_any_strides(device, monkeypatch):
    """x as a view of [B, T, H, D], x with a strided last axis, a transposed matrix and a store that is a view."""
    force_tile(monkeypatch, "tile")
    generator = torch.Generator().manual_seed(0)
    head_dim, rule = 16, ScaleRule.parse("percentile(0.9)")
    x = torch.randint(-32, 33, (2, 5, 3, 2 * head_dim), generator=generator).transpose(1, 2) / 8.0
    transform = (hadamard(head_dim) * torch.arange(1, head_dim + 1)).T
    for piece in (x[..., :head_dim], x[..., ::2]):
        rows = random_store(2, 3, head_dim, 8, False)
        expected, got = store_copy(rows, "cpu"), store_copy(rows, device)
        # A store narrowed to part of the batch keeps the strides of the whole.
        wide = [torch.cat([t, t]) for t in got.named.values()]
        got.codes, got.scale, got.min = (t[1:3] for t in wide)
        before = [t.clone() for t in got.named.values()]
        expected.codes, expected.scale, expected.min = (t.cpu() for t in before)
        append_rows_reference(side_of(expected, rule, transform), 4, piece)
        moved = x.to(device)[..., :head_dim] if piece.stride(-1) == 1 else x.to(device)[..., ::2]
        append_rows_triton(side_of(got, rule, transform.to(device)), 4, moved)
        got = got.mapped(torch.Tensor.cpu)
        assert_same_store(expected, got)


def test_nothing_to_append_and_errors(device):
    """No token is no launch; a write past the room, a wrong shape or a missing metric is an error, not a wild store."""
    rows = random_store(1, 2, 16, 16, False)
    got = store_copy(rows, device)
    plain = ScaleRule()
    append_rows_triton(side_of(got, plain), 5, torch.zeros(1, 2, 0, 16, device=device))
    with pytest.raises(ValueError, match="capacity"):
        append_rows_triton(side_of(got, plain), CAPACITY - 1, torch.zeros(1, 2, 2, 16, device=device))
    with pytest.raises(ValueError, match="to fit the store"):
        append_rows_triton(side_of(got, plain), 0, torch.zeros(1, 3, 2, 16, device=device))
    weighted = ScaleRule.parse("weighted_search")
    with pytest.raises(ValueError, match="metric"):
        append_rows_triton(side_of(got, weighted), 0, torch.zeros(1, 2, 2, 16, device=device))
    got = got.mapped(torch.Tensor.cpu)
    assert_same_store(rows, got)


def test_cpu_tensors_take_the_reference_silently(monkeypatch):
    """The dispatching function runs no interpreter on the CPU and says nothing about it."""
    monkeypatch.setattr(append, "append_rows_triton", None)
    rows = PackedRows(1, 1, 16, 16, False, "cpu", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        append_rows(side_of(rows), 0, torch.randn(1, 1, 2, 16))
    assert rows.scale[:, :, :2].all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim,rule", [(64, "percentile(0.9)"), (128, "percentile(0.96)"), (128, "weighted_search")]
)
def test_long_append_on_a_gpu(head_dim, rule):
    """Tile sizes as the launcher picks them, many programs side by side in the rows that pairs of tokens share."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    generator, rule = torch.Generator().manual_seed(0), ScaleRule.parse(rule)
    x = torch.randn(2, 4, 1001, head_dim, generator=generator).bfloat16()
    metric = metric_of(4, head_dim, True, generator)
    rows = PackedRows(2, 4, head_dim, 64, False, "cpu", 1024)
    expected, got = append_both(rows, 5, x, None, None, rule, metric, "cuda")
    if rule.search:
        assert_as_good(x.double(), expected, got, 5, 1006, rule, metric)
    else:
        assert_same_store(expected, got)


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernel(monkeypatch):
    """The dispatching function launches on a GPU, except for a head dim it cannot take: then it warns once."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setattr(launch, "_given_warnings", set())
    rows = PackedRows(1, 1, 16, 16, False, "cuda", 4)
    with monkeypatch.context() as patch:
        patch.setattr(append, "append_rows_reference", None)
        append_rows(side_of(rows), 0, torch.randn(1, 1, 2, 16, device="cuda"))
    assert rows.scale[:, :, :2].all()
    rows = PackedRows(1, 1, 264, 264, False, "cuda", 4)
    x = torch.randn(1, 1, 2, 264, device="cuda")
    with pytest.warns(UserWarning, match="264"):
        append_rows(side_of(rows), 0, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        append_rows(side_of(rows), 2, x)


def test_one_warning_per_reason_on_a_gpu_alone(monkeypatch):
    """fall_back warns once per reason and never for CPU tensors."""
    monkeypatch.setattr(launch, "_given_warnings", set())
    with pytest.warns(UserWarning, match="because of the weather"):
        launch.fall_back(torch.device("cuda"), "because of the weather")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.fall_back(torch.device("cuda"), "because of the weather")
        launch.fall_back(torch.device("cpu"), "another reason")


def test_reasons(monkeypatch):
    """Every reason not to launch is named."""
    assert launch.head_dim_problem(128) == "" and "12" in launch.head_dim_problem(12)
    assert "264" in launch.head_dim_problem(264)
    assert "cpu" in launch.launch_problem(torch.device("cpu"))
    assert "256 columns" in append.encode_problem(200, 5)
    if launch.HAS_TRITON:
        for version, is_problem in (("3.3.1", True), ("3.4.0", False), ("3.10.0+git12ab", False), ("2.1.0", True)):
            monkeypatch.setattr(launch.triton, "__version__", version)
            assert bool(launch.triton_problem()) == is_problem


def test_import_without_triton():
    """The kernel modules import, and the references run, where Triton is not installed."""
    package = Path(append.__file__).parents[1]
    script = f"""
import sys, types
sys.modules["triton"] = None
package = types.ModuleType("oscar_hf")
package.__path__ = [{str(package)!r}]
sys.modules["oscar_hf"] = package
import torch
from oscar_hf.kernels.append import append_rows
from oscar_hf.kernels.dequantize import dequantize_rows
from oscar_hf.kernels.launch import HAS_TRITON, triton_problem
from oscar_hf.quantization.quantizer import ScaleRule
from oscar_hf.quantization.kv_side import Side, SideFormat
assert not HAS_TRITON and "not installed" in triton_problem()
form = SideFormat(16, 16, False, ScaleRule(), True)
side = Side(form, form.new_rows(1, 1, "cpu", 4))
append_rows(side, 0, torch.randn(1, 1, 2, 16))
assert dequantize_rows(side, 0, 2, torch.float32).isfinite().all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)

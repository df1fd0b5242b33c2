"""The scale rules `feedback` and `unbiased`: references against plain loops, and kernels against the references."""

import copy

import pytest
import torch
from helpers import generator, random_covariance, random_orthogonal, side_of
from test_append_kernel import append_both, assert_untouched_outside, force_tile, random_store

from oscar_hf.kernels import append, decode_step, launch
from oscar_hf.kernels.append import append_rows_triton
from oscar_hf.kernels.encode import encode_plan
from oscar_hf.quantization.packed_rows import PackedRows
from oscar_hf.quantization.quantizer import (
    UNBIASED_RANGE,
    ScaleRule,
    choose_qparams,
    dequantize,
    feedback_codes,
    feedback_matrix,
    quantize,
    quantize_rows,
    unbiased_scale,
)

UNBIASED = ScaleRule.parse("unbiased")
FEEDBACK = ScaleRule.parse("feedback")
START = 3


@pytest.fixture
def device():
    if not launch.HAS_TRITON:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if type(append._append_kernel).__name__ != "InterpretedFunction":
        pytest.skip("the kernels were imported without TRITON_INTERPRET=1")
    return "cpu"


def correlated_metric(*shape, seed=0):
    """Random covariances whose eigenvalues span four orders of magnitude, float64."""
    return random_covariance(*shape, seed=seed, decay=10 ** (-4 / shape[-1]))


def random_rows(*shape, seed=0):
    """Rows of very different sizes, with a few outliers."""
    x = (
        torch.randn(*shape, generator=generator(seed))
        * torch.randn(*shape[:-1], 1, generator=generator(seed + 1)).exp()
    )
    return x * torch.where(torch.rand(x.shape, generator=generator(seed + 2)) > 0.98, 8.0, 1.0)


def total_loss(stored, x_rot, metric):
    """Sum of e M e^T over all rows, per head, relative to the size of each row."""
    x_rot = x_rot.double()
    error = (dequantize(*stored, dtype=torch.float64) - x_rot) / x_rot.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return ((error @ metric.double()) * error).sum((-1, -2))


def assert_agree(expected, got, x_rot, metric):
    """Scales within one step of fp16, codes but for rare rounding ties, and as good."""
    scale_steps = expected[1].view(torch.int16).int() - got[1].view(torch.int16).int()
    assert scale_steps.abs().max() <= 1
    assert (expected[0] == got[0]).float().mean() >= 0.99
    torch.testing.assert_close(
        total_loss(got, x_rot, metric), total_loss(expected, x_rot, metric), rtol=1e-3, atol=1e-12
    )


# ------------------------------------------------------------------------------------------------------ the reference
@pytest.mark.parametrize("dim,group_size", [(16, 16), (24, 8), (40, 20), (64, 32)])
def test_codes_of_a_plain_double_loop(dim, group_size):
    """Channel after channel, from the last to the first, each target less what the later errors ask of it."""
    x = random_rows(2, 5, dim).double()
    feedback = feedback_matrix(correlated_metric(2, dim, dim)).double()
    scale, minimum = choose_qparams(x, group_size, FEEDBACK, True, feedback)
    assert minimum is None and scale.dtype == torch.float16
    codes = feedback_codes(x, scale, feedback)
    for head in range(2):
        for row in range(5):
            errors = [0.0] * dim
            for k in reversed(range(dim)):
                target = float(x[head, row, k])
                for j in range(k + 1, dim):
                    target -= errors[j] * float(feedback[head, j, k])
                step = float(scale[head, row, k // group_size])
                code = min(3, max(0, int((target / step + 2) // 1)))
                errors[k] = step * (code - 1.5) - float(x[head, row, k])
                assert code == codes[head, row, k]


@pytest.mark.parametrize("per_head", [False, True])
def test_feedback_beats_plain_rounding_with_a_weighted_search(per_head):
    """In the measure of both, on rows of a strongly correlated metric, and by a lot."""
    dim = 64
    metric = correlated_metric(2, dim, dim) if per_head else correlated_metric(dim, dim)
    x = torch.randn(1, 2, 50, dim, dtype=torch.float64, generator=generator(5))
    fed = quantize_rows(x, dim, FEEDBACK, True, feedback_matrix(metric))
    searched = quantize_rows(x, dim, ScaleRule.parse("weighted_search"), True, metric)
    assert (total_loss(fed, x, metric) < 0.6 * total_loss(searched, x, metric)).all()


@pytest.mark.parametrize("dim,group_size", [(16, 16), (24, 8), (64, 32)])
def test_stored_rows_keep_their_product_with_the_row(dim, group_size):
    """In each group, or with feedback in the product of x (I + L); within half a step of fp16, where the bounds are not met."""
    x = torch.randn(2, 50, dim, dtype=torch.float64, generator=generator(1))
    groups = x.unflatten(-1, (-1, group_size))
    stored = dequantize(*quantize_rows(x[None], group_size, UNBIASED, True))[0].unflatten(-1, (-1, group_size))
    torch.testing.assert_close((groups * stored).sum(-1), groups.square().sum(-1), rtol=6e-4, atol=0)
    mixed = torch.eye(dim, dtype=torch.float64) + feedback_matrix(correlated_metric(2, dim, dim)).double()
    stored = quantize_rows(x[None], group_size, FEEDBACK, True, mixed - torch.eye(dim))
    y, z = x @ mixed, dequantize(*stored, dtype=torch.float64)[0] @ mixed
    step = choose_qparams(x[None], group_size, FEEDBACK, True, mixed - torch.eye(dim))[0][0].double()
    factor = (stored[1][0].double() / step)[..., 0]
    within = (factor > UNBIASED_RANGE[0] * 1.01) & (factor < UNBIASED_RANGE[1] * 0.99)
    assert within.float().mean() > 0.95
    torch.testing.assert_close((y * z).sum(-1)[within], y.square().sum(-1)[within], rtol=6e-4, atol=1e-9)


def test_sums_over_unbiased_rows_come_right():
    """What the least error leaves too short does not average out; this does."""
    x = torch.randn(1, 1, 4000, 64, dtype=torch.float64, generator=generator(3)) + 0.2
    off = {}
    for name in ("unbiased", "search"):
        mean = dequantize(*quantize_rows(x, 64, ScaleRule.parse(name), True), dtype=torch.float64).mean(2)
        off[name] = float((mean - x.mean(2)).norm() / x.mean(2).norm())
    assert off["unbiased"] < 0.5 * off["search"]


def test_rows_without_a_product_keep_their_scale():
    x = torch.tensor([[0.0] * 8, [1e-30] * 8, [1e30] * 8])
    scale, _ = choose_qparams(x, 8, UNBIASED, True)
    codes = quantize(x, scale, None)
    assert unbiased_scale(x, codes, scale).isfinite().all()
    assert torch.equal(unbiased_scale(x, codes, scale)[0], scale[0])
    with pytest.raises(ValueError, match="symmetric storage only"):
        choose_qparams(x, 8, UNBIASED)


def test_the_matrix_is_a_factor_of_the_metric():
    metric = correlated_metric(2, 24, 24)
    lower = feedback_matrix(metric).double() + torch.eye(24, dtype=torch.float64)
    middle = torch.linalg.solve_triangular(lower, metric, upper=False)
    middle = torch.linalg.solve_triangular(lower, middle.mT, upper=False)
    off_diagonal = middle - torch.diag_embed(middle.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-5 and torch.equal(lower, lower.tril())


def test_what_the_rule_refuses():
    x, identity = torch.zeros(1, 16), torch.zeros(16, 16)
    with pytest.raises(ValueError, match="needs the error metric"):
        choose_qparams(x, 8, FEEDBACK, True)
    with pytest.raises(ValueError, match="symmetric storage only"):
        choose_qparams(x, 8, FEEDBACK, False, identity)
    with pytest.raises(ValueError, match="symmetric storage only"):
        encode_plan(16, 8, False, FEEDBACK, True)


# -------------------------------------------------------------------------------------------------------- the kernels
@pytest.mark.parametrize(
    "head_dim,group_size,tokens,tile,per_head,dtype",
    [
        (64, 64, 33, "tile", True, torch.bfloat16),
        (64, 16, 5, "tile", False, torch.float32),
        (64, 8, 2, "one_token", True, torch.float16),
        (64, 64, 5, "one_token", False, torch.bfloat16),
        (128, 128, 33, "tile", False, torch.bfloat16),
        (128, 64, 1, "one_token", True, torch.float32),
        (128, 64, 5, "tile", True, torch.float16),
        (96, 96, 33, "tile", True, torch.float16),
        (96, 48, 2, "one_token", False, torch.bfloat16),
        (96, 12, 5, "tile", True, torch.float32),
        (256, 64, 1, "one_token", False, torch.bfloat16),
        (256, 128, 66, "tile", True, torch.bfloat16),
        (8, 8, 5, "tile", False, torch.float32),
        (80, 20, 2, "one_token", True, torch.float32),
    ],
)
def test_appended_rows(head_dim, group_size, tokens, tile, per_head, dtype, device, monkeypatch):
    """Paired and unpaired layouts, padded groups, groups shorter than a block of the kernel; nothing else changes."""
    force_tile(monkeypatch, tile)
    heads = 2 if tokens <= 5 else 1
    x = random_rows(1, heads, tokens, head_dim, seed=head_dim).to(dtype)
    transform = random_orthogonal(heads, head_dim, head_dim, seed=1).float() if per_head else None
    metric = correlated_metric(heads, head_dim, head_dim) if per_head else correlated_metric(head_dim, head_dim)
    rows = random_store(1, heads, head_dim, group_size, True, 80)
    expected, got = append_both(rows, START, x, transform, None, FEEDBACK, feedback_matrix(metric), device)
    assert_untouched_outside(rows, got, START, START + tokens)
    x_rot = x.float() if transform is None else x.float() @ transform
    stored = (side.read(START, START + tokens) for side in (expected, got))
    assert_agree(*stored, x_rot, metric)


@pytest.mark.parametrize(
    "head_dim,group_size,tokens,tile,dtype",
    [
        (64, 64, 33, "tile", torch.bfloat16),
        (64, 16, 2, "one_token", torch.float32),
        (128, 128, 33, "tile", torch.float16),
        (128, 64, 1, "one_token", torch.bfloat16),
        (96, 12, 5, "tile", torch.float32),
        (256, 128, 66, "tile", torch.bfloat16),
        (8, 8, 5, "tile", torch.float32),
        (80, 20, 2, "one_token", torch.float32),
    ],
)
def test_appended_unbiased_rows(head_dim, group_size, tokens, tile, dtype, device, monkeypatch):
    """As with feedback, without a metric."""
    force_tile(monkeypatch, tile)
    x = random_rows(1, 2, tokens, head_dim, seed=head_dim).to(dtype)
    transform = random_orthogonal(2, head_dim, head_dim, seed=1).float()
    rows = random_store(1, 2, head_dim, group_size, True, 80)
    expected, got = append_both(rows, START, x, transform, None, UNBIASED, None, device)
    assert_untouched_outside(rows, got, START, START + tokens)
    stored = (side.read(START, START + tokens) for side in (expected, got))
    assert_agree(*stored, x.float() @ transform, torch.eye(head_dim, dtype=torch.float64).expand(2, -1, -1))


@pytest.mark.parametrize("tile", ["one_token", "tile"])
def test_extreme_rows_stay_finite(tile, device, monkeypatch):
    """Zero, constant, huge, denormal and one-hot rows are those of the reference."""
    force_tile(monkeypatch, tile)
    head_dim = 64
    x = torch.stack([torch.full((head_dim,), value) for value in (0.0, -0.0, 1.5, 6e4, -6e4, 1e-41, -1e-7, 1e15)] * 2)
    x[8:, 5] = -x[8:, 5]
    x = torch.cat([x, torch.zeros(2, head_dim)])
    x[-1, 3], x[-2, 60] = 6e4, -65504.0
    # Every other row will do where each is a program of its own.
    x = x[:: 3 if tile == "one_token" else 1]
    feedback = feedback_matrix(correlated_metric(head_dim, head_dim))
    rows = random_store(1, 1, head_dim, 32, True)
    expected, got = append_both(rows, START, x[None, None], None, None, FEEDBACK, feedback, device)
    expected, got = (side.read(START, START + len(x)) for side in (expected, got))
    assert torch.equal(expected[1], got[1]) and (expected[0] == got[0]).float().mean() >= 0.99
    assert got[1].isfinite().all() and (got[1] > 0).all() and dequantize(*got).isfinite().all()


def test_a_transposed_matrix_and_a_missing_one(device):
    """L with any strides; none at all is an error before anything is launched."""
    x = random_rows(1, 2, 3, 32)
    feedback = feedback_matrix(correlated_metric(2, 32, 32))
    rows = random_store(1, 2, 32, 16, True)
    strided = feedback.mT.contiguous().mT
    plain = append_both(rows, START, x, None, None, FEEDBACK, feedback, device)[1]
    assert torch.equal(append_both(rows, START, x, None, None, FEEDBACK, strided, device)[1].codes, plain.codes)
    with pytest.raises(ValueError, match="needs the error metric"):
        append_rows_triton(side_of(rows, FEEDBACK), 0, x)


@pytest.mark.parametrize("dim,group_size,on_device", [(64, 64, True), (96, 48, False)])
def test_steps(dim, group_size, on_device, device):
    """Tokens that leave the window, one and several at once, are packed as by the reference."""
    sink, recent, ring = 2, 3, 6
    metric = correlated_metric(2, dim, dim)

    def side(rule, centered, seed):
        windows = {name: torch.zeros(1, 2, size, dim, device=device) for name, size in (("sink", sink), ("ring", ring))}
        constants = (
            random_orthogonal(2, dim, dim, seed=seed).float().to(device),
            torch.randn(2, dim, generator=generator(seed)).to(device) if centered else None,
            feedback_matrix(metric).to(device) if centered else None,
        )
        return side_of(PackedRows(1, 2, dim, group_size, True, device, 16), rule, *constants, **windows)

    pairs = [(side("feedback", True, 1), side("unbiased", False, 2))]
    pairs.append(copy.deepcopy(pairs[0]))
    places = (decode_step.place_tokens_reference, decode_step.place_tokens_triton)
    lengths = [
        torch.zeros(decode_step.COUNTERS, dtype=torch.int32, device=device) if on_device else (0, 0) for _ in places
    ]
    torch.manual_seed(0)
    seen = []
    for new in (3, 3, 1, 2, 1):
        tokens = [torch.randn(1, 2, new, dim).to(device) for _ in "kv"]
        seen.append(tokens[0])
        for i, place in enumerate(places):
            lengths[i] = place(*pairs[i], *tokens, lengths[i], recent, None, None)
    first, second = (tuple(x.tolist()) if on_device else x for x in lengths)
    assert first == second
    history = first[1]
    assert history == 5
    keys = pairs[0][0]
    x_rot = (torch.cat(seen, 2)[:, :, sink : sink + history] - keys.mean[:, None]) @ keys.transform
    expected, got = ([t if t is None else t.cpu() for t in pair[0].rows.read(0, history)] for pair in pairs)
    assert_agree(expected, got, x_rot.cpu(), metric)
    for name in ("sink", "ring"):
        assert torch.equal(getattr(pairs[0][0], name), getattr(pairs[1][0], name))
    values = [[t if t is None else t.cpu() for t in pair[1].rows.read(0, history)] for pair in pairs]
    assert (values[0][1].view(torch.int16).int() - values[1][1].view(torch.int16).int()).abs().max() <= 1
    assert (values[0][0] == values[1][0]).float().mean() >= 0.99


def test_the_step_kernel_refuses_feedback_for_values(monkeypatch):
    monkeypatch.setattr(decode_step, "launch_problem", lambda device: "")
    rows = PackedRows(1, 1, 16, 16, True, "cpu", 4)
    side = side_of(rows, FEEDBACK, metric=torch.zeros(16, 16), sink=torch.zeros(1, 1, 1, 16))
    assert "for keys only" in decode_step.place_problem(side, side)
    assert decode_step.place_problem(side, side_of(rows)) == ""

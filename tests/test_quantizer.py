"""The reference quantizer: the golden row, extreme rows, every scale rule, and properties over random rows."""

import pytest
import torch
from helpers import generator, random_covariance
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_hf.quantization import quantizer
from oscar_hf.quantization.quantizer import (
    FP16_MAX,
    ScaleRule,
    choose_qparams,
    clip_threshold,
    dequantize,
    quantize,
    quantize_rows,
)

GOLDEN = [0.5, -1, 2, -3, 0.25, 0.75, -0.5, 4, 1.5, -2.5, 0.1, -0.1, 0.9, -0.9, 3.5, -1.25]
GOLDEN_CODES = [2, 1, 3, 0, 2, 2, 1, 3, 2, 0, 2, 1, 2, 1, 3, 1]
RULES = [
    "percentile(none)", "percentile(0.96)", "percentile(0.5)", "percentile(1)", "search", "weighted_search",
    "weighted_search_both_ends",
]  # fmt: skip
SEARCHES = RULES[4:]
PLAIN = ScaleRule.parse("percentile(none)")


def rows_with_outliers(count=40, dim=32, seed=0):
    x = torch.randn(2, count, dim, dtype=torch.float64, generator=generator(seed))
    return x * torch.where(torch.rand(x.shape, generator=generator(seed + 1)) > 0.95, 6.0, 1.0)


def restored(x, group_size, rule, symmetric=False, metric=None):
    scale, minimum = choose_qparams(x, group_size, rule, symmetric, metric)
    codes = quantize(x, scale, minimum)
    return dequantize(codes, scale.double(), None if minimum is None else minimum.double()), scale


def test_golden_row():
    x, rule = torch.tensor([GOLDEN]), ScaleRule.parse("percentile(0.80)")
    assert clip_threshold(x, 0.80).tolist() == [[2.5]]
    scale, minimum = choose_qparams(x, 8, rule)
    assert scale.dtype == minimum.dtype == torch.float16
    assert scale.float().tolist() == [pytest.approx([5 / 3, 5 / 3], rel=1e-3)]
    assert minimum.tolist() == [[-2.5, -2.5]]
    codes = quantize(x, scale, minimum)
    assert codes.dtype == torch.uint8 and codes.tolist() == [GOLDEN_CODES]
    expected = [-2.5 + code * float(scale[0, 0]) for code in GOLDEN_CODES]
    assert dequantize(codes, scale, minimum).tolist() == [pytest.approx(expected)]


@pytest.mark.parametrize("clip,index", [(0.96, 15), (0.92, 14), (0.8, 12), (1.0, 15), (0.01, 0)])
def test_threshold_is_an_order_statistic_of_the_whole_row(clip, index):
    x = torch.tensor([GOLDEN])
    assert clip_threshold(x, clip).item() == sorted(abs(v) for v in x[0].tolist())[index]


EXTREMES = {
    "zero": torch.zeros(16),
    "constant": torch.full((16,), 3.7),
    "negative_constant": torch.full((16,), -0.02),
    "denormal": torch.linspace(-1e-40, 1e-40, 16),
    "fp16_denormal": torch.linspace(-3e-8, 5e-8, 16),
    "huge": torch.linspace(-6e4, 6e4, 16),
    "beyond_fp16": torch.linspace(-1e5, 1e5, 16),
    "beyond_fp16_constant": torch.full((16,), 1e5),
    "float32_max": torch.tensor([3e38, -3e38] * 8),
    "one_outlier": torch.tensor([0.0] * 15 + [6e4]),
}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_rows_stay_finite_and_in_range(name, rule, symmetric):
    x = EXTREMES[name][None]
    scale, minimum = choose_qparams(x, 8, ScaleRule.parse(rule), symmetric, torch.eye(16))
    assert torch.isfinite(scale).all() and (scale.float() >= 1e-6).all()
    assert (minimum is None) == symmetric and (symmetric or torch.isfinite(minimum).all())
    codes = quantize(x, scale, minimum)
    assert codes.max() <= 3
    back = dequantize(codes, scale, minimum)
    assert torch.isfinite(back).all()
    if not symmetric and name in ("zero", "constant", "negative_constant"):
        assert torch.allclose(back, x, rtol=1e-3, atol=2e-6)


def test_saturation_keeps_the_sign_and_the_largest_number():
    _, minimum = choose_qparams(torch.tensor([[1e5] * 8 + [-1e5] * 8]), 8, PLAIN)
    assert minimum.tolist() == [[FP16_MAX, -FP16_MAX]]


def test_symmetric_rows_have_a_scale_and_no_min():
    x = rows_with_outliers()
    scale, minimum = choose_qparams(x, 16, PLAIN, symmetric=True)
    assert minimum is None
    codes = quantize(x, scale, None)
    back = dequantize(codes, scale.double(), None)
    assert torch.equal(back, scale.double().repeat_interleave(16, -1) * (codes.double() - 1.5))
    # The ends of the range are +-the largest magnitude, so the error inside it is at most half a step.
    step = scale.double().repeat_interleave(16, -1)
    assert ((back - x).abs() <= step * 0.502).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_search_is_never_worse_than_min_max(symmetric):
    x, squared = rows_with_outliers(), {}
    for name in ("percentile(none)", "search"):
        back, _ = restored(x, 16, ScaleRule.parse(name), symmetric)
        squared[name] = (back - x).unflatten(-1, (-1, 16)).square().sum(-1)
    assert (squared["search"] <= squared["percentile(none)"] * (1 + 1e-12)).all()
    assert squared["search"].sum() < 0.95 * squared["percentile(none)"].sum(), "and better over all"


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_weighted_searches_are_never_worse_in_their_own_measure(symmetric, per_head):
    x, dim, losses = rows_with_outliers(), 32, {}
    metric = random_covariance(2, dim, dim) if per_head else random_covariance(dim, dim)
    for name in ("percentile(none)", "weighted_search", "weighted_search_both_ends"):
        error = restored(x, 16, ScaleRule.parse(name), symmetric, metric)[0] - x
        losses[name] = ((error @ metric) * error).sum(-1)
    for name in SEARCHES[1:]:
        assert (losses[name] <= losses["percentile(none)"] * (1 + 1e-12)).all()
        assert losses[name].sum() < 0.95 * losses["percentile(none)"].sum()


def test_weighted_search_with_the_identity_minimises_the_squared_error_of_the_row():
    x = rows_with_outliers()
    back, _ = restored(x, 32, ScaleRule.parse("weighted_search"), metric=torch.eye(32, dtype=torch.float64))
    plain, _ = restored(x, 32, ScaleRule.parse("search"))
    # With one group per row, both rules choose one factor for the same error.
    assert torch.equal(back, plain)


def test_a_weighted_search_needs_its_metric():
    with pytest.raises(ValueError, match="needs the error metric"):
        choose_qparams(torch.zeros(1, 16), 8, ScaleRule.parse("weighted_search"))


def test_parsed_rules():
    assert ScaleRule.parse("percentile(0.96)") == ScaleRule(clip=0.96)
    assert ScaleRule.parse("percentile( .5 )") == ScaleRule(clip=0.5)
    assert ScaleRule.parse("percentile(None)") == ScaleRule.parse("percentile(0)") == ScaleRule()
    assert ScaleRule.parse("search") == ScaleRule(search=True)
    assert ScaleRule.parse("weighted_search_both_ends") == ScaleRule(search=True, weighted=True, both_ends=True)
    assert len(ScaleRule.parse("weighted_search_both_ends").factors()) == 16
    assert ScaleRule.parse("search").factors()[0] == (1.0, 1.0)


@pytest.mark.parametrize(
    "name", ["", "minmax", "percentile", "percentile()", "percentile(1.1)", "percentile(-1)", "percentile(0.9.6)",
             "percentile(nan)", "percentile(.)", "Search", " search", "percentile(0.9) ", 0.96, None, ["search"]],
)  # fmt: skip
def test_unknown_rules_are_refused_with_the_allowed_ones(name):
    with pytest.raises(ValueError, match="unknown scale rule") as caught:
        ScaleRule.parse(name)
    assert repr(name) in str(caught.value) and "percentile(c)" in str(caught.value)


@pytest.mark.parametrize("group_size", [0, -8, 3, 32])
def test_groups_must_divide_the_row(group_size):
    with pytest.raises(ValueError, match=f"got group_size {group_size} for head dim 16"):
        choose_qparams(torch.zeros(1, 16), group_size, PLAIN)


@pytest.mark.parametrize("dim,group_size", [(64, 32), (80, 16), (96, 96), (192, 64), (256, 128)])
def test_groups_are_neighboring_channels(dim, group_size):
    x = torch.randn(3, dim, dtype=torch.float64, generator=generator())
    back, scale = restored(x, group_size, PLAIN)
    assert scale.shape == (3, dim // group_size)
    for group in range(dim // group_size):
        part = slice(group * group_size, (group + 1) * group_size)
        assert torch.equal(back[:, part], restored(x[:, part], group_size, PLAIN)[0])


@pytest.mark.parametrize("rule", RULES)
def test_slices_of_a_long_prompt_give_the_same_rows(rule, monkeypatch):
    x = torch.randn(2, 2, 9, 16, generator=generator())
    metric = random_covariance(2, 16, 16).float()
    whole = quantize_rows(x, 8, ScaleRule.parse(rule), metric=metric)
    monkeypatch.setattr(quantizer, "_SEARCH_ELEMENTS", 2 * 2 * 16 * 2)
    for one, other in zip(whole, quantize_rows(x, 8, ScaleRule.parse(rule), metric=metric)):
        assert torch.equal(one, other)
    codes, scale, minimum = quantize_rows(x[:, :, :0], 8, PLAIN)
    assert codes.shape == (2, 2, 0, 16) and scale.shape == minimum.shape == (2, 2, 0, 2)


FLOATS = st.one_of(st.floats(-7e4, 7e4, width=32), st.floats(-2, 2, width=32), st.sampled_from([0.0, 6e4, -6e4, 1e-40]))
ROWS = st.lists(FLOATS, min_size=16, max_size=16)


@settings(max_examples=80, deadline=None)
@given(row=ROWS, rule=st.sampled_from(RULES), symmetric=st.booleans(), group_size=st.sampled_from([4, 8, 16]))
def test_error_inside_the_range_is_at_most_half_a_step(row, rule, symmetric, group_size):
    x = torch.tensor([row], dtype=torch.float64)
    scale, minimum = choose_qparams(x, group_size, ScaleRule.parse(rule), symmetric, torch.eye(16, dtype=torch.float64))
    assert torch.isfinite(scale).all() and (minimum is None or torch.isfinite(minimum).all())
    codes = quantize(x, scale, minimum)
    assert codes.max() <= 3
    step = scale.double().repeat_interleave(group_size, -1)
    low = step * -1.5 if minimum is None else minimum.double().repeat_interleave(group_size, -1)
    back = dequantize(codes, scale.double(), None if minimum is None else minimum.double())
    inside = (x >= low) & (x <= low + 3 * step)
    assert ((back - x).abs() <= step / 2 * (1 + 1e-9))[inside].all()
    # Outside of it the nearer end is taken.
    assert (codes[x < low] == 0).all() and (codes[x > low + 3 * step] == 3).all()


@settings(max_examples=40, deadline=None)
@given(row=ROWS)
def test_the_min_max_range_covers_the_row_up_to_fp16_rounding(row):
    x = torch.tensor([row], dtype=torch.float64).clamp(-FP16_MAX, FP16_MAX)
    back, scale = restored(x, 16, PLAIN)
    assert ((back - x).abs() <= scale.double() / 2 + 2**-11 * (x.abs().max() + 3 * scale.double()) + 1e-6).all()

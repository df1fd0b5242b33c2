"""Reference quantizer in plain PyTorch: the specification that every kernel is tested against.

Three pure functions apart from storage: `choose_qparams` picks scale and min, `quantize` makes codes 0..3, `dequantize`
reads them back. A row is one rotated key or value of one token and KV head, [D]; a group is `group_size` neighboring
channels of a row that share one scale and one min.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CODE = 3
SCALE_FLOOR = 1e-6
FP16_MAX = 65504.0
SHRINK_FACTORS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52)
END_SHRINK_FACTORS = (1.0, 0.85, 0.7, 0.55)
# Scale over root mean square of a group by which codes are made, with error feedback and without: what was best of the factors
# tried on real models. (A Gaussian's least squared error is at 0.996; feedback spreads the errors, so that rows reach further.)
FEEDBACK_SCALE, UNBIASED_SCALE = 1.1, 1.1
# How far the stored scale may be from that one.
UNBIASED_RANGE = (0.5, 2.0)
# Channels whose codes are made in turn before their errors go to all others at once.
FEEDBACK_CHANNELS = 16
# Candidates x row elements that a search holds at once; bounds the memory of a long prefill.
_SEARCH_ELEMENTS = 1 << 24

_PERCENTILE = re.compile(r"percentile\(\s*(none|[0-9.]+)\s*\)", re.IGNORECASE)


@dataclass(frozen=True)
class ScaleRule:
    """How the range of a row is chosen.

    clip: fraction c of `percentile(c)`, or None for the plain min-max range.
    search: try shrunken ranges and keep the least error. weighted: measure that error as e M e^T with the metric M of
    the artifact, one factor for the whole row. both_ends: shrink the two ends of the range apart.
    unbiased: no range at all, symmetric; codes are made with UNBIASED_SCALE times the root mean square of the group, and the scale
    is stored that makes a row's product with itself right, see `unbiased_scale`.
    feedback: the same with FEEDBACK_SCALE and codes that are made one channel after the other, each making good for the errors of
    those before, see `feedback_codes`; products are those of the metric.
    """

    clip: float | None = None
    search: bool = False
    weighted: bool = False
    both_ends: bool = False
    feedback: bool = False
    unbiased: bool = False

    NAMES = (
        "percentile(c) with 0 < c <= 1, percentile(none), unbiased, search, weighted_search, weighted_search_both_ends, "
        "feedback"
    )

    @property
    def needs_symmetric(self) -> bool:
        """Whether the rule stores no minimum."""
        return self.feedback or self.unbiased

    @property
    def needs_metric(self) -> bool:
        """Whether rows cannot be quantized without the metric of a side."""
        return self.weighted or self.feedback

    @classmethod
    def parse(cls, name: str) -> "ScaleRule":
        """Read the name used in OscarConfig. Raises ValueError that lists the allowed names."""
        if name == "search":
            return cls(search=True)
        if name == "weighted_search":
            return cls(search=True, weighted=True)
        if name == "weighted_search_both_ends":
            return cls(search=True, weighted=True, both_ends=True)
        if name == "feedback":
            return cls(feedback=True)
        if name == "unbiased":
            return cls(unbiased=True)
        match = _PERCENTILE.fullmatch(name) if isinstance(name, str) else None
        if match:
            if match[1].lower() == "none":
                return cls()
            try:
                clip = float(match[1])
            except ValueError:
                clip = -1.0
            if clip == 0:
                return cls()
            if 0 < clip <= 1:
                return cls(clip=clip)
        raise ValueError(f"unknown scale rule {name!r}: use one of {cls.NAMES}")

    def factors(self) -> list[tuple[float, float]]:
        """The (lower end, upper end) shrink factors that the search tries, the unshrunken range first."""
        if self.both_ends:
            return [(low, high) for low in END_SHRINK_FACTORS for high in END_SHRINK_FACTORS]
        return [(factor, factor) for factor in SHRINK_FACTORS]


def round_to_fp16(x: Tensor) -> Tensor:
    """Value of x once stored in fp16, saturating instead of overflowing; same dtype as x."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(x.dtype)


def clip_threshold(x: Tensor, clip: float) -> Tensor:
    """Per-row threshold [..., 1]: the ascending order statistic min(int(clip * D), D - 1) of |x| over the whole row."""
    dim = x.shape[-1]
    index = min(int(clip * dim), dim - 1)
    return x.abs().sort(-1).values[..., index : index + 1]


def _grouped(x: Tensor, group_size: int) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // group_size, group_size))


def check_group_size(dim: int, group_size: int) -> None:
    """Raise ValueError unless group_size divides dim."""
    if group_size < 1 or dim % group_size:
        raise ValueError(f"group_size must divide the head dim: got group_size {group_size} for head dim {dim}")


def choose_qparams(
    x: Tensor, group_size: int, rule: ScaleRule, symmetric: bool = False, metric: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Choose scale and min of each group, by which codes are made.

    x: rotated rows, float32 or float64 [..., D]. metric: [D, D], or [H, D, D] matching dim -3 of x; M for a weighted rule,
    its `feedback_matrix` for feedback.
    Returns fp16 (scale, min), each [..., D / group_size]; min is None when symmetric, where a code c
    stands for scale * (c - 1.5). Both saturate in fp16 and scale is at least 1e-6, so a constant, zero, huge or
    denormal row stays finite. What is stored is the same except for unbiased rules, see `unbiased_scale`.
    """
    check_group_size(x.shape[-1], group_size)
    if rule.needs_metric and metric is None:
        raise ValueError("this scale rule needs the error metric of the keys: got none")
    if rule.needs_symmetric:
        if not symmetric:
            name = "feedback" if rule.feedback else "unbiased"
            raise ValueError(f"the scale rule {name} is for symmetric storage only")
        rms = _grouped(x, group_size).square().mean(-1).sqrt()
        factor = FEEDBACK_SCALE if rule.feedback else UNBIASED_SCALE
        return round_to_fp16((factor * rms).clamp(min=SCALE_FLOOR)).to(torch.float16), None
    if rule.clip is not None:
        threshold = clip_threshold(x, rule.clip)
        x = x.clamp(-threshold, threshold)
    groups = _grouped(x, group_size)
    if symmetric:
        high = groups.abs().amax(-1)
        low = -high
    else:
        low, high = groups.amin(-1), groups.amax(-1)
    if rule.search:
        scale, low = _search(x, low, high, group_size, rule, symmetric, metric)
    else:
        scale, low = _qparams_of_range(low, high, symmetric)
    return scale.to(torch.float16), None if symmetric else low.to(torch.float16)


def _qparams_of_range(low: Tensor, high: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and min of a range, already rounded to what fp16 will hold."""
    scale = round_to_fp16(((high - low) / MAX_CODE).clamp(min=SCALE_FLOOR))
    return scale, scale * -1.5 if symmetric else round_to_fp16(low)


def _search(x, low, high, group_size, rule, symmetric, metric):
    """Least-error range among the shrunken ones; a strictly smaller error wins, so ties keep the wider range."""
    factors = torch.tensor(rule.factors(), dtype=x.dtype, device=x.device)
    factors = factors.view(-1, 2, *[1] * low.dim())
    middle, best = (low + high) / 2, None
    # Candidates are tried side by side as far as memory allows: a single token then costs one pass, not one per candidate.
    for part in factors.split(max(1, _SEARCH_ELEMENTS // 4 // max(1, x.numel()))):
        scale, candidate = _qparams_of_range(
            middle + (low - middle) * part[:, 0], middle + (high - middle) * part[:, 1], symmetric
        )
        error = dequantize(quantize(x, scale, candidate), scale, candidate) - x
        if rule.weighted:
            # The metric couples all channels of a row, so one factor is chosen for the whole row.
            loss = ((error @ metric.to(error.dtype)) * error).sum(-1, keepdim=True).expand_as(scale)
        else:
            loss = _grouped(error, group_size).square().sum(-1)
        winner = loss.argmin(0, keepdim=True)
        found = [t.gather(0, winner)[0] for t in (loss, scale, candidate)]
        if best is None:
            best = found
        else:
            better = found[0] < best[0]
            best = [torch.where(better, new, old) for new, old in zip(found, best)]
    return best[1], best[2]


def _minimum(scale: Tensor, minimum: Tensor | None) -> Tensor:
    return scale * -1.5 if minimum is None else minimum


def quantize(x: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    """Codes uint8 [..., D]: floor((x - min) / scale + 0.5) clamped to 0..3.

    x float32 or float64 [..., D]; scale and min [..., D / group_size] as `choose_qparams` returns them. min None means
    symmetric. Clamping the codes is the same as clamping x to the range first.
    """
    group_size = x.shape[-1] // scale.shape[-1]
    scale = scale.to(x.dtype)
    low = _minimum(scale, None if minimum is None else minimum.to(x.dtype))
    codes = ((_grouped(x, group_size) - low[..., None]) / scale[..., None] + 0.5).floor().clamp(0, MAX_CODE)
    return codes.flatten(-2).to(torch.uint8)


def feedback_matrix(metric: Tensor) -> Tensor:
    """L of an error metric M = (I + L) D (I + L)^T [..., D, D] with L strictly lower triangular, float32: what `feedback_codes`
    takes. M must be symmetric positive semidefinite; a ridge of 1e-6 of its mean diagonal keeps the factor finite."""
    metric = (metric + metric.mT).double() / 2
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    eye = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    factor = torch.linalg.cholesky_ex(metric + 1e-6 * mean * eye)[0]
    return (factor / factor.diagonal(dim1=-2, dim2=-1)[..., None, :]).tril(-1).float()


def feedback_codes(x: Tensor, scale: Tensor, feedback: Tensor) -> Tensor:
    """Codes uint8 [..., D] of rotated rows x [..., D], symmetric, made with error feedback.

    feedback: L of `feedback_matrix`, [D, D], or [H, D, D] matching dim -3 of x. With e = dequantized - x the loss e M e^T is
    sum_k d_k (e_k + sum_{j > k} e_j L[j, k])^2. From the last channel to the first, each is quantized to bring its own term
    nearest to 0: its target is x_k - sum_{j > k} e_j L[j, k] (the LDLQ of QuIP, arXiv 2307.13304, on rows of keys). Channels
    go in blocks of FEEDBACK_CHANNELS: what the blocks behind did to a block is one product.
    """
    dim = x.shape[-1]
    feedback, scale = feedback.to(x.dtype), scale.to(x.dtype).repeat_interleave(dim // scale.shape[-1], -1)
    errors, codes = torch.zeros_like(x), torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for begin in range((dim - 1) // FEEDBACK_CHANNELS * FEEDBACK_CHANNELS, -1, -FEEDBACK_CHANNELS):
        end = min(begin + FEEDBACK_CHANNELS, dim)
        target = x[..., begin:end] - errors[..., end:] @ feedback[..., end:, begin:end]
        within = feedback[..., begin:end, begin:end]
        for k in range(end - begin - 1, -1, -1):
            step = scale[..., begin + k]
            code = ((target[..., k] + 1.5 * step) / step + 0.5).floor().clamp(0, MAX_CODE)
            errors[..., begin + k] = error = step * (code - 1.5) - x[..., begin + k]
            codes[..., begin + k] = code.to(torch.uint8)
            # Only channels before k have entries in row k of the strictly lower matrix.
            target = target - error[..., None] * within[..., k, :][..., None, :]
    return codes


def unbiased_scale(x: Tensor, codes: Tensor, scale: Tensor, feedback: Tensor | None = None) -> Tensor:
    """Scale fp16 [..., D / group_size] to store for rotated rows x [..., D], symmetric, in place of the `scale` of their codes.

    Codes of the least error are too short along the row: <x^, x> < <x, x>. In a sum over tokens, or in a score, that does not
    average out as other errors do. So the scale is multiplied by <x, x> / <x^, x>, the estimator of RaBitQ (arXiv 2405.12497):
    of each group, or with feedback of each row, in the product y . y' of y = x (I + L), near the metric's. The factor is held
    within UNBIASED_RANGE.
    """
    wide = scale.to(x.dtype)
    rows = (wide[..., None] * (_grouped(codes, x.shape[-1] // scale.shape[-1]).to(x.dtype) - 1.5)).flatten(-2)
    if feedback is None:
        x, rows = (_grouped(t, x.shape[-1] // scale.shape[-1]) for t in (x, rows))
    else:
        feedback = feedback.to(x.dtype)
        # One factor for all groups of a row.
        x, rows = ((t + t @ feedback)[..., None, :] for t in (x, rows))
    own, shared = x.square().sum(-1), (x * rows).sum(-1)
    # What is zero, or too small or large for its square, keeps its scale.
    factor = torch.where((shared > 0) & own.isfinite(), own / shared, 1).clamp(*UNBIASED_RANGE)
    return round_to_fp16((wide * factor).clamp(min=SCALE_FLOOR)).to(torch.float16)


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """min + scale * code, [..., D], computed in `dtype` (default: float32, or the dtype of scale if it is wider)."""
    dtype = dtype or torch.promote_types(scale.dtype, torch.float32)
    scale = scale.to(dtype)
    low = _minimum(scale, None if minimum is None else minimum.to(dtype))
    group_size = codes.shape[-1] // scale.shape[-1]
    return (low[..., None] + scale[..., None] * _grouped(codes, group_size).to(dtype)).flatten(-2)


def quantize_rows(
    x: Tensor, group_size: int, rule: ScaleRule, symmetric: bool = False, metric: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`choose_qparams` and `quantize` of rotated rows [B, H, T, D], in slices of T that bound the memory of a search."""
    rows = max(1, _SEARCH_ELEMENTS // max(1, x.shape[0] * x.shape[1] * x.shape[3]))
    parts = []
    for piece in x.split(rows, dim=2) if x.shape[2] else (x,):
        scale, minimum = choose_qparams(piece, group_size, rule, symmetric, metric)
        codes = feedback_codes(piece, scale, metric) if rule.feedback else quantize(piece, scale, minimum)
        if rule.needs_symmetric:
            scale = unbiased_scale(piece, codes, scale, metric if rule.feedback else None)
        parts.append((codes, scale, minimum))
    codes, scale, minimum = zip(*parts)
    return torch.cat(codes, 2), torch.cat(scale, 2), None if symmetric else torch.cat(minimum, 2)

"""What a store learns from the first tokens of its sequence, where its artifact does not say it: how keys spread, and what an
error of a key costs.

Queries are seen while nothing is packed yet; keys are those that are exact when the first ones are to be packed. Both are sampled
over the whole prompt, so that a long one costs no more than a few thousand tokens.
"""

import functools

import torch
from torch import Tensor

from ..artifact.config import OscarConfig
from ..artifact.layer_constants import LayerConstants
from ..quantization.quantizer import feedback_matrix
from ..quantization.rotation import hadamard, whitening_transform

# Tokens of a row whose keys, and as many whose queries, are looked at.
SAMPLE_TOKENS = 4096
# Shares of the mean variance that are added to all directions: of keys, and of queries. Few tokens know few directions.
KEY_RIDGE, QUERY_RIDGE = 0.3, 0.1


def is_needed(config: OscarConfig, constants: LayerConstants) -> bool:
    """Whether a layer with these constants has to learn something from its sequence."""
    learns_metric = config.key_rule.needs_metric and constants.key_metric is None
    return config.key_transform == "whitened" or learns_metric


class PromptStatistics:
    """Query moments of one layer, float32 [H, D, D], and the constants that follow from them and from keys.

    base: the constants that the artifact gives. Rows of a batch are one sample.
    """

    def __init__(self, config: OscarConfig, base: LayerConstants, heads: int):
        self.config, self.base, self.heads = config, base, heads
        self.forget()

    def forget(self) -> None:
        """A new sequence begins."""
        self.query_moment: Tensor | None = None
        self.queries = 0

    def __deepcopy__(self, memo):
        copied = PromptStatistics(self.config, self.base, self.heads)
        copied.query_moment, copied.queries = self.query_moment, self.queries
        return copied

    @torch.no_grad()
    def see(self, query: Tensor, first: int, starts: list[int]) -> None:
        """Take queries [B, Hq, M, D] of slots `first`.. in; those of the sink only where there are few others, and none of padding.

        starts: first real slot of each row, empty for none. A query of one token may come as [B, H, g, D].
        """
        batch, heads, count, _ = query.shape
        group = heads // self.heads
        query = query.unflatten(1, (self.heads, group))
        skip = max(0, min(self.config.sink_tokens - first, count // 2))
        picks = _spread(count - skip, max(64, SAMPLE_TOKENS // batch), query.device) + skip
        if len(picks) < count:
            query = query.index_select(3, picks)
        query = query.float()
        if starts and max(starts) > first + skip:
            begins = torch.tensor(starts, device=query.device)
            real = first + picks >= begins[:, None]
            query = query * real[:, None, None, :, None]
            seen = int(sum(max(0, first + count - start) > 0 for start in starts))
        else:
            seen = batch
        rows = query.flatten(2, 3)
        moment = (rows.mT @ rows).sum(0)
        # Rows of padding alone tell nothing; how many tokens the others have is only a weight.
        weight = min(len(picks), SAMPLE_TOKENS) * seen * group
        if not weight:
            return
        self.query_moment = moment if self.query_moment is None else self.query_moment + moment
        self.queries += weight

    @torch.no_grad()
    def constants(self, keys: Tensor, hidden: list[int]) -> LayerConstants:
        """Constants of the layer, on the device of keys [B, H, T, D]: the exact keys of history tokens 0.. on.

        hidden: per row, history tokens that are padding; empty for none.
        """
        config, base = self.config, self.base
        transform, inverse = base.key_transform, base.key_inverse
        if config.key_transform == "whitened":
            covariance, tokens = self._spread_of(keys, hidden)
            # Fewer tokens than a few times the dimensions know too little of most of them.
            ridge = KEY_RIDGE + keys.shape[3] / (4 * max(tokens, 1))
            transform, inverse = whitening_transform(covariance, ridge, _mix(keys.shape[3], keys.device))
        transform, inverse = (x.double().expand(self.heads, -1, -1) for x in (transform, inverse))
        metric = base.key_metric
        if config.key_rule.needs_metric and (metric is None or config.key_transform == "whitened"):
            metric = self._metric(inverse)
            if config.key_rule.feedback:
                metric = feedback_matrix(metric)
        return LayerConstants(
            key_transform=transform.float().contiguous(),
            key_inverse=inverse.float().contiguous(),
            value_transform=base.value_transform,
            value_inverse=base.value_inverse,
            key_mean=base.key_mean,
            key_metric=None if metric is None else metric.float().contiguous(),
        )

    def placeholder(self) -> LayerConstants:
        """Constants of the shapes that `constants` gives, for as long as nothing is known."""
        base = self.base
        return self.constants(base.key_transform.new_zeros(1, self.heads, 1, base.key_dim), [])

    def _metric(self, inverse: Tensor) -> Tensor:
        """A^-1 C_Q A^-T with a mean diagonal of 1, float64; C_Q is the identity where no query was seen."""
        dim = inverse.shape[-1]
        spread = torch.eye(dim, dtype=torch.float64, device=inverse.device).expand(self.heads, -1, -1)
        if self.query_moment is not None:
            seen = self.query_moment.to(inverse)
            mean = seen.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            ridge = QUERY_RIDGE + dim / (4 * self.queries)
            spread = torch.where(mean > 0, seen / mean.clamp(min=1e-300), 0) + ridge * spread
        metric = inverse @ spread @ inverse.mT
        return metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-300)

    def _spread_of(self, keys: Tensor, hidden: list[int]) -> tuple[Tensor, int]:
        """Mean outer product of keys less their block's mean, [H, D, D] float32, and the tokens that it is of."""
        batch, _, count, _ = keys.shape
        block = self.config.center_block
        if not block:
            # Keys that are not centered, or centered by a mean of the artifact.
            picks = _spread(count, max(64, SAMPLE_TOKENS // batch), keys.device)
            sample = keys.index_select(2, picks).float()
            if self.config.key_center == "mean":
                sample = sample - self.base.key_mean[:, None]
            real = _real(picks, hidden)
            blocks = None
        else:
            whole = max(1, count // block)
            size = min(block, count)
            blocks = keys[:, :, : whole * size].unflatten(2, (whole, size))
            picked = _spread(whole, max(1, SAMPLE_TOKENS // (batch * size)), keys.device)
            blocks = blocks.index_select(2, picked).float()
            real = _real(picked[:, None] * size + torch.arange(size, device=keys.device), hidden)
            if real is None:
                sample = (blocks - blocks.mean(3, keepdim=True)).flatten(2, 3)
            else:
                seen = real[:, None, ..., None]
                mean = (blocks * seen).sum(3, keepdim=True) / seen.sum(3, keepdim=True).clamp(min=1)
                sample, real = (blocks - mean).flatten(2, 3), real.flatten(1)
        if real is not None:
            sample = torch.where(real[:, None, :, None], sample, 0)
        total = sample.shape[0] * sample.shape[2]
        return (sample.mT @ sample).sum(0) / total, total


@functools.lru_cache(maxsize=32)
def _mix(dim: int, device: torch.device) -> Tensor:
    """A Hadamard matrix on a device: copying it there for every layer would wait for the device."""
    with torch.inference_mode(False):
        return hadamard(dim).to(device)


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of the numbers 0..count-1, evenly spread."""
    if count <= most:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, most, device=device, dtype=torch.float64).long()


def _real(history: Tensor, hidden: list[int]) -> Tensor | None:
    """Which history tokens are not padding, bool [B, *history.shape]; None where all are."""
    if not any(hidden):
        return None
    count = torch.tensor(hidden, device=history.device)
    return history >= count.view(-1, *[1] * history.dim())

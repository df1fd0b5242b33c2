"""CallView: what one call sees of a layer, between `update` and the attention output."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CacheStateError
from .packed import attend, exact_attention, packed_scores, packed_weighted_sum

if TYPE_CHECKING:
    from ..cache.layer import OscarLayer


class CallView:
    """One call's view of a layer: what the two handles of an update refer to.

    Of the first call of a sequence it holds the exact keys and values, so that attention over a prompt is exact even after
    the layer has packed them. Later views read the layer and become stale with its next update.
    """

    def __init__(self, layer: "OscarLayer", keys: Tensor, values: Tensor, is_first: bool):
        self.layer, self.version = layer, layer.version
        self.exact = (keys, values) if is_first else None
        # What is stored never has a gradient; the call's own tokens keep theirs for as long as the view lives.
        needs_grad = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        self.live = (keys, values) if needs_grad else None
        self.kv_heads, self.new_tokens = keys.shape[1:3]
        self.dtype, self.device = keys.dtype, keys.device

    @property
    def dense_is_free(self) -> bool:
        """Whether `dense` returns what is there already."""
        return self.exact is not None

    def _check_fresh(self) -> None:
        if self.version != self.layer.version:
            raise CacheStateError(
                "these keys and values belong to an earlier update of the cache: use the ones that the last update returned"
            )

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Let the layer learn from a mask or from attention weights where the rows of a padded batch begin."""
        if weights is None:
            self.layer.observe_mask(self, mask)
        else:
            self.layer.observe_weights(self, weights)

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, repeat: int) -> Tensor:
        """Attention output [B, Hq, M, Dv] in the query's dtype; arguments as in scaled_dot_product_attention."""
        if self.exact is not None:
            return exact_attention(query, *self.exact, mask, is_causal, scale, repeat)
        self._check_fresh()
        return attend(self.layer, query, mask, is_causal, scale, self.new_tokens)

    def scores(self, query: Tensor) -> Tensor:
        """query k^T of eager attention, [B, Hq, M, T], unscaled."""
        if self.exact is not None:
            return torch.matmul(query, repeat_heads(self.exact[0], query.shape[1]).transpose(2, 3))
        self._check_fresh()
        return packed_scores(self.layer, query)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """weights v of eager attention, [B, Hq, M, Dv]."""
        if self.exact is not None:
            return torch.matmul(weights, repeat_heads(self.exact[1], weights.shape[1]))
        self._check_fresh()
        return packed_weighted_sum(self.layer, weights)

    def dense(self, kind: str) -> Tensor:
        """Dense keys ("k") or values ("v"), [B, H, T, D]."""
        if self.exact is not None:
            return self.exact[kind == "v"]
        self._check_fresh()
        dense = self.layer.dense(kind).to(self.dtype)
        if self.live is None:
            return dense
        return torch.cat([dense[:, :, : dense.shape[2] - self.new_tokens], self.live[kind == "v"]], 2)


class DenseView:
    """Base of views that attend to the keys and values of one call as they are, to look at them on the way."""

    dense_is_free = True
    live = None

    def __init__(self, layer, keys: Tensor, values: Tensor):
        self.layer, self.keys, self.values = layer, keys, values
        self.kv_heads, self.dtype, self.device = keys.shape[1], keys.dtype, keys.device

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Masks and weights tell such a view nothing."""


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, H, T, D] with each KV head repeated until there are `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)

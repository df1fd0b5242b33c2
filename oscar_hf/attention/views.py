"""Views: what one call sees of a layer, between `update` and the attention output. The handles of `kv_handle` refer to them."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CacheStateError
from ..kernels.decode_step import LENGTH
from ..masks import MaskMemory, first_visible, first_visible_of_weights, sees_own, shows_any_before
from ..storage.layer_store import LayerStore
from ..storage.static_store import StaticStore
from . import static_ops
from .dispatch import attend, one_row_per_token
from .packed import exact_attention, packed_scores, packed_weighted_sum


class AttentionView(Protocol):
    """What a handle asks of the call that it belongs to. Tensors are [B, H, T, D]; kind is "k" or "v".

    dense_is_free: whether `dense` gives what is there already. live: keys and values of the call with their gradient, or None.
    """

    kv_heads: int
    dtype: torch.dtype
    device: torch.device
    dense_is_free: bool
    live: tuple[Tensor, Tensor] | None

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """See the mask of the call, or the softmax weights of eager attention."""

    def see_queries(self, query: Tensor) -> None:
        """The queries of the call, [B, Hq, M, D], pass by, however attention is computed."""

    def ask(self, mask: Tensor, question: Hashable, answer: Callable[[], Any]) -> Any:
        """What `answer` says of a mask, asked once for all layers, see masks.MaskMemory."""

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, repeat: int) -> Tensor:
        """Attention output [B, Hq, M, Dv] in the query's dtype; arguments as in scaled_dot_product_attention."""

    def scores(self, query: Tensor) -> Tensor:
        """query k^T of eager attention, [B, Hq, M, T], unscaled."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """weights v of eager attention, [B, Hq, M, Dv]."""

    def dense(self, kind: str) -> Tensor:
        """Dense keys or values."""


class _StoreView:
    """What the views of a store have in common."""

    def __init__(self, store: LayerStore, masks: MaskMemory, layer: int, keys: Tensor, values: Tensor):
        self.store, self.masks, self.layer = store, masks, layer
        self.kv_heads, self.new_tokens = keys.shape[1:3]
        self.dtype, self.device = keys.dtype, keys.device
        # What is stored never has a gradient; a call's own tokens keep theirs for as long as its view lives.
        needs_grad = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        self.live = (keys, values) if needs_grad else None

    def ask(self, mask: Tensor, question: Hashable, answer: Callable[[], Any]) -> Any:
        """See AttentionView."""
        return self.masks.ask(self.layer, mask, question, answer)


class CallView(_StoreView):
    """One call's view of a store: an AttentionView.

    Of the first call of a sequence it holds the exact keys and values, so that attention over a prompt is exact even after
    the store has packed them. Later views read the store and become stale with its next update.
    """

    def __init__(self, store: LayerStore, masks: MaskMemory, layer: int, keys: Tensor, values: Tensor):
        super().__init__(store, masks, layer, keys, values)
        self.exact = None if store.held else (keys, values)
        # Queries that came before the mask, as in eager attention, which shows its weights last.
        self.is_observed, self.early_queries = False, []

    def open(self) -> None:
        """The store has taken the call's tokens: what it holds now is what this view is of."""
        self.version = self.store.version

    @property
    def dense_is_free(self) -> bool:
        """Whether `dense` returns what is there already."""
        return self.exact is not None

    def _check_fresh(self) -> None:
        if self.version != self.store.version:
            raise CacheStateError(
                "these keys and values belong to an earlier update of the cache: use the ones that the last update returned"
            )

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Learn where the rows of a padded batch begin, or check that a later mask does not show what was dropped."""
        store, padding = self.store, self.store.padding
        if self.exact is None and mask is not None and self.layer == self.masks.first_layer:
            self._check_own(mask)
        # Only a call whose tokens wait may tell, and only while some row is still undecided.
        if not padding.is_settled and store.waits_for(self):
            self._learn(mask, weights)
        elif padding.is_padded and mask is not None and self.new_tokens > 1:
            # Stated padding may reach beyond the tokens held so far.
            first = min(max(padding.rows), store.sink, mask.shape[-1])
            if shows_any_before(mask[..., :first], padding.on(store.device)):
                raise CacheStateError(
                    "this attention mask shows tokens that the first mask hid, and those were taken for padding and dropped: "
                    "use the same mask from the first call on, or a new cache"
                )
        self.is_observed = True
        queries, self.early_queries = self.early_queries, []
        for query in queries:
            self.see_queries(query)

    def _check_own(self, mask: Tensor) -> None:
        """Refuse tokens that none of their queries may see: generate() was given less text than the cache holds, cuts it from the
        wrong end, and pads the mask with zeros. Steps are not asked: an answer waits for the device."""
        if self.new_tokens == 1:
            return
        new, total = self.new_tokens, self.store.held
        if not sees_own(mask, new, total):
            held = total - new
            raise CacheStateError(
                f"none of the {new} new tokens is visible to its own query: the text is shorter than the {held} tokens that the "
                "cache holds (a chat template that drops part of an earlier turn does that, and the same prompt again), and its "
                "middle would be read as new; call cache.reset() and give the whole text, or before generate() cache.crop(n) to "
                "the n tokens that both begin with"
            )

    def see_queries(self, query: Tensor) -> None:
        """The store may learn from them, once it is known which of them are padding."""
        if self.version != self.store.version:
            return
        if self.is_observed or self.store.padding.is_settled:
            self.store.see_queries(query, self.new_tokens)
        else:
            self.early_queries.append(query)

    def _learn(self, mask: Tensor | None, weights: Tensor | None) -> None:
        store, held = self.store, self.store.held
        if weights is not None:
            # One slot has weight 1 whatever the mask: it tells nothing, and no row can be padding alone.
            first = None if weights.shape[-1] == 1 else first_visible_of_weights(weights)
        else:
            first = None if mask is None else first_visible(mask[..., :held])
        if first is None:
            store.padding.settle_as_is()
        else:
            store.padding.learn(first.expand(store.batch_size).tolist(), store.tokens, held)

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, repeat: int) -> Tensor:
        """See AttentionView."""
        if self.exact is not None:
            return exact_attention(query, *self.exact, mask, is_causal, scale, repeat)
        self._check_fresh()
        # Masks for a static cache may be wider than what it holds.
        if mask is not None and mask.shape[-1] > self.store.held:
            mask = mask[..., : self.store.held]
        return attend(self.store, query, mask, is_causal, scale, self.new_tokens, self.ask)

    def scores(self, query: Tensor) -> Tensor:
        """See AttentionView."""
        if self.exact is not None:
            return torch.matmul(query, repeat_heads(self.exact[0], query.shape[1]).transpose(2, 3))
        self._check_fresh()
        return packed_scores(self.store, query)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See AttentionView."""
        if self.exact is not None:
            return torch.matmul(weights, repeat_heads(self.exact[1], weights.shape[1]))
        self._check_fresh()
        return packed_weighted_sum(self.store, weights)

    def dense(self, kind: str) -> Tensor:
        """See AttentionView."""
        if self.exact is not None:
            return self.exact[kind == "v"]
        self._check_fresh()
        dense = self.store.dense(kind).to(self.dtype)
        if self.live is None:
            return dense
        return torch.cat([dense[:, :, : dense.shape[2] - self.new_tokens], self.live[kind == "v"]], 2)


class StepView(_StoreView):
    """View of a step of a static store, an AttentionView: everything is read from the device through operators."""

    dense_is_free = False
    store: StaticStore

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Padding is known before the first step."""

    def see_queries(self, query: Tensor) -> None:
        """Constants are made before the first step."""

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, repeat: int) -> Tensor:
        """See AttentionView; causal among the new tokens whatever the mask."""
        store, shape, facts = self.store, query.shape, None
        if mask is not None:
            if mask.shape[-1] < store.max_cache_len:
                raise CacheStateError(
                    f"a step on this static cache needs an attention mask over max_cache_len={store.max_cache_len} slots, got "
                    f"{list(mask.shape)}: pass a mask [batch, tokens], or make 4D masks as wide as cache.get_mask_sizes() says"
                )
            question = ("step facts", self.new_tokens)
            facts = self.ask(mask, question, lambda: static_ops.mask_facts_of(store, mask, self.new_tokens))
        scale = shape[3] ** -0.5 if scale is None else scale
        output = static_ops.attend_step(store, one_row_per_token(query, self.new_tokens), mask, facts, scale)
        return output.reshape(*shape[:3], -1)

    def scores(self, query: Tensor) -> Tensor:
        """See AttentionView; over max_cache_len slots."""
        return torch.matmul(query, repeat_heads(self.dense("k"), query.shape[1]).transpose(2, 3).to(query.dtype))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See AttentionView."""
        return torch.matmul(weights, repeat_heads(self.dense("v"), weights.shape[1]).to(weights.dtype))

    def dense(self, kind: str) -> Tensor:
        """See AttentionView; [B, H, max_cache_len, D], slots without a token are 0."""
        dense = static_ops.dense_slots(self.store, kind == "k").to(self.dtype)
        if self.live is None:
            return dense
        newest = self.store.counters[LENGTH].long() - self.new_tokens
        slots = newest + torch.arange(self.new_tokens, device=dense.device)
        return dense.index_copy(2, slots, self.live[kind == "v"])


class DenseView:
    """Base of views that attend to the keys and values of one call as they are, to look at them on the way."""

    dense_is_free = True
    live = None

    def __init__(self, layer, keys: Tensor, values: Tensor):
        self.layer, self.keys, self.values = layer, keys, values
        self.kv_heads, self.dtype, self.device = keys.shape[1], keys.dtype, keys.device

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Masks and weights tell such a view nothing."""

    def see_queries(self, query: Tensor) -> None:
        """Nor do queries."""


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, H, T, D] with each KV head repeated until there are `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)

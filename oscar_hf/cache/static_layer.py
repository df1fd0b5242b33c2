"""StaticOscarLayer: an OscarLayer of fixed size whose lengths live on the device, for compiled decode and CUDA graphs.

Layout and operations are those of OscarLayer. Prompts and other calls of many tokens run as they do there, outside of any
graph, and ask the device for the lengths. A step of up to MAX_NEW_TOKENS tokens is two operators, `place` and `attend`, that
no host number enters: the same graph serves every length, every second cache and every padding.
"""

import dataclasses

import torch
from torch import Tensor

from ..attention import static_ops as ops
from ..attention.handle import OscarKV
from ..attention.packed import one_row_per_token, without_autocast
from ..attention.static_ops import overflow_message
from ..attention.views import CallView, repeat_heads
from ..errors import CacheStateError
from ..kernels.decode import MAX_NEW_TOKENS
from ..kernels.step import AHEAD, COUNTERS, HISTORY, LENGTH, OVERFLOW
from ..quantization.packed_rows import PackedRows
from ..storage.static_layout import Layout
from .layer import OscarLayer

_CAPACITY_ROUND = 64


class StepMask:
    """What a cache's layers share about the mask of the step that is running: each reads it once for all.

    first, last: the layers that open and close a step. Nothing is kept between steps, so that a captured graph hands
    nothing out.
    """

    def __init__(self):
        self.mask = self.facts = self.first = self.last = None

    def facts_of(self, layer: "StaticOscarLayer", mask: Tensor | None, new_tokens: int) -> Tensor | None:
        """`kernels.decode.mask_facts` of a mask, computed by the first layer that meets it."""
        if mask is None:
            return None
        if layer.layer_idx == self.first or self.mask is not mask:
            self.mask, self.facts = mask, layer.mask_facts(mask, new_tokens)
        facts = self.facts
        if layer.layer_idx == self.last:
            self.mask = self.facts = None
        return facts


class StaticOscarLayer(OscarLayer):
    """An OscarLayer that holds at most `max_cache_len` tokens, everything allocated at the first update."""

    is_compileable = True

    def __init__(
        self, config, artifact, layer_idx: int, max_cache_len: int, step_mask: StepMask, returns_dense: bool = False
    ):
        self.max_cache_len, self.step_mask = max_cache_len, step_mask
        step_mask.first = layer_idx if step_mask.first is None else step_mask.first
        step_mask.last = layer_idx
        # int32 [COUNTERS]: the lengths, see kernels/step.py. Inside of `storage` once there is one.
        with torch.inference_mode(False):
            self.counters = torch.zeros(COUNTERS, dtype=torch.int32)
        self.start_slots: Tensor | None = None
        super().__init__(config, artifact, layer_idx, returns_dense)

    def _forget(self) -> None:
        super()._forget()
        # Whether the next few tokens can be a step: there is a placed prompt, and its padding is known.
        self.takes_steps = False
        self.counters[OVERFLOW] = 0
        self._write_starts()

    # -------------------------------------------------------------------------------------------------- lengths
    @property
    def tokens(self) -> int:
        """Slots placed; asks the device."""
        return int(self.counters[LENGTH])

    @tokens.setter
    def tokens(self, count: int) -> None:
        self.counters[LENGTH] = count
        # The token that was encoded ahead may be another one now.
        self.counters[AHEAD] = 0

    @property
    def history(self) -> int:
        """Slots packed; asks the device."""
        return int(self.counters[HISTORY])

    @history.setter
    def history(self, count: int) -> None:
        self.counters[HISTORY] = count
        self.counters[AHEAD] = 0

    def get_seq_length(self) -> int | Tensor:
        """Slots held: once a prompt is placed an int64 tensor on the device, so that asking costs no wait for it."""
        return self.counters[LENGTH].long() if self.takes_steps else self.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask: of full width for a step, for calls of many tokens that of a growing cache."""
        # A prompt may wait still, if nothing but its dense tensors was read: the next update places it, and is a step then.
        waits = self.pending is not None and self._settles_starts
        if not (self.takes_steps or waits) or query_length > MAX_NEW_TOKENS:
            return super().get_mask_sizes(query_length)
        self._check_some_are_new(query_length)
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.max_cache_len

    # -------------------------------------------------------------------------------------------------- buffers
    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        config = self.config
        capacity = max(self.max_cache_len - self.sink, 1)
        key_dim, value_dim = key_states.shape[3], value_states.shape[3]
        self.flat_constants, kinds = self.constants.flat
        self.layout = Layout(
            batch=self.batch_size, heads=self.kv_heads, key_dim=key_dim, value_dim=value_dim, sink=self.sink,
            ring=self.ring_size, recent=config.recent_tokens, capacity=-(-capacity // _CAPACITY_ROUND) * _CAPACITY_ROUND,
            limit=self.max_cache_len, key_group=config.group_size_for(key_dim), value_group=config.group_size_for(value_dim),
            key_symmetric=config.key_symmetric, value_symmetric=config.value_symmetric, key_rule_name=config.key_scale,
            value_rule_name=config.value_scale, key_is_identity=config.key_transform == "identity",
            value_is_identity=config.value_transform == "identity", dtype_name=str(self.dtype).removeprefix("torch."),
            constants=kinds,
        )  # fmt: skip
        self._bind(self.layout.new_storage(self.device))

    def _bind(self, storage: Tensor) -> None:
        """Make a flat buffer the layer's own: every stored tensor is a view of it."""
        self.storage, self.spec, stored = storage, self.layout.spec, self.layout.views(storage)
        self.stored = stored
        self.key_rows = PackedRows.of(stored.k_codes, stored.k_scale, stored.k_min, self.layout.key_dim)
        self.value_rows = PackedRows.of(stored.v_codes, stored.v_scale, stored.v_min, self.layout.value_dim)
        self.sink_keys, self.sink_values = stored.sink_k, stored.sink_v
        self.ring_keys, self.ring_values = stored.ring_k, stored.ring_v
        self.counters, self.start_slots = stored.counters, stored.start
        self._write_starts()
        if not torch.compiler.is_compiling():
            # Without it every graph would copy the buffers first.
            for tensor in (self.storage, self.flat_constants):
                torch._dynamo.mark_static_address(tensor, guard=False)

    def __getstate__(self):
        # Views are made anew, and constants are shared by copies of a layer.
        made_anew = {
            "stored", "key_rows", "value_rows", "sink_keys", "sink_values", "ring_keys", "ring_values", "start_slots",
            "flat_constants", *(("counters",) if self.is_initialized else ()),
        }  # fmt: skip
        return {name: value for name, value in super().__getstate__().items() if name not in made_anew}

    def __setstate__(self, state):
        self.__dict__.update(state, start_slots=None)
        if self.is_initialized:
            self.flat_constants = self.constants.flat[0]
            self._bind(self.storage)

    def _write_starts(self) -> None:
        """Bring `start_slots`, which the kernels read, up to what the layer has learnt."""
        rows = 0 if self.start_slots is None else self.start_slots.shape[0]
        starts = self.starts or [0] * rows
        # Padding that was stated for a batch of another size waits for buffers of that size.
        if rows and len(starts) == rows:
            self.start_slots.copy_(torch.tensor(starts, dtype=torch.int32))

    # -------------------------------------------------------------------------------------------------- update
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Add the tokens of a call, [B, H, M, D]; returns two OscarKV handles over all slots."""
        if not self.takes_steps:
            self.commit()
        if self.takes_steps and key_states.shape[2] <= MAX_NEW_TOKENS:
            return self._take_step(key_states, value_states)
        return self._take_prompt(key_states, value_states)

    @torch.compiler.disable
    def _take_prompt(self, key_states: Tensor, value_states: Tensor):
        if self.held + key_states.shape[2] > self.max_cache_len:
            raise CacheStateError(overflow_message(self.held, key_states.shape[2], self.max_cache_len))
        handles = super().update(key_states, value_states)
        self.takes_steps = self.starts_known and self.pending is None
        return handles

    def _view(self, key_states: Tensor, value_states: Tensor, is_first: bool) -> CallView:
        return PromptView(self, key_states, value_states, is_first)

    def _take_step(self, key_states: Tensor, value_states: Tensor):
        # Fewer rows or heads would be broadcast over what is stored, or a kernel would read past them.
        self._check_fits(key_states, value_states)
        keys, values = key_states.detach(), value_states.detach()
        if torch.compiler.is_compiling():
            torch.ops.oscar_hf.place(self.storage, self.flat_constants, keys, values, self.spec)
        else:
            with torch.no_grad(), without_autocast(self.device):
                ops.place(self.stored, self.constants, self.layout, keys, values)
        view = StepView(self, key_states, value_states)
        if self.returns_dense:
            return view.dense("k"), view.dense("v")
        shape = (*key_states.shape[:2], self.max_cache_len)
        return OscarKV(view, "k", (*shape, key_states.shape[3])), OscarKV(view, "v", (*shape, value_states.shape[3]))

    def mask_facts(self, mask: Tensor, new_tokens: int) -> Tensor:
        """What a step's mask says, see `kernels.decode.mask_facts`."""
        if torch.compiler.is_compiling():
            return torch.ops.oscar_hf.mask_facts(mask, self.storage, new_tokens, self.spec)
        return ops.facts_of(self.stored, mask, new_tokens)

    def attend(self, query: Tensor, mask: Tensor | None, facts: Tensor | None, scale: float) -> Tensor:
        """Attention of a step's tokens, [B, Hq, M, D] to [B, Hq, M, Dv]."""
        if torch.compiler.is_compiling():
            return torch.ops.oscar_hf.attend(query, self.storage, self.flat_constants, mask, facts, scale, self.spec)
        with without_autocast(self.device):
            return ops.attend(self.stored, self.constants, self.layout, query, mask, facts, scale)

    def dense_slots(self, is_key: bool) -> Tensor:
        """All slots of keys or of values, [B, H, max_cache_len, D]; those without a token are 0."""
        if torch.compiler.is_compiling():
            return torch.ops.oscar_hf.dense(self.storage, self.flat_constants, is_key, self.spec)
        with torch.no_grad(), without_autocast(self.device):
            return ops.dense(self.stored, self.constants, self.layout, is_key)

    def commit(self) -> None:
        """Place the tokens of the latest call if they are still waiting; idempotent."""
        if self.pending is None:
            return
        super().commit()
        self.takes_steps = self.starts_known

    def _learn_starts(self, seen: Tensor) -> None:
        super()._learn_starts(seen)
        self._write_starts()

    def set_starts(self, starts: list[int]) -> None:
        """State where each row begins, before the first update."""
        super().set_starts(starts)
        self._write_starts()

    def adopt(self, tokens: int, history: int, starts: list[int] | None, starts_known: bool) -> None:
        """Count tokens that were written to the buffers from outside: a saved cache."""
        super().adopt(tokens, history, starts, starts_known)
        self.takes_steps = starts_known
        self._write_starts()

    # -------------------------------------------------------------------------------------------------- operations
    @torch.inference_mode(False)
    def _map(self, function) -> None:
        example = function(self.sink_keys)
        old, counters = self.stored[:10], self.counters.clone()
        if (example.shape, example.device) != (self.sink_keys.shape, self.sink_keys.device):
            self.layout = dataclasses.replace(self.layout, batch=example.shape[0])
            self.start_slots = None
            self._bind(self.layout.new_storage(example.device))
            self.counters.copy_(counters)
        # Same shape, same place: a captured graph knows these addresses.
        for before, after in zip(old, self.stored):
            if before is not None:
                after.copy_(function(before))

    def _select(self, function, rows) -> None:
        super()._select(function, rows)
        self._write_starts()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, or keep that many of a positive number."""
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self._write_starts()


class PromptView(CallView):
    """View of a call of many tokens; they are placed as soon as attention has read them, before any graph runs."""

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, repeat: int) -> Tensor:
        """As CallView; the mask may be wider than the tokens held."""
        if mask is not None and self.exact is None:
            mask = mask[..., : self.layer.held]
        output = super().attend(query, mask, is_causal, scale, repeat)
        self.layer.commit()
        return output

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As CallView."""
        output = super().weighted_sum(weights)
        self.layer.commit()
        return output


class StepView:
    """View of a step: everything is read from the device through the operators."""

    dense_is_free = False

    def __init__(self, layer: StaticOscarLayer, keys: Tensor, values: Tensor):
        self.layer, self.kv_heads, self.new_tokens = layer, keys.shape[1], keys.shape[2]
        self.dtype, self.device = keys.dtype, keys.device
        needs_grad = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        self.live = (keys, values) if needs_grad else None

    def observe(self, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Padding is known before the first step."""

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, repeat: int) -> Tensor:
        """Attention output [B, Hq, M, Dv]; causal among the new tokens whatever the mask."""
        layer, shape = self.layer, query.shape
        if mask is not None and mask.shape[-1] < layer.max_cache_len:
            raise CacheStateError(
                f"a step on this static cache needs an attention mask over max_cache_len={layer.max_cache_len} slots, got "
                f"{list(mask.shape)}: pass a mask [batch, tokens], or make 4D masks as wide as cache.get_mask_sizes() says"
            )
        scale = shape[3] ** -0.5 if scale is None else scale
        facts = layer.step_mask.facts_of(layer, mask, self.new_tokens)
        output = layer.attend(one_row_per_token(query, self.new_tokens), mask, facts, scale)
        return output.reshape(*shape[:3], -1)

    def scores(self, query: Tensor) -> Tensor:
        """query k^T of eager attention, [B, Hq, M, max_cache_len], unscaled."""
        return torch.matmul(query, repeat_heads(self.dense("k"), query.shape[1]).transpose(2, 3).to(query.dtype))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """weights v of eager attention, [B, Hq, M, Dv]."""
        return torch.matmul(weights, repeat_heads(self.dense("v"), weights.shape[1]).to(weights.dtype))

    def dense(self, kind: str) -> Tensor:
        """Dense keys ("k") or values ("v"), [B, H, max_cache_len, D]; slots without a token are 0."""
        layer, is_key = self.layer, kind == "k"
        dense = layer.dense_slots(is_key).to(self.dtype)
        if self.live is None:
            return dense
        slots = layer.counters[LENGTH].long() - self.new_tokens + torch.arange(self.new_tokens, device=dense.device)
        return dense.index_copy(2, slots, self.live[not is_key])

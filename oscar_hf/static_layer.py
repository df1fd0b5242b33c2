"""StaticOscarLayer: an OscarLayer of fixed size whose lengths live on the device, for compiled decode and CUDA graphs.

Layout and operations are those of OscarLayer. Prompts and other calls of many tokens run as they do there, outside of any
graph, and ask the device for the lengths. A step of up to MAX_NEW_TOKENS tokens is two operators, `place` and `attend`, that
no host number enters: the same graph serves every length, every second cache and every padding.
"""

import torch
from torch import Tensor

from .errors import CacheStateError
from .handle import OscarKV
from .kernels.decode import MAX_NEW_TOKENS
from .kernels.step import COUNTERS, HISTORY, LENGTH, OVERFLOW
from .layer import OscarLayer
from .ops import overflow_message
from .packed import PackedRows
from .view import CallView

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
            self.mask, self.facts = mask, torch.ops.oscar_hf.mask_facts(mask, layer.counters, new_tokens)
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
        # int32 [COUNTERS]: the lengths, see kernels/step.py.
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

    @property
    def history(self) -> int:
        """Slots packed; asks the device."""
        return int(self.counters[HISTORY])

    @history.setter
    def history(self, count: int) -> None:
        self.counters[HISTORY] = count

    def get_seq_length(self) -> int | Tensor:
        """Slots held: once a prompt is placed an int64 tensor on the device, so that asking costs no wait for it."""
        return self.counters[LENGTH].long() if self.takes_steps else self.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask: of full width for a step, for calls of many tokens that of a growing cache."""
        if not self.takes_steps or query_length > MAX_NEW_TOKENS:
            return super().get_mask_sizes(query_length)
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.max_cache_len

    # -------------------------------------------------------------------------------------------------- buffers
    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super()._allocate(key_states, value_states)
        config, shape = self.config, (self.batch_size, self.kv_heads)
        capacity = max(self.max_cache_len - self.sink, 1)
        capacity = -(-capacity // _CAPACITY_ROUND) * _CAPACITY_ROUND
        self.key_rows, self.value_rows = (
            PackedRows(*shape, dim, config.group_size_for(dim), symmetric, self.device, capacity)
            for dim, symmetric in (
                (key_states.shape[3], config.key_symmetric),
                (value_states.shape[3], config.value_symmetric),
            )
        )
        self.counters = self.counters.to(self.device)
        self.start_slots = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        self._write_starts()
        self._bind_constants()

    def _bind_constants(self) -> None:
        """The constants as the operators take them: plain attributes, which torch.compile follows easily."""
        config, constants = self.config, self.constants
        keys, values = self.sides()
        self._place_constants = (keys.transform, keys.mean, keys.metric, values.transform)
        self._attend_constants = (
            None if config.key_transform == "identity" else constants.key_query,
            constants.key_mean,
            None if config.value_transform == "identity" else constants.value_inverse,
            constants.key_inverse,
        )
        self._value_inverse = constants.value_inverse
        self._fix_addresses()

    def __getstate__(self):
        # Constants are shared by copies of a layer; what refers to them is made anew.
        bound = ("_place_constants", "_attend_constants", "_value_inverse")
        return {name: value for name, value in super().__getstate__().items() if name not in bound}

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.is_initialized:
            self._bind_constants()

    def _fix_addresses(self) -> None:
        """Tell torch.compile that these tensors stay where they are: without it every graph would copy them first."""
        if torch.compiler.is_compiling():
            return
        fixed = [
            *self._packed(),
            self.start_slots,
            *self._place_constants,
            *self._attend_constants,
            self._value_inverse,
        ]
        for tensor in fixed:
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _packed(self) -> tuple:
        """The stored tensors in the order of the operators' arguments."""
        keys, values = self.key_rows, self.value_rows
        return (
            keys.codes, keys.scale, keys.min, values.codes, values.scale, values.min,
            self.sink_keys, self.sink_values, self.ring_keys, self.ring_values, self.counters,
        )  # fmt: skip

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
        if self.takes_steps and key_states.shape[2] <= MAX_NEW_TOKENS:
            return self._take_step(key_states, value_states)
        return self._take_prompt(key_states, value_states)

    @torch.compiler.disable
    def _take_prompt(self, key_states: Tensor, value_states: Tensor):
        self.check_overflow()
        self.commit()
        if self.held + key_states.shape[2] > self.max_cache_len:
            raise CacheStateError(overflow_message(self.held, key_states.shape[2], self.max_cache_len))
        handles = super().update(key_states, value_states)
        self.takes_steps = self.starts_known and self.pending is None
        return handles

    def _view(self, key_states: Tensor, value_states: Tensor, is_first: bool) -> CallView:
        return PromptView(self, key_states, value_states, is_first)

    def _take_step(self, key_states: Tensor, value_states: Tensor):
        torch.ops.oscar_hf.place(
            *self._packed(), self.start_slots, *self._place_constants, key_states.detach(), value_states.detach(),
            self.config.recent_tokens, self.max_cache_len, self.config.key_scale, self.config.value_scale,
        )  # fmt: skip
        view = StepView(self, key_states, value_states)
        if self.returns_dense:
            return view.dense("k"), view.dense("v")
        shape = (*key_states.shape[:2], self.max_cache_len)
        return OscarKV(view, "k", (*shape, key_states.shape[3])), OscarKV(view, "v", (*shape, value_states.shape[3]))

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

    def check_overflow(self) -> None:
        """Raise CacheStateError if a compiled step did not fit; such a step has stored nothing."""
        if int(self.counters[OVERFLOW]):
            self.counters[OVERFLOW] = 0
            raise CacheStateError(overflow_message(self.tokens, "some", self.max_cache_len))

    # -------------------------------------------------------------------------------------------------- operations
    @torch.inference_mode(False)
    def _map(self, function) -> None:
        def into_place(tensor: Tensor) -> Tensor:
            mapped = function(tensor)
            # Same shape, same place: a captured graph knows these addresses.
            return tensor.copy_(mapped) if (mapped.shape, mapped.device) == (tensor.shape, tensor.device) else mapped

        super()._map(into_place)
        batch = self.sink_keys.shape[0]
        if batch != self.start_slots.shape[0]:
            self.start_slots = self.start_slots.new_zeros(batch)
        self._fix_addresses()

    def _select(self, function, rows) -> None:
        super()._select(function, rows)
        self._write_starts()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, or keep that many of a positive number."""
        if self.is_initialized:
            self.check_overflow()
        super().crop(tokens_to_remove)
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
        # A query of one token per head may come packed as [B, Hkv, g, D].
        packed_group = self.new_tokens == 1 and shape[2] > 1
        if packed_group:
            query = query.reshape(shape[0], shape[1] * shape[2], 1, shape[3])
        scale = shape[3] ** -0.5 if scale is None else scale
        facts = layer.step_mask.facts_of(layer, mask, self.new_tokens)
        output = torch.ops.oscar_hf.attend(
            query,
            *layer._packed(),
            layer.start_slots,
            *layer._attend_constants,
            mask,
            facts,
            scale,
            layer.max_cache_len,
        )
        return output.reshape(*shape[:3], -1) if packed_group else output

    def scores(self, query: Tensor) -> Tensor:
        """query k^T of eager attention, [B, Hq, M, max_cache_len], unscaled."""
        return torch.matmul(query, self._repeated("k", query).transpose(2, 3).to(query.dtype))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """weights v of eager attention, [B, Hq, M, Dv]."""
        return torch.matmul(weights, self._repeated("v", weights).to(weights.dtype))

    def _repeated(self, kind: str, like: Tensor) -> Tensor:
        dense = self.dense(kind)
        return dense if like.shape[1] == dense.shape[1] else dense.repeat_interleave(like.shape[1] // dense.shape[1], 1)

    def dense(self, kind: str) -> Tensor:
        """Dense keys ("k") or values ("v"), [B, H, max_cache_len, D]; slots without a token are 0."""
        layer, is_key = self.layer, kind == "k"
        inverse, mean = (
            (layer._attend_constants[3], layer._attend_constants[1]) if is_key else (layer._value_inverse, None)
        )
        dense = torch.ops.oscar_hf.dense(
            *layer._packed(), layer.start_slots, inverse, mean, is_key, layer.max_cache_len
        )
        dense = dense.to(self.dtype)
        if self.live is None:
            return dense
        slots = layer.counters[LENGTH].long() - self.new_tokens + torch.arange(self.new_tokens, device=dense.device)
        return dense.index_copy(2, slots, self.live[not is_key])

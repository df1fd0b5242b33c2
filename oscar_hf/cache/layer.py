"""OscarLayer: the keys and values of one layer in three regions, sink / history / recent, and every operation on them.

Slots are positions in the sequence, padding included, 0-based. Of `tokens` slots in all,
    [0, sink)                        are exact, in the sink buffer,
    [sink, sink + history)           are packed, history token j being slot sink + j,
    [sink + history, tokens)         are exact, slot s at ring index (s - sink) % ring size.
A token once packed stays packed. `tokens`, `history` and `starts` are the only counters; all else follows from them.

In a left-padded batch row b begins at slot starts[b], and its sink is the first `sink` real tokens, slots starts[b] ..
starts[b] + sink - 1: entry i of its sink buffer is slot starts[b] + i. What of those lies beyond slot `sink` is packed like
every other slot, too, so that all rows share one layout; attention then leaves the packed copy out.

New tokens of a call stay exact during that call. They are placed at once if they are few, so that a single kernel can read
everything, and after attention if they are many (a prompt), so that at most one layer holds its prompt in full. Up to
DRAFT_MARGIN tokens of the latest call stay exact beyond the recent window: rejected draft tokens leave no trace.
"""

import copy
import weakref

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..artifact.artifact import Artifact
from ..artifact.config import OscarConfig
from ..attention.handle import OscarKV
from ..attention.packed import keeps_dtypes, visible
from ..attention.views import CallView
from ..errors import CacheStateError, UnsupportedModelError
from ..kernels.append import append_rows
from ..kernels.decode import MAX_NEW_TOKENS, DecodeStore
from ..kernels.dequantize import dequantize_rows
from ..kernels.step import Side, packed_after, place_problem, place_tokens_triton
from ..quantization.packed_rows import PackedRows

DRAFT_MARGIN = 32
# More tokens than this leave the window faster through the append kernel, which takes them side by side.
_MAX_STEP_LEAVING = 2


class OscarLayer(CacheLayerMixin):
    """A growing layer. See the module's text for the layout; `config` and `artifact` say how rows are quantized."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = True

    def __init__(self, config: OscarConfig, artifact: Artifact, layer_idx: int, returns_dense: bool = False):
        super().__init__()
        self.config, self.artifact, self.layer_idx = config, artifact, layer_idx
        self.returns_dense = returns_dense
        self.version = 0
        self._row_starts: tuple[list[int], Tensor] | None = None
        self._forget()

    def _forget(self) -> None:
        """Counters of an empty layer."""
        self.tokens = self.history = 0
        self.starts: list[int] | None = None
        # Until a mask, or the lack of one, says where each row begins.
        self.starts_known = self._mask_seen = False
        self.pending: tuple[Tensor, Tensor] | None = None
        # Weak: the view refers to the layer, and a cycle would keep a whole prompt alive until the next collection.
        self._pending_view: weakref.ref[CallView] | None = None

    def __repr__(self) -> str:
        return f"OscarLayer(tokens={self.held}, history={self.history})"

    def __getstate__(self):
        # Copies and pickles hold placed tokens only: a waiting prompt may carry an autograd graph.
        self.commit()
        return self.__dict__.copy()

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = type(self).__new__(type(self))
        # A copy is written to for as long as it lives, whatever mode it was made in.
        with torch.inference_mode(False):
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state):
        self.__dict__.update(state)

    # -------------------------------------------------------------------------------------------------- geometry
    @property
    def sink(self) -> int:
        """Size of the sink region in tokens."""
        return self.config.sink_tokens

    @property
    def ring_size(self) -> int:
        """Slots of the recent buffer: the window before a call and the few tokens of the call."""
        return self.config.recent_tokens - 1 + DRAFT_MARGIN

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate windows and empty packed stores for [B, H, *, D] keys and values."""
        self._check_geometry(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.kv_heads = key_states.shape[:2]
        self.constants = self.artifact.constants_for(self.layer_idx, key_states, value_states)
        # Buffers that are updated in place for a long time must not be inference tensors, whatever mode the first call is in.
        with torch.inference_mode(False):
            self._allocate(key_states, value_states)
        self.is_initialized = True

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        shape, key_dim, value_dim = (self.batch_size, self.kv_heads), key_states.shape[3], value_states.shape[3]
        self.sink_keys = key_states.new_zeros(*shape, self.sink, key_dim)
        # Autocast passes float32 keys (they went through RoPE) beside bfloat16 values; one dtype holds both.
        self.sink_values = key_states.new_zeros(*shape, self.sink, value_dim)
        self.ring_keys = key_states.new_zeros(*shape, self.ring_size, key_dim)
        self.ring_values = key_states.new_zeros(*shape, self.ring_size, value_dim)
        config = self.config
        self.key_rows = PackedRows(*shape, key_dim, config.group_size_for(key_dim), config.key_symmetric, self.device)
        self.value_rows = PackedRows(
            *shape, value_dim, config.group_size_for(value_dim), config.value_symmetric, self.device
        )

    def _check_geometry(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.dim() != 4 or value_states.shape[:3] != key_states.shape[:3]:
            raise UnsupportedModelError(
                f"layer {self.layer_idx} passed keys {list(key_states.shape)} and values {list(value_states.shape)}: "
                "the cache holds [batch, KV heads, tokens, head dim] of equal first three sizes (no latent attention)"
            )
        for name, states in (("keys", key_states), ("values", value_states)):
            if not states.is_floating_point():
                raise UnsupportedModelError(
                    f"layer {self.layer_idx}: {name} are {states.dtype}, allowed are floating types"
                )
            if states.shape[3] % 8:
                raise UnsupportedModelError(
                    f"layer {self.layer_idx}: {name} have head dim {states.shape[3]}, allowed are multiples of 8"
                )

    def _same_kind(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether the buffers suit these states; an empty layer may be used again for others."""
        same_dims = self.sink_values.shape[3] == value_states.shape[3]
        held, given = self.sink_keys, key_states
        kinds = [(x.shape[:2], x.shape[3], x.dtype, x.device) for x in (held, given)]
        return same_dims and kinds[0] == kinds[1]

    def _check_fits(self, key_states: Tensor, value_states: Tensor) -> None:
        self._check_geometry(key_states, value_states)
        given = (key_states.shape[0], key_states.shape[1], key_states.shape[3], value_states.shape[3])
        held = (self.batch_size, self.kv_heads, self.sink_keys.shape[3], self.sink_values.shape[3])
        if given != held:
            raise CacheStateError(
                f"layer {self.layer_idx} holds (batch, KV heads, key dim, value dim) = {held}, but the model passed {given}: "
                "use a new cache, or select or repeat its batch first"
            )

    # -------------------------------------------------------------------------------------------------- update
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Add the tokens of a call, [B, H, M, D]; returns two OscarKV handles over all tokens (dense tensors on request)."""
        if not self.is_initialized or (self.held == 0 and not self._same_kind(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        self._check_fits(key_states, value_states)
        if self.starts is not None and len(self.starts) != self.batch_size:
            raise CacheStateError(
                f"the padding was given for {len(self.starts)} rows, the model passed {self.batch_size}: generate() expands "
                "rows for beams and num_return_sequences, so give mask.repeat_interleave(n, 0)"
            )
        self.commit()
        self.version += 1
        is_first, new = self.tokens == 0, key_states.shape[2]
        view = self._view(key_states, value_states, is_first)
        if is_first or new > DRAFT_MARGIN or not self.starts_known:
            self.pending, self._pending_view = (key_states, value_states), weakref.ref(view)
        else:
            self._place(key_states, value_states)
        if self.returns_dense:
            return view.dense("k"), view.dense("v")
        total = self.held
        shape = (self.batch_size, self.kv_heads, total)
        return OscarKV(view, "k", (*shape, key_states.shape[3])), OscarKV(view, "v", (*shape, value_states.shape[3]))

    def _view(self, key_states: Tensor, value_states: Tensor, is_first: bool) -> CallView:
        return CallView(self, key_states, value_states, is_first)

    @property
    def _settles_starts(self) -> bool:
        """Whether it is known where rows begin once what waits is placed. If no mask was shown (flash attention), every row is
        taken to begin at slot 0."""
        return self.starts_known or not self._mask_seen

    def commit(self) -> None:
        """Place the tokens of the latest call if they are still waiting; idempotent."""
        if self.pending is None:
            return
        self.starts_known = self._settles_starts
        # They stop waiting only once they are placed: running out of memory must not lose them.
        self._place(*self.pending)
        self.pending = self._pending_view = None

    @torch.no_grad()
    @keeps_dtypes
    def _place(self, keys: Tensor, values: Tensor) -> None:
        """Put new tokens into sink and ring, first packing what must leave the exact region. Counters change last, so that a
        failure leaves the layer as it was and a second try does the same again."""
        first, new = self.tokens, keys.shape[2]
        total = first + new
        if new <= MAX_NEW_TOKENS and self._step(keys, values):
            return
        exact = self.config.recent_tokens - 1 + min(new, DRAFT_MARGIN)
        history = max(self.history, total - self.sink - exact)
        begin, end = self.sink + self.history, self.sink + history
        if history > self.history:
            leaving_keys = self._slots(self.ring_keys, keys, begin, end)
            leaving_values = self._slots(self.ring_values, values, begin, end)
            self._append_history(leaving_keys, leaving_values)
        # Slots of the sink region go to the sink buffer alone.
        sinking = min(self.sink, total) - first
        if sinking > 0:
            self._write_sink(first, keys[:, :, :sinking], values[:, :, :sinking])
        begin = max(first, self.sink + history)
        if begin < total:
            index = self.ring_index(begin, total)
            self.ring_keys[:, :, index] = keys[:, :, begin - first :].to(self.dtype)
            self.ring_values[:, :, index] = values[:, :, begin - first :].to(self.dtype)
        self.tokens, self.history = total, history

    def sides(self) -> tuple[Side, Side]:
        """Keys and values as the step kernel takes them; what is not transformed has no transform."""
        config, constants = self.config, self.constants
        key_transform = None if config.key_transform == "identity" else constants.key_transform
        value_transform = None if config.value_transform == "identity" else constants.value_transform
        return (
            Side(
                self.key_rows, self.sink_keys, self.ring_keys, config.key_rule, key_transform, constants.key_mean,
                constants.key_metric,
            ),
            Side(self.value_rows, self.sink_values, self.ring_values, config.value_rule, value_transform),
        )  # fmt: skip

    def _step(self, keys: Tensor, values: Tensor) -> bool:
        """Place a few tokens in one launch; False where no kernel can, or where many tokens leave the window."""
        packed = packed_after(self.tokens, self.history, self.sink, self.config.recent_tokens)
        if packed - self.history > _MAX_STEP_LEAVING:
            return False
        sides = self.sides()
        if place_problem(*sides):
            return False
        for rows in (self.key_rows, self.value_rows):
            rows.reserve(packed)
        start = None if self.starts is None else self.row_starts()
        recent = self.config.recent_tokens
        self.tokens, self.history = place_tokens_triton(
            *sides, keys, values, (self.tokens, self.history), recent, start
        )
        return True

    def ring_index(self, begin: int, end: int) -> Tensor | slice:
        """Ring positions of slots begin..end-1."""
        first = (begin - self.sink) % self.ring_size
        if first + end - begin <= self.ring_size:
            return slice(first, first + end - begin)
        return torch.arange(begin - self.sink, end - self.sink, device=self.ring_keys.device) % self.ring_size

    def _slots(self, ring: Tensor, new: Tensor, begin: int, end: int) -> Tensor:
        """Exact rows of slots begin..end-1, the older ones from the ring, the rest from the new tokens."""
        middle = min(max(begin, self.tokens), end)
        parts = []
        if begin < middle:
            parts.append(ring[:, :, self.ring_index(begin, middle)])
        if middle < end:
            parts.append(new[:, :, middle - self.tokens : end - self.tokens])
        return parts[0] if len(parts) == 1 else torch.cat([part.to(self.dtype) for part in parts], 2)

    def _append_history(self, keys: Tensor, values: Tensor) -> None:
        """Pack rows as history tokens self.history.. ; the owner then raises the counter."""
        for side, new in zip(self.sides(), (keys, values)):
            side.rows.reserve(self.history + new.shape[2])
            append_rows(side.rows, self.history, new, side.transform, side.mean, side.rule, side.metric)
        if self.starts is not None and self.history < max(self.starts):
            self._write_sink(self.sink + self.history, keys, values)

    def _write_sink(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Copy those of slots first.. that belong to a row's sink into its sink buffer."""
        last = first + keys.shape[2]
        if self.starts is None:
            last = min(last, self.sink)
            self.sink_keys[:, :, first:last] = keys[:, :, : last - first].to(self.dtype)
            self.sink_values[:, :, first:last] = values[:, :, : last - first].to(self.dtype)
            return
        for row, start in enumerate(self.starts):
            begin, end = max(first, start), min(last, start + self.sink)
            if begin < end:
                target, source = slice(begin - start, end - start), slice(begin - first, end - first)
                self.sink_keys[row, :, target] = keys[row, :, source].to(self.dtype)
                self.sink_values[row, :, target] = values[row, :, source].to(self.dtype)

    # -------------------------------------------------------------------------------------------------- padding
    def observe_mask(self, view: CallView, mask: Tensor | None) -> None:
        """Learn from the attention mask of a call where each row begins: after the leading slots that no query sees."""
        if not self._still_learns_from(view):
            if self.starts is not None and mask is not None and view.new_tokens > 1:
                self._check_padding_stays_hidden(mask)
            return
        if mask is None:
            self.starts_known = True
            return
        seen = visible(mask[..., : self.held]).flatten(1, 2).any(1)
        self._learn_starts(torch.where(seen.any(-1), seen.int().argmax(-1), seen.shape[-1]))

    def _still_learns_from(self, view: CallView) -> bool:
        """Whether a call may tell where rows begin: only while its tokens wait and some row is still undecided."""
        return not self.starts_known and self._pending_view is not None and view is self._pending_view()

    def observe_weights(self, view: CallView, weights: Tensor) -> None:
        """The same from the weights of eager attention [B, Hq, M, T], which hides a padding query's whole row: softmax then
        gives every slot the same weight, later ones too, which no causal row of a real token can."""
        if not self._still_learns_from(view):
            return
        new, total = weights.shape[2:]
        if total == 1:
            self.starts_known = True
            return
        hidden = (weights == weights[..., :1]).all(-1).all(1)
        # The last query has no later slot; it is padding only if all before it are.
        leading = hidden.int().cumprod(-1).sum(-1)
        if new > 1:
            leading = torch.where(hidden[:, :-1].all(-1), leading, leading.clamp(max=new - 1))
        self._learn_starts(torch.where(leading > 0, total - new + leading, 0 if total == new else total - new))

    def _check_padding_stays_hidden(self, mask: Tensor) -> None:
        """Refuse a mask that shows slots which an earlier mask hid from every query: nothing was kept of them."""
        # Stated padding may reach beyond the tokens held so far.
        first = min(max(self.starts), self.sink, mask.shape[-1])
        slots = torch.arange(first, device=mask.device)
        dropped = slots < self.row_starts().to(mask.device)[:, None]
        if bool((visible(mask[..., :first]).flatten(1, 2).any(1) & dropped).any()):
            raise CacheStateError(
                "this attention mask shows tokens that the first mask hid, and those were taken for padding and dropped: "
                "use the same mask from the first call on, or a new cache"
            )

    def set_starts(self, starts: list[int]) -> None:
        """State where each row begins, before the first update."""
        if self.held:
            raise CacheStateError(
                "the padding must be given before the first tokens: call cache.reset() or use a new cache"
            )
        self.starts, self.starts_known = (starts if any(starts) else None), True

    def _learn_starts(self, seen: Tensor) -> None:
        """seen: int [B | 1], the first real slot of each row as far as this call tells; its length where there is none yet."""
        total = self.held
        seen = seen.expand(self.batch_size).tolist()
        # What an earlier call settled stays: only rows that were still inside their padding are decided now.
        known = self.starts or [0 if self._mask_seen else self.tokens] * self.batch_size
        starts = [old if old < self.tokens else new for old, new in zip(known, seen)]
        # A row that sees nothing yet is still inside its padding: the next call tells more.
        self.starts_known, self._mask_seen = all(start < total for start in starts), True
        self.starts = starts if any(starts) else None

    def row_starts(self) -> Tensor:
        """`starts` as int32 [B] on the layer's device; one copy to the device for as long as they stay the same."""
        if self._row_starts is None or self._row_starts[0] != self.starts:
            self._row_starts = (list(self.starts), torch.tensor(self.starts, dtype=torch.int32, device=self.device))
        return self._row_starts[1]

    def decode_store(self) -> DecodeStore:
        """The layer as the fused decode kernel reads it; all tokens must be placed."""
        constants, config, keys, values = self.constants, self.config, self.key_rows, self.value_rows
        return DecodeStore(
            k_codes=keys.codes, k_scale=keys.scale, k_min=keys.min,
            v_codes=values.codes, v_scale=values.scale, v_min=values.min,
            sink_k=self.sink_keys, sink_v=self.sink_values, ring_k=self.ring_keys, ring_v=self.ring_values,
            length=self.tokens, history=self.history,
            key_query=None if config.key_transform == "identity" else constants.key_query,
            value_inverse=None if config.value_transform == "identity" else constants.value_inverse,
            key_mean=constants.key_mean, start=None if self.starts is None else self.row_starts(),
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------------- reading
    @torch.no_grad()
    @keeps_dtypes
    def dense(self, kind: str) -> Tensor:
        """All tokens of one kind as a dense tensor [B, H, T, D] in the model's dtype, the history dequantized."""
        is_key = kind == "k"
        sink, ring = (self.sink_keys, self.ring_keys) if is_key else (self.sink_values, self.ring_values)
        constants, exact = self.constants, min(self.sink, self.tokens)
        parts = [sink[:, :, :exact] if self.starts is None else sink.new_zeros(*sink.shape[:2], exact, sink.shape[3])]
        if self.history:
            rows, inverse, mean = (
                (self.key_rows, constants.key_inverse, constants.key_mean)
                if is_key
                else (self.value_rows, constants.value_inverse, None)
            )
            parts.append(dequantize_rows(rows, 0, self.history, inverse, mean, self.dtype))
        begin = self.sink + self.history
        if begin < self.tokens:
            parts.append(ring[:, :, self.ring_index(begin, self.tokens)])
        if self.pending is not None:
            parts.append(self.pending[not is_key])
        dense = torch.cat(parts, 2)
        if self.starts is not None:
            packed_end = min(self.tokens, begin)
            for row, start in enumerate(self.starts):
                count = min(start + self.sink, packed_end) - start
                if count > 0:
                    dense[row, :, start : start + count] = sink[row, :, :count]
        return dense

    @property
    def held(self) -> int:
        """Slots held, padding and waiting tokens included."""
        return self.tokens + (self.pending[0].shape[2] if self.pending is not None else 0)

    def get_seq_length(self) -> int:
        """Slots held, padding included."""
        return self.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask for a call with `query_length` new tokens, of which there must be one."""
        self._check_some_are_new(query_length)
        return self.held + int(query_length), 0

    def _check_some_are_new(self, query_length: int) -> None:
        if not query_length:
            raise CacheStateError(
                f"no token is new: the cache holds {self.held} already, and generate() takes the whole text, at least one token "
                "longer than that (the model itself takes the new tokens alone)"
            )

    def get_max_length(self) -> int:
        """-1: a growing layer has no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Older name of `get_max_length`."""
        return self.get_max_length()

    # -------------------------------------------------------------------------------------------------- operations
    @torch.inference_mode(False)
    def _map(self, function) -> None:
        """Apply `function` to every stored tensor."""
        for name in ("sink_keys", "sink_values", "ring_keys", "ring_values"):
            setattr(self, name, function(getattr(self, name)))
        self.key_rows.map(function)
        self.value_rows.map(function)

    def _select(self, function, rows) -> None:
        # An empty layer has no rows to gather, whatever batch its buffers were made for.
        if not self.held:
            return
        self.commit()
        self._map(function)
        self.batch_size = self.sink_keys.shape[0]
        if self.starts is not None:
            self.starts = rows(self.starts)
            self.starts = self.starts if any(self.starts) else None
        self.version += 1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gather rows of the batch, bit for bit: nothing is quantized again."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch (integers, or a bool mask)."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        if self.is_initialized:
            indices = torch.where(indices < 0, indices + self.batch_size, indices)
        self._select(
            lambda t: t.index_select(0, indices.to(t.device)), lambda starts: [starts[i] for i in indices.tolist()]
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        self._select(
            lambda t: t.repeat_interleave(repeats, 0), lambda starts: [s for s in starts for _ in range(repeats)]
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens (a negative number, or 0 for none). A positive number is the length to
        keep, as older callers mean it. 0 asks the device nothing."""
        self.commit()
        count = int(tokens_to_remove)
        if not count:
            return
        keep = min(count, self.tokens) if count > 0 else max(self.tokens + count, 0)
        if keep == self.tokens:
            return
        self.version += 1
        self.tokens, self.history = keep, min(self.history, max(0, keep - self.sink))
        if keep == 0:
            self._forget()
        elif self.starts is not None:
            # A row of which nothing is left but padding begins with whatever comes next.
            self.starts = [min(start, keep) for start in self.starts]

    def reset(self) -> None:
        """Forget all tokens but keep the buffers."""
        self.version += 1
        self._forget()

    def adopt(self, tokens: int, history: int, starts: list[int] | None, starts_known: bool) -> None:
        """Count tokens that were written to the buffers from outside: a saved cache."""
        self.version += 1
        self.tokens, self.history = tokens, history
        self.starts, self.starts_known, self._mask_seen = starts, starts_known, not starts_known

    def offload(self) -> None:
        """Move the stored tensors to the CPU."""
        if self.is_initialized:
            self.commit()
            self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the stored tensors back to the layer's device."""
        if self.is_initialized and self.sink_keys.device != self.device:
            self._map(lambda t: t.to(self.device, non_blocking=True))

"""LayerStore: the keys and values of one layer in three regions, sink / history / recent, and every operation on them.

Slots are positions in the sequence, padding included, 0-based. Of `tokens` slots in all,
    [0, sink)                        are exact, in the sink buffer,
    [sink, sink + history)           are packed, history token j being slot sink + j,
    [sink + history, tokens)         are exact, slot s at ring index (s - sink) % ring size.
A token once packed stays packed. `tokens`, `history` and `padding` are the only counters; all else follows from them.

In a left-padded batch row b begins at slot starts[b], and its sink is the first `sink` real tokens, slots starts[b] ..
starts[b] + sink - 1: entry i of its sink buffer is slot starts[b] + i. What of those lies beyond slot `sink` is packed like
every other slot, too, so that all rows share one layout; attention then leaves the packed copy out.

A call's tokens are exact during that call; `waiting_prompt` says when they are placed.

Up to DRAFT_MARGIN tokens of the latest call stay exact beyond the recent window: rejected draft tokens leave no trace.
"""

import copy
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ..artifact.config import OscarConfig
from ..artifact.layer_constants import LayerConstants
from ..dtypes import keeps_dtypes, without_autocast
from ..errors import CacheStateError
from ..kernels.append import append_rows
from ..kernels.decode import MAX_NEW_TOKENS, DecodeStore
from ..kernels.decode_step import packed_after, place_problem, place_tokens_triton
from ..kernels.dequantize import dequantize_rows
from ..quantization.block_centers import open_blocks
from ..quantization.kv_side import Side
from ..quantization.packed_rows import PackedRows
from . import prompt_statistics
from .padding import Padding
from .prompt_statistics import PromptStatistics
from .waiting_prompt import DRAFT_MARGIN, WaitingPrompt

# More tokens than this leave the window faster through the append kernel, which takes them side by side.
_MAX_STEP_LEAVING = 2


class LayerStore:
    """A growing store. See the module's text for the layout; `config` says how rows are quantized.

    keys, values: the two Sides, once there are any (`is_allocated`). version: counts changes, so that a view of an earlier
    moment knows that it is stale.
    """

    def __init__(self, config: OscarConfig):
        self.config, self.version = config, 0
        self.keys: Side | None = None
        self.values: Side | None = None
        self.statistics: PromptStatistics | None = None
        self.padding = Padding()
        self.forget()

    def forget(self) -> None:
        """Drop all tokens but keep the buffers."""
        self.version += 1
        self.waiting: WaitingPrompt | None = None
        # Between the first write that a second try could not repeat and the new lengths.
        self.is_torn = False
        self.set_lengths(0, 0)
        self.padding.clear()
        if self.statistics is not None:
            self.statistics.forget()

    # -------------------------------------------------------------------------------------------------- lengths
    def lengths(self) -> tuple[int, int]:
        """(tokens, history): slots placed, and how many of them are packed."""
        return self._lengths

    def set_lengths(self, tokens: int, history: int) -> None:
        """Change both at once."""
        self._lengths = (tokens, history)

    @property
    def tokens(self) -> int:
        """Slots placed."""
        return self.lengths()[0]

    @property
    def history(self) -> int:
        """Slots packed."""
        return self.lengths()[1]

    @property
    def waiting_tokens(self) -> int:
        """Slots of a call that are not placed yet."""
        return 0 if self.waiting is None else self.waiting.keys.shape[2]

    @property
    def held(self) -> int:
        """Slots held, padding and waiting tokens included."""
        return self.tokens + self.waiting_tokens

    @property
    def sink(self) -> int:
        """Size of the sink region in tokens."""
        return self.config.sink_tokens

    @property
    def ring_size(self) -> int:
        """Slots of the recent buffer: the window before a call and the few tokens of the call."""
        return self.config.recent_tokens - 1 + DRAFT_MARGIN

    # -------------------------------------------------------------------------------------------------- buffers
    @property
    def is_allocated(self) -> bool:
        """Whether there are buffers."""
        return self.keys is not None

    @property
    def sides(self) -> tuple[Side, Side]:
        """Keys and values."""
        return self.keys, self.values

    def side(self, kind: str) -> Side:
        """The keys ("k") or the values ("v")."""
        return self.keys if kind == "k" else self.values

    def allocate(self, keys: Tensor, values: Tensor, constants: LayerConstants) -> None:
        """Make windows and empty packed rows for [B, H, *, D] keys and values. All are made before anything changes, so that a
        failure leaves the store as it was, with the buffers of another batch if there are any."""
        # Buffers that are updated in place for a long time must not be inference tensors, whatever mode the first call is in.
        with torch.inference_mode(False):
            learns = prompt_statistics.is_needed(self.config, constants)
            statistics = PromptStatistics(self.config, constants, keys.shape[1]) if learns else None
            constants = statistics.placeholder() if learns else constants.for_rule(self.config.key_rule)
            self._allocate(keys, values, constants, statistics)

    def _allocate(
        self, keys: Tensor, values: Tensor, constants: LayerConstants, statistics: PromptStatistics | None
    ) -> None:
        (batch, heads), made = keys.shape[:2], []
        for kind, dim in (("key", keys.shape[3]), ("value", values.shape[3])):
            rows = self.config.side_format(kind, dim).new_rows(batch, heads, keys.device)
            # Autocast passes float32 keys (they went through RoPE) beside bfloat16 values; the keys' dtype holds both.
            windows = [
                torch.zeros(batch, heads, size, dim, dtype=keys.dtype, device=keys.device)
                for size in (self.sink, self.ring_size)
            ]
            made.append((kind, rows, *windows))
        self._take_geometry(keys, constants, statistics)
        self.keys, self.values = (self._new_side(*parts) for parts in made)

    def _take_geometry(self, keys: Tensor, constants: LayerConstants, statistics: PromptStatistics | None) -> None:
        self.dtype, self.device, self.constants, self.statistics = keys.dtype, keys.device, constants, statistics
        self.batch_size, self.kv_heads = keys.shape[:2]

    def _new_side(self, kind: str, rows: PackedRows, sink: Tensor, ring: Tensor) -> Side:
        form = self.config.side_format(kind, sink.shape[3])
        return Side(form, rows, **self.constants.of_side(kind, form), sink=sink, ring=ring)

    def suits(self, keys: Tensor, values: Tensor) -> bool:
        """Whether the buffers are for such states; an empty store may be used again for others."""
        held = self.keys.sink
        same = (held.shape[:2], held.shape[3], held.dtype, held.device) == (
            keys.shape[:2], keys.shape[3], keys.dtype, keys.device,
        )  # fmt: skip
        return same and self.values.dim == values.shape[3]

    @property
    def geometry(self) -> tuple[int, int, int, int]:
        """(batch, KV heads, key dim, value dim)."""
        return self.batch_size, self.kv_heads, self.keys.dim, self.values.dim

    def __getstate__(self):
        # Constants are shared by copies; sides are made of them anew.
        state = self.__dict__.copy()
        state["keys"] = state["values"] = None
        state["buffers"] = [(side.rows, side.sink, side.ring) for side in self.sides] if self.is_allocated else None
        return state

    def __setstate__(self, state):
        buffers = state.pop("buffers")
        self.__dict__.update(state)
        if buffers is not None:
            self.keys, self.values = (self._new_side(kind, *parts) for kind, parts in zip(("key", "value"), buffers))

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = type(self).__new__(type(self))
        # A copy is written to for as long as it lives, whatever mode it was made in.
        with torch.inference_mode(False):
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    # -------------------------------------------------------------------------------------------------- learning
    def see_queries(self, query: Tensor, new_tokens: int) -> None:
        """The queries of a call's tokens, [B, Hq, M, D], pass by: learn from them while nothing is packed yet."""
        if self.statistics is not None and not self._lengths[1]:
            self._see_queries(query, new_tokens)

    # Chunks of a prompt may be compiled; what is learned from them is no part of a graph.
    @torch.compiler.disable
    def _see_queries(self, query: Tensor, new_tokens: int) -> None:
        with torch.inference_mode(False), without_autocast(self.device):
            # Layers that share keys may ask for the last tokens of a prompt alone.
            first = self.held - min(new_tokens, query.shape[2])
            self.statistics.see(query.detach(), first, self.padding.rows)

    def _learn(self, new: Tensor, first: int) -> None:
        """Make the constants that depend on the sequence, now that its first tokens are to be packed. new: keys of slots
        `first`.."""
        if (
            self.statistics is not None
            and not self._lengths[1]
            and (made := self._constants_of(new, first)) is not None
        ):
            self._take_constants(made)

    def _constants_of(self, new: Tensor, first: int) -> LayerConstants | None:
        """What is known from the exact keys of all slots, those of `first`.. being `new`; None where they are the sink's alone."""
        total = first + new.shape[2]
        # Of a short prompt the sink's tokens are most; the very first ones are like no others.
        begin = self.sink if first or total > 2 * self.sink else min(4, total - 1)
        if begin >= total:
            return None
        keys = self._slots(self.keys, new, first, begin, total)
        hidden = [max(0, row - begin) for row in self.padding.rows]
        with torch.inference_mode(False):
            return self.statistics.constants(keys, hidden)

    def learned(self) -> LayerConstants | None:
        """Constants that were made from the sequence so far or, where nothing is packed yet, would be; None where none are."""
        if self.statistics is None or self.history:
            return None if self.statistics is None else self.constants
        return self._constants_of(self.dense("k"), 0)

    def restore_learned(self, constants: dict[str, Tensor], query_moment: Tensor | None, queries: int) -> None:
        """Take what was learned from the sequence of a saved cache: constants by name, and what its queries were."""
        self._take_constants(LayerConstants(**{**self.constants.tensors(), **constants}))
        self.statistics.query_moment, self.statistics.queries = query_moment, queries

    def _take_constants(self, constants: LayerConstants) -> None:
        self.constants = constants
        for kind, side in zip(("key", "value"), self.sides):
            for name, tensor in constants.of_side(kind, side.format).items():
                setattr(side, name, tensor)

    # -------------------------------------------------------------------------------------------------- writing
    def begin(self, new_tokens: int) -> None:
        """Make ready for a call of so many tokens."""
        self.place_waiting()

    def add(self, keys: Tensor, values: Tensor, call: object) -> None:
        """Take the tokens of a call, [B, H, M, D], after `begin`: place them, or let them wait until it has read them. call: what
        reads them."""
        self.version += 1
        if not self.tokens or keys.shape[2] > DRAFT_MARGIN or not self.padding.is_settled:
            self.waiting = WaitingPrompt(keys, values, weakref.ref(call))
        else:
            self.place(keys, values)

    def waits_for(self, call: object) -> bool:
        """Whether the tokens of a call are those that wait."""
        return self.waiting is not None and self.waiting.call is not None and self.waiting.call() is call

    def check_not_torn(self) -> None:
        """Raise CacheStateError if storing was interrupted where tokens are neither in their old place nor counted in their new."""
        if self.is_torn:
            raise CacheStateError(
                "storing tokens was interrupted in the middle, and some that were held are overwritten: call cache.reset() or use "
                "a new cache"
            )

    def place_waiting(self) -> None:
        """Place the tokens of the latest call if they are still waiting; idempotent."""
        self.check_not_torn()
        if self.waiting is None:
            return
        self.padding.settle()
        # They stop waiting only once they are placed: running out of memory must not lose them.
        self.place(self.waiting.keys, self.waiting.values)
        self.waiting = None

    @torch.no_grad()
    @keeps_dtypes
    def place(self, keys: Tensor, values: Tensor) -> None:
        """Put new tokens into sink and ring, first packing what must leave the exact region. Lengths change last, so that a
        failure leaves the store as it was and a second try does the same again."""
        new = (keys, values)
        if keys.shape[2] > MAX_NEW_TOKENS or not self._place_in_one_launch(*new):
            self._place_many(new)

    def _place_many(self, new: tuple[Tensor, Tensor]) -> None:
        (first, old), count = self.lengths(), new[0].shape[2]
        total = first + count
        exact = self.config.recent_tokens - 1 + min(count, DRAFT_MARGIN)
        history = max(old, total - self.sink - exact)
        if history > old:
            # A step does all of this without its new tokens: the step kernel may encode before they are known.
            known = new if count > MAX_NEW_TOKENS else [rows[:, :, :0] for rows in new]
            self._learn(known[0], first)
            self._open_blocks(known, first, old, history)
            slots = (self.sink + old, self.sink + history)
            self._pack(old, [self._slots(side, rows, first, *slots) for side, rows in zip(self.sides, new)])
        # Slots of the sink region go to the sink buffer alone.
        sinking = min(self.sink, total) - first
        if sinking > 0:
            self._write_sink(first, [rows[:, :, :sinking] for rows in new])
        begin = max(first, self.sink + history)
        if begin < total:
            index = self.ring_index(begin, total)
            # A second try reads the ring again, so nothing may fail between writing to it and the new lengths.
            ready = [rows[:, :, begin - first :].to(self.dtype) for rows in new]
            self.is_torn = True
            for side, rows in zip(self.sides, ready):
                side.ring[:, :, index] = rows
        self.set_lengths(total, history)
        self.is_torn = False

    def _place_in_one_launch(self, keys: Tensor, values: Tensor) -> bool:
        """Place a few tokens with the step kernel; False where it cannot, or where many tokens leave the window."""
        tokens, history = self.lengths()
        packed = packed_after(tokens, history, self.sink, self.config.recent_tokens)
        if packed - history > _MAX_STEP_LEAVING or place_problem(*self.sides):
            return False
        if packed > history:
            self._learn(keys[:, :, :0], tokens)
        for side in self.sides:
            side.rows.reserve(packed)
        start = self.padding.on(self.device) if self.padding.is_padded else None
        recent = self.config.recent_tokens
        self.is_torn = True
        try:
            lengths = place_tokens_triton(*self.sides, keys, values, (tokens, history), recent, start)
        except Exception:
            # Nothing was launched.
            self.is_torn = False
            raise
        self.set_lengths(*lengths)
        self.is_torn = False
        return True

    def ring_index(self, begin: int, end: int) -> Tensor | slice:
        """Ring positions of slots begin..end-1."""
        first = (begin - self.sink) % self.ring_size
        if first + end - begin <= self.ring_size:
            return slice(first, first + end - begin)
        return torch.arange(begin - self.sink, end - self.sink, device=self.keys.ring.device) % self.ring_size

    def _slots(self, side: Side, new: Tensor, first: int, begin: int, end: int) -> Tensor:
        """Exact rows of slots begin..end-1, the older ones from the ring, the rest from new tokens that begin at slot `first`."""
        middle = min(max(begin, first), end)
        parts = []
        if begin < middle:
            parts.append(side.ring[:, :, self.ring_index(begin, middle)])
        if middle < end:
            parts.append(new[:, :, middle - first : end - first])
        return parts[0] if len(parts) == 1 else torch.cat([part.to(self.dtype) for part in parts], 2)

    def _pack(self, history: int, leaving: list[Tensor]) -> None:
        """Pack rows as history tokens `history`..; the caller then raises the length."""
        for side, rows in zip(self.sides, leaving):
            side.rows.reserve(history + rows.shape[2])
            append_rows(side, history, rows)
        if self.padding.is_padded and history < max(self.padding.rows):
            self._write_sink(self.sink + history, leaving)

    def _open_blocks(self, new: tuple[Tensor, Tensor], first: int, old: int, history: int) -> None:
        """Set the centers of the blocks that packing tokens old..history-1 opens, from all of their tokens that are exact."""
        hidden = [max(0, row - self.sink) for row in self.padding.rows]
        for side, rows in zip(self.sides, new):
            if not (block := side.center_block):
                continue
            side.rows.reserve(history)
            opened = -(-old // block) * block
            if opened < history:
                end = min(first + rows.shape[2], self.sink + -(-history // block) * block)
                exact = self._slots(side, rows, first, self.sink + opened, end)
                open_blocks(side.rows, opened, history, exact, hidden)

    def _write_sink(self, first: int, new: list[Tensor]) -> None:
        """Copy those of slots first.. that belong to a row's sink into its sink buffer."""
        last = first + new[0].shape[2]
        for side, rows in zip(self.sides, new):
            if not self.padding.is_padded:
                end = min(last, self.sink)
                side.sink[:, :, first:end] = rows[:, :, : end - first].to(self.dtype)
                continue
            for row, start in enumerate(self.padding.rows):
                begin, end = max(first, start), min(last, start + self.sink)
                if begin < end:
                    side.sink[row, :, begin - start : end - start] = rows[row, :, begin - first : end - first].to(
                        self.dtype
                    )

    # -------------------------------------------------------------------------------------------------- reading
    def decode_store(self) -> DecodeStore:
        """The store as the fused decode kernel reads it; all tokens must be placed."""
        start = self.padding.on(self.device) if self.padding.is_padded else None
        return DecodeStore(self.keys, self.values, *self.lengths(), start)

    @torch.no_grad()
    @keeps_dtypes
    def dense(self, kind: str) -> Tensor:
        """All tokens of keys ("k") or values ("v") as a dense tensor [B, H, T, D] in the model's dtype, the history dequantized."""
        self.check_not_torn()
        side, (tokens, history) = self.side(kind), self.lengths()
        sink, exact, begin = side.sink, min(self.sink, tokens), self.sink + history
        padded = self.padding.is_padded
        parts = [sink.new_zeros(*sink.shape[:2], exact, side.dim) if padded else sink[:, :, :exact]]
        if history:
            parts.append(dequantize_rows(side, 0, history, self.dtype))
        if begin < tokens:
            parts.append(side.ring[:, :, self.ring_index(begin, tokens)])
        if self.waiting is not None:
            parts.append(self.waiting.keys if kind == "k" else self.waiting.values)
        dense = torch.cat(parts, 2)
        for row, start in enumerate(self.padding.rows):
            count = min(start + self.sink, tokens, begin) - start
            if count > 0:
                dense[row, :, start : start + count] = sink[row, :, :count]
        return dense

    @torch.no_grad()
    @keeps_dtypes
    def rows(self, kind: str, begin: int, end: int) -> Tensor:
        """Keys ("k") or values ("v") of slots begin..end-1 of rows without padding, [B, H, end - begin, D], packed ones
        dequantized. All tokens must be placed."""
        side, (_, history) = self.side(kind), self.lengths()
        packed = self.sink + history
        parts = []
        if begin < self.sink:
            parts.append(side.sink[:, :, begin : min(end, self.sink)])
        first, last = max(begin, self.sink), min(end, packed)
        if first < last:
            parts.append(dequantize_rows(side, first - self.sink, last - self.sink, self.dtype))
        if max(begin, packed) < end:
            parts.append(side.ring[:, :, self.ring_index(max(begin, packed), end)])
        return torch.cat(parts, 2)

    # -------------------------------------------------------------------------------------------------- operations
    @torch.inference_mode(False)
    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to every stored tensor; all new ones exist before the first old one goes."""
        self.keys, self.values = [side.mapped(function) for side in self.sides]

    def select(self, indices: Tensor) -> None:
        """Keep the rows `indices` (whole numbers from 0 on) of the batch, bit for bit: nothing is quantized again."""
        # An empty store has no rows to gather, whatever batch its buffers were made for.
        if not self.held:
            return
        self.place_waiting()
        self._map(lambda t: t.index_select(0, indices.to(t.device)))
        self.batch_size = self.keys.sink.shape[0]
        self.padding.select(indices.tolist())
        self.version += 1

    def crop(self, keep: int) -> None:
        """Keep the first `keep` slots."""
        tokens, history = self.lengths()
        if keep >= tokens:
            return
        if keep <= 0:
            self.forget()
            return
        self.version += 1
        self.set_lengths(keep, min(history, max(0, keep - self.sink)))
        self.padding.crop(keep)

    def restore(self, tokens: int, history: int, starts: list[int] | None, settled: bool) -> None:
        """Count tokens that were written to the buffers from outside: a saved cache."""
        self.version += 1
        self.padding.restore(starts, settled)
        self.set_lengths(tokens, history)

    def offload(self) -> None:
        """Move the stored tensors to the CPU."""
        if self.is_allocated:
            self.place_waiting()
            self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the stored tensors back to the layer's device."""
        if self.is_allocated and self.keys.sink.device != self.device:
            self._map(lambda t: t.to(self.device, non_blocking=True))

    def region_bytes(self) -> dict[str, int]:
        """Bytes allocated by region: sink, recent, codes, scale_min, centers, constants."""
        regions = {"sink": 0, "recent": 0, "codes": 0, "scale_min": 0, "centers": 0, "constants": self.constants.nbytes}
        for side in self.sides:
            regions["sink"] += side.sink.nbytes
            regions["recent"] += side.ring.nbytes
            regions["codes"] += side.rows.code_bytes
            regions["scale_min"] += side.rows.qparam_bytes
            regions["centers"] += side.rows.center_bytes
        return regions

"""StaticStore: a LayerStore of fixed size whose lengths live on the device, for compiled decode and CUDA graphs."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ..artifact.config import OscarConfig
from ..artifact.layer_constants import LayerConstants
from ..dtypes import without_autocast
from ..errors import CacheStateError
from ..kernels.decode_step import AHEAD, COUNTERS, HISTORY, LENGTH, OVERFLOW
from .layer_store import LayerStore
from .prompt_statistics import PromptStatistics
from .static_layout import Layout, StaticRegions

_CAPACITY_ROUND = 64


def overflow_message(held: int, new: int | str, limit: int) -> str:
    """What is wrong when tokens do not fit a static cache."""
    return (
        f"the cache was made for max_cache_len={limit} tokens, holds {held} and was given {new} more, which were not stored: "
        "use a larger max_cache_len or a growing cache (leave it out), or call reset() for another prompt"
    )


class StaticStore(LayerStore):
    """A LayerStore that holds at most `max_cache_len` tokens, everything allocated at once in one flat buffer.

    takes_steps: the state STEPS, in which calls of a few tokens go through operators that read and write the lengths on the
    device; there the host does not know them and `lengths` waits for the device. In any other state it does know them; the next
    call of a few tokens opens STEPS again.
    counters: int32 [COUNTERS], the lengths as kernels/decode_step.py describes them, inside `storage` once there is one.
    """

    def __init__(self, config: OscarConfig, max_cache_len: int):
        self.max_cache_len, self.takes_steps = max_cache_len, False
        self.layout: Layout | None = None
        self.storage: Tensor | None = None
        self.regions: StaticRegions | None = None
        with torch.inference_mode(False):
            self.counters = torch.zeros(COUNTERS, dtype=torch.int32)
        super().__init__(config)

    def forget(self) -> None:
        """Drop all tokens but keep the buffers."""
        self.takes_steps = False
        super().forget()
        self.counters[OVERFLOW] = 0

    # -------------------------------------------------------------------------------------------------- lengths
    def lengths(self) -> tuple[int, int]:
        """(tokens, history); waits for the device while the store takes steps."""
        if self.takes_steps:
            tokens, history = self.counters[: HISTORY + 1].tolist()
            return tokens, history
        return self._lengths

    def open_forward(self) -> None:
        """A forward begins: place what waits; calls of a few tokens are steps from now on if a prompt is placed and its padding
        known."""
        if not self.takes_steps:
            self.place_waiting()
            self.takes_steps = self.padding.is_settled and self._lengths[0] > 0

    def set_lengths(self, tokens: int, history: int) -> None:
        """Change both at once, on the host and on the device."""
        self._lengths = (tokens, history)
        self.counters[LENGTH] = tokens
        self.counters[HISTORY] = history
        # The token that was encoded ahead may be another one now.
        self.counters[AHEAD] = 0

    # -------------------------------------------------------------------------------------------------- buffers
    def _allocate(
        self, keys: Tensor, values: Tensor, constants: LayerConstants, statistics: PromptStatistics | None
    ) -> None:
        config, capacity = self.config, max(self.max_cache_len - self.sink, 1)
        if statistics is not None:
            constants = self._own(constants, keys.shape[1])
        flat_constants, kinds = constants.flat
        layout = Layout(
            batch=keys.shape[0], heads=keys.shape[1], keys=config.side_format("key", keys.shape[3]),
            values=config.side_format("value", values.shape[3]), sink=self.sink, ring=self.ring_size,
            recent=config.recent_tokens, capacity=-(-capacity // _CAPACITY_ROUND) * _CAPACITY_ROUND,
            limit=self.max_cache_len, dtype_name=str(keys.dtype).removeprefix("torch."), constants=kinds,
        )  # fmt: skip
        storage = layout.new_storage(keys.device)
        self._take_geometry(keys, constants, statistics)
        self.layout, self.flat_constants = layout, flat_constants
        self._bind(storage)

    def _own(self, constants: LayerConstants, kv_heads: int) -> LayerConstants:
        """Constants in a buffer that no other store has, to be written to."""
        flat, kinds = constants.flat
        own = flat.clone()
        made = LayerConstants.from_flat(own, kinds, kv_heads, constants.key_dim, constants.value_dim)
        vars(made)["flat"] = (own, kinds)
        return made

    def _take_constants(self, constants: LayerConstants) -> None:
        # In place: a captured graph knows the address, and the sides are views of the buffer.
        self.flat_constants.copy_(constants.flat[0])

    def learned(self) -> LayerConstants | None:
        """Constants that were made from the sequence so far: those in use, for steps learn nothing."""
        return None if self.statistics is None else self.constants

    def place(self, keys: Tensor, values: Tensor) -> None:
        """As LayerStore does; and what is to be learned of the sequence is learned now, for steps cannot."""
        first = self._lengths[0]
        super().place(keys, values)
        if self.statistics is not None and not self._lengths[1]:
            # They are placed; what waits would be placed again.
            self.is_torn = True
            with torch.no_grad(), without_autocast(self.device):
                self._learn(keys, first)
            self.is_torn = False

    def _bind(self, storage: Tensor) -> None:
        """Make a flat buffer the store's own: every stored tensor is a view of it."""
        self.storage, self.spec = storage, self.layout.spec
        self.regions = self.layout.open(storage, self.constants)
        self.keys, self.values, self.counters = self.regions.keys, self.regions.values, self.regions.counters
        self.padding.bind(self.regions.start)
        if not torch.compiler.is_compiling():
            # Without it every graph would copy the buffers first.
            for tensor in (self.storage, self.flat_constants):
                torch._dynamo.mark_static_address(tensor, guard=False)

    def __getstate__(self):
        # Views are made anew, and constants are shared by copies.
        state = {**super().__getstate__(), "buffers": None, "regions": None, "flat_constants": None}
        if self.is_allocated:
            del state["counters"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.storage is not None:
            if self.statistics is not None:
                self.constants = self._own(self.constants, self.kv_heads)
            self.flat_constants = self.constants.flat[0]
            self._bind(self.storage)

    @torch.inference_mode(False)
    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        # All new tensors exist before the first old one changes.
        made = [function(tensor) for tensor in self.regions.tensors()]
        batch, device = made[0].shape[0], made[0].device
        if (batch, device) != (self.batch_size, self.storage.device):
            counters, layout = self.counters.clone(), dataclasses.replace(self.layout, batch=batch)
            storage = layout.new_storage(device)
            self.layout = layout
            self.padding.bind(None)
            self._bind(storage)
            self.counters.copy_(counters)
        # Same shape, same place: a captured graph knows these addresses.
        for tensor, new in zip(self.regions.tensors(), made):
            tensor.copy_(new)

    # -------------------------------------------------------------------------------------------------- writing
    def begin(self, new_tokens: int) -> None:
        """Make ready for a call of so many tokens outside of a step. Raises CacheStateError if they do not fit."""
        super().begin(new_tokens)
        self.know_lengths(*self.lengths())
        self.check_room(new_tokens)

    def check_room(self, new_tokens: int) -> None:
        """Raise CacheStateError if so many more tokens do not fit."""
        if self.held + new_tokens > self.max_cache_len:
            raise CacheStateError(overflow_message(self.held, new_tokens, self.max_cache_len))

    def know_lengths(self, tokens: int, history: int) -> None:
        """Take what the device counts: the host knows the lengths from now on, until the next step."""
        self._lengths, self.takes_steps = (tokens, history), False

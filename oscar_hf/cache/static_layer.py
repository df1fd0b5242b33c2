"""StaticOscarLayer: an OscarLayer of fixed size whose lengths live on the device, for compiled decode and CUDA graphs.

Layout and operations are those of OscarLayer. Prompts and other calls of many tokens run as they do there, outside of any
graph, and wait for the device once to learn the lengths. A step of up to MAX_NEW_TOKENS tokens is two operators, `place` and
`attend`, that no host number enters: the same graph serves every length, every second cache and every padding.
"""

import torch
from torch import Tensor

from ..artifact.artifact import Artifact
from ..artifact.config import OscarConfig
from ..attention.kv_handle import OscarKV
from ..attention.static_ops import place_step
from ..attention.views import StepView
from ..kernels.decode import MAX_NEW_TOKENS
from ..masks import MaskMemory
from ..storage.static_store import StaticStore
from .layer import OscarLayer


class StaticOscarLayer(OscarLayer):
    """An OscarLayer that holds at most `max_cache_len` tokens, everything allocated at the first update."""

    is_compileable = True
    store: StaticStore

    def __init__(
        self,
        config: OscarConfig,
        artifact: Artifact,
        layer_idx: int,
        max_cache_len: int,
        masks: MaskMemory | None = None,
    ):
        self.max_cache_len = max_cache_len
        super().__init__(config, artifact, layer_idx, masks)

    def _new_store(self) -> StaticStore:
        return StaticStore(self.config, self.max_cache_len)

    # -------------------------------------------------------------------------------------------------- lengths
    def get_seq_length(self) -> int | Tensor:
        """Slots held: once the layer takes steps an int64 tensor on the device, so that asking does not wait for it."""
        self.open_forward()
        return self.store.regions.length[0].long() if self.store.takes_steps else self.store.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask: of full width for a step, for calls of many tokens that of a growing cache."""
        if query_length > MAX_NEW_TOKENS:
            return super().get_mask_sizes(query_length)
        self.open_forward()
        if not self.store.takes_steps:
            return super().get_mask_sizes(query_length)
        self._check_some_are_new(query_length)
        return self.max_cache_len, 0

    def open_forward(self) -> None:
        """A forward begins, as far as is known: make ready for steps. Does nothing while a model is traced."""
        if not torch.compiler.is_compiling():
            self.store.open_forward()

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.max_cache_len

    # -------------------------------------------------------------------------------------------------- update
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[OscarKV, OscarKV]:
        """Add the tokens of a call, [B, H, M, D]; returns two OscarKV handles over all slots."""
        if key_states.shape[2] <= MAX_NEW_TOKENS:
            if not self.store.takes_steps:
                self._open_forward_untraced()
            if self.store.takes_steps:
                return self._take_step(key_states, value_states)
        return self._take_prompt(key_states, value_states)

    @torch.compiler.disable
    def _open_forward_untraced(self) -> None:
        self.store.open_forward()

    @torch.compiler.disable
    def _take_prompt(self, key_states: Tensor, value_states: Tensor) -> tuple[OscarKV, OscarKV]:
        return super().update(key_states, value_states)

    def _take_step(self, key_states: Tensor, value_states: Tensor) -> tuple[OscarKV, OscarKV]:
        # Fewer rows or heads would be broadcast over what is stored, or a kernel would read past them.
        self._check_fits(key_states, value_states)
        self.masks.enter(self.layer_idx)
        place_step(self.store, key_states.detach(), value_states.detach())
        view = StepView(self.store, self.masks, self.layer_idx, key_states, value_states)
        return self._handles(view, key_states, value_states, self.max_cache_len)

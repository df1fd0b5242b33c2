"""OscarLayer: transformers' protocol of a cache layer over a LayerStore, which holds everything (`storage/layer_store.py`)."""

import copy

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..artifact.artifact import Artifact
from ..artifact.config import OscarConfig
from ..attention.kv_handle import OscarKV
from ..attention.views import AttentionView, CallView
from ..errors import CacheStateError, UnsupportedModelError
from ..masks import MaskMemory
from ..storage.layer_store import LayerStore


class OscarLayer(CacheLayerMixin):
    """A growing layer; `config` and `artifact` say how rows are quantized. masks: shared by the layers of a cache."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = True

    def __init__(self, config: OscarConfig, artifact: Artifact, layer_idx: int, masks: MaskMemory | None = None):
        super().__init__()
        self.config, self.artifact, self.layer_idx = config, artifact, layer_idx
        self.masks = MaskMemory() if masks is None else masks
        self.masks.serve(layer_idx)
        self.store = self._new_store()

    def _new_store(self) -> LayerStore:
        return LayerStore(self.config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokens={self.store.held}, history={self.store.history})"

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    @property
    def constants(self):
        """The LayerConstants in use, once there are any."""
        return self.store.constants

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.store.batch_size

    # -------------------------------------------------------------------------------------------------- geometry
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate windows and empty packed rows for [B, H, *, D] keys and values."""
        self._check_geometry(key_states, value_states)
        constants = self.artifact.constants_for(self.layer_idx, key_states, value_states)
        self.store.allocate(key_states, value_states, constants)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

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

    def _check_fits(self, key_states: Tensor, value_states: Tensor) -> None:
        self._check_geometry(key_states, value_states)
        given = (key_states.shape[0], key_states.shape[1], key_states.shape[3], value_states.shape[3])
        if given != self.store.geometry:
            raise CacheStateError(
                f"layer {self.layer_idx} holds (batch, KV heads, key dim, value dim) = {self.store.geometry}, but the model passed "
                f"{given}: use a new cache, or select or repeat its batch first"
            )

    # -------------------------------------------------------------------------------------------------- update
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[OscarKV, OscarKV]:
        """Add the tokens of a call, [B, H, M, D]; returns two OscarKV handles over all tokens."""
        store = self.store
        store.begin(key_states.shape[2])
        if not self.is_initialized or (store.held == 0 and not store.suits(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        self._check_fits(key_states, value_states)
        self.check_rows(key_states.shape[0])
        self.masks.enter(self.layer_idx)
        view = CallView(store, self.masks, self.layer_idx, key_states, value_states)
        store.add(key_states, value_states, view)
        view.open()
        return self._handles(view, key_states, value_states, store.held)

    def check_rows(self, batch: int) -> None:
        """Raise CacheStateError unless a call's rows are as many as those that are held, and those of the stated padding."""
        store = self.store
        if store.held and batch != store.batch_size:
            raise CacheStateError(
                f"the cache holds {store.batch_size} rows, but the model passed {batch}: use a new cache, or select or repeat its "
                "batch first"
            )
        rows = store.padding.rows
        if rows and len(rows) != batch:
            raise CacheStateError(
                f"the padding was given for {len(rows)} rows, the model passed {batch}: generate() expands rows for beams and "
                "num_return_sequences, so give mask.repeat_interleave(n, 0)"
            )

    def _handles(self, view: AttentionView, keys: Tensor, values: Tensor, slots: int) -> tuple[OscarKV, OscarKV]:
        shape = (*keys.shape[:2], slots)
        return OscarKV(view, "k", (*shape, keys.shape[3])), OscarKV(view, "v", (*shape, values.shape[3]))

    def set_padding(self, starts: list[int]) -> None:
        """State where each row begins, before the first update."""
        if self.store.held:
            raise CacheStateError(
                "the padding must be given before the first tokens: call cache.reset() or use a new cache"
            )
        self.store.padding.state_rows(starts)

    # -------------------------------------------------------------------------------------------------- lengths
    def get_seq_length(self) -> int:
        """Slots held, padding included."""
        return self.store.held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask for a call with `query_length` new tokens, of which there must be one."""
        self._check_some_are_new(query_length)
        return self.store.held + int(query_length), 0

    def _check_some_are_new(self, query_length: int) -> None:
        if not query_length:
            raise CacheStateError(
                f"no token is new: the cache holds {self.store.held} already, and generate() takes the whole text, at least one "
                "token longer than that (the model itself takes the new tokens alone)"
            )

    def get_max_length(self) -> int:
        """-1: a growing layer has no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Older name of `get_max_length`."""
        return self.get_max_length()

    # -------------------------------------------------------------------------------------------------- operations
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gather rows of the batch, bit for bit: nothing is quantized again."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch (integers, or a bool mask)."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        if self.is_initialized:
            self.store.select(torch.where(indices < 0, indices + self.store.batch_size, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        if self.is_initialized:
            self.store.select(torch.arange(self.store.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens (a negative number, or 0 for none). A positive number is the length to
        keep, as older callers mean it. 0 does not wait for the device."""
        self.store.place_waiting()
        count = int(tokens_to_remove)
        if count:
            self.store.crop(count if count > 0 else max(self.store.tokens + count, 0))

    def reset(self) -> None:
        """Forget all tokens but keep the buffers."""
        self.store.forget()

    def offload(self) -> None:
        """Move the stored tensors to the CPU."""
        self.store.offload()

    def prefetch(self) -> None:
        """Move the stored tensors back to the layer's device."""
        self.store.prefetch()

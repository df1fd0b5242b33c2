"""OscarCache: a container of one layer per model layer, built the way transformers builds its own caches."""

import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, StaticCache

from ..artifact.artifact import Artifact
from ..artifact.config import OscarConfig
from ..artifact.recipes import OVERRIDABLE
from ..checks import check_whole_number
from ..errors import ArtifactError, CacheStateError, OscarError
from ..kernels.decode import MAX_NEW_TOKENS
from ..kernels.decode_step import HISTORY, LENGTH, OVERFLOW
from ..storage.static_store import StaticStore, overflow_message
from ..transformers_compat import model_config as compat
from ..transformers_compat.deferred_stop import stop_is_deferred
from . import build, native_layers, save_load
from .batch_rows import BatchRows
from .guards import Guards
from .layer import OscarLayer
from .memory_report import MemoryReport, layer_memory
from .static_layer import StaticOscarLayer
from .wholeness import STATE_METHODS, Wholeness, watched


class OscarCache(BatchRows, Cache):
    """A 2-bit KV cache for `model.generate(past_key_values=...)` and `model(past_key_values=...)`.

    The first `sink_tokens` and the last `recent_tokens` tokens stay as the model made them; everything between is 2-bit.
    Full-attention layers are OscarLayers; sliding, chunked and linear ones stay transformers' own.

    `OscarCache(...)` grows with its tokens. With `max_cache_len=N` it has a fixed size and is a `StaticOscarCache`, which is a
    `StaticCache` to transformers: generate() compiles its decode step by itself on a GPU. To derive a class of your own, derive a
    growing one from `OscarCache` and a static one from `StaticOscarCache`.

    Args:
        config (`PreTrainedConfig`, *optional*):
            The model's config (`model.config`). May be left out only with an artifact that records what is needed.
        artifact (`Artifact`, `str` or path, *optional*):
            Calibrated constants: an `Artifact`, a folder, or a Hub repository id. Not together with `recipe`.
        recipe (`str`, *optional*):
            What to do without an artifact: `"default"`, which learns from each sequence's own first tokens, or `"hadamard"`.
        max_cache_len (`int`, *optional*):
            Allocate room for that many tokens at once.
        offloading (`bool`, defaults to `False`):
            Keep each layer on the CPU except while it is in use. Growing caches only.
        sink_tokens, recent_tokens, group_size, key_scale, value_scale, key_symmetric, value_symmetric, key_center, key_block:
            How rows are stored, see `OscarConfig`; `None` takes what the artifact says.

    Raises:
        ArtifactError: for an artifact that is missing, unsound, or made for another model.
        UnsupportedModelError: for a model whose cache does not hold keys and values.

    Example:

    ```python
    from oscar_hf import OscarCache

    cache = OscarCache(model.config)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=20)
    ```
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        artifact: Artifact | str | os.PathLike | None = None,
        recipe: str | None = None,
        *,
        max_cache_len: int | None = None,
        offloading: bool = False,
        sink_tokens: int | None = None,
        recent_tokens: int | None = None,
        group_size: int | None = None,
        key_scale: str | None = None,
        value_scale: str | None = None,
        key_symmetric: bool | None = None,
        value_symmetric: bool | None = None,
        key_center: str | None = None,
        key_block: int | None = None,
        **unknown,
    ):
        if unknown:
            raise ArtifactError(f"unknown arguments {sorted(unknown)}: allowed overrides are {', '.join(OVERRIDABLE)}")
        self._settle_kind(max_cache_len, offloading)
        self.artifact = build.choose_artifact(artifact, recipe, config)
        storage = dict(
            sink_tokens=sink_tokens, recent_tokens=recent_tokens, group_size=group_size, key_scale=key_scale,
            value_scale=value_scale, key_symmetric=key_symmetric, value_symmetric=value_symmetric,
            key_center=key_center, key_block=key_block,
        )  # fmt: skip
        given = {name: value for name, value in storage.items() if value is not None}
        self.oscar_config: OscarConfig = self.artifact.config.override(**given)
        decoder = build.decoder_config(config, self.artifact)
        layers = build.build_layers(decoder, self.artifact, self.oscar_config, max_cache_len)
        # By name: a static cache has StaticCache next in line, which would build layers of its own.
        Cache.__init__(self, layers=layers)
        self._packed = [layer for layer in layers if isinstance(layer, OscarLayer)]
        self._blank = {}
        if max_cache_len is None:
            natives = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, OscarLayer)}
            self._blank = {i: native_layers.blank_copy(layer) for i, layer in natives.items()}
        fields = self.artifact.config.cache_fields | compat.cache_fields(decoder)
        self.record_model({"layer_types": compat.layer_types(decoder), "cache_fields": fields})
        # Not the base class's `offloading`: that moves a layer away before attention has read it through our handles.
        self._offloads = offloading
        self._open_layers: list[OscarLayer] = []
        self._whole = Wholeness(layers)
        known = None if config is None else decoder
        self._is_dropped_if_true = compat.drops_caches(known, self.artifact.config.model_type)
        self._guards = Guards(
            self.artifact,
            config is not None and compat.has_cross_attention(config),
            len(layers),
            compat.rope_switch(known),
        )
        if max_cache_len is not None:
            self._guards.warn_beyond_calibration(max_cache_len, stacklevel=3)

    def _settle_kind(self, max_cache_len: int | None, offloading: bool) -> None:
        """Be a static cache if there is a fixed size, a growing one if not."""
        if max_cache_len is None:
            if isinstance(self, StaticCache):
                raise OscarError(
                    f"{type(self).__name__} has a fixed size: pass max_cache_len=N, the tokens it is to hold"
                )
            return
        build.check_max_cache_len(max_cache_len, offloading)
        if isinstance(self, StaticCache):
            return
        if type(self) is not OscarCache:
            raise OscarError(
                f"{type(self).__name__} derives from OscarCache, which grows: derive it from StaticOscarCache to give it "
                f"max_cache_len={max_cache_len}"
            )
        # transformers knows static caches by their class.
        self.__class__ = StaticOscarCache

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        config: PreTrainedConfig | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
        sink_tokens: int | None = None,
        recent_tokens: int | None = None,
        group_size: int | None = None,
        key_scale: str | None = None,
        value_scale: str | None = None,
        key_symmetric: bool | None = None,
        value_symmetric: bool | None = None,
        key_center: str | None = None,
        key_block: int | None = None,
        **unknown,
    ) -> "OscarCache":
        """A new, empty cache from an artifact on the Hub or in a folder.

        Args:
            name_or_path (`str` or path): A folder or a Hub repository id.
            config (`PreTrainedConfig`, *optional*):
                The model's config. With it layers, KV heads and head dim are checked at once.
            revision, subfolder, token, cache_dir, local_files_only: See `Artifact.load`.
            max_cache_len, offloading and the storage arguments: See the class.

        Raises:
            ArtifactError, UnsupportedModelError: As the class and `Artifact.load`.

        Example:

        ```python
        cache = OscarCache.from_pretrained("hub_artifacts/oscar-smollm2-135m-instruct")
        ```
        """
        artifact = Artifact.load(
            name_or_path, revision=revision, subfolder=subfolder, token=token, cache_dir=cache_dir,
            local_files_only=local_files_only,
        )  # fmt: skip
        return cls(
            config, artifact=artifact, max_cache_len=max_cache_len, offloading=offloading, sink_tokens=sink_tokens,
            recent_tokens=recent_tokens, group_size=group_size, key_scale=key_scale, value_scale=value_scale,
            key_symmetric=key_symmetric, value_symmetric=value_symmetric, key_center=key_center, key_block=key_block,
            **unknown,
        )  # fmt: skip

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        *,
        config: PreTrainedConfig | None = None,
        artifact: Artifact | str | os.PathLike | None = None,
        device: torch.device | str | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
    ) -> "OscarCache":
        """A cache that `save_pretrained` wrote, with all its tokens.

        Args:
            directory (`str` or path): The folder.
            config (`PreTrainedConfig`, *optional*): The model's config, to check that it is the same model.
            artifact (`Artifact`, `str` or path, *optional*):
                The one that the cache was saved with, where the folder does not hold it or it is loaded already.
            device (`torch.device` or `str`, *optional*): Where to put the tokens; the CPU by default.
            max_cache_len (`int`, *optional*): Make it a static cache.
            offloading (`bool`, defaults to `False`): As in the class.

        Raises:
            CacheStateError: for anything missing or unsound in the folder.
            ArtifactError: for another artifact than the cache was saved with.

        Example:

        ```python
        cache = OscarCache.load("prompt-cache", device=model.device)
        ```
        """
        return save_load.load(cls, directory, config, artifact, device, max_cache_len, offloading)

    def save_pretrained(self, directory: str | os.PathLike, include_artifact: bool = True) -> Path:
        """Write the cache and all its tokens to a folder, which `OscarCache.load` reads.

        Args:
            directory (`str` or path): The folder. An older saved cache in it is replaced at the end.
            include_artifact (`bool`, defaults to `True`): Put the artifact in as well, so that the folder is complete.

        Returns:
            `Path`: the folder.

        Raises:
            CacheStateError: for an empty cache, and for a layer of a kind that cannot be saved.

        Example:

        ```python
        cache.save_pretrained("prompt-cache")
        ```
        """
        self.check_overflow()
        self._whole.check_all()
        return save_load.save(self, directory, include_artifact)

    def record_model(self, fields: dict) -> None:
        """Keep what of the model's config is needed to build the cache again: layer_types, cache_fields."""
        self.model_fields = fields
        self._donors = build.donor_layers(fields["cache_fields"], self._packed)

    @property
    def oscar_layers(self) -> list[OscarLayer]:
        """The layers that hold packed data."""
        return list(self._packed)

    def __bool__(self) -> bool:
        """True, but for families whose generate() throws away a cache that is (Phi-3, Phi-4, Phi-MoE), so that they use it."""
        return not self._is_dropped_if_true

    # -------------------------------------------------------------------------------------------------- update
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Add the tokens of a call to one layer; returns what stands for all its keys and values."""
        if not 0 <= layer_idx < len(self.layers):
            raise ArtifactError(
                f"the model has a layer {layer_idx}, this cache was made for {len(self.layers)} layers "
                f"({self.artifact.source}): use the artifact of this model, or pass config=model.config"
            )
        layer = self.layers[layer_idx]
        self._guards.refuse_cross_attention(layer_idx, layer)
        begins = self._whole.enter(layer_idx)
        if begins and self._packed:
            # Before layers of transformers' own have taken another batch.
            self._packed[0].check_rows(key_states.shape[0])
        self._place_what_waits(layer_idx, begins)
        if isinstance(layer, OscarLayer):
            self._open_layers.append(layer)
            if self._offloads:
                layer.prefetch()
            # It compares the tokens with stored ones, so the layer must be back on its device.
            if layer is self._packed[0]:
                self._guards.check_new_forward(layer.store, value_states)
        handles = layer.update(key_states, value_states, *args, **kwargs)
        self._whole.leave(layer_idx)
        return handles

    def _place_what_waits(self, layer_idx: int, is_new_forward: bool) -> None:
        """Place prompts whose attention is over, now that a layer is about to be written to (see storage/layer_store.py)."""
        still_open = []
        for layer in self._open_layers:
            if layer in self._donors and not is_new_forward:
                still_open.append(layer)
                continue
            layer.store.place_waiting()
            if self._offloads and layer.layer_idx != layer_idx:
                layer.offload()
        self._open_layers = still_open

    def commit(self) -> None:
        """Place what the latest call left exact; every reader does so by itself."""
        for layer in self._packed:
            layer.store.place_waiting()

    def set_padding(self, attention_mask: Tensor) -> None:
        """Say before the first call which tokens are left padding.

        Only needed where the cache cannot see the mask itself (flash attention without `register_attention`): the sink then is
        the first real tokens of each row.

        Args:
            attention_mask (`torch.Tensor`): [B, T], 0 for padding.

        Raises:
            CacheStateError: if tokens are held already, or for a mask of another shape.
        """
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise CacheStateError(f"attention_mask must be a tensor [batch, tokens], got {given}")
        real = attention_mask.bool()
        starts = torch.where(real.any(-1), real.int().argmax(-1), 0).tolist()
        for layer in self._packed:
            layer.set_padding(starts)

    # -------------------------------------------------------------------------------------------------- operations
    def __iter__(self):
        """(keys, values, sliding window) of each layer as DynamicCache gives them: dense, the history dequantized."""
        self.check_overflow()
        for layer in self.layers:
            if isinstance(layer, OscarLayer):
                yield (*(layer.store.dense(kind) if layer.is_initialized else None for kind in "kv"), None)
            else:
                yield tuple(getattr(layer, name, None) for name in ("keys", "values", "_sliding_window_tensor"))

    def reset(self) -> None:
        """Forget all tokens of all layers."""
        self._whole.give_up("reset")
        for index, layer in enumerate(self.layers):
            if index in self._blank:
                native_layers.forget(layer, self._blank[index])
            else:
                layer.reset()
        self._whole.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens. Raises CacheStateError, with no layer changed, where one cannot."""
        check_whole_number("crop", tokens_to_remove)
        others = {
            index: layer
            for index, layer in enumerate(self.layers)
            if not isinstance(layer, OscarLayer) and native_layers.tensors_of(layer)
        }
        if tokens_to_remove:
            for index, layer in others.items():
                native_layers.check_croppable(index, layer)
        with self._whole.changing("crop"):
            for layer in self._packed:
                layer.crop(tokens_to_remove)
            for layer in others.values():
                # Crop 0 lets a layer drop what it recorded for a rollback; those that record nothing know no crop.
                if tokens_to_remove or getattr(layer, "record_past", False):
                    native_layers.crop(layer, tokens_to_remove)

    def check_overflow(self) -> None:
        """Raise CacheStateError if tokens could not be stored; a growing cache stores all."""

    def memory_report(self) -> MemoryReport:
        """Bytes by region and layer; print it for a table.

        Example:

        ```python
        report = cache.memory_report()
        print(f"{report.ratio:.1f}x smaller than BF16", report, sep="\\n")
        ```
        """
        self.check_overflow()
        self.commit()
        return MemoryReport([layer_memory(index, layer) for index, layer in enumerate(self.layers)])

    def __repr__(self) -> str:
        packed = len(self._packed)
        # Not a static cache's get_seq_length: that begins a forward, and a look must change nothing.
        tokens = self._packed[0].store.held if packed else self.get_seq_length()
        return f"OscarCache({self.artifact!r}, {packed} packed of {len(self.layers)} layers, {tokens} tokens)"


for _name in STATE_METHODS:
    setattr(OscarCache, _name, watched(_name))


class StaticOscarCache(OscarCache, StaticCache):
    """An OscarCache of fixed size: what `OscarCache(..., max_cache_len=N)` makes, or `StaticOscarCache(..., max_cache_len=N)`.

    Being a StaticCache tells transformers to keep masks and to compile the decode step. Steps beyond `max_cache_len` store
    nothing; where the lengths are only known on the device, the error comes with the next call that looks at the cache.
    Arguments are those of OscarCache; `max_cache_len` is required.
    """

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Add the tokens of a call to one layer; returns what stands for all its keys and values."""
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if isinstance(layer, StaticOscarLayer):
            is_step = key_states.shape[2] <= MAX_NEW_TOKENS and layer.store.takes_steps
        else:
            # A layer of transformers' own inside a traced step; outside of a trace it may end another layer's prompt.
            is_step = layer is not None and torch.compiler.is_compiling()
        if not is_step:
            return self._update_prompt(key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self._guards.refuse_cross_attention(layer_idx, layer)
            self._whole.enter(layer_idx)
        handles = layer.update(key_states, value_states, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self._whole.leave(layer_idx)
        return handles

    @torch.compiler.disable
    def _update_prompt(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        new, first = key_states.shape[2], self._packed[0].store if self._packed else None
        if first is not None and self._whole.begins(layer_idx) and (new > MAX_NEW_TOKENS or not first.takes_steps):
            # One wait for the device tells all that a prompt needs to know of all layers.
            self._refuse_overflow(self._read_counters())
            # Before layers of transformers' own have taken what ours could not.
            first.check_room(new)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Slots held by a layer."""
        self._open_forward()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the mask for a call with `query_length` new tokens."""
        self._open_forward()
        return super().get_mask_sizes(query_length, layer_idx)

    def _open_forward(self) -> None:
        """A forward begins, as far as is known: no graph can place what waits, so it is placed now."""
        # Layers are opened together, so the first one tells of all; this is asked several times a token.
        if torch.compiler.is_compiling() or not self._packed or self._packed[0].store.takes_steps:
            return
        for layer in self._packed:
            layer.open_forward()

    def check_overflow(self) -> None:
        """Raise CacheStateError, once, if compiled steps did not fit; no layer has stored anything of them."""
        self._refuse_overflow(self._read_counters())

    def _refuse_overflow(self, overflowed: bool) -> None:
        if overflowed:
            store = self._packed[0].store
            if len(self._packed) < len(self.layers):
                # Those of transformers' own have taken the tokens.
                self._whole.give_up("step that did not fit")
            raise CacheStateError(overflow_message(store.held, "some", store.max_cache_len))

    def _read_counters(self) -> bool:
        """Let every store know its lengths; whether a step did not fit, which is forgotten then. Waits once for each device."""
        by_device: dict[torch.device, list[StaticStore]] = {}
        for layer in self._packed:
            by_device.setdefault(layer.store.counters.device, []).append(layer.store)
        overflowed = False
        for stores in by_device.values():
            for store, counts in zip(stores, torch.stack([store.counters for store in stores]).tolist()):
                store.know_lengths(counts[LENGTH], counts[HISTORY])
                overflowed |= bool(counts[OVERFLOW])
        if overflowed:
            for layer in self._packed:
                layer.store.counters[OVERFLOW] = 0
        return overflowed

    def crop(self, tokens_to_remove: int) -> None:
        """As OscarCache, after `check_overflow`; 0 does not wait for the device."""
        # The step that a deferred stop takes back may be one that did not fit: then nothing is there to be removed.
        if tokens_to_remove == -1 and stop_is_deferred() and self._read_counters():
            return
        if tokens_to_remove:
            self.check_overflow()
        super().crop(tokens_to_remove)

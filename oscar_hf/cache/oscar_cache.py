"""OscarCache: a container of one layer per model layer, built the way transformers builds its own caches."""

import os
import warnings

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, StaticCache

from ..artifact.artifact import Artifact
from ..artifact.config import OVERRIDABLE, RECIPES, OscarConfig
from ..attention.static_ops import overflow_message
from ..errors import ArtifactError, CacheStateError, OscarError
from ..kernels.decode import MAX_NEW_TOKENS
from ..kernels.step import OVERFLOW
from ..transformers_compat import model_config as compat
from . import native_layers as native
from .layer import OscarLayer
from .memory_report import LayerMemory, MemoryReport, tensors_of
from .static_layer import StaticOscarLayer, StepMask

# Fewer equal tokens at the start of two turns are likely chance (a BOS token, a chat header).
_REPEATED_TOKENS = 16
_LABELS = {"num_key_value_heads": "KV heads", "head_dim": "head dim"}


class OscarCache(Cache):
    """A 2-bit KV cache for `model.generate(past_key_values=...)` and `model(past_key_values=...)`.

    The first `sink_tokens` and the last `recent_tokens` tokens stay as the model made them; everything between is 2-bit.
    Full-attention layers are OscarLayers; sliding, chunked and linear ones stay transformers' own.

    config: the model's config; None only with an artifact that records what is needed. artifact: an Artifact, a folder
    or a Hub repository id; recipe: `hadamard`, which needs no calibration. Exactly one of the two. overrides: storage
    fields of OscarConfig (sink_tokens, recent_tokens, group_size, key_scale, value_scale, key_symmetric,
    value_symmetric). max_cache_len: allocate room for that many tokens at once, for compiled decode: the cache then is a
    StaticOscarCache, which generate() compiles by itself on a GPU. offloading: keep each layer on the CPU except while it
    is in use.
    Raises ArtifactError, UnsupportedModelError.
    """

    def __new__(cls, *args, max_cache_len: int | None = None, **kwargs):
        return super().__new__(StaticOscarCache if cls is OscarCache and max_cache_len is not None else cls)

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        artifact: Artifact | str | os.PathLike | None = None,
        recipe: str | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        **overrides,
    ):
        if (artifact is None) == (recipe is None):
            raise ArtifactError(
                "give exactly one of artifact (calibrated, a folder, Hub id or Artifact) and recipe ('hadamard', data-free): "
                f"got {'both' if artifact is not None else 'neither'}"
                + (
                    "; for a folder or Hub id: OscarCache.from_pretrained(name)"
                    if isinstance(config, (str, os.PathLike))
                    else ""
                )
            )
        if max_cache_len is not None:
            _check_max_cache_len(max_cache_len, offloading)
        dense_twin = overrides.pop("_returns_dense", False)
        unknown = sorted(set(overrides) - set(OVERRIDABLE))
        if unknown:
            raise ArtifactError(f"unknown arguments {unknown}: allowed overrides are {', '.join(OVERRIDABLE)}")
        if recipe is not None:
            artifact = Artifact.data_free(recipe)
        elif not isinstance(artifact, Artifact):
            if isinstance(artifact, str) and artifact in RECIPES:
                raise ArtifactError(f"{artifact!r} is a recipe, not an artifact: pass recipe={artifact!r}")
            artifact = Artifact.load(artifact)
        self.artifact = artifact
        self.oscar_config: OscarConfig = artifact.config.override(**overrides)
        self._has_cross_attention = config is not None and compat.has_cross_attention(config)
        self._last_updated = None
        if config is not None:
            config = compat.text_config(config)
            compat.refuse_latent_attention(config)
        else:
            config = _recorded_config(artifact)
        layers = compat.native_layers(config, max_cache_len)
        _check_layers(artifact, layers)
        _check_model(artifact, config)

        step_mask = StepMask()

        def packed(index: int) -> OscarLayer:
            if max_cache_len is None:
                return OscarLayer(self.oscar_config, artifact, index, dense_twin)
            return StaticOscarLayer(self.oscar_config, artifact, index, max_cache_len, step_mask, dense_twin)

        layers = [packed(index) if compat.is_plain_attention(layer) else layer for index, layer in enumerate(layers)]
        if not any(isinstance(layer, OscarLayer) for layer in layers):
            warnings.warn(
                f"oscar_hf: {getattr(config, 'model_type', 'this model')} has no layer that is full attention alone, so nothing "
                "is quantized",
                stacklevel=2,
            )
        self._check_group_sizes(config, layers)
        self._blank = {}
        if max_cache_len is None:
            ours = [isinstance(layer, OscarLayer) for layer in layers]
            self._blank = {i: native.blank_copy(layer) for i, layer in enumerate(layers) if not ours[i]}
        # By name: a static cache has StaticCache next in line, which would build layers of its own.
        Cache.__init__(self, layers=layers)
        fields = artifact.config.cache_fields | compat.cache_fields(config)
        self.record_model({"layer_types": compat.layer_types(config), "cache_fields": fields})
        # Not the base class's `offloading`: that moves a layer away before attention has read it through our handles.
        self._offloads = offloading
        self._open_layer: OscarLayer | None = None
        self._first_layer = next(iter(self.oscar_layers), None)
        self._warned_of_length = False
        if max_cache_len is not None:
            self._warn_beyond_calibration(max_cache_len, stacklevel=3)

    def _warn_beyond_calibration(self, tokens: int, stacklevel: int) -> None:
        """Say once that constants made from short sequences do not hold for long ones (keys drift with the position)."""
        longest = self.artifact.config.longest_calibrated
        if longest is None or tokens <= longest or self._warned_of_length:
            return
        self._warned_of_length = True
        warnings.warn(
            f"oscar_hf: this cache is to hold {tokens} tokens, but {self.artifact.source} was calibrated on sequences of "
            f"{longest}, and quality can collapse beyond that: calibrate it on longer text (`oscar-hf calibrate --context N "
            "--tokens N`)",
            stacklevel=stacklevel,
        )

    def _check_group_sizes(self, config: PreTrainedConfig, layers: list) -> None:
        """Refuse a group size that rows cannot be cut into, as far as head dims are known before the first call."""
        for layer in layers:
            if isinstance(layer, OscarLayer):
                try:
                    geometry = compat.layer_geometry(config, layer.layer_idx)
                    dims = geometry.key_dim, geometry.value_dim
                except OscarError:
                    names = ("head_dim", "value_head_dim")
                    dims = (self.artifact.config.per_layer(name, layer.layer_idx) for name in names)
                for dim in filter(None, dims):
                    self.oscar_config.group_size_for(dim)

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
        **overrides,
    ) -> "OscarCache":
        """A new, empty cache from an artifact on the Hub or in a folder; see `Artifact.load` and the class for arguments."""
        artifact = Artifact.load(
            name_or_path,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        return cls(config, artifact=artifact, max_cache_len=max_cache_len, offloading=offloading, **overrides)

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
        """A cache that `save_pretrained` wrote, with all its tokens, on a device (default: the CPU).

        config: the model's config, to check that it is the same model; artifact: the one that the cache was saved with, where
        the folder does not hold it or it is loaded already. max_cache_len makes it a static cache. Raises CacheStateError for
        anything missing or unsound in the folder, ArtifactError for another artifact.
        """
        from .save_load import load

        return load(cls, directory, config, artifact, device, max_cache_len, offloading)

    def save_pretrained(self, directory: str | os.PathLike, include_artifact: bool = True):
        """Write the cache and all its tokens to a folder, which `OscarCache.load` reads; the folder's Path.

        include_artifact: put the artifact in as well, so that the folder is complete. An older saved cache in the folder is
        replaced at the end. Raises CacheStateError for an empty cache and for a layer of a kind that cannot be saved.
        """
        from .save_load import save

        self.check_overflow()
        return save(self, directory, include_artifact)

    def record_model(self, fields: dict) -> None:
        """Keep what of the model's config is needed to build the cache again: layer_types, cache_fields."""
        self.model_fields = fields
        # Layers that read another layer's keys and values do so after the next layers' updates.
        self._donors = _donor_layers(fields["cache_fields"], self.oscar_layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Add the tokens of a call to one layer; returns what stands for all its keys and values."""
        if layer_idx >= len(self.layers):
            raise ArtifactError(
                f"the model has a layer {layer_idx}, this cache was made for {len(self.layers)} layers "
                f"({self.artifact.source}): use the artifact of this model, or pass config=model.config"
            )
        layer = self.layers[layer_idx]
        if self._has_cross_attention:
            self._refuse_cross_attention(layer)
        previous = self._open_layer
        if previous is not None and previous is not layer and previous not in self._donors:
            # Attention of that layer is over: pack what it kept exact, so that one layer at most holds a whole prompt.
            previous.commit()
            if self._offloads:
                previous.offload()
        if layer is self._first_layer:
            self._check_new_forward(value_states)
        if isinstance(layer, OscarLayer):
            self._open_layer = layer
            if self._offloads:
                layer.prefetch()
        return layer.update(key_states, value_states, *args, **kwargs)

    def _refuse_cross_attention(self, layer) -> None:
        """Raise CacheStateError if an encoder-decoder model was given a bare cache: it then writes to each layer twice in a
        row, self-attention and cross-attention. (With one layer that is what two forwards do, so there it goes unnoticed.)"""
        again, self._last_updated = layer is self._last_updated and len(self.layers) > 1, layer
        if again and layer.get_seq_length():
            raise CacheStateError(
                "this encoder-decoder model was given a bare OscarCache, which would mix its cross-attention into its "
                "self-attention; pass EncoderDecoderCache(OscarCache(model.config, ...), DynamicCache()) instead"
            )

    def _check_new_forward(self, value_states: Tensor) -> None:
        """At the start of a forward: refuse to go on after an interrupted one, warn if the prompt is being fed again."""
        first = self._first_layer
        held = first.held
        lengths = {layer.held for layer in self.oscar_layers} - {0}
        if len(lengths) > 1:
            raise CacheStateError(
                f"the layers hold {min(lengths)} to {max(lengths)} tokens: an earlier forward did not finish, or belonged to "
                "another model; call cache.reset() or use a new cache"
            )
        self._warn_beyond_calibration(held + value_states.shape[2], stacklevel=5)
        count = min(value_states.shape[2], held, first.sink)
        if count < _REPEATED_TOKENS or first.starts is not None:
            return
        same = (value_states.shape[0], value_states.shape[1], value_states.shape[3])
        if same == (first.batch_size, first.kv_heads, first.sink_values.shape[3]):
            first.commit()
            # Values of the first layer carry no positions, so the same tokens give the same rows.
            if torch.allclose(
                value_states[:, :, :count].to(first.dtype), first.sink_values[:, :, :count], atol=1e-3, rtol=1e-3
            ):
                warnings.warn(
                    "oscar_hf: these tokens begin like the ones that the cache holds already. A cache that was used for a prompt "
                    "must not be given the same prompt again: give generate() the whole text and at least one new token, give "
                    "the model itself only the new tokens, or call cache.reset() first",
                    stacklevel=5,
                )

    @property
    def oscar_layers(self) -> list[OscarLayer]:
        """The layers that hold packed data."""
        return [layer for layer in self.layers if isinstance(layer, OscarLayer)]

    def set_padding(self, attention_mask: Tensor) -> None:
        """Say before the first call which tokens are left padding, [B, T] with 0 for padding.

        Only needed where the cache cannot see the mask itself (flash attention): the sink then is the first real tokens
        of each row. Raises CacheStateError if tokens are held already, or for a mask of another shape.
        """
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise CacheStateError(f"attention_mask must be a tensor [batch, tokens], got {given}")
        real = attention_mask.bool()
        starts = torch.where(real.any(-1), real.int().argmax(-1), 0).tolist()
        for layer in self.oscar_layers:
            layer.set_starts(list(starts))

    def __iter__(self):
        """(keys, values, sliding window) of each layer as DynamicCache gives them: dense, the history dequantized."""
        self.check_overflow()
        for layer in self.layers:
            if isinstance(layer, OscarLayer):
                yield (*(layer.dense(kind) if layer.is_initialized else None for kind in "kv"), None)
            else:
                yield tuple(getattr(layer, name, None) for name in ("keys", "values", "_sliding_window_tensor"))

    def reset(self) -> None:
        """Forget all tokens of all layers."""
        for index, layer in enumerate(self.layers):
            if index in self._blank:
                native.forget(layer, self._blank[index])
            else:
                layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens. Raises CacheStateError, with no layer changed, where one cannot."""
        check_whole_number("crop", tokens_to_remove)
        others = [layer for layer in self.layers if not isinstance(layer, OscarLayer) and tensors_of(layer)]
        if tokens_to_remove:
            for layer in others:
                native.check_croppable(self.layers.index(layer), layer)
        for layer in self.oscar_layers:
            layer.crop(tokens_to_remove)
        for layer in others:
            # Crop 0 lets a layer drop what it recorded for a rollback; those that record nothing know no crop.
            if tokens_to_remove or getattr(layer, "record_past", False):
                native.crop(layer, tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch (integers, or a bool mask)."""
        indices = torch.as_tensor(indices)
        for layer in self.layers:
            if isinstance(layer, OscarLayer):
                layer.batch_select_indices(indices)
            else:
                native.select_rows(layer, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        check_whole_number("batch_repeat_interleave", repeats, minimum=1)
        for layer in self.layers:
            if isinstance(layer, OscarLayer):
                layer.batch_repeat_interleave(repeats)
            else:
                native.repeat_rows(layer, repeats)

    def check_overflow(self) -> None:
        """Raise CacheStateError if tokens could not be stored; a growing cache stores all."""

    def commit(self) -> None:
        """Pack what the latest call left exact; every reader does so by itself."""
        for layer in self.oscar_layers:
            layer.commit()

    def memory_report(self) -> MemoryReport:
        """Bytes by region and layer; print it for a table."""
        self.check_overflow()
        self.commit()
        report = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, OscarLayer):
                report.append(_layer_memory(index, layer))
                continue
            tensors = tensors_of(layer)
            tokens = layer.get_seq_length() if hasattr(layer, "get_seq_length") and tensors else 0
            report.append(
                LayerMemory(
                    index,
                    "native",
                    int(tokens),
                    sum(t.numel() for t in tensors),
                    {"native": sum(t.nbytes for t in tensors)},
                )
            )
        return MemoryReport(report)

    def __repr__(self) -> str:
        kinds = len(self.oscar_layers)
        return f"OscarCache({self.artifact!r}, {kinds} packed of {len(self.layers)} layers, {self.get_seq_length()} tokens)"


class StaticOscarCache(OscarCache, StaticCache):
    """An OscarCache of fixed size, made by `OscarCache(..., max_cache_len=N)`.

    Being a StaticCache tells transformers to keep masks and to compile the decode step. Steps beyond `max_cache_len` store
    nothing; where the lengths are only known on the device, the error comes with the next call that looks at the cache.
    """

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Add the tokens of a call to one layer; returns what stands for all its keys and values."""
        if layer_idx < len(self.layers):
            layer = self.layers[layer_idx]
            is_step = key_states.shape[2] <= MAX_NEW_TOKENS and getattr(layer, "takes_steps", False)
            if is_step or not isinstance(layer, StaticOscarLayer):
                if self._has_cross_attention and not torch.compiler.is_compiling():
                    self._refuse_cross_attention(layer)
                return layer.update(key_states, value_states, *args, **kwargs)
        return self._update_prompt(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def _update_prompt(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self._first_layer is not None and layer_idx == self._first_layer.layer_idx:
            self.check_overflow()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def check_overflow(self) -> None:
        """Raise CacheStateError, once, if compiled steps did not fit; no layer has stored anything of them."""
        if self._take_overflow():
            raise CacheStateError(overflow_message(self._first_layer.held, "some", self._first_layer.max_cache_len))

    def _take_overflow(self) -> bool:
        """Whether a step did not fit; the layers forget it."""
        flags = [layer.counters[OVERFLOW].cpu() for layer in self.oscar_layers]
        if not any(flags):
            return False
        for layer in self.oscar_layers:
            layer.counters[OVERFLOW] = 0
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """As OscarCache, after `check_overflow`; 0 does not ask the device."""
        # The step that a deferred stop takes back may be one that did not fit: then nothing is there to be removed.
        if tokens_to_remove == -1 and compat.stop_is_deferred() and self._take_overflow():
            return
        if tokens_to_remove:
            self.check_overflow()
        super().crop(tokens_to_remove)


def check_whole_number(what: str, given, minimum: int | None = None) -> None:
    """Raise CacheStateError for anything but an int (or a tensor that holds one) from `minimum` on."""
    is_whole = isinstance(given, int) or (
        isinstance(given, Tensor) and given.numel() == 1 and not given.is_floating_point()
    )
    if not is_whole or isinstance(given, bool) or (minimum is not None and given < minimum):
        allowed = "a whole number" if minimum is None else f"a whole number from {minimum} on"
        raise CacheStateError(f"{what} takes {allowed}, got {given!r}")


def check_token_count(name: str, given: int) -> None:
    """Raise OscarError for anything but a positive int."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise OscarError(f"{name} must be a positive number of tokens, got {given!r}")


def _check_max_cache_len(max_cache_len: int, offloading: bool) -> None:
    check_token_count("max_cache_len", max_cache_len)
    if offloading:
        raise OscarError(
            "max_cache_len and offloading=True exclude each other: a compiled step needs its buffers where they are; use a "
            "growing cache (leave max_cache_len out) to offload"
        )


def _donor_layers(fields: dict, layers: list[OscarLayer]) -> list[OscarLayer]:
    """Layers whose keys and values other layers may read later in a forward; they pack a prompt at their next update."""
    if fields.get("kv_sharing_modes"):
        return layers
    return layers[-1:] if fields.get("num_kv_shared_layers") else []


def _layer_memory(index: int, layer: OscarLayer) -> LayerMemory:
    if not layer.is_initialized:
        return LayerMemory(index, "oscar", 0, 0)
    rows = (layer.key_rows, layer.value_rows)
    dims = layer.sink_keys.shape[3] + layer.sink_values.shape[3]
    return LayerMemory(
        index,
        "oscar",
        layer.tokens,
        layer.tokens * layer.batch_size * layer.kv_heads * dims,
        {
            "sink": layer.sink_keys.nbytes + layer.sink_values.nbytes,
            "recent": layer.ring_keys.nbytes + layer.ring_values.nbytes,
            "codes": sum(r.code_bytes for r in rows),
            "scale_min": sum(r.qparam_bytes for r in rows),
            "constants": layer.constants.nbytes,
        },
    )


def _recorded_config(artifact: Artifact) -> PreTrainedConfig:
    """Stand-in for the model's config from what the artifact records."""
    recorded = artifact.config
    count = recorded.num_hidden_layers
    if count is None and sorted(artifact.layers) == list(range(len(artifact.layers))):
        count = len(artifact.layers)
    if not count:
        raise ArtifactError(
            f"{artifact.source} does not say which layers the model has: pass config=model.config as well"
        )
    return compat.config_from_fields(count, recorded.layer_types, recorded.cache_fields)


def _check_model(artifact: Artifact, config: PreTrainedConfig) -> None:
    """Refuse an artifact for heads of another kind; warn if it was made for another family of models."""
    recorded = artifact.config
    for name, value in compat.attention_geometry(config).items():
        made_for = getattr(recorded, name)
        # Where layers differ the artifact has a list: such layers are checked when they are first used.
        if isinstance(made_for, int) and made_for != value:
            raise ArtifactError(
                f"{artifact.source} was made for {_LABELS[name]} {made_for}, this model has {value}: use the artifact of this model"
            )
    given = getattr(config, "model_type", "")
    if recorded.model_type and given and recorded.model_type != given:
        warnings.warn(
            f"oscar_hf: {artifact.source} was made for a {recorded.model_type} model, this one is {given}: quality will suffer "
            "unless they share their weights",
            stacklevel=3,
        )


def _check_layers(artifact: Artifact, layers: list) -> None:
    """Refuse an artifact that was made for another number of layers or lacks one that it must have."""
    recorded = artifact.config
    expected = len(recorded.layer_types) if recorded.layer_types is not None else recorded.num_hidden_layers
    if expected is not None and expected != len(layers):
        raise ArtifactError(
            f"{artifact.source} was made for {recorded.base_model or 'a model'} with {expected} cache layers, this model has "
            f"{len(layers)}: use the artifact of this model"
        )
    wanted = [index for index, layer in enumerate(layers) if compat.is_plain_attention(layer)]
    if artifact.layers and (missing := [index for index in wanted if index not in artifact.layers]):
        raise ArtifactError(
            f"{artifact.source} has no constants for the full-attention layers {missing} of this model: "
            "use the artifact of this model, or calibrate one with `oscar-hf calibrate`"
        )

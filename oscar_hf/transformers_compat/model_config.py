"""Every difference between transformers versions, and every question about a model config, in one place."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer
from transformers.generation import utils as generation_utils
from transformers.models.auto import modeling_auto

from ..errors import OscarError, UnsupportedModelError

# Name of the cache argument of forward and generate; 5.24 renamed it.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"

# Config fields from which transformers builds the cache layers that are not ours; an artifact records them, so that a
# cache can be built without the model's config.
CACHE_FIELDS = (
    "sliding_window", "attention_chunk_size", "number_of_conv_states", "num_kv_shared_layers", "kv_sharing_modes",
)  # fmt: skip

# No window and no count is larger.
_MAX_FIELD = 1 << 30


# Name of the class by which generate() defers its question whether it is done; transformers has it from 5.17 on.
_DEFERRED = "DeferredStopCheck"
_deferring = threading.Lock()
# How many blocks of `deferred_stop` are open, and what transformers' own answer is while there are any.
_deferred_blocks, _plain_is_supported = 0, None


@contextlib.contextmanager
def deferred_stop() -> Iterator[None]:
    """Within it, generate() learns one step late whether it is done, and so prepares a step while the GPU runs the one before.

    transformers works that way by itself on Apple's GPUs, and only with a cache that can be cropped, since the step that was one
    too many is taken back: the same tokens come out, and the cache ends at the same length (what stays of that step: one more
    token may have been packed, and a random number drawn). This asks for it on all devices that work beside the host; on a
    CPU it changes nothing. Until the last open block ends it holds for the whole process. Raises OscarError where
    transformers is older than 5.17.
    """
    global _deferred_blocks, _plain_is_supported
    check = getattr(generation_utils, _DEFERRED, None)
    if check is None:
        raise OscarError(
            f"deferred_stop needs transformers 5.17 or later, got {transformers.__version__}: update it, or leave deferred_stop out"
        )
    with _deferring:
        if not _deferred_blocks:
            _plain_is_supported = check.is_supported
            check.is_supported = staticmethod(_is_supported_beside_host)
        _deferred_blocks += 1
    try:
        yield
    finally:
        with _deferring:
            _deferred_blocks -= 1
            if not _deferred_blocks:
                check.is_supported = staticmethod(_plain_is_supported)


def stop_is_deferred() -> bool:
    """Whether a block of `deferred_stop` is open."""
    return _deferred_blocks > 0


def _is_supported_beside_host(device, cache, cache_is_returned, is_assistant):
    # transformers' crop of a pair of caches knows its own classes only.
    if not _works_beside_host(device) or (isinstance(cache, EncoderDecoderCache) and cache_is_returned):
        return _plain_is_supported(device, cache, cache_is_returned, is_assistant)
    supported = _plain_is_supported(torch.device("mps"), cache, cache_is_returned, is_assistant)
    if not supported and not is_assistant:
        warnings.warn(
            f"oscar_hf: deferred_stop changes nothing for this {type(cache).__name__}, which cannot be cropped: leave it out, or "
            "use a growing cache if the model has sliding layers",
            stacklevel=2,
        )
    return supported


def can_defer_stop(cache, device: torch.device) -> bool:
    """Whether `deferred_stop` makes a difference for a cache that is passed to generate()."""
    is_ours = not isinstance(cache, EncoderDecoderCache)
    return hasattr(generation_utils, _DEFERRED) and _works_beside_host(device) and is_ours and cache.is_croppable


def _works_beside_host(device: torch.device) -> bool:
    return device.type != "cpu"


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's config of a (possibly multimodal) model config."""
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"config must be the config of a transformers model (model.config), got {type(config).__name__}"
        )
    decoder = config.get_text_config(decoder=True)
    count = getattr(decoder, "num_decoder_layers", None)
    if count is not None and decoder is not config:
        # T5: transformers leaves the encoder's number of layers in its copy of the config.
        try:
            decoder.num_hidden_layers = count
        except NotImplementedError:
            raise UnsupportedModelError(
                f"the config of a {config.model_type} model does not say its decoder's layers in the way this package reads: use "
                "DynamicCache for this model"
            ) from None
    return decoder


def has_cross_attention(config: PreTrainedConfig) -> bool:
    """Whether a model feeds its decoder from an encoder, so that its layers cache cross-attention beside self-attention."""
    return any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))


def refuse_latent_attention(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for multi-head latent attention: its cache holds a latent and a rotary key, not K and V."""
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type} uses multi-head latent attention (kv_lora_rank={config.kv_lora_rank}): its cache holds a "
            "compressed latent and a rotary key, which OSCAR's rotations do not fit; use DynamicCache for this model"
        )


def native_layers(config: PreTrainedConfig, max_cache_len: int | None = None) -> list[CacheLayerMixin]:
    """transformers' own layers for a model, growing ones or of a fixed length: one per model layer but for the last ones
    that read other layers' keys and values."""
    try:
        cache = (
            DynamicCache(config=config)
            if max_cache_len is None
            else StaticCache(config=config, max_cache_len=max_cache_len)
        )
    except KeyError as error:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} knows no cache layer of the kind {error}: update transformers"
        ) from None
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers makes no cache for this {config.model_type or type(config).__name__} config ({error}): pass the "
            "config of a language model, complete as its model_type needs it"
        ) from None
    layers = list(cache.layers)
    modes = list(shared_field(config, "kv_sharing_modes") or ())
    if len(layers) == len(modes):
        # From 5.24 on these layers have a placeholder, before they had none: artifacts must fit either.
        while modes and modes.pop() == "reuse":
            layers.pop()
    return layers


def is_plain_attention(layer: CacheLayerMixin) -> bool:
    """Whether a native layer is full attention and nothing else, so that an OscarLayer can stand in its place."""
    return type(layer) in (DynamicLayer, StaticLayer)


def shared_field(config: PreTrainedConfig, name: str) -> Any:
    """A field of a config; None if there is none, or if layers differ in it (Gemma 4), where transformers raises."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def attention_geometry(config: PreTrainedConfig) -> dict[str, int]:
    """num_key_value_heads and head_dim as far as a config states one value for all layers."""
    heads, hidden = shared_field(config, "num_attention_heads"), shared_field(config, "hidden_size")
    dim = shared_field(config, "head_dim")
    if dim is None and not getattr(config, "is_heterogeneous", False) and isinstance(heads, int):
        dim = hidden // heads if isinstance(hidden, int) else None
    values = {"num_key_value_heads": shared_field(config, "num_key_value_heads"), "head_dim": dim}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def longest_context(config: PreTrainedConfig, most: int) -> int:
    """Tokens that a model takes at a time as far as its config says, at most `most`."""
    stated = shared_field(text_config(config), "max_position_embeddings")
    return min(stated, most) if isinstance(stated, int) and stated > 0 else most


def without_head(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a language model that ends with the last hidden state."""
    # Llama 4 names its body in a way that `base_model` does not find.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def logit_scaling(config: PreTrainedConfig) -> tuple[float, float | None]:
    """(factor, softcap) that a model applies to what its head gives, in this order; softcap may be None."""
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    factor *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    factor /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return factor, getattr(config, "final_logit_softcapping", None)


@dataclass(frozen=True)
class Geometry:
    """Sizes of one attention layer."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


def layer_geometry(config: PreTrainedConfig, layer: int) -> Geometry:
    """Sizes of one layer's attention from a decoder's config. Raises OscarError where it does not state them."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    heads = getattr(config, "num_attention_heads", None)
    dim = getattr(config, "head_dim", None)
    if dim is None and isinstance(heads, int) and isinstance(getattr(config, "hidden_size", None), int):
        dim = config.hidden_size // heads
    one_for_all = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    names = ("num_key_value_heads", "num_kv_heads")
    kv_heads = 1 if one_for_all else next((n for name in names if (n := getattr(config, name, None))), heads)
    value_dim = getattr(config, "v_head_dim", None) or dim
    for name, value in (("num_attention_heads", heads), ("KV heads", kv_heads), ("head_dim", dim)):
        if not isinstance(value, int) or value < 1:
            raise OscarError(
                f"the config of this {config.model_type} model states no number for {name} of layer {layer}"
            )
    return Geometry(heads, kv_heads, dim, value_dim)


def native_tokens(layer: CacheLayerMixin, context: int) -> tuple[int, bool]:
    """Tokens that a native layer keeps of a context, and whether it holds a state of fixed size as well."""
    has_state = isinstance(layer, LinearAttentionCacheLayerMixin)
    if not isinstance(layer, CacheLayerMixin):
        return 0, has_state
    fixed, window = getattr(layer, "max_cache_len", None), getattr(layer, "sliding_window", None)
    if fixed is not None:
        return fixed, has_state
    return (context if window is None else min(context, window - 1)), has_state


def supports_sdpa(config: PreTrainedConfig) -> bool | None:
    """Whether transformers offers a model sdpa attention; None for a model that it does not know."""
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ):
        if type(config) in mapping:
            return bool(getattr(mapping[type(config)], "_supports_sdpa", False))
    return None


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Name of the kind of each layer; `full_attention` marks those that an artifact has constants for."""
    layers = native_layers(config)
    named = getattr(config, "layer_types", None)
    if named is None:
        # transformers' own rule; where neither field is set all layers are full attention.
        name = "chunked_attention" if shared_field(config, "sliding_window") is None else "sliding_attention"
        named = [name] * len(layers)
    return ["full_attention" if is_plain_attention(layer) else name for layer, name in zip(layers, named)]


def cache_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The CACHE_FIELDS of a config that have a value."""
    values = {name: shared_field(config, name) for name in CACHE_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def config_from_fields(num_hidden_layers: int, types: list[str] | None, fields: dict[str, Any]) -> PreTrainedConfig:
    """A stand-in config that is enough for `native_layers`, from what an artifact records. Raises OscarError for values that
    are no numbers."""
    fields = {name: value for name, value in fields.items() if name in CACHE_FIELDS and value is not None}
    for name, value in fields.items():
        if name == "kv_sharing_modes":
            ok, allowed = (
                isinstance(value, list) and all(isinstance(v, (str, type(None))) for v in value),
                "a list of names",
            )
        else:
            ok, allowed = type(value) is int and 0 <= value <= _MAX_FIELD, f"an integer from 0 to {_MAX_FIELD}"
        if not ok:
            raise OscarError(f"cache_fields: {name} is {value!r}, allowed is {allowed}")
    types = types or ["full_attention"] * num_hidden_layers
    # The recorded list already leaves out layers that share another layer's cache.
    fields.pop("num_kv_shared_layers", None)
    config = PreTrainedConfig()
    for name, value in dict(fields, num_hidden_layers=len(types), layer_types=list(types)).items():
        setattr(config, name, value)
    return config

"""Every question about a model config: its decoder, its kinds of layers, their sizes."""

from dataclasses import dataclass
from typing import Any

import transformers
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from ..checks import is_whole_number
from ..errors import OscarError, UnsupportedModelError
from .versions import without_placeholders

# Config fields from which transformers builds the cache layers that are not ours; an artifact records them, so that a
# cache can be built without the model's config.
CACHE_FIELDS = (
    "sliding_window", "attention_chunk_size", "number_of_conv_states", "num_kv_shared_layers", "kv_sharing_modes",
)  # fmt: skip

# No window and no count is larger.
_MAX_FIELD = 1 << 30


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
    return without_placeholders(list(cache.layers), shared_field(config, "kv_sharing_modes"))


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


# Families whose generate() throws a cache away that is true and holds at most `original_max_position_embeddings` tokens, when the
# text is longer: a DynamicCache takes its place, and nothing says so.
_DROP_CACHES = ("phi3", "phi4_multimodal", "phimoe")


def drops_caches(config: PreTrainedConfig | None, model_type: str | None) -> bool:
    """Whether generate() of a model, known by its config or by its type, throws caches away."""
    return (getattr(config, "model_type", None) or model_type) in _DROP_CACHES


def rope_switch(config: PreTrainedConfig | None) -> int | None:
    """Tokens up to which a model takes other rotary factors than beyond, so that keys of one kind do not serve the other."""
    rope = shared_field(config, "rope_parameters") if config is not None else None
    if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
        return None
    limit = rope.get("original_max_position_embeddings") or shared_field(config, "original_max_position_embeddings")
    return limit if isinstance(limit, int) else None


# Rotations that are the same whatever the length of the sequence.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")


def is_relative(config: PreTrainedConfig) -> bool:
    """Whether a model says the same of a text wherever its positions begin: they enter by fixed rotations of queries and keys, one
    number a token, and in no other way."""
    config = text_config(config)
    stated = shared_field(config, "rope_parameters")
    if not isinstance(stated, dict) or not stated or shared_field(config, "alibi"):
        return False
    # Parameters for each type of layer, or for all.
    ropes = [rope for rope in stated.values() if isinstance(rope, dict)] or [stated]
    scaled_by_position = shared_field(config, "attn_temperature_tuning") or any(
        "llama_4_scaling_beta" in r for r in ropes
    )
    return not scaled_by_position and all(
        rope.get("rope_type", "default") in _FIXED_ROPES and "mrope_section" not in rope for rope in ropes
    )


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
            ok, allowed = is_whole_number(value, 0, _MAX_FIELD), f"an integer from 0 to {_MAX_FIELD}"
        if not ok:
            raise OscarError(f"cache_fields: {name} is {value!r}, allowed is {allowed}")
    types = types or ["full_attention"] * num_hidden_layers
    # The recorded list already leaves out layers that share another layer's cache.
    fields.pop("num_kv_shared_layers", None)
    config = PreTrainedConfig()
    for name, value in dict(fields, num_hidden_layers=len(types), layer_types=list(types)).items():
        setattr(config, name, value)
    return config

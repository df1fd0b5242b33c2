"""What differs between versions of transformers and between its model classes, so that nothing else has to know."""

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin
from transformers.models.auto import modeling_auto

# Name of the cache argument of forward and generate; 5.24 renamed it.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"

# transformers' own cache layers whose state this package knows, plain full attention aside. Not every version has all.
_NATIVE_LAYERS = (
    "DynamicSlidingWindowLayer", "StaticSlidingWindowLayer", "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)  # fmt: skip


def native_layer_kinds() -> tuple[type, ...]:
    """Classes of transformers' own cache layers whose state this package knows, as far as this version has them."""
    return tuple(getattr(cache_utils, name) for name in _NATIVE_LAYERS if hasattr(cache_utils, name))


def without_placeholders(
    layers: list[CacheLayerMixin], sharing_modes: list[str | None] | None
) -> list[CacheLayerMixin]:
    """A model's cache layers but for the last ones that only read other layers' keys and values.

    From 5.24 on such layers have a placeholder, before they had none: artifacts must fit either.
    """
    modes = list(sharing_modes or ())
    if len(layers) == len(modes):
        while modes and modes.pop() == "reuse":
            layers = layers[:-1]
    return layers


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

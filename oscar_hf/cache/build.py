"""Which layer goes where in a cache."""

import warnings

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ..artifact.artifact import Artifact
from ..artifact.config import OscarConfig
from ..artifact.recipes import RECIPES
from ..checks import check_token_count
from ..errors import ArtifactError, OscarError
from ..masks import MaskMemory
from ..transformers_compat import model_config as compat
from .artifact_fit import check_group_sizes, check_heads, check_layers, check_means
from .layer import OscarLayer
from .static_layer import StaticOscarLayer


def choose_artifact(artifact, recipe: str | None, config) -> Artifact:
    """The artifact of a cache: the one given (an Artifact, a folder or a Hub id) or that of a data-free recipe."""
    if isinstance(config, str):
        raise ArtifactError(
            f"config is the model's config (model.config), got {config!r}: for a folder or Hub id of an artifact use "
            "OscarCache.from_pretrained(name)"
        )
    if artifact is not None and recipe is not None:
        raise ArtifactError(
            "give artifact (calibrated, a folder, Hub id or Artifact) or recipe ('default' or 'hadamard', nothing prepared), "
            "got both"
        )
    if artifact is None:
        return Artifact.data_free(recipe or "default")
    if isinstance(artifact, Artifact):
        return artifact
    if isinstance(artifact, str) and artifact in RECIPES:
        raise ArtifactError(f"{artifact!r} is a recipe, not an artifact: pass recipe={artifact!r}")
    return Artifact.load(artifact)


def decoder_config(config: PreTrainedConfig | None, artifact: Artifact) -> PreTrainedConfig:
    """The config of a model's decoder, or a stand-in from what the artifact records."""
    if config is not None:
        config = compat.text_config(config)
        compat.refuse_latent_attention(config)
        return config
    recorded = artifact.config
    count = recorded.num_hidden_layers
    if count is None and sorted(artifact.layers) == list(range(len(artifact.layers))):
        count = len(artifact.layers)
    if not count:
        raise ArtifactError(
            f"{artifact.source} does not say which layers the model has: pass config=model.config as well"
        )
    return compat.config_from_fields(count, recorded.layer_types, recorded.cache_fields)


def build_layers(
    config: PreTrainedConfig, artifact: Artifact, storage: OscarConfig, max_cache_len: int | None
) -> list[CacheLayerMixin]:
    """One layer per model layer: OscarLayers (static ones with `max_cache_len`) where it is full attention and nothing else,
    transformers' own elsewhere. Raises OscarError where the artifact does not fit the model."""
    layers = compat.native_layers(config, max_cache_len)
    check_layers(artifact, layers)
    check_heads(artifact, config)
    check_means(artifact, storage)
    masks = MaskMemory()

    def packed(index: int) -> OscarLayer:
        if max_cache_len is None:
            return OscarLayer(storage, artifact, index, masks)
        return StaticOscarLayer(storage, artifact, index, max_cache_len, masks)

    layers = [packed(index) if compat.is_plain_attention(layer) else layer for index, layer in enumerate(layers)]
    ours = [layer for layer in layers if isinstance(layer, OscarLayer)]
    if not ours:
        warnings.warn(
            f"oscar_hf: {getattr(config, 'model_type', 'this model')} has no layer that is full attention alone, so nothing "
            "is quantized",
            stacklevel=3,
        )
    for layer in ours:
        check_group_sizes(config, artifact, storage, layer.layer_idx)
    return layers


def check_max_cache_len(max_cache_len: int, offloading: bool) -> None:
    """Raise OscarError for anything but a number of tokens, and for a static cache that is to be offloaded."""
    check_token_count("max_cache_len", max_cache_len)
    if offloading:
        raise OscarError(
            "max_cache_len and offloading=True exclude each other: a compiled step needs its buffers where they are; use a "
            "growing cache (leave max_cache_len out) to offload"
        )


def donor_layers(fields: dict, layers: list[OscarLayer]) -> list[OscarLayer]:
    """Layers whose keys and values other layers may read later in a forward; their prompts wait for the next one."""
    if fields.get("kv_sharing_modes"):
        return layers
    return layers[-1:] if fields.get("num_kv_shared_layers") else []

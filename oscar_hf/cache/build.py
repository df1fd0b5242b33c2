"""Which layer goes where in a cache, and whether an artifact fits a model."""

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
from .layer import OscarLayer
from .static_layer import StaticOscarLayer

_LABELS = {"num_key_value_heads": "KV heads", "head_dim": "head dim"}


def choose_artifact(artifact, recipe: str | None, config) -> Artifact:
    """The artifact of a cache: the one given (an Artifact, a folder or a Hub id) or that of a data-free recipe."""
    if (artifact is None) == (recipe is None):
        both = "both" if artifact is not None else "neither"
        hint = "; for a folder or Hub id: OscarCache.from_pretrained(name)" if isinstance(config, str) else ""
        raise ArtifactError(
            "give exactly one of artifact (calibrated, a folder, Hub id or Artifact) and recipe ('hadamard', data-free): got "
            + both
            + hint
        )
    if recipe is not None:
        return Artifact.data_free(recipe)
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
    _check_layers(artifact, layers)
    _check_model(artifact, config)
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
        _check_group_sizes(config, artifact, storage, layer.layer_idx)
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


def _check_group_sizes(config: PreTrainedConfig, artifact: Artifact, storage: OscarConfig, index: int) -> None:
    """Refuse a group size that rows cannot be cut into, as far as head dims are known before the first call."""
    try:
        geometry = compat.layer_geometry(config, index)
        dims = geometry.key_dim, geometry.value_dim
    except OscarError:
        dims = [artifact.config.per_layer(name, index) for name in ("head_dim", "value_head_dim")]
    for dim in filter(None, dims):
        storage.group_size_for(dim)


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
            stacklevel=4,
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

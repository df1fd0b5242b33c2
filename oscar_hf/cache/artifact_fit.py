"""Whether an artifact fits a model: the errors that an artifact made for another model gets when a cache is built.

What is first seen in a layer's own keys and values is checked by `Artifact.constants_for`.
"""

import warnings

from transformers import PreTrainedConfig

from ..artifact.artifact import Artifact
from ..artifact.config import OscarConfig
from ..errors import ArtifactError, OscarError
from ..transformers_compat import model_config as compat

_LABELS = {"num_key_value_heads": "KV heads", "head_dim": "head dim"}


def check_group_sizes(config: PreTrainedConfig, artifact: Artifact, storage: OscarConfig, index: int) -> None:
    """Refuse a group size that rows cannot be cut into, as far as head dims are known before the first call."""
    try:
        geometry = compat.layer_geometry(config, index)
        dims = geometry.key_dim, geometry.value_dim
    except OscarError:
        dims = [artifact.config.per_layer(name, index) for name in ("head_dim", "value_head_dim")]
    for dim in filter(None, dims):
        storage.group_size_for(dim)


def check_means(artifact: Artifact, storage: OscarConfig) -> None:
    """Refuse to center keys by means that the artifact does not hold."""
    means = [constants.key_mean for constants in artifact.layers.values()]
    if storage.key_center == "mean" and (not means or any(mean is None for mean in means)):
        raise ArtifactError(
            f"key_center: got 'mean', but {artifact.source} holds no key means: use 'block' or 'none', or calibrate an artifact "
            "with key_center 'mean'"
        )


def check_heads(artifact: Artifact, config: PreTrainedConfig) -> None:
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


def check_layers(artifact: Artifact, layers: list) -> None:
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

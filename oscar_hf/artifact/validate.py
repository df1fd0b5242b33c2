"""What makes an artifact sound: files of a sane size, shapes that fit the config, finite and invertible transforms.

Artifacts come from strangers: everything is checked before it is used.
"""

from pathlib import Path

import torch

from ..errors import ArtifactError
from ..quantization.rotation import condition_number, inverse_error
from .config import MIN_CALIBRATION_TOKENS, OscarConfig
from .describe import layer_ranges
from .layer_constants import LayerConstants

# The published check for orthogonality; float32 storage of a sound matrix is far below it.
INVERSE_TOLERANCE = 5e-3
MAX_CONDITION = 1e4
# No head dim and no number of heads is larger.
_MAX_SIZE = 1 << 16


def check_size(path: Path, limit: int) -> None:
    """Refuse a file that is larger than any sound artifact before it is read."""
    size = path.stat().st_size
    if size > limit:
        raise ArtifactError(f"{path.name} has {size} bytes, allowed are {limit}: this is not an artifact of oscar_hf")


def check_artifact(source: str, config: OscarConfig, layers: dict[int, LayerConstants]) -> None:
    """Raise ArtifactError unless every layer that the config asks for is present, well shaped, finite and invertible."""
    if not layers:
        if config.needs_calibration:
            raise ArtifactError(
                f"{source} has no layers, but key_transform {config.key_transform!r}, value_transform "
                f"{config.value_transform!r} and key_center {config.key_center!r} need calibrated ones: "
                "download or calibrate it again"
            )
        return
    if config.num_hidden_layers is not None and max(layers) >= config.num_hidden_layers:
        raise ArtifactError(
            f"{source} has constants for layer {max(layers)}, but num_hidden_layers is "
            f"{config.num_hidden_layers}: config and tensors do not belong together"
        )
    missing = sorted(set(config.expected_layers()) - set(layers))
    if missing:
        raise ArtifactError(
            f"{source} lacks layer {layer_ranges(missing)} of {config.num_hidden_layers}: "
            "download or calibrate it again"
        )
    tokens = config.calibration.get("tokens")
    if isinstance(tokens, (int, float)) and not tokens >= MIN_CALIBRATION_TOKENS:
        raise ArtifactError(
            f"{source} was calibrated on {tokens} tokens, allowed are at least {MIN_CALIBRATION_TOKENS}: "
            "calibrate it again on more text"
        )
    for layer, constants in sorted(layers.items()):
        _check_layer(f"{source}, layer {layer}", layer, constants, config)


def check_shape(where: str, name: str, layer: int, shape: tuple[int, ...], config: OscarConfig) -> None:
    """Refuse a tensor, called `name` in `layer`, of a shape that does not fit the config; `where` is what messages call it."""
    if 0 in shape:
        raise ArtifactError(f"{where} has shape {list(shape)} and holds nothing: download or calibrate it again")
    dim = config.per_layer("value_head_dim" if name.startswith("value") else "head_dim", layer)
    heads = config.per_layer("num_key_value_heads", layer)
    if name == "key_mean":
        ok = len(shape) == 2 and shape[1] == (dim or shape[1]) and shape[0] == (heads or shape[0])
        allowed = f"[{heads or 'KV heads'}, {dim or 'D'}]"
    else:
        ok = len(shape) in (2, 3) and shape[-1] == shape[-2] == (dim or shape[-1])
        ok = ok and (len(shape) == 2 or shape[0] == (heads or shape[0]))
        allowed = f"[{dim or 'D'}, {dim or 'D'}] or [{heads or 'KV heads'}, {dim or 'D'}, {dim or 'D'}]"
    if not ok or max(shape) > _MAX_SIZE:
        raise ArtifactError(
            f"{where} has shape {list(shape)}, allowed is {allowed}: the artifact does not fit its config"
        )


def _check_layer(where: str, layer: int, constants: LayerConstants, config: OscarConfig) -> None:
    for name, tensor in constants.tensors().items():
        if tensor.dtype != torch.float32:
            raise ArtifactError(f"{where}: {name} is {tensor.dtype}, allowed is torch.float32")
        check_shape(f"{where}: {name}", name, layer, tuple(tensor.shape), config)
        if not torch.isfinite(tensor).all():
            raise ArtifactError(
                f"{where}: {name} holds NaN or infinite values, allowed are finite ones: calibrate it again"
            )
    _check_agreement(where, constants)
    for kind in ("key", "value"):
        transform, inverse = getattr(constants, f"{kind}_transform"), getattr(constants, f"{kind}_inverse")
        if transform.shape != inverse.shape:
            raise ArtifactError(
                f"{where}: {kind}_inverse has shape {list(inverse.shape)}, allowed is {list(transform.shape)}"
            )
        error = inverse_error(transform, inverse)
        if error > INVERSE_TOLERANCE:
            what = (
                "is not orthogonal"
                if torch.equal(inverse, transform.mT)
                else "and its inverse do not give the identity"
            )
            raise ArtifactError(
                f"{where}: {kind}_transform {what} (max error {error:.2g}, allowed {INVERSE_TOLERANCE:g}): "
                "download or calibrate it again"
            )
        condition = condition_number(transform)
        if condition > MAX_CONDITION:
            raise ArtifactError(
                f"{where}: {kind}_transform is nearly singular (condition number {condition:.3g}, "
                f"allowed {MAX_CONDITION:g}): calibrate it again"
            )
    if config.key_center == "mean" and constants.key_mean is None:
        raise ArtifactError(f"{where}: key_center is 'mean' but there is no key_mean: calibrate it again")


def _check_agreement(where: str, constants: LayerConstants) -> None:
    """The tensors of a layer must be for the same head dims and KV heads, also where the config does not say which."""
    heads = {}
    for name, tensor in constants.tensors().items():
        dim = constants.value_dim if name.startswith("value") else constants.key_dim
        if tensor.shape[-1] != dim:
            raise ArtifactError(f"{where}: {name} has shape {list(tensor.shape)}, but the transform has dim {dim}")
        if name == "key_mean" or tensor.dim() == 3:
            heads.setdefault(tensor.shape[0], name)
    if len(heads) > 1:
        (first, name), (second, other) = list(heads.items())[:2]
        raise ArtifactError(f"{where}: {name} is for {first} KV heads, but {other} is for {second}: calibrate it again")

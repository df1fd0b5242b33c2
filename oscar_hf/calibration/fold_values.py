"""Fold the value rotation into a model's projections, as the paper does, so that the cache need not rotate values at all.

With rows v' = v R per KV head, attention sums rotated values and o_proj undoes the rotation: W_v <- R^T W_v per KV head and
W_o <- W_o R per query head leave the layer's output unchanged up to rounding.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..artifact.artifact import Artifact
from ..artifact.layer_constants import LayerConstants
from ..errors import UnsupportedModelError


class Folded:
    """A folded model. Call it, or leave its `with` block, to put the original weights back, bit for bit.

    Attributes:
        artifact (`Artifact`): What caches of the model must be built from while it is folded.
    """

    def __init__(self, artifact: Artifact, restore: Callable[[], None]):
        self.artifact, self._restore = artifact, restore

    def __call__(self) -> None:
        """Undo the folding; a second call does nothing."""
        restore, self._restore = self._restore, lambda: None
        restore()

    def __enter__(self) -> "Folded":
        return self

    def __exit__(self, *exc) -> None:
        self()


def fold_value_rotation(model: nn.Module, artifact: Artifact) -> Folded:
    """Fold the value rotation of every layer of an artifact into v_proj and o_proj of a model, in place.

    A cache of the folded model need not rotate values. Rotations per layer or per KV head are folded, biases too. The
    original weights are kept on the CPU for the undo.

    Args:
        model (`torch.nn.Module`): The artifact's model.
        artifact (`Artifact`): A calibrated artifact.

    Returns:
        `Folded`: Its `artifact` is what caches must be built from; call it, or use it as a context, to undo the folding.

    Raises:
        `UnsupportedModelError`: Before any weight is touched, for an artifact without rotations, and for projections
            that are quantized, wrapped, fused, shared between layers, or separated from the cache by a norm or a gate.

    Example:

    ```python
    from oscar_hf import Artifact, OscarCache, fold_value_rotation

    with fold_value_rotation(model, Artifact.load("my-artifact")) as folded:
        cache = OscarCache(model.config, artifact=folded.artifact)
        model.generate(**inputs, past_key_values=cache)
    ```
    """
    if not artifact.layers:
        raise UnsupportedModelError(f"{artifact.source} holds no value rotations to fold: use a calibrated artifact")
    modules = {layer: _attention_module(model, layer) for layer in sorted(artifact.layers)}
    seen: dict[int, int] = {}
    for layer, module in modules.items():
        _check(layer, module, artifact.layers[layer])
        for projection in (module.v_proj, module.o_proj):
            other = seen.setdefault(projection.weight.data_ptr(), layer)
            if other != layer:
                raise UnsupportedModelError(
                    f"layers {other} and {layer} share a projection, so it cannot be rotated for both"
                )
    saved: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for layer, module in modules.items():
            _fold(module, artifact.layers[layer].value_transform, saved)
    except BaseException:
        _put_back(saved)
        raise
    return Folded(_without_value_rotation(artifact), lambda: _put_back(saved))


def _attention_module(model: nn.Module, layer: int) -> nn.Module:
    """The attention module of a model layer: the one that knows its layer index and has the projections."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer and hasattr(module, "o_proj"):
            if not hasattr(module, "v_proj"):
                raise UnsupportedModelError(
                    f"layer {layer} ({type(module).__name__}) has no v_proj of its own (keys and values come from one fused "
                    "projection): the value rotation cannot be folded, use the cache without folding"
                )
            return module
    raise UnsupportedModelError(f"the model has no attention module with v_proj and o_proj for layer {layer}")


def _check(layer: int, module: nn.Module, constants: LayerConstants) -> None:
    where = f"layer {layer} ({type(module).__name__})"
    for name in ("v_proj", "o_proj"):
        projection = getattr(module, name)
        if type(projection) is not nn.Linear or not projection.weight.is_floating_point():
            raise UnsupportedModelError(
                f"{where}: {name} is a {type(projection).__name__}, only a plain torch.nn.Linear can be folded (quantized and "
                "wrapped projections keep their own weights): use the cache without folding"
            )
    if getattr(module, "v_norm", None) is not None:
        raise UnsupportedModelError(
            f"{where}: a norm stands between v_proj and the cache, so the rotation cannot be folded"
        )
    dim, query_width = constants.value_dim, module.o_proj.in_features
    if module.v_proj.out_features % dim or query_width % module.v_proj.out_features:
        raise UnsupportedModelError(
            f"{where}: v_proj has {module.v_proj.out_features} outputs and o_proj {query_width} inputs, which do not fit "
            f"heads of dim {dim}: use the artifact of this model"
        )
    rotation = constants.value_transform
    if rotation.dim() == 3 and rotation.shape[0] * dim != module.v_proj.out_features:
        raise UnsupportedModelError(f"{where}: the artifact has {rotation.shape[0]} KV heads, the model another number")
    query = getattr(module, "q_proj", None)
    if isinstance(query, nn.Linear) and query.out_features > query_width and constants.key_dim == dim:
        raise UnsupportedModelError(
            f"{where}: q_proj also makes a gate for the attention output, which a rotation does not commute with: use the "
            "cache without folding"
        )


@torch.no_grad()
def _fold(module: nn.Module, rotation: Tensor, saved: list) -> None:
    value, output = module.v_proj, module.o_proj
    dim = rotation.shape[-1]
    kv_heads = value.out_features // dim
    rotation = rotation.to(value.weight.device, torch.float64)
    per_head = rotation.expand(kv_heads, dim, dim)
    per_query_head = per_head.repeat_interleave(output.in_features // value.out_features, 0)
    for parameter in (value.weight, value.bias, output.weight):
        if parameter is not None:
            saved.append((parameter, parameter.detach().to("cpu", copy=True)))
    heads = value.weight.double().unflatten(0, (kv_heads, dim))
    value.weight.copy_((per_head.mT @ heads).flatten(0, 1))
    if value.bias is not None:
        bias = value.bias.double().unflatten(0, (kv_heads, 1, dim))
        value.bias.copy_((bias @ per_head).flatten())
    columns = output.weight.double().unflatten(1, (per_query_head.shape[0], dim)).transpose(0, 1)
    output.weight.copy_((columns @ per_query_head).transpose(0, 1).flatten(1))


@torch.no_grad()
def _put_back(saved: list) -> None:
    for parameter, original in saved:
        parameter.copy_(original)
    saved.clear()


def _without_value_rotation(artifact: Artifact) -> Artifact:
    """The same artifact for values that arrive rotated."""
    layers = {}
    for index, constants in artifact.layers.items():
        identity = torch.eye(constants.value_dim)
        layers[index] = dataclasses.replace(constants, value_transform=identity, value_inverse=identity.clone())
    config = dataclasses.replace(artifact.config, value_transform="identity")
    return Artifact(config, layers, source=f"{artifact.source}, values folded")

"""Read RotationZoo folders: torch pickles of the published rotations, opened with weights_only=True and nothing else.

Schema: {format_version, objective, source_grouping, layers: {id: {layer_id, rotation float32 [D, D] (v1, per layer) or
[Hkv, D, D] (v2, per head), eigenvalues}}}. The files carry no other configuration, so the recipe is the paper's.
"""

import itertools
import pickle
import re
from pathlib import Path

import torch

from ..errors import ArtifactError
from .config import MAX_LAYERS, OscarConfig
from .layer_constants import LayerConstants
from .validate import check_size

FILE_PAIRS = [
    ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"],
    ["k_rotation_perhead.pt", "v_rotation_perhead.pt"],
    ["k_rotation_hadamard.pt", "v_rotation_hadamard.pt"],
]
_KNOWN_VERSIONS = (1, 2)
_LAYER_NUMBER = re.compile("[0-9]{1,9}")
# What torch's restricted unpickler says of anything but plain data; its other complaints are about damaged files.
_FOREIGN_OBJECT = re.compile(
    "not an allowed global|is blocked|add_safe_globals|can only build|must be imported|unrecognized function",
    re.IGNORECASE,
)
_MAX_BYTES = 4 << 30


def find_pair(folder: Path) -> list[str] | None:
    """The first pair of file names of which the folder has at least one."""
    return next((pair for pair in FILE_PAIRS if any((folder / name).is_file() for name in pair)), None)


def read(folder: Path, pair: list[str]) -> tuple[OscarConfig, dict[int, LayerConstants]]:
    """Config (recipe `paper`) and constants of a RotationZoo folder; ArtifactError for anything off its schema."""
    keys, values = (_read_file(folder / name) for name in pair)
    if keys.keys() != values.keys():
        odd = sorted(keys.keys() ^ values.keys())
        raise ArtifactError(
            f"{pair[0]} and {pair[1]} do not hold the same layers (only one has {odd}): download both again"
        )
    layers = {layer: LayerConstants(key, key.mT, values[layer], values[layer].mT) for layer, key in keys.items()}
    hadamard = "hadamard" in pair[0]
    some = next(iter(layers.values()))
    per_head = some.key_transform.dim() == 3
    config = OscarConfig.from_recipe(
        "hadamard" if hadamard else "paper",
        per_head=per_head,
        num_key_value_heads=[c.key_transform.shape[0] for c in _dense(layers)] if per_head else None,
        head_dim=[c.key_dim for c in _dense(layers)],
        value_head_dim=[c.value_dim for c in _dense(layers)],
        calibration={"source": "RotationZoo", "files": pair},
    )
    return config, layers


def _dense(layers: dict[int, LayerConstants]) -> list[LayerConstants]:
    """One entry per layer index up to the last; hybrid models use global ids with gaps, which no one reads."""
    some = next(iter(layers.values()))
    return [layers.get(i, some) for i in range(max(layers) + 1)]


def _read_file(path: Path) -> dict[int, torch.Tensor]:
    name = path.name
    if not path.is_file():
        raise ArtifactError(
            f"{path.parent} lacks {name}: a RotationZoo folder holds a file for keys and one for values"
        )
    check_size(path, _MAX_BYTES)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if _FOREIGN_OBJECT.search(str(error)):
            raise ArtifactError(
                f"{name} is a pickle that holds more than plain tensors (it could run code): allowed are tensors, "
                "numbers, text, lists and dicts; do not trust this file"
            ) from None
        raise ArtifactError(
            f"{name} is not a sound torch file (damaged, or a pickle that holds more than plain tensors and could run "
            "code): download it again from a source that you trust"
        ) from None
    except Exception as error:  # A damaged pickle can fail in any way: IndexError, struct.error, MemoryError, ...
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArtifactError(f"{name} is not a sound torch file ({reason}): download it again") from None
    if not isinstance(state, dict) or not isinstance(state.get("layers"), dict) or not state["layers"]:
        raise ArtifactError(f"{name} is not a RotationZoo file: expected a dict with format_version and layers")
    version = state.get("format_version")
    if type(version) is not int or version not in _KNOWN_VERSIONS:
        raise ArtifactError(f"{name}: format_version {version!r}, allowed are {_KNOWN_VERSIONS}: update oscar_hf")
    if len(state["layers"]) > MAX_LAYERS:
        raise ArtifactError(f"{name} has {len(state['layers'])} layers, allowed are {MAX_LAYERS}")
    rotations, promised, held = {}, 0, path.stat().st_size
    for key, entry in state["layers"].items():
        layer = int(key) if type(key) is int or (isinstance(key, str) and _LAYER_NUMBER.fullmatch(key)) else -1
        rotation = entry.get("rotation") if isinstance(entry, dict) else None
        if not 0 <= layer < MAX_LAYERS or layer in rotations or not isinstance(rotation, torch.Tensor):
            raise ArtifactError(
                f"{name}: the entry of layer {key!r} has no rotation tensor or no number of its own: download it again"
            )
        layer_id = entry.get("layer_id", layer)
        if type(layer_id) is not int or layer_id != layer:
            raise ArtifactError(f"{name}: layer {layer} says it is layer {layer_id!r}: download it again")
        shape = list(rotation.shape)
        plain = rotation.dtype == torch.float32 and rotation.layout == torch.strided and rotation.device.type == "cpu"
        if not plain or len(shape) not in (2, 3) or shape[-1] != shape[-2] or 0 in shape:
            raise ArtifactError(
                f"{name}: the rotation of layer {layer} is {rotation.dtype} {shape}, "
                "allowed is float32 [D, D] or [KV heads, D, D]"
            )
        promised += rotation.numel() * rotation.element_size()
        if promised > held:
            # A tensor of stride 0 takes no room in the file and any amount of memory here.
            raise ArtifactError(
                f"{name}: the rotations up to layer {layer}, of shape {shape}, take {promised} bytes, "
                f"but the file has {held}: do not trust this file"
            )
        rotations[layer] = rotation.detach().contiguous()
    if len({rotation.dim() for rotation in rotations.values()}) > 1:
        raise ArtifactError(
            f"{name} mixes rotations [D, D] and [KV heads, D, D], allowed is one kind for all layers: download it again"
        )
    # Hybrid models use global layer ids, so their attention layers come at regular distances.
    _check_gaps(name, sorted(rotations))
    return rotations


def _check_gaps(name: str, ids: list[int]) -> None:
    """Refuse a file in which a layer is clearly missing: a gap in layers that are otherwise evenly spaced."""
    steps = [b - a for a, b in itertools.pairwise(ids)]
    if not steps:
        return
    usual = max(set(steps), key=steps.count)
    even = steps.count(usual) >= 0.8 * len(steps) and all(step % usual == 0 for step in steps)
    missing = [i for a, b in itertools.pairwise(ids) for i in range(a + usual, b, usual)] if even else []
    if usual == 1 and ids[0] > 0:
        missing = list(range(ids[0])) + missing
    if missing:
        raise ArtifactError(
            f"{name} lacks layers {missing}: every attention layer needs a rotation, download the file again"
        )

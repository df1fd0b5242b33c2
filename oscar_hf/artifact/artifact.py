"""Artifact: an OscarConfig plus the calibrated tensors of each layer, loaded from a folder, the Hub or a RotationZoo.

A folder holds `oscar_config.json` and `rotations.safetensors` (tensors `layers.{i}.{field of LayerConstants}`; an
inverse that is just the transpose is not stored). Artifacts come from strangers:
everything is checked before it is used.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ArtifactError
from ..quantization.rotation import condition_number, inverse_error
from . import hub
from . import rotation_zoo as zoo
from .config import MAX_LAYERS, MIN_CALIBRATION_TOKENS, RECIPES, OscarConfig
from .layer_constants import LayerConstants

CONFIG_FILE = "oscar_config.json"
TENSOR_FILE = "rotations.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 8 << 30
# The published check for orthogonality; float32 storage of a sound matrix is far below it.
INVERSE_TOLERANCE = 5e-3
MAX_CONDITION = 1e4
# Transforms that follow from the head dim alone.
_DATA_FREE = ("hadamard", "identity")
_LAYER_NAMES = frozenset(str(layer) for layer in range(MAX_LAYERS))
_FIELDS = ("key_transform", "key_inverse", "value_transform", "value_inverse", "key_mean", "key_metric")


class Artifact:
    """Calibrated constants of a model, immutable and shared by every cache made from it.

    layers maps a model layer index to its LayerConstants; a data-free artifact (recipe `hadamard`) has none and makes
    them when a layer first sees its head dim.
    """

    def __init__(self, config: OscarConfig, layers: dict[int, LayerConstants], source: str = "memory"):
        self.config, self.layers, self.source = config, dict(layers), source
        self._on_device: dict = {}

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        # The per-device copies are a cache of `layers`; a pickle must not carry them twice.
        return {**self.__dict__, "_on_device": {}}

    def __repr__(self):
        return f"Artifact(recipe={self.config.recipe!r}, layers={len(self.layers)}, source={self.source!r})"

    @property
    def is_data_free(self) -> bool:
        """Whether the constants follow from the head dim alone."""
        return not self.layers and _needs_no_data(self.config)

    @classmethod
    def data_free(cls, recipe: str = "hadamard", **overrides) -> "Artifact":
        """An artifact that needs no calibration. Recipes that do are refused, never replaced by another."""
        config = OscarConfig.from_recipe(recipe, **overrides)
        if not _needs_no_data(config):
            free = ", ".join(name for name in RECIPES if name == "hadamard")
            raise ArtifactError(
                f"recipe {recipe!r} needs calibrated statistics: pass artifact=... (see `oscar-hf calibrate`), "
                f"or a recipe that needs none: {free}"
            )
        return cls(config, {}, source=f"recipe {recipe!r}")

    def constants(self, layer: int, device: torch.device, key_dim: int, value_dim: int) -> LayerConstants:
        """Constants of a layer on a device, shared by every cache that asks. Raises ArtifactError if it has none."""
        key = (layer if self.layers else (key_dim, value_dim), str(device))
        if key not in self._on_device:
            if self.is_data_free:
                constants = LayerConstants.data_free(
                    self.config.key_transform, self.config.value_transform, key_dim, value_dim
                )
            elif layer in self.layers:
                constants = self.layers[layer]
            else:
                raise ArtifactError(
                    f"{self.source} has no constants for layer {layer}, only for {_ranges(self.layers)}: "
                    "use the artifact that was made for this model, or calibrate one with `oscar-hf calibrate`"
                )
            # They outlive the call, whatever mode it is in.
            with torch.inference_mode(False):
                self._on_device[key] = constants.to(device)
        return self._on_device[key]

    def constants_for(self, layer: int, keys: Tensor, values: Tensor) -> LayerConstants:
        """Constants for the states [B, H, T, D] of a layer, on their device. Raises ArtifactError if they do not fit."""
        kv_heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
        constants = self.constants(layer, keys.device, key_dim, value_dim)
        made_for = (constants.key_dim, constants.value_dim)
        heads = [t.shape[0] for name, t in constants.tensors().items() if name == "key_mean" or t.dim() == 3]
        expected = self.config.per_layer("num_key_value_heads", layer)
        if (
            made_for != (key_dim, value_dim)
            or any(h != kv_heads for h in heads)
            or (expected is not None and not self.is_data_free and expected != kv_heads)
        ):
            raise ArtifactError(
                f"{self.source} was made for {heads[0] if heads else expected or 'any number of'} KV heads of dim "
                f"{made_for[0]} (values {made_for[1]}) in layer {layer}, the model has {kv_heads} of dim "
                f"{key_dim} (values {value_dim}): use the artifact of this model"
            )
        return constants

    @classmethod
    def load(
        cls,
        name_or_path: str | os.PathLike,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
    ) -> "Artifact":
        """Load and check an artifact: a local folder, a Hub repository id, or either holding RotationZoo `.pt` files.

        revision, token, cache_dir, local_files_only are huggingface_hub's and apply to the Hub only; subfolder applies
        to both. Raises ArtifactError with one sentence for anything missing or unsound.
        """
        folder = hub.resolve(
            name_or_path,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            choices=[[CONFIG_FILE, TENSOR_FILE], *zoo.FILE_PAIRS],
        )
        source = str(name_or_path) if not subfolder else f"{name_or_path}/{subfolder}"
        if (folder / CONFIG_FILE).is_file():
            artifact = cls._read_folder(folder, source)
        elif pair := zoo.find_pair(folder):
            config, layers = zoo.read(folder, pair)
            artifact = cls(config, layers, source)
        else:
            raise ArtifactError(
                f"{source} holds neither {CONFIG_FILE} nor RotationZoo files such as {zoo.FILE_PAIRS[0][0]}: "
                "give the folder or Hub repository of an artifact"
            )
        artifact.validate()
        return artifact

    @classmethod
    def _read_folder(cls, folder: Path, source: str) -> "Artifact":
        config_path, tensor_path = folder / CONFIG_FILE, folder / TENSOR_FILE
        hub.check_size(config_path, _MAX_CONFIG_BYTES)
        try:
            text = config_path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ArtifactError(f"{config_path} is not UTF-8 text: download or calibrate it again") from None
        config = OscarConfig.from_json(text)
        if not tensor_path.is_file():
            if _needs_no_data(config):
                return cls(config, {}, source)
            raise ArtifactError(f"{source} has {CONFIG_FILE} but no {TENSOR_FILE}: download the whole artifact")
        hub.check_size(tensor_path, _MAX_TENSOR_BYTES)
        return cls(config, _read_tensors(tensor_path, config), source)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write the two files; an interruption leaves the artifact that was there, or none, never half of one."""
        self.validate()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for layer, constants in sorted(self.layers.items()):
            for name, tensor in constants.tensors().items():
                transform = getattr(constants, name.replace("_inverse", "_transform"))
                if name.endswith("_inverse") and torch.equal(tensor, transform.mT):
                    continue
                # Cloned, because layers may share a tensor and safetensors refuses shared memory.
                tensors[f"layers.{layer}.{name}"] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        text = self.config.to_json()
        writers = {CONFIG_FILE: lambda path: path.write_text(text, encoding="utf-8")}
        if tensors:
            writers[TENSOR_FILE] = lambda path: save_file(tensors, path, metadata={"format": "pt"})
        _replace_files(folder, writers, remove=() if tensors else (TENSOR_FILE,))
        return folder

    def validate(self) -> None:
        """Raise ArtifactError unless every layer is present, well shaped, finite and invertible."""
        config = self.config
        if not self.layers:
            if not self.is_data_free:
                raise ArtifactError(
                    f"{self.source} has no layers, but key_transform {config.key_transform!r}, value_transform "
                    f"{config.value_transform!r}, key_scale {config.key_scale!r} and center_keys {config.center_keys} "
                    "need calibrated ones: download or calibrate it again"
                )
            return
        if config.num_hidden_layers is not None and max(self.layers) >= config.num_hidden_layers:
            raise ArtifactError(
                f"{self.source} has constants for layer {max(self.layers)}, but num_hidden_layers is "
                f"{config.num_hidden_layers}: config and tensors do not belong together"
            )
        missing = sorted(set(self.expected_layers()) - set(self.layers))
        if missing:
            raise ArtifactError(
                f"{self.source} lacks layer {_ranges(missing)} of {config.num_hidden_layers}: "
                "download or calibrate it again"
            )
        tokens = config.calibration.get("tokens")
        if isinstance(tokens, (int, float)) and not tokens >= MIN_CALIBRATION_TOKENS:
            raise ArtifactError(
                f"{self.source} was calibrated on {tokens} tokens, allowed are at least {MIN_CALIBRATION_TOKENS}: "
                "calibrate it again on more text"
            )
        for layer, constants in sorted(self.layers.items()):
            _check_layer(f"{self.source}, layer {layer}", layer, constants, config)

    def expected_layers(self) -> list[int]:
        """Layers that must have constants: every full-attention layer of the base model, as far as it is known."""
        config = self.config
        if config.layer_types is not None:
            return [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
        return list(range(config.num_hidden_layers or 0))

    def describe(self) -> str:
        """Several lines for people: what the artifact is, its geometry, its provenance, how sound its matrices are."""
        config, lines = self.config, [f"artifact    {self.source}"]
        lines.append(f"recipe      {config.recipe}: keys {config.key_transform}, values {config.value_transform}")
        lines.append(
            f"scales      keys {config.key_scale}{' symmetric' if config.key_symmetric else ''}, "
            f"values {config.value_scale}{' symmetric' if config.value_symmetric else ''}, "
            f"centred keys {'yes' if config.center_keys else 'no'}, per head {'yes' if config.per_head else 'no'}"
        )
        lines.append(
            f"windows     sink {config.sink_tokens}, recent {config.recent_tokens}, "
            f"group {config.group_size or 'head dim'}"
        )
        lines.append(f"base model  {config.base_model} revision {config.base_model_revision} ({config.model_type})")
        lines.append(
            f"geometry    {config.num_hidden_layers} layers, KV heads {config.num_key_value_heads}, "
            f"head dim {config.head_dim}, value head dim {config.value_head_dim or 'the same'}"
        )
        if self.layers:
            worst = max(inverse_error(c.key_transform, c.key_inverse) for c in self.layers.values())
            condition = max(condition_number(c.key_transform) for c in self.layers.values())
            nbytes = sum(c.nbytes for c in self.layers.values())
            lines.append(f"tensors     layers {_ranges(self.layers)}, {nbytes / 1e6:.1f} MB")
            lines.append(f"soundness   max |A A^-1 - I| {worst:.1e}, condition number {condition:.3g}: sound")
        else:
            lines.append("tensors     none needed")
        for key, value in sorted(config.calibration.items()):
            lines.append(f"calibration {key}: {json.dumps(value)}")
        return "\n".join(lines)


def _read_tensors(path: Path, config: OscarConfig) -> dict[int, LayerConstants]:
    """Read rotations.safetensors, shapes and dtypes checked from its header before any tensor is allocated."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                parts = name.split(".")
                known = len(parts) == 3 and parts[0] == "layers" and parts[2] in _FIELDS
                # One spelling of each number: "03" would silently replace "3".
                if not known or parts[1] not in _LAYER_NAMES:
                    raise ArtifactError(
                        f"{path.name} has an unknown tensor {name!r}: allowed are layers.N.{'|'.join(_FIELDS)}"
                    )
                view = file.get_slice(name)
                if view.get_dtype() != "F32":
                    raise ArtifactError(f"{path.name}: {name} is {view.get_dtype()}, allowed is float32")
                _check_shape(f"{path.name}: {name}", parts[2], int(parts[1]), tuple(view.get_shape()), config)
                found.setdefault(int(parts[1]), {})[parts[2]] = file.get_tensor(name)
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} is not a sound safetensors file ({error}): download or calibrate it again"
        ) from None
    layers = {}
    for layer, tensors in found.items():
        for kind in ("key", "value"):
            if f"{kind}_transform" not in tensors:
                raise ArtifactError(
                    f"{path.name} lacks layers.{layer}.{kind}_transform: download or calibrate it again"
                )
            tensors.setdefault(f"{kind}_inverse", tensors[f"{kind}_transform"].mT)
        layers[layer] = LayerConstants(**tensors)
    return layers


def _check_shape(where: str, name: str, layer: int, shape: tuple[int, ...], config: OscarConfig) -> None:
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
    if not ok or max(shape) > 1 << 16:
        raise ArtifactError(
            f"{where} has shape {list(shape)}, allowed is {allowed}: the artifact does not fit its config"
        )


def _needs_no_data(config: OscarConfig) -> bool:
    kinds = {config.key_transform, config.value_transform}
    return kinds <= set(_DATA_FREE) and not config.center_keys and not config.key_rule.weighted


def _check_layer(where: str, layer: int, constants: LayerConstants, config: OscarConfig) -> None:
    for name, tensor in constants.tensors().items():
        if tensor.dtype != torch.float32:
            raise ArtifactError(f"{where}: {name} is {tensor.dtype}, allowed is torch.float32")
        _check_shape(f"{where}: {name}", name, layer, tuple(tensor.shape), config)
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
    if config.center_keys and constants.key_mean is None:
        raise ArtifactError(f"{where}: center_keys is on but there is no key_mean: calibrate it again")
    if config.key_rule.weighted and constants.key_metric is None:
        raise ArtifactError(
            f"{where}: key_scale {config.key_scale!r} needs key_metric, which is missing: calibrate it again"
        )


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


def _replace_files(folder: Path, writers: dict, remove: tuple[str, ...]) -> None:
    """Write all files under temporary names first, then put them in place, CONFIG_FILE last.

    The old config is taken away before the first file is replaced: a folder without one is not an artifact, so that no
    interruption can pair the config of one artifact with the tensors of another.
    """
    temporary = {}
    try:
        for name, write in writers.items():
            descriptor, path = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
            os.close(descriptor)
            temporary[name] = Path(path)
            write(temporary[name])
            # mkstemp makes private files; an artifact is to be shared like any other file.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(path, 0o666 & ~mask)
        for name in (CONFIG_FILE, *remove):
            (folder / name).unlink(missing_ok=True)
        for name in sorted(temporary, key=lambda name: name == CONFIG_FILE):
            os.replace(temporary[name], folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _ranges(numbers) -> str:
    """0, 1, 2, 5 -> '0-2, 5'."""
    numbers, parts = sorted(numbers), []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)

"""Artifact: an OscarConfig plus the calibrated tensors of each layer, loaded from a folder, the Hub or a RotationZoo.

A folder holds `oscar_config.json` and `rotations.safetensors` (tensors `layers.{i}.{field of LayerConstants}`; an
inverse that is just the transpose is not stored). Artifacts come from strangers:
everything is checked before it is used.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Unpack

from .. import saving
from ..errors import ArtifactError
from . import hub
from . import rotation_zoo as zoo
from .config import MAX_LAYERS, OscarConfig
from .describe import describe, layer_ranges
from .hub import HubOptions
from .layer_constants import LayerConstants
from .recipes import RECIPES
from .validate import check_artifact, check_shape, check_size

CONFIG_FILE = "oscar_config.json"
TENSOR_FILE = "rotations.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 8 << 30
_LAYER_NAMES = frozenset(str(layer) for layer in range(MAX_LAYERS))
_FIELDS = ("key_transform", "key_inverse", "value_transform", "value_inverse", "key_mean", "key_metric")


class Artifact:
    """Calibrated constants of a model and what is known of them; shared by every cache made from it, so never changed.

    A data-free artifact (recipe `hadamard`) has no layers: it makes their constants when a layer first sees its head dim.

    Args:
        config (`OscarConfig`): What the constants are and how rows are to be stored.
        layers (`dict[int, LayerConstants]`): The constants by layer index of the model.
        source (`str`, defaults to `"memory"`): What messages call it, such as a folder or repository.

    Example:

    ```python
    from oscar_hf import Artifact, OscarCache

    artifact = Artifact.load("my-artifact")  # once, for many caches
    cache = OscarCache(model.config, artifact=artifact)
    ```
    """

    def __init__(self, config: OscarConfig, layers: dict[int, LayerConstants], source: str = "memory"):
        self.config, self.layers, self.source = config, dict(layers), source
        # The fields of a config of format version 1, as they were written: caches saved then know the artifact by them.
        self.written_fields: dict[str, Any] | None = None
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
        return not self.layers and not self.config.needs_calibration

    @classmethod
    def data_free(cls, recipe: str = "default", **fields: Any) -> "Artifact":
        """An artifact that needs no calibration. Recipes that do are refused, never replaced by another.

        Args:
            recipe (`str`, defaults to `"default"`): A recipe that needs no calibration.
            fields: Fields of `OscarConfig` that replace those of the recipe, such as `sink_tokens`.

        Returns:
            `Artifact`: One without layers, for any model.

        Raises:
            `ArtifactError`: If the recipe with these fields needs calibration.

        Example:

        ```python
        from oscar_hf import Artifact

        Artifact.data_free("hadamard", recent_tokens=128)
        ```
        """
        config = OscarConfig.from_recipe(recipe, **fields)
        if config.needs_calibration:
            free = [name for name in RECIPES if not OscarConfig.from_recipe(name).needs_calibration]
            raise ArtifactError(
                f"recipe {recipe!r} needs calibrated statistics: pass artifact=... (see `oscar-hf calibrate`), "
                f"or a recipe that needs none: {', '.join(free)}"
            )
        return cls(config, {}, source=f"recipe {recipe!r}")

    def with_provenance(self, facts: dict[str, Any] | None = None, *, source: str | None = None) -> "Artifact":
        """A copy that says more of where it comes from, and shares the constants.

        Args:
            facts (`dict[str, Any]`, *optional*): Entries to add to `config.calibration`, or to replace there.
            source (`str`, *optional*): What messages call the copy. Defaults to what they call this one.

        Returns:
            `Artifact`: The copy; this one stays as it is.
        """
        config = dataclasses.replace(self.config, calibration=self.config.calibration | (facts or {}))
        copy = Artifact(config, self.layers, self.source if source is None else source)
        # The same constants, so the same copies of them on devices.
        copy._on_device, copy.written_fields = self._on_device, self.written_fields
        return copy

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
                    f"{self.source} has no constants for layer {layer}, only for {layer_ranges(self.layers)}: "
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
    def load(cls, name_or_path: str | os.PathLike, **hub_options: Unpack[HubOptions]) -> "Artifact":
        """Load and check an artifact: a local folder, a Hub repository id, or either holding RotationZoo `.pt` files.

        Args:
            name_or_path (`str` or `os.PathLike`): Folder, or repository id `"owner/name"`.
            subfolder (`str`, *optional*): Folder inside the folder or repository.
            revision (`str`, *optional*): Branch, tag or commit. This and the following matter for the Hub only.
            token (`str` or `bool`, *optional*): Access token. Defaults to the one that huggingface_hub has stored.
            cache_dir (`str` or `os.PathLike`, *optional*): Where downloads are kept. Defaults to the Hub cache.
            local_files_only (`bool`, defaults to `False`): Take what was downloaded before, without asking the Hub.

        Returns:
            `Artifact`: Complete and sound.

        Raises:
            `ArtifactError`: In one sentence, for anything missing, unsound or out of reach.

        Example:

        ```python
        from oscar_hf import Artifact

        Artifact.load("my-artifact")
        Artifact.load("owner/artifact", revision="v1", local_files_only=True)
        ```
        """
        folder = hub.resolve(name_or_path, [[CONFIG_FILE, TENSOR_FILE], *zoo.FILE_PAIRS], **hub_options)
        subfolder = hub_options.get("subfolder")
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
        check_size(config_path, _MAX_CONFIG_BYTES)
        try:
            text = config_path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ArtifactError(f"{config_path} is not UTF-8 text: download or calibrate it again") from None
        config, layers = OscarConfig.from_json(text), {}
        if tensor_path.is_file():
            check_size(tensor_path, _MAX_TENSOR_BYTES)
            layers = _read_tensors(tensor_path, config)
        elif config.needs_calibration:
            raise ArtifactError(f"{source} has {CONFIG_FILE} but no {TENSOR_FILE}: download the whole artifact")
        artifact = cls(config, layers, source)
        written = json.loads(text)
        if written["format_version"] == 1:
            artifact.written_fields = written
        return artifact

    def save(self, folder: str | os.PathLike) -> Path:
        """Check the artifact and write its two files, `oscar_config.json` and `rotations.safetensors`.

        An interruption leaves the artifact that was there, never half of one; a kill in the last moment leaves it under hidden
        names beside it.

        Args:
            folder (`str` or `os.PathLike`): Where to write; made if need be.

        Returns:
            `Path`: The folder, to be given to `Artifact.load` or uploaded as it is.

        Raises:
            `ArtifactError`: If the artifact is not sound; nothing is written.

        Example:

        ```python
        artifact.save("my-artifact")
        ```
        """
        self.validate()
        folder = Path(folder)
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
        saving.replace_files(folder, writers, () if tensors else (TENSOR_FILE,), "an artifact")
        return folder

    def validate(self) -> None:
        """Check that every layer is present, well shaped, finite and invertible.

        Raises:
            `ArtifactError`: With the first thing that is not.
        """
        check_artifact(self.source, self.config, self.layers)

    def describe(self) -> str:
        """Several lines for people: what the artifact is, its geometry, where it comes from, how sound its matrices are.

        Returns:
            `str`: What `oscar-hf inspect` prints.
        """
        return describe(self.source, self.config, self.layers)


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
                check_shape(f"{path.name}: {name}", parts[2], int(parts[1]), tuple(view.get_shape()), config)
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

"""OscarConfig: what an artifact is made of, a frozen dataclass <-> `oscar_config.json`."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from ..checks import is_whole_number
from ..errors import ArtifactError
from ..quantization.kv_side import SideFormat
from ..quantization.quantizer import ScaleRule
from . import version_1
from .recipes import (
    DATA_FREE_TRANSFORMS,
    KEY_CENTERS,
    OVERRIDABLE,
    RECIPES,
    TRANSFORMS,
    VALUE_TARGETS,
    VALUE_TRANSFORMS,
)

FORMAT_VERSION = 2
# Fewer tokens than this and the covariance of a 256-dim head is mostly noise.
MIN_CALIBRATION_TOKENS = 2048
# Far above any model; bounds what a config from a stranger can make us allocate.
MAX_LAYERS = 4096
# Groups longer than this share one scale between too many channels; the paper's group for head dim 128.
_LARGEST_DEFAULT_GROUP = 128
# Tokens that share a center by default, and the least that may.
KEY_BLOCK, LEAST_KEY_BLOCK = 128, 32
# No count of a config is larger.
_LARGEST = 1 << 24


@dataclass(frozen=True)
class OscarConfig:
    """Everything about an artifact but its tensors. Invalid values raise ArtifactError with the allowed ones.

    Attributes:
        recipe (`str`): Name of the recipe that the parts are from.
        key_transform (`str`): `"whitened"`, made by each cache from its own first tokens, `"hadamard"`, `"identity"`,
            `"oscar"` or `"balanced"`.
        value_transform (`str`): `"hadamard"`, `"identity"` or `"oscar"`.
        per_head (`bool`): One transform per KV head in place of one per layer.
        value_target (`str`): What the value covariance is weighted by: `"score"`, the mean squared attention score of a
            token, as in the published files, or `"attention"`, the paper's formula.
        key_center (`str`): What is taken off keys before they are quantized: `"block"`, the mean of each block of neighboring
            tokens, `"mean"`, a mean that was calibrated, or `"none"`.
        key_block (`int`, *optional*): Tokens of a block; None means 128, or less where fewer recent tokens are exact.
        key_scale (`str`): How the scales of keys are chosen, see `ScaleRule`.
        value_scale (`str`): How those of values are chosen.
        key_symmetric (`bool`): Store a scale of keys but no minimum.
        value_symmetric (`bool`): The same of values.
        sink_tokens (`int`): First tokens that stay exact.
        recent_tokens (`int`): Last tokens that stay exact.
        group_size (`int`, *optional*): Channels per scale; None means the head dim, halved until it is at most 128.
        base_model (`str`, *optional*): The model that the artifact is for, by name.
        base_model_revision (`str`, *optional*): Its commit.
        model_type (`str`, *optional*): Its family, as transformers names it.
        num_hidden_layers (`int`, *optional*): Its cache layers.
        layer_types (`list[str]`, *optional*): Their kinds; `"full_attention"` marks those that have constants.
        num_key_value_heads (`int` or `list[int]`, *optional*): KV heads; a list has one entry per layer.
        head_dim (`int` or `list[int]`, *optional*): Head dim of keys.
        value_head_dim (`int` or `list[int]`, *optional*): Head dim of values; None means that of keys.
        cache_fields (`dict`): What transformers needs to build the layers that are not ours.
        calibration (`dict`): Where the artifact comes from: text, tokens, seed, date, versions, evaluation.
        format_version (`int`): Version of the file format.

    Example:

    ```python
    from oscar_hf import OscarConfig

    OscarConfig.from_recipe("default", per_head=False, recent_tokens=128)
    ```
    """

    recipe: str = "default"
    key_transform: str = "whitened"
    value_transform: str = "hadamard"
    per_head: bool = True
    value_target: str = "score"
    key_center: str = "block"
    key_block: int | None = None
    key_scale: str = "feedback"
    value_scale: str = "unbiased"
    key_symmetric: bool = True
    value_symmetric: bool = True
    sink_tokens: int = 64
    recent_tokens: int = 256
    group_size: int | None = None
    base_model: str | None = None
    base_model_revision: str | None = None
    model_type: str | None = None
    num_hidden_layers: int | None = None
    layer_types: list[str] | None = None
    num_key_value_heads: int | list[int] | None = None
    head_dim: int | list[int] | None = None
    value_head_dim: int | list[int] | None = None
    cache_fields: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def from_recipe(cls, recipe: str, **fields: Any) -> "OscarConfig":
        """The config of a named recipe, with any other field of the class replaced."""
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise ArtifactError(f"unknown recipe {recipe!r}: use one of {', '.join(RECIPES)}")
        return cls(**{"recipe": recipe, **RECIPES[recipe], **fields})

    def __post_init__(self):
        self._check_choice("key_transform", TRANSFORMS)
        self._check_choice("value_transform", VALUE_TRANSFORMS)
        self._check_choice("value_target", VALUE_TARGETS)
        self._check_choice("key_center", KEY_CENTERS)
        for name in ("per_head", "key_symmetric", "value_symmetric"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("format_version", _is_known_version(self.format_version), f"{FORMAT_VERSION}; update oscar_hf")
        self._check("recipe", isinstance(self.recipe, str) and self.recipe != "", "a name")
        for name in ("base_model", "base_model_revision", "model_type"):
            self._check(name, isinstance(getattr(self, name), (str, type(None))), "null or a string")
        self._check("sink_tokens", _is_count(self.sink_tokens, 0), "an integer >= 0")
        self._check("recent_tokens", _is_count(self.recent_tokens, 1), "an integer >= 1 (the token being decoded)")
        self._check("group_size", self.group_size is None or _is_count(self.group_size, 1), "null or an integer >= 1")
        largest = max(LEAST_KEY_BLOCK, self.recent_tokens)
        ok = _is_count(self.key_block, LEAST_KEY_BLOCK) and self.key_block <= largest
        ok = self.key_block is None or (ok and not self.key_block & (self.key_block - 1))
        # The mean of a block is taken while its tokens are exact.
        reach = f"null or a power of two from {LEAST_KEY_BLOCK} to {largest} (recent_tokens is {self.recent_tokens})"
        self._check("key_block", ok, reach)
        layers = self.num_hidden_layers
        ok = layers is None or is_whole_number(layers, 1, MAX_LAYERS)
        self._check("num_hidden_layers", ok, f"null or an integer from 1 to {MAX_LAYERS}")
        for name in ("num_key_value_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            # A layer that is not full attention has none: 0.
            listed = isinstance(value, list) and len(value) > 0 and all(_is_count(v, 0) for v in value)
            ok = value is None or _is_count(value, 1) or listed
            self._check(name, ok, "null, an integer >= 1, or a list of one integer per layer")
        for name in ("cache_fields", "calibration"):
            self._check(name, isinstance(getattr(self, name), dict), "an object")
        ok = self.layer_types is None or (
            isinstance(self.layer_types, list) and all(isinstance(t, str) for t in self.layer_types)
        )
        self._check("layer_types", ok, "null or a list of one name per layer")
        for name in ("layer_types", "num_key_value_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            if layers is not None and isinstance(value, list) and len(value) != layers:
                raise ArtifactError(
                    f"{name}: got a list of {len(value)} entries, allowed is one per layer, "
                    f"num_hidden_layers being {layers}"
                )
        for name in ("key_scale", "value_scale"):
            try:
                rule = ScaleRule.parse(getattr(self, name))
            except ValueError as error:
                raise ArtifactError(f"{name}: {error}") from None
            side = name.removesuffix("_scale")
            if rule.needs_symmetric and not getattr(self, f"{side}_symmetric"):
                given, other = getattr(self, name), "weighted_search_both_ends" if side == "key" else "percentile(0.92)"
                raise ArtifactError(
                    f"{name}: got {given!r} with {side}_symmetric false, but {given} stores no minimum: "
                    f"give another {name}, such as {other}, or leave {side}_symmetric true"
                )
            if rule.needs_metric and name == "value_scale":
                raise ArtifactError(
                    f"value_scale: {self.value_scale!r} needs a query metric and is for keys only: "
                    "use unbiased, percentile(c) or search"
                )

    def _check(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ArtifactError(f"{name}: got {getattr(self, name)!r}, allowed is {allowed}")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        self._check(name, getattr(self, name) in allowed, "one of " + ", ".join(allowed))

    @property
    def key_rule(self) -> ScaleRule:
        """Parsed key_scale."""
        return ScaleRule.parse(self.key_scale)

    @property
    def value_rule(self) -> ScaleRule:
        """Parsed value_scale."""
        return ScaleRule.parse(self.value_scale)

    @property
    def needs_calibration(self) -> bool:
        """Whether an artifact of this config needs tensors made from a model's statistics."""
        transforms = {self.key_transform, self.value_transform}
        return not transforms <= set(DATA_FREE_TRANSFORMS) or self.key_center == "mean"

    @property
    def center_block(self) -> int:
        """Tokens of history that share a center, 0 where keys are not centered by blocks."""
        if self.key_center != "block":
            return 0
        if self.key_block is not None:
            return self.key_block
        reach = 1 << self.recent_tokens.bit_length() - 1
        return max(LEAST_KEY_BLOCK, min(KEY_BLOCK, reach))

    @property
    def longest_calibrated(self) -> int | None:
        """Positions that the constants were made from, None where that is not recorded: an older artifact states the tokens of its
        longest sequence."""
        reach = self.calibration.get("positions", self.calibration.get("context"))
        return reach if _is_count(reach, 1) else None

    def side_format(self, kind: str, dim: int) -> SideFormat:
        """How keys (kind "key") or values ("value") of a head dim are stored."""
        return SideFormat(
            dim,
            self.group_size_for(dim),
            getattr(self, f"{kind}_symmetric"),
            ScaleRule.parse(getattr(self, f"{kind}_scale")),
            getattr(self, f"{kind}_transform") == "identity",
            self.center_block if kind == "key" else 0,
            kind == "key" and self.key_center == "mean",
        )

    def group_size_for(self, head_dim: int) -> int:
        """Group size in use for a head dim: group_size, or by default the head dim halved until it is at most 128."""
        if self.group_size is None:
            group = head_dim
            while group > _LARGEST_DEFAULT_GROUP and group % 2 == 0:
                group //= 2
            return group
        if head_dim % self.group_size:
            raise ArtifactError(
                f"group_size: got {self.group_size}, but it must divide the head dim {head_dim}: "
                f"use one of {', '.join(str(g) for g in range(1, head_dim + 1) if head_dim % g == 0)}"
            )
        return self.group_size

    def per_layer(self, name: str, layer: int) -> int | None:
        """Value of a geometry field (num_key_value_heads, head_dim, value_head_dim) in one layer, None if unknown."""
        value = getattr(self, name)
        if name == "value_head_dim" and value is None:
            return self.per_layer("head_dim", layer)
        if isinstance(value, list):
            return value[layer] if layer < len(value) else None
        return value

    def expected_layers(self) -> list[int]:
        """Layers that must have constants: every full-attention layer of the base model, as far as it is known."""
        if self.layer_types is not None:
            return [i for i, kind in enumerate(self.layer_types) if kind == "full_attention"]
        return list(range(self.num_hidden_layers or 0))

    def override(self, **overrides) -> "OscarConfig":
        """A copy with storage fields replaced; refuses fields that the tensors of the artifact were made for."""
        for name in overrides:
            if name not in OVERRIDABLE:
                raise ArtifactError(
                    f"{name!r} cannot be overridden on an artifact: allowed are {', '.join(OVERRIDABLE)}; "
                    "to change the transform calibrate a new artifact"
                )
        return dataclasses.replace(self, **overrides)

    def to_json(self) -> str:
        """The text of oscar_config.json."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "OscarConfig":
        """Read oscar_config.json; unknown or badly typed fields are refused, each by name."""
        try:
            # Python's reader accepts NaN and Infinity, which are not JSON.
            data = json.loads(text, parse_constant=lambda name: math.nan)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(
                f"oscar_config.json is not valid JSON ({error}): download or calibrate it again"
            ) from None
        if not isinstance(data, dict):
            raise ArtifactError(f"oscar_config.json must hold a JSON object, got {type(data).__name__}")
        version = data.get("format_version")
        if not is_whole_number(version, 1, FORMAT_VERSION):
            raise ArtifactError(
                f"format_version: got {version!r}, this oscar_hf reads 1 to {FORMAT_VERSION}: "
                "update oscar_hf or the artifact"
            )
        if version == 1:
            data = {**version_1.today(data), "format_version": FORMAT_VERSION}
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ArtifactError(f"oscar_config.json has unknown fields {unknown}: allowed are {sorted(known)}")
        return cls(**data)


def _is_count(value: object, minimum: int) -> bool:
    return is_whole_number(value, minimum, _LARGEST)


def _is_known_version(version: object) -> bool:
    return is_whole_number(version, FORMAT_VERSION, FORMAT_VERSION)

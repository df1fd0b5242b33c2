"""OscarConfig: what an artifact is made of, a frozen dataclass <-> `oscar_config.json`, and the named recipes."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArtifactError
from ..quantization.quantizer import ScaleRule

FORMAT_VERSION = 1
TRANSFORMS = ("oscar", "hadamard", "identity", "balanced")
VALUE_TARGETS = ("score", "attention")
# Fewer tokens than this and the covariance of a 256-dim head is mostly noise.
MIN_CALIBRATION_TOKENS = 2048
# Far above any model; bounds what a config from a stranger can make us allocate.
MAX_LAYERS = 4096
# Groups longer than this share one scale between too many channels; the paper's group for head dim 128.
_LARGEST_DEFAULT_GROUP = 128

RECIPES: dict[str, dict[str, Any]] = {
    # The published method, arXiv 2605.17757.
    "paper": dict(
        key_transform="oscar", value_transform="oscar", center_keys=False, per_head=False,
        key_scale="percentile(0.96)", value_scale="percentile(0.92)",
    ),
    # No calibration data at all: a Hadamard rotation and the paper's clipping.
    "hadamard": dict(
        key_transform="hadamard", value_transform="hadamard", center_keys=False, per_head=False,
        key_scale="percentile(0.96)", value_scale="percentile(0.92)",
    ),
    # Beyond the paper at the same bits: the parts that lost least on the models measured.
    "default": dict(
        key_transform="balanced", value_transform="oscar", center_keys=True, per_head=True,
        key_scale="weighted_search_both_ends", value_scale="percentile(0.92)",
    ),
}  # fmt: skip

# Fields that only change how rows are stored, so that a user may override them on a finished artifact.
OVERRIDABLE = (
    "sink_tokens", "recent_tokens", "group_size", "key_scale", "value_scale", "key_symmetric", "value_symmetric",
)  # fmt: skip


@dataclass(frozen=True)
class OscarConfig:
    """Everything about an artifact but its tensors. Invalid values raise ArtifactError with the allowed ones.

    key_transform, value_transform: oscar | hadamard | identity | balanced (keys only). per_head: one transform per KV
    head instead of per layer. value_target: what the value covariance is weighted by, `score` (the mean squared
    attention score of a token, as in the published files) or `attention` (the paper's formula). key_scale, value_scale:
    see `ScaleRule`. *_symmetric: store a scale but no min. group_size: channels per scale; None means the head dim,
    halved until it is at most 128. num_key_value_heads, head_dim, value_head_dim: int, or a list with one entry per
    layer where layers differ. cache_fields: what transformers needs to build the layers that are not ours.
    calibration: provenance (text, tokens, seed, date, versions, evaluation).
    """

    recipe: str = "default"
    key_transform: str = "balanced"
    value_transform: str = "oscar"
    per_head: bool = True
    value_target: str = "score"
    center_keys: bool = True
    key_scale: str = "weighted_search_both_ends"
    value_scale: str = "percentile(0.92)"
    key_symmetric: bool = False
    value_symmetric: bool = False
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
    def from_recipe(cls, recipe: str, **overrides) -> "OscarConfig":
        """The config of a named recipe, with any field replaced."""
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise ArtifactError(f"unknown recipe {recipe!r}: use one of {', '.join(RECIPES)}")
        return cls(**{"recipe": recipe, **RECIPES[recipe], **overrides})

    def __post_init__(self):
        self._check_choice("key_transform", TRANSFORMS)
        self._check_choice("value_transform", tuple(t for t in TRANSFORMS if t != "balanced"))
        self._check_choice("value_target", VALUE_TARGETS)
        for name in ("per_head", "center_keys", "key_symmetric", "value_symmetric"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        version_is_known = _is_int(self.format_version, 1) and self.format_version == FORMAT_VERSION
        self._check("format_version", version_is_known, f"{FORMAT_VERSION}; update oscar_hf")
        self._check("recipe", isinstance(self.recipe, str) and self.recipe != "", "a name")
        for name in ("base_model", "base_model_revision", "model_type"):
            self._check(name, isinstance(getattr(self, name), (str, type(None))), "null or a string")
        self._check("sink_tokens", _is_int(self.sink_tokens, 0), "an integer >= 0")
        self._check("recent_tokens", _is_int(self.recent_tokens, 1), "an integer >= 1 (the token being decoded)")
        self._check("group_size", self.group_size is None or _is_int(self.group_size, 1), "null or an integer >= 1")
        layers = self.num_hidden_layers
        ok = layers is None or (_is_int(layers, 1) and layers <= MAX_LAYERS)
        self._check("num_hidden_layers", ok, f"null or an integer from 1 to {MAX_LAYERS}")
        for name in ("num_key_value_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            # A layer that is not full attention has none: 0.
            listed = isinstance(value, list) and len(value) > 0 and all(_is_int(v, 0) for v in value)
            ok = value is None or _is_int(value, 1) or listed
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
            if rule.weighted and name == "value_scale":
                raise ArtifactError(
                    f"value_scale: {self.value_scale!r} needs a query metric and is for keys only: "
                    "use percentile(c) or search"
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
    def longest_calibrated(self) -> int | None:
        """Tokens of the longest sequence that the constants were made from, None where that is not recorded."""
        context = self.calibration.get("context")
        return context if _is_int(context, 1) else None

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

    def override(self, **overrides) -> "OscarConfig":
        """A copy with storage fields replaced; refuses fields that the tensors of the artifact were made for."""
        for name in overrides:
            if name not in OVERRIDABLE:
                raise ArtifactError(
                    f"{name!r} cannot be overridden on an artifact: allowed are {', '.join(OVERRIDABLE)}; "
                    "to change the transform calibrate a new artifact"
                )
        changed = dataclasses.replace(self, **overrides)
        if changed.key_rule.weighted and not self.key_rule.weighted:
            raise ArtifactError(
                f"key_scale: got {changed.key_scale!r}, which needs an error metric that an artifact made for "
                f"{self.key_scale!r} does not hold: use percentile(c) or search, or calibrate a new artifact"
            )
        return changed

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
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise ArtifactError(
                f"format_version: got {version!r}, this oscar_hf reads {FORMAT_VERSION}: "
                "update oscar_hf or the artifact"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ArtifactError(f"oscar_config.json has unknown fields {unknown}: allowed are {sorted(known)}")
        return cls(**data)


def _is_int(value, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= 1 << 24

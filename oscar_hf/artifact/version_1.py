"""Format version 1 of artifacts, which centered keys by one mean: how it is read today, and what it said."""

import dataclasses
from typing import Any

from ..errors import ArtifactError
from .recipes import PUBLISHED_STORAGE, RECIPES

# What the recipes said of storage.
_STORAGE: dict[str, dict[str, Any]] = {
    "paper": PUBLISHED_STORAGE,
    "hadamard": PUBLISHED_STORAGE,
    "default": {**PUBLISHED_STORAGE, "key_center": "mean", "key_scale": "weighted_search_both_ends"},
}


# What a config of version 1 says where it says nothing; the other fields have the defaults of today.
_DEFAULTS: dict[str, Any] = {
    "recipe": "default",
    "key_transform": "balanced",
    "value_transform": "oscar",
    "per_head": True,
    "value_target": "score",
    "center_keys": True,
    "key_scale": "weighted_search_both_ends",
    "value_scale": "percentile(0.92)",
    "key_symmetric": False,
    "value_symmetric": False,
}


def today(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a version 1 config as those of today, but for format_version. Where they say of storage what their recipe said
    then, they take what recipes say now: one mean for all keys fails at positions that it was not made from."""
    fields = {**_DEFAULTS, **fields}
    fields["key_center"] = _center(fields)
    fields.pop("center_keys", None)
    former = _STORAGE.get(fields.get("recipe"), {})
    if former and all(fields.get(name, value) == value for name, value in former.items()):
        fields |= {name: RECIPES["default"][name] for name in former}
    if fields.get("recipe") == "default":
        fields["recipe"] = "balanced"
    return fields


def _center(fields: dict[str, Any]) -> str:
    centered = fields.get("center_keys", True)
    if not isinstance(centered, bool):
        raise ArtifactError(f"center_keys: got {centered!r}, allowed is true or false")
    return "mean" if centered else "none"


def former_fields(config, written: dict[str, Any] | None) -> dict[str, Any]:
    """The fields that version 1 had of an artifact: as written in its file, or for one that never had a file (RotationZoo files, a
    recipe) as version 1 would have made it."""
    fields = dataclasses.asdict(config) | PUBLISHED_STORAGE | {"center_keys": False, "format_version": 1}
    if written is not None:
        fields |= {**_DEFAULTS, **written}
    for name in ("key_center", "key_block"):
        fields.pop(name)
    return fields


def key_center(config, written: dict[str, Any] | None) -> str:
    """What version 1 took off keys."""
    return _center(former_fields(config, written))
